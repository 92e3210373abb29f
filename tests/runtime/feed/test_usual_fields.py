"""Records of the usual forms: a dataset that names no fields says what to write for them, and that is enough."""

import json
from pathlib import Path
from typing import Any

import pytest

from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.documents import DocumentEncoder, TokenDocument
from xtrain.runtime.feed.records import BadRecord
from xtrain.runtime.feed.sources.source import open_source
from xtrain.runtime.feed.tokenizers import load_tokenizer

SPEC = """experiment small {{ seed = 1, budget = 4 steps }}
model llama {{ dim = 32, layers = 1, heads = 4, ffn = 48 }}
tokenizer bytes
dataset d {{ source = jsonl("in.jsonl"){settings} }}
batch {{ sequence = 64 }}
optimizer adamw {{ lr = 1e-3 }}
{more}
"""
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
# Record → what is written for it.
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"id": 1, "messages": TALK}, 'messages = "messages"'),
    ({"messages": TALK, "tools": None}, 'messages = "messages", tools = "tools"'),
    ({"conversations": SHAREGPT}, 'messages = "conversations"'),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, 'chosen = "chosen", rejected = "rejected", prompt = "prompt"'),
    ({"chosen": TALK, "rejected": [TALK[0], {"from": "gpt", "value": "b"}]},
        'chosen = "chosen", rejected = "rejected"'),
    ({"prompt": "q", "completion": "a"}, 'prompt = "prompt", response = "completion"'),
    ({"prompt": TALK[:1], "completion": TALK[1:]}, 'prompt = "prompt", response = "completion"'),
    ({"prompt": "q", "completion": "a", "label": True}, 'prompt = "prompt", response = "completion", label = "label"'),
    ({"instruction": "i", "input": "", "output": "a"}, 'prompt = "instruction", response = "output", input = "input"'),
    ({"instruction": "i", "context": "c", "response": "a"},
        'prompt = "instruction", response = "response", input = "context"'),
    ({"question": "q", "answer": "a"}, 'prompt = "question", response = "answer"'),
    ({"problem": "q", "solution": "a", "answer": "1"}, 'prompt = "problem", response = "solution"'),
    ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, 'tokens = "input_ids", mask = "labels"'),
    ({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}, 'tokens = "input_ids"'),
    ({"tokens": [1, 2, 3], "mask": [0, 1, 1]}, 'tokens = "tokens", mask = "mask"'),
    ({"content": "a"}, 'text = "content"'),
]  # fmt: skip


def read(record: dict[str, Any], settings: str, folder: Path) -> Any:
    """What becomes of a line, read as the plan of a dataset with these settings says."""
    (folder / "in.jsonl").write_text(json.dumps(record) + "\n")
    turns = any(f"{name} =" in settings for name in ("messages", "response", "chosen"))
    given = "".join(f", {each}" for each in (settings, 'template = "plain"' * turns) if each)
    loss = "loss simpo" if "chosen =" in settings else ""
    plan = plan_from_text(SPEC.format(settings=given, more=loss), "small.xtrain").plan
    assert plan is not None
    reads = plan.node("setup.data.d").args["reads"]
    source = open_source("jsonl", patterns=("in.jsonl",), reads=reads, base=folder)
    (found,) = [record for unit in source.units() for record in source.read(unit)]
    if isinstance(found, BadRecord):
        return found
    (document,) = DocumentEncoder(load_tokenizer("bytes", folder), reads).encode([found])
    return document


@pytest.mark.parametrize(("record", "settings"), FORMS)
def test_the_settings_of_a_form_are_named_and_read_it(record, settings, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = read(record, "", tmp_path)
    assert isinstance(bad, BadRecord) and bad.reason.endswith(f"; write `{settings}`")
    assert isinstance(read(record, settings, tmp_path), TokenDocument)


def test_of_other_fields_nothing_is_said(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = read({"body": "x", "prompt": "y"}, "", tmp_path)
    assert bad.reason == "no field `text`; there are `body`, `prompt`"
    # Nor where a field was named.
    named = read({"messages": TALK}, 'text = "body.text"', tmp_path)
    assert named.reason.startswith("no field `body`; there are `messages`; write")
    wrong = read({"messages": 3}, 'messages = "talk"', tmp_path)
    assert wrong.reason == "no field `talk`; there are `messages`"


def test_columns_of_tables_are_named_alike(tmp_path: Path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"instruction": ["i"], "output": ["o"]}), tmp_path / "a.parquet")
    reads = {"form": "text", "text": "text"}
    with pytest.raises(DataError, match=r'Write `prompt = "instruction", response = "output"`'):
        list(open_source("parquet", patterns=("a.parquet",), reads=reads, base=tmp_path).units())
