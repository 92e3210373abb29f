"""Every loss computes on layouts what it computes in one process, and goes on as if the run had not stopped."""

import pytest
from attrs import evolve
from projects import Project, curve, records
from topologies import BY_NAME
from trials import TOLERANCE, Laboratory, gaps

pytestmark = pytest.mark.distributed

LOSSES = {"smoothed labels": "loss cross_entropy { label_smoothing = 0.2, z_loss = 0.1, chunk = 8 KiB }"}
# Vocabularies in pieces, the last a smaller one, and gathered; parts of sequences; stages; several microbatches.
LAYOUTS = (
    "pp 2 · tp 2, tied, uneven vocabulary (dense)",
    "tp 2, without loss (dense)",
    "pp 2 · ring 2 (dense)",
    "fsdp 2, three microbatches (dense)",
    pytest.param("pp 2, zbv (dense)", marks=pytest.mark.matrix),
    pytest.param("replicate 2, ddp (dense)", marks=pytest.mark.matrix),
    pytest.param("ring 2 · tp 2 · ep 2 (moe)", marks=pytest.mark.matrix),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_layout_minimises_what_one_process_does(lab: Laboratory, loss: str, layout: str):
    topology = BY_NAME[layout]
    trial = topology.trial("fp64")
    trial = evolve(trial, more=LOSSES[loss], settings=(*trial.settings, *topology.shallow))
    alone = lab.alone(trial)
    outcome = lab.run(trial, topology.layout)
    found = gaps(outcome, alone)
    limit = TOLERANCE["fp64"]
    assert found.loss < limit and found.norm < limit and found.eval < limit and found.routing < limit
    assert not {tensor: gap for tensor, gap in found.tensors.items() if not gap < limit}
    ours, theirs = ([line["objective"] for line in records(one.directory, "metrics")] for one in (outcome, alone))
    assert ours == pytest.approx(theirs, rel=limit) and len(ours) == 3
    assert all(objective > loss for objective, (_, loss, _) in zip(ours, outcome.curve, strict=True))


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_goes_on_bit_for_bit(project: Project, name: str):
    spec = project.spec(steps=6, more=LOSSES[name])
    directory = project.run(spec, root="whole")
    project.run(spec, "--set", "launch.stop_at=3 steps", root="parts", expect=75)
    resumed = project.run(spec, root="parts")
    assert curve(resumed) == curve(directory) and len(curve(directory)) == 6
    lines = [[line["objective"] for line in records(one, "metrics")] for one in (directory, resumed)]
    assert lines[0] == lines[1]
