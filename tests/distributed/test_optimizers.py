"""Every optimizer computes on layouts what it computes in one process, and goes on as if it had not stopped."""

import pytest
from projects import Project, curve
from topologies import SHALLOW
from trials import TOLERANCE, Laboratory, Trial, gaps, stray_shapes

pytestmark = pytest.mark.distributed

OPTIMIZERS = {
    "sgd": "sgd { lr = 0.1, momentum = 0.9, nesterov = true, weight_decay = 0.1",
    "plain sgd": "sgd { lr = 0.1, momentum = 0",
    "lion": "lion { lr = 1e-3, weight_decay = 0.5",
}
LAYOUTS = {
    "dense": ("parallel.tp=2", "parallel.fsdp=2", "batch.micro=2"),
    "moe": ("parallel.ep=2", "parallel.fsdp=2", "batch.micro=2"),
}


@pytest.mark.parametrize("model", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_layout_updates_as_one_process_does(lab: Laboratory, name: str, model: str):
    trial = Trial(model=model, optimizer=OPTIMIZERS[name], settings=SHALLOW)
    alone = lab.alone(trial)
    outcome = lab.run(trial, LAYOUTS[model], saves=False)
    found = gaps(outcome, alone)
    limit = TOLERANCE["fp64"]
    assert found.loss < limit and found.norm < limit and found.eval < limit
    assert not {tensor: gap for tensor, gap in found.tensors.items() if not gap < limit}
    assert not stray_shapes(lab.plan(trial, LAYOUTS[model]), outcome)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_with_its_state(project: Project, name: str):
    more = f"optimizer {OPTIMIZERS[name]} }}"
    spec = project.spec(steps=6)
    text = (project.folder / spec).read_text().replace("optimizer adamw { lr = 3e-3 }", more)
    (project.folder / spec).write_text(text)
    whole = curve(project.run(spec, root="whole"))
    project.run(spec, "--set", "launch.stop_at=3 steps", root="parts", expect=75)
    assert curve(project.run(spec, root="parts")) == whole and len(whole) == 6
