"""Evaluations that people quote: the numbers of EleutherAI's lm-evaluation-harness on the same items and texts.

tests/support/harness_numbers.py asks the harness.
"""

import json
import math

import numpy as np
import pytest
from harness_numbers import ITEMS, NUMBERS, POSITIONS, TEXTS, make_model, right
from projects import Project, events

from xtrain.components.actions.eval_torch import accuracies
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.runtime.feed.records import Reads, Unusable
from xtrain.runtime.feed.sources.fields import taker

HARNESS = json.loads(NUMBERS.read_text())
LIKELIHOODS = HARNESS["log_likelihoods"]
# The learning rate moves no weight of fp32.
SPEC = f"""
experiment tiny {{ seed = 1, budget = 1 steps }}
model "model" {{}}
tokenizer "model"
dataset made {{ source = synthetic(documents = 10) }}
dataset asked {{ source = jsonl("items.jsonl"), choices = "choices", holdout = 100% }}
dataset last {{ source = jsonl("items.jsonl"), choices = "choices", answer = "last", holdout = 100% }}
dataset texts {{ source = jsonl("texts.jsonl"), holdout = 100% }}
batch {{ sequence = {POSITIONS}, micro = 2 }}
optimizer adamw {{ lr = 1e-30 }}
checkpoint {{ enabled = false }}
every 1 step eval texts {{ batches = 1 }}
on finish eval asked then eval last then eval texts {{ batches = none }}
"""


def test_the_numbers_of_the_harness(tmp_path):
    """Questions with every kind of space at their ends, some longer than a row, and whole texts."""
    project = Project(tmp_path)
    make_model(tmp_path / "model")
    items = [{**item, "last": len(item["choices"]) - 1} for item in ITEMS]
    for name, found in (("items", items), ("texts", [{"text": text} for text in TEXTS])):
        lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in found)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "tiny.xtrain").write_text(SPEC)
    directory = project.run("tiny.xtrain")
    some, asked, last, texts = events(directory, "eval")
    assert asked["questions"] == last["questions"] == len(ITEMS)
    for name in ("acc", "acc_norm", "acc_bytes"):
        assert asked[name] == pytest.approx(HARNESS[name], abs=1e-12)
    assert len({asked["acc"], asked["acc_bytes"], last["acc"]}) == 3
    tokenizer = HuggingFaceTokenizer(tmp_path / "model")
    for event, chosen in ((asked, right), (last, lambda item: -1)):
        total = -sum(each[chosen(item)] for each, item in zip(LIKELIHOODS, ITEMS, strict=True))
        tokens = sum(len(
            tokenizer.encode(f"{item['question']} {item['choices'][chosen(item)]}"),
        ) - len(tokenizer.encode(item["question"].rstrip())) for item in ITEMS)  # fmt: skip
        assert event["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert texts["bits_per_byte"] == pytest.approx(HARNESS["bits_per_byte"], rel=1e-5)
    assert texts["bytes"] == sum(len(text.encode()) for text in TEXTS)
    recorded = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert {name: recorded[f"eval/asked/{name}"] for name in ("loss", "acc")} == {n: asked[n] for n in ("loss", "acc")}
    assert recorded["final/texts/bits_per_byte"] == texts["bits_per_byte"]
    assert recorded["eval/texts/loss"] == some["loss"]


def test_accuracies_follow_from_log_likelihoods():
    choices = [
        (number, int(number == right(item)), len(choice), len(choice.encode()))
        for item in ITEMS
        for number, choice in enumerate(item["choices"])
    ]
    found = accuracies(np.array([each for question in LIKELIHOODS for each in question]), np.array(choices))
    assert found == {name: pytest.approx(HARNESS[name]) for name in ("acc", "acc_norm", "acc_bytes")}
    equal = np.array([(0, 1, 2, 2), (1, 0, 2, 2), (0, 0, 2, 2), (1, 1, 2, 2)])
    assert accuracies(np.zeros(4), equal)["acc"] == 0.5
    assert math.isnan(accuracies(np.array([0, 0, math.nan, 0]), equal)["acc"])


@pytest.mark.parametrize(("record", "reason"), [
    ({"choices": ["a", "b"], "answer": 0}, "no field `question`"),
    ({"question": " \n", "choices": ["a", "b"], "answer": 0}, "`question` is blank"),
    ({"question": "q", "choices": "ab", "answer": 0}, "`choices` is a string, not a list"),
    ({"question": "q", "choices": ["a"], "answer": 0}, "`choices` has 1; a question has two"),
    ({"question": "q", "choices": ["a", ""], "answer": 0}, "choice 1 of field `choices` is empty"),
    ({"question": "q", "choices": ["a", 3], "answer": 0}, "choice 1 of field `choices` is a number"),
    ({"question": "q", "choices": ["a", "b"], "answer": 2}, "neither the number of a choice, 0 to 1, nor"),
    ({"question": "q", "choices": ["a", "b"], "answer": "c"}, "nor the text of one"),
    ({"question": "q", "choices": ["a", "b"], "answer": True}, "neither the number"),
])  # fmt: skip
def test_records_that_are_no_questions(record: dict, reason: str):
    found = taker(Reads(form="choices"))(record)
    assert isinstance(found, Unusable) and reason in found.reason
