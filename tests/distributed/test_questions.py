"""Questions with choices are answered alike on every layout: the same choices, with the same log-likelihoods."""

import json

import pytest
from attrs import evolve
from projects import events
from topologies import SHALLOW, Topology
from trials import TOLERANCE, Laboratory

# Some with their choices are longer than a row.
QUESTIONS = [{
    "question": f"line {n} " + "abc def ghi " * (n % 8),
    "choices": [f"{'ghi ' * (each % 3 + 1)}{n * each}" for each in range(2 + n % 3)],
    "answer": n % 2,
} for n in range(30)]  # fmt: skip
MORE = """
dataset asked { source = jsonl("questions.jsonl"), choices = "choices", holdout = 100% }
on finish eval asked
checkpoint { enabled = false }
"""
# Documents are laid into rows alike everywhere: a ring of two wants them at multiples of four.
ALIGN = "collate=to_tensor -> flatten -> shift_tokens -> pack(sequential, align = 4)"
LAYOUTS = {
    "tp": Topology(tp=2),
    "fsdp": Topology(fsdp=2),
    "pp": Topology(pp=2),
    "ring": Topology(ring=2),
    "ulysses": Topology(ulysses=2),
    "pp and fsdp": Topology(model="moe", pp=2, fsdp=2, ep=2),
}
ORDINARY = ("ring",)


def answers(lab: Laboratory, layout: Topology, *, alone: bool = False) -> dict[str, float]:
    lines = "".join(json.dumps(each) + "\n" for each in QUESTIONS)
    (lab.folder / "questions.jsonl").write_text(lines)
    trial = evolve(layout.trial("fp64", shallow=True), steps=1, more=MORE, align=1, settings=(*SHALLOW, ALIGN))
    run = lab.run(trial, () if alone else layout.layout, alone=alone, saves=False)
    (found,) = [event for event in events(run.directory, "eval") if event["dataset"] == "asked"]
    return found


@pytest.fixture(scope="module")
def expected(lab: Laboratory):
    """By model: the answers of one process."""
    known: dict[str, dict[str, float]] = {}

    def of(model: str) -> dict[str, float]:
        if model not in known:
            known[model] = answers(lab, Topology(model=model), alone=True)
        return known[model]

    return of


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.matrix) for name in LAYOUTS]
)
def test_answers_do_not_depend_on_the_layout(lab: Laboratory, expected, name: str):
    layout = LAYOUTS[name]
    found, theirs = answers(lab, layout), expected(layout.model)
    assert found["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE["fp64"])
    for count in ("questions", "tokens", "acc", "acc_norm", "acc_bytes"):
        assert found[count] == theirs[count]
    assert theirs["questions"] == len(QUESTIONS) and 0 < theirs["acc"] < 1
