"""`norms`: those of the tensors of a run, on every layout those of one process, and after a stop as without one."""

import numpy as np
import pytest
from attrs import evolve
from projects import Project, records
from topologies import TIED, Topology
from trials import TOLERANCE, Laboratory, Trial

pytestmark = pytest.mark.distributed

TICKS = """
every 1 step norms { by = parameter }
every 2 steps norms
every 3 steps norms { by = module, of = [updates] }
"""
LAYOUTS = [
    Topology(fsdp=2, tp=2),
    Topology(pp=2, ring=2, shared=TIED, note="tied"),
    Topology(replicate=2, sets=("parallel.stack=ddp",), note="ddp"),
    Topology(model="moe", ep=2, fsdp=2),
    Topology(model="moe", pp=2, tp=2),
]


def norms(directory) -> dict[tuple[int, str], float]:
    """(step, key) → value."""
    found = {}
    for record in records(directory, "metrics"):
        found |= {(record["step"], key): value for key, value in record.items() if "_norm/" in key}
    return found


@pytest.mark.parametrize("topology", LAYOUTS, ids=lambda topology: topology.name)
def test_a_layout_has_the_norms_of_one_process(lab: Laboratory, topology: Topology):
    """Each element counts once, however it is cut and on however many ranks it is."""
    trial = evolve(topology.trial("fp64"), more=TICKS)
    alone, ours = norms(lab.alone(trial).directory), norms(lab.run(trial, topology.layout, saves=False).directory)
    assert alone.keys() == ours.keys() and len(alone) > 100
    assert not {key: (ours[key], alone[key]) for key in alone if abs(ours[key] / alone[key] - 1) > TOLERANCE["fp64"]}


def test_they_are_those_of_the_tensors(lab: Laboratory):
    """In fp64: of parameters as they are after the step, of what it has added to them, of gradients before clipping,
    which every step of this trial does."""
    trial = Trial(more=TICKS)
    whole, before = lab.alone(trial), lab.alone(evolve(trial, steps=2))
    found = norms(whole.directory)
    names = [name for name in whole.tensors if not name.startswith("optimizer.")]
    for name in names:
        now, then = whole.tensors[name], before.tensors[name]
        assert found[3, f"param_norm/{name}"] == pytest.approx(np.linalg.norm(now), rel=1e-12)
        assert found[3, f"update_norm/{name}"] == pytest.approx(np.linalg.norm(now - then), rel=1e-12)
    layer = [whole.tensors[name] - before.tensors[name] for name in names if name.startswith("layers.1.mlp.")]
    assert found[3, "update_norm/layers.1.mlp"] == pytest.approx(np.sqrt(sum((x**2).sum() for x in layer)), rel=1e-12)
    grad_norm = {step: norm for step, _, norm in whole.curve}
    for step in (1, 2, 3):
        of_all = [found[step, f"grad_norm/{name}"] for name in names]
        assert np.linalg.norm(of_all) == pytest.approx(grad_norm[step], rel=1e-12) and grad_norm[step] > 0.5
        assert found[step, "grad_norm/model"] == pytest.approx(grad_norm[step], rel=1e-12)
    assert (2, "grad_norm/layers.0") in found and (1, "grad_norm/layers.0") not in found


def test_a_run_that_goes_on_has_the_same_norms(project: Project):
    more = "every 2 steps norms\nevery 3 steps norms { by = module, of = [updates] }\non finish norms { by = model }"
    spec = project.spec(steps=5, more=more)
    whole = norms(project.run(spec, root="whole"))
    project.run(spec, "--set", "launch.stop_at=2 steps", root="parts", expect=75)
    assert norms(project.run(spec, root="parts")) == whole
    steps = {step for step, _ in whole}
    assert steps == {2, 3, 4, 5} and (3, "grad_norm/model") not in whole
    assert [key for step, key in whole if step == 5] == ["param_norm/model", "grad_norm/model"]
