"""What a plan says of the disk, against what real runs have in their folders of checkpoints."""

import pytest
from attrs import evolve
from checkpoints import folder
from forked_ranks import Mutation
from topologies import Topology
from trials import Laboratory

from xtrain.planner.costs.run import disk_of

SLOW = pytest.mark.slow
# The loss falls, so that the first checkpoint stays the best.
BEST = """every 1 step eval lines {{ batches = 1 }} then checkpoint
checkpoint {{ keep = 1, best = eval.lines.loss, best_is = highest{} }}"""
BIASED = "model.router.bias_speed=0.001"


@pytest.mark.parametrize(("topology", "settings", "more"), [
    (Topology(), ", backend = file, mode = async", ""),
    pytest.param(Topology(fsdp=2), "", "ema { decay = 0.9, publish = true }", marks=SLOW),
    pytest.param(Topology(model="moe", fsdp=2, ep=2, sets=(BIASED,)), "", "", marks=SLOW),
    pytest.param(Topology(replicate=2), ", mode = async", "", marks=SLOW),
    pytest.param(Topology(pp=2, tp=2), "", "", marks=SLOW),
    pytest.param(Topology(fsdp=2, tp=2), ", model = false", "ema {}", marks=SLOW),
])  # fmt: skip
def test_the_disk_figure_is_never_exceeded_and_nearly_reached(lab: Laboratory, topology, settings, more):
    trial = topology.trial("fp32", shallow=True)
    name = f"disk-{topology.name}-{settings}"
    report = lab.folder / "weight.txt"
    for count in (2, 4):  # the run ends, with weights alone, and goes on behind its end
        again = evolve(trial, steps=count, more=f"{BEST.format(settings)}\n{more}")
        plan = lab.plan(again, topology.layout)
        outcome = lab.ranks.run(plan, lab.folder, name=name, mutation=Mutation("weighed_folder", report=str(report)))
    said = disk_of(plan, saves=4)
    assert said is not None
    own = folder(outcome.directory)
    files = {path.stat().st_ino: path.stat().st_size for path in own.root.rglob("*") if path.is_file()}
    assert len(own.entries()) == 2
    assert 0.97 * said.most < int(report.read_text()) <= said.most
    assert 0.97 * said.rest < sum(files.values()) <= said.rest
