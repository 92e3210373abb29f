"""`norms`: those of the tensors of a run, on every layout those of one process, and after a stop as without one."""

import numpy as np
import pytest
from attrs import evolve
from forked_ranks import RanksFailed
from projects import records
from topologies import BY_NAME, ELSEWHERE, SHALLOW
from trials import TOLERANCE, Laboratory, Trial, gaps

TICKS = """
every 1 step norms { by = parameter }
every 2 steps norms
every 2 steps norms { by = module, of = [updates] }
"""
LAYOUTS = (
    *(pytest.param(name) for name in ELSEWHERE["norms"]),
    *(
        pytest.param(name, marks=pytest.mark.matrix)
        for name in (
            "pp 2 · ring 2 (dense)",
            "fsdp 2 · tp 2 (dense)",
            "pp 2, tied (dense)",
            "replicate 2, ddp (dense)",
            "fsdp 2 · ep 2 (moe)",
            "pp 2 · tp 2, zbv (moe)",
        )
    ),
)


def norms(directory) -> dict[tuple[int, str], float]:
    """(step, key) → value."""
    found = {}
    for record in records(directory, "metrics"):
        found |= {(record["step"], key): value for key, value in record.items() if "_norm/" in key}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_norms_of_one_process(lab: Laboratory, layout: str):
    """Each element counts once, however it is cut and on however many ranks it is."""
    topology = BY_NAME[layout]
    trial = evolve(topology.trial("fp64", shallow=True), more=TICKS)
    whole, cut = lab.alone(trial), lab.run(trial, topology.layout, saves=False)
    assert gaps(cut, whole).worst < TOLERANCE["fp64"]
    alone, ours = norms(whole.directory), norms(cut.directory)
    assert alone.keys() == ours.keys() and len(alone) > 100
    assert not {key: (ours[key], alone[key]) for key in alone if abs(ours[key] / alone[key] - 1) > TOLERANCE["fp64"]}


def test_they_are_those_of_the_tensors(lab: Laboratory):
    """In fp64: of parameters as they are after the step, of what it has added to them, of gradients before clipping,
    which every step of this trial does."""
    trial = Trial(more=TICKS, steps=2, settings=SHALLOW)
    whole, before = lab.alone(trial), lab.alone(evolve(trial, steps=1))
    found = norms(whole.directory)
    names = [name for name in whole.tensors if not name.startswith("optimizer.")]
    for name in names:
        now, then = whole.tensors[name], before.tensors[name]
        assert found[2, f"param_norm/{name}"] == pytest.approx(np.linalg.norm(now), rel=1e-12)
        assert found[2, f"update_norm/{name}"] == pytest.approx(np.linalg.norm(now - then), rel=1e-12)
    layer = [whole.tensors[name] - before.tensors[name] for name in names if name.startswith("layers.1.mlp.")]
    assert found[2, "update_norm/layers.1.mlp"] == pytest.approx(np.sqrt(sum((x**2).sum() for x in layer)), rel=1e-12)
    grad_norm = {step: norm for step, _, norm in whole.curve}
    for step in (1, 2):
        of_all = [found[step, f"grad_norm/{name}"] for name in names]
        assert np.linalg.norm(of_all) == pytest.approx(grad_norm[step], rel=1e-12) and grad_norm[step] > 0.5
        assert found[step, "grad_norm/model"] == pytest.approx(grad_norm[step], rel=1e-12)
    assert (2, "grad_norm/layers.0") in found and (1, "grad_norm/layers.0") not in found


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_same_norms(lab: Laboratory):
    more = "every 2 steps norms\nevery 3 steps norms { by = module, of = [updates] }\non finish norms { by = model }"
    trial = Trial(steps=5, settings=SHALLOW, more=more)

    def train(name: str, *more: str) -> dict[tuple[int, str], float]:
        return norms(lab.ranks.run(lab.plan(trial, more), lab.folder, name=name).directory)

    whole = train("norms-whole")
    with pytest.raises(RanksFailed, match="stopped"):
        train("norms-parts", "launch.stop_at=2 steps")
    assert train("norms-parts") == whole
    steps = {step for step, _ in whole}
    assert steps == {2, 3, 4, 5} and (3, "grad_norm/model") not in whole
    assert [key for step, key in whole if step == 5] == ["param_norm/model", "grad_norm/model"]
