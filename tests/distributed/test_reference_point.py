"""What kto compares with, estimated from answers to other prompts: in every layout as in one process."""

import json

import pytest
from attrs import evolve
from forked_ranks import Outcome
from projects import records
from topologies import BY_NAME
from trials import TOLERANCE, Laboratory, Trial, gaps

SETTINGS = (
    'dataset.lines.source=jsonl("rated.jsonl")',
    "dataset.lines.prompt=question",
    "dataset.lines.response=answer",
    "dataset.lines.label=good",
    'dataset.lines.template="plain"',
)
LAYOUTS = (
    "pp 2 · fsdp 2 · tp 2 (dense)", "fsdp 2, three microbatches (dense)", "tp 2, uneven vocabulary (dense)",
    "ring 2 (dense)", "ulysses 2 (dense)", "pp 2, zbv (dense)", "fsdp 2 · ep 2 (moe)",
)  # fmt: skip
ORDINARY = ("fsdp 2, three microbatches (dense)",)
POINT = "rewards/reference_point"


def trial_of(lab: Laboratory, layout: str) -> Trial:
    lines = [
        {"question": f"{i} + {i % 7}", "answer": f"{i + i % 7}{'!' * (i % 5)}", "good": i % 3 != 0} for i in range(60)
    ]
    (lab.folder / "rated.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trial = BY_NAME[layout].trial("fp64", shallow=True)
    loss = "loss kto { beta = 0.5, undesirable = 1.5, reference_point = estimated, chunk = 8 KiB }"
    return evolve(trial, settings=(*trial.settings, *SETTINGS), more=loss, steps=4)


def measured(outcome: Outcome) -> list[list[float]]:
    names = ("objective", "rewards/margin", POINT)  # in the first step accuracy is a matter of rounding
    steps = [[line[name] for name in names] for line in records(outcome.directory, "metrics")]
    held_out = [[event["objective"], *event["metrics"].values()] for event in outcome.evals]
    return steps + held_out


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.matrix) for name in LAYOUTS]
)
def test_a_layout_compares_with_what_one_process_does(lab: Laboratory, layout: str):
    trial = trial_of(lab, layout)
    alone, outcome = lab.alone(trial), lab.run(trial, BY_NAME[layout].layout, saves=False)
    limit = TOLERANCE["fp64"]
    assert gaps(outcome, alone).worst < limit
    found, expected = measured(outcome), measured(alone)
    points = [line[-1] for line in expected]
    # The model is its reference in the first step; where the mean is negative the point is 0.
    assert points[0] == pytest.approx(0, abs=1e-10) and max(points) > 1e-3
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=limit, abs=limit)


@pytest.mark.matrix
def test_a_fixed_point_is_another_loss(lab: Laboratory):
    trial = trial_of(lab, ORDINARY[0])
    fixed = evolve(trial, more=trial.more.replace("reference_point = estimated, ", ""))
    estimated, zero = lab.alone(trial), lab.alone(fixed)
    assert gaps(zero, estimated).worst > 1e3 * TOLERANCE["fp64"]
    assert POINT not in records(zero.directory, "metrics")[0]
