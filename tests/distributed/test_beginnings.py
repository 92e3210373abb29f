"""A run that begins with another's state, or with its weights, on other ranks than those that wrote them."""

import numpy as np
import pytest
from attrs import evolve
from checkpoints import folder, tensors
from projects import events
from topologies import FLAT, Topology
from trials import Laboratory

pytestmark = pytest.mark.distributed

TWO = Topology(fsdp=2, accumulate=1, shared=FLAT)
TRIAL = evolve(TWO.trial("fp64"), steps=2, more="checkpoint { best = eval.lines.loss }\nevery 1 step eval lines")


@pytest.mark.slow
def test_a_run_goes_on_from_another_and_after_a_stop_from_itself(lab: Laboratory):
    lab.ranks.run(lab.plan(TRIAL, TWO.layout), lab.folder, name="origin")
    source = lab.folder / "jobs" / "origin"
    assert folder(source).named("best") and folder(source).named("model") == "model-s000000000002"
    unbroken = lab.run(evolve(TRIAL, steps=4), TWO.layout)
    named = (*TWO.layout, f'checkpoint.from="{source}"')
    for steps in (3, 4):
        outcome = lab.ranks.run(lab.plan(evolve(TRIAL, steps=steps), named), lab.folder, name="heir")
    assert outcome.curve == unbroken.curve[2:]
    resumed = events(outcome.directory, "resumed")
    assert [(e["step"], e["source"]) for e in resumed] == [(2, "from"), (3, "run")]
    assert folder(outcome.directory).latest().state()["begun_from"]["step"] == 2


def test_weights_alone_are_taken_over_and_nothing_else(lab: Laboratory):
    """One rank, in another number format; a learning rate of nothing leaves them as they came."""
    source = lab.folder / "jobs" / "origin"
    if not source.is_dir():
        lab.ranks.run(lab.plan(TRIAL, TWO.layout), lab.folder, name="origin")
    sets = (f'checkpoint.pretrained="{source}"', "optimizer.lr=1e-30", "precision.params=fp32")
    outcome = lab.ranks.run(lab.plan(evolve(TRIAL, steps=1), sets), lab.folder, name="pupil")
    weights = tensors(folder(source).pointed("model").path)
    for name, value in weights.items():
        np.testing.assert_array_equal(outcome.tensors[name.removeprefix("model.")], value.float().numpy())
    assert [step for step, *_ in outcome.curve] == [1]
    assert events(outcome.directory, "pretrained")[0]["of_step"] == 2 and not events(outcome.directory, "resumed")
