"""`xtrain init JOB`: specs for a model and data of one's own."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from model_folders import CONFIG, Folder, safetensors, shapes

from xtrain.cli.main import main
from xtrain.planner.load import plan_from_text

TURNS = [{"role": "user", "content": "2 and 3?"}, {"role": "assistant", "content": "5"}]
TALK: dict[str, Any] = {"messages": TURNS}
PAIR = {"prompt": "2 and 3?", "chosen": "5", "rejected": "6"}
ASKED = {"problem": "2 and 3?", "solution": "2 and 3 are 5", "answer": "5"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    folder = Folder.whole(tmp_path)
    config = {**CONFIG, "hidden_size": 64, "vocab_size": 8}
    folder.config(hidden_size=64, vocab_size=8, max_position_embeddings=512)
    folder.weights(safetensors(shapes(config)))
    _tokenizer()
    return "model"


def _tokenizer(*added: str) -> None:
    token = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [{"id": number, "content": text, **token} for number, text in enumerate(("</s>", *added))]
    words = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "a"}
    Path("model/tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": tokens, "model": words}))


def test_patterns_may_be_absolute_and_other_files_lie_beside(model: str, tmp_path: Path):
    place = tmp_path / "data"
    _lines("data/a.jsonl", {"text": "a"})
    (place / "README.md").write_text("of the data")
    assert f'source = jsonl("{place}/**/*.jsonl")' in _written(model, str(place))
    assert f'source = jsonl("{place}/*.jsonl")' in _written(model, f"{place}/*.jsonl")


def _lines(name: str, record: dict[str, Any], count: int = 3) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    text = f"{json.dumps(record)}\n" * count
    with gzip.open(name, "wt") if name.endswith(".gz") else Path(name).open("w") as file:
        file.write(text)
    return name


@pytest.mark.parametrize(("job", "record", "said"), [
    ("sft", TALK, ('messages = "messages"', 'template = "plain"', "budget = 2 epochs", 'to = "models/sft"')),
    ("sft", {"text": "a"}, ("dataset data {\n  source = jsonl(\"data.jsonl\")\n}",)),
    ("lora", {"instruction": "a", "input": "", "output": "b"}, ('input = "input"', "adapter lora", "adapter = true")),
    ("qlora", TALK, ("base nf4",)),
    ("dpo", PAIR, ('chosen = "chosen"', 'prompt = "prompt"', "loss dpo")),
    ("grpo", ASKED, ('prompt = "problem"', 'response = "answer"', "max_tokens = 256", "sequence = 4096")),
    ("distill", TALK, ('teacher = "model", live = true',)),
    ("pretrain", {"content": "a"}, ('text = "content"', "weights = none", "sequence = 512")),
    ("serve", None, ("serve {}", "adapter lora { rank = 32 }")),
])  # fmt: skip
def test_a_job_has_a_plan(model: str, job: str, record: dict[str, Any] | None, said: Sequence[str]):
    data = [] if record is None else ["--data", _lines("data.jsonl", record)]
    teacher = ["--teacher", model] if job == "distill" else []
    assert main(["init", job, "--model", model, *data, *teacher]) == 0
    text = Path(f"{job}.xtrain").read_text()
    assert all(each in text for each in said), text
    found = plan_from_text(text, "a.xtrain")
    assert found.plan is not None and not found.diagnostics, found.diagnostics.render()


@pytest.mark.parametrize(
    ("added", "template"),
    [
        ((), 'template = "plain"'),
        (("<|im_start|>", "<|im_end|>"), 'template = "chatml"'),
        (("<|start_header_id|>",), 'template = "llama3"'),
    ],
)
def test_a_template_whose_marks_are_tokens(model: str, added: tuple[str, ...], template: str):
    _tokenizer(*added)
    assert template in _written(model, _lines("a.jsonl", TALK))
    Path("model/chat_template.jinja").write_text("{{ messages }}")
    assert "template" not in _written(model, _lines("a.jsonl", TALK))


@pytest.mark.parametrize(
    ("place", "file", "source"),
    [
        ("data", "data/one/a.jsonl.gz", 'jsonl("data/**/*.jsonl.gz")'),
        ("data/*.txt", "data/a.txt", 'text("data/*.txt")'),
        ("data", "data/a.parquet", 'parquet("data/**/*.parquet")'),
        ("data/a.arrow", "data/a.arrow", 'arrow("data/a.arrow")'),
        ("data/a.json", "data/a.json", 'jsonl("data/a.json")'),
        ("data", "data/a.arrow", 'arrow("data/**/*.arrow")'),
    ],
)
def test_places_of_data(model: str, place: str, file: str, source: str):
    record = {"text": "a"}
    if file.endswith(".json"):
        Path(file).parent.mkdir()
        Path(file).write_text(json.dumps([record] * 3))
    elif file.endswith((".parquet", ".arrow")):
        pa = pytest.importorskip("pyarrow")
        Path(file).parent.mkdir()
        table = pa.Table.from_pylist([record] * 3)
        if file.endswith(".arrow"):
            with pa.OSFile(file, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        else:
            pytest.importorskip("pyarrow.parquet").write_table(table, file)
    elif file:
        _lines(file, record)
    assert main(["init", "pretrain", "--model", model, "--data", place, "--to", "first.xtrain"]) == 0
    text = Path("first.xtrain").read_text()
    assert f"source = {source}\n" in text and "experiment first {" in text


def test_many_records_are_held_out(model: str):
    assert main(["init", "sft", "--model", model, "--data", _lines("a.jsonl", TALK, 300), "--data", "a.jsonl"]) == 0
    text = Path("sft.xtrain").read_text()
    assert text.count("holdout = 2%") == 2 and "eval a_2" in text and "mixture { a = 1, a_2 = 1 }" in text
    assert "holdout" not in _written(model, _lines("b.jsonl", TALK, 20))


def _written(model: str, data: str) -> str:
    assert main(["init", "sft", "--model", model, "--data", data, "--force"]) == 0
    return Path("sft.xtrain").read_text()


@pytest.mark.parametrize(("characters", "sequence"), [(100, 128), (381, 128), (600, 256), (20_000, 512)])
def test_a_row_holds_a_long_record(model: str, characters: int, sequence: int):
    record = {"text": "a" * (characters - len(json.dumps({"text": ""})))}
    assert f"sequence = {sequence}," in _written(model, _lines("a.jsonl", record))


@pytest.mark.parametrize(("words", "said"), [
    (["lora"], "needs --model"),
    (["lora", "--model", "nowhere"], "there is no model folder nowhere"),
    (["lora", "--model", "org/absent"], "xtrain fetch org/absent"),
    (["lora", "--model", "model"], "needs --data"),
    (["lora", "--model", "model", "--data", "org/name"], "xtrain fetch org/name --dataset"),
    (["lora", "--model", "model", "--data", "mixed"], "has arrow and jsonl files"),
    (["lora", "--model", "model", "--data", "none.jsonl"], "pattern matches no file: none.jsonl"),
    (["lora", "--model", "model", "--data", "pairs.jsonl"], "their fields are: chosen, prompt, rejected"),
    (["dpo", "--model", "model", "--data", "talks.jsonl"], "need `chosen` and `rejected`"),
    (["distill", "--model", "model", "--data", "talks.jsonl"], "needs --teacher"),
    (["sft", "--model", "model", "--data", "talks.jsonl", "--teacher", "model"], "takes no --teacher"),
    (["tryout", "--model", "model"], "--model goes with a job"),
    (["lora", "--model", "model", "--data", "talks.jsonl", "--template", "moe"], "takes no --template"),
    (["sft", "--model", "model", "--data", "bad.jsonl"], "bad.jsonl: invalid JSON"),
    (["sft", "--model", "model", "--data", "model"], "an object over several lines"),
    (["sft", "--model", "model", "--data", "a.bin"], "has token ids"),
    (["sft", "--model", "model", "--data", "talks.jsonl", "--to", "a-b"], "cannot be called `a-b`"),
])  # fmt: skip
def test_refusals(model: str, capsys: pytest.CaptureFixture[str], words: list[str], said: str):
    _lines("talks.jsonl", TALK)
    _lines("pairs.jsonl", PAIR)
    Path("bad.jsonl").write_text("{")
    Path("a.bin").write_text("a")
    Path("mixed").mkdir()
    for name in ("a.jsonl", "b.arrow"):
        Path("mixed", name).write_text("{}")
    assert main(["init", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(Path().glob("*.xtrain"))
