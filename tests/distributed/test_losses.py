"""Every loss computes on layouts what it computes in one process, and goes on as if the run had not stopped."""

import pytest
from attrs import evolve
from projects import records
from topologies import BY_NAME, ELSEWHERE, SHALLOW
from trials import TOLERANCE, Laboratory, Trial, gaps

PARTS = '''
import torch
from xtrain import loss

@loss
def own(logprob_T, mean_logprob_T, entropy_T, lse_T, gamma: float = 2.0):
    """Of all that a loss may read."""
    focal = -((1 - logprob_T.exp()) ** gamma) * logprob_T
    return focal - 0.1 * mean_logprob_T + (0.2 * entropy_T - logprob_T).square() + 0.01 * (lse_T - 3).square().log1p()
'''
LOSSES = {
    "z loss": "loss cross_entropy { z_loss = 0.1, chunk = 8 KiB }",
    "smoothed labels": "loss cross_entropy { label_smoothing = 0.2, z_loss = 0.1, chunk = 8 KiB }",
    "own": 'use "losses.py"\nloss own { gamma = 1.5, z_loss = 0.1, chunk = 8 KiB }',
}
# Vocabularies in pieces, the last a smaller one, and gathered; parts of sequences; stages; several microbatches.
LAYOUTS = (
    "pp 2 · tp 2, tied, uneven vocabulary (dense)",
    "tp 2, uneven vocabulary (dense)",
    "tp 2, without loss (dense)",
    "pp 2 · ring 2 (dense)",
    "fsdp 2, three microbatches (dense)",
    "pp 2, zbv (dense)",
    "replicate 2, ddp (dense)",
    "ring 2 · tp 2 · ep 2 (moe)",
)
# An own loss reads all that smoothing needs.
ORDINARY = {"z loss": LAYOUTS[:1], "own": ELSEWHERE["own loss"], "smoothed labels": ELSEWHERE["smoothed labels"]}
CASES = [
    pytest.param(loss, layout, marks=() if layout in ORDINARY[loss] else pytest.mark.matrix)
    for loss in LOSSES
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("loss", "layout"), CASES)
def test_a_layout_minimises_what_one_process_does(lab: Laboratory, loss: str, layout: str):
    topology = BY_NAME[layout]
    (lab.folder / "losses.py").write_text(PARTS)
    trial = evolve(topology.trial("fp64", shallow=True), more=LOSSES[loss])
    alone = lab.alone(trial)
    outcome = lab.run(trial, topology.layout, saves=False)
    found = gaps(outcome, alone)
    limit = TOLERANCE["fp64"]
    assert not found.beyond(limit)
    ours, theirs = ([line["objective"] for line in records(one.directory, "metrics")] for one in (outcome, alone))
    assert ours == pytest.approx(theirs, rel=limit) and len(ours) == 2
    assert all(objective > loss for objective, (_, loss, _) in zip(ours, outcome.curve, strict=True))


MIXED = """
dataset others { source = jsonl("data.jsonl"), holdout = 10% }
mixture { lines = 1, others = 2 }
"""


def test_the_loss_of_records_stays_the_cross_entropy(lab: Laboratory):
    """Of a step on the same weights: over all, of each dataset, and held out; what is learned is another thing."""
    (lab.folder / "losses.py").write_text(PARTS)
    losses = ("loss cross_entropy { chunk = 8 KiB }", *LOSSES.values())
    trials = [Trial(steps=1, more=f"{MIXED}{loss}", settings=SHALLOW) for loss in losses]
    found = [lab.alone(trial) for trial in trials]
    (plain,), *others = (records(outcome.directory, "metrics") for outcome in found)
    names = ("loss", "loss/lines", "loss/others")
    for (line,) in others:
        assert [line[name] for name in names] == [plain[name] for name in names]
        assert line["objective"] > line["loss"] and line["grad_norm"] != plain["grad_norm"]
    assert "objective" not in plain
    evals = [outcome.evals[-1]["loss"] for outcome in found]
    assert len(set(evals)) == 4 and max(evals) < 1.2 * min(evals)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["one rank", "pp 2 · tp 2"])
def test_a_run_with_an_own_loss_goes_on_bit_for_bit(lab: Laboratory, layout: str):
    (lab.folder / "losses.py").write_text(PARTS)
    trial = Trial(steps=4, model="qwen3", more=LOSSES["own"], settings=SHALLOW)
    sets = () if layout == "one rank" else ("parallel.pp=2", "parallel.tp=2")

    whole, later = lab.resumed(trial, sets, f"loss-{len(sets)}")
    ours, theirs = ([line["objective"] for line in records(each.directory, "metrics")] for each in (later, whole))
    assert ours == theirs[1:] and len(theirs) == 4
