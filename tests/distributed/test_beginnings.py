"""A run that begins with another's state, or with its weights, on other ranks than those that wrote them."""

import numpy as np
import pytest
from attrs import evolve
from checkpoints import folder, tensors
from forked_ranks import RanksFailed
from projects import events
from topologies import FLAT, Topology
from trials import Laboratory

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
    assert weights
    for name, value in weights.items():
        np.testing.assert_array_equal(outcome.tensors[name.removeprefix("model.")], value.float().numpy())
    assert [step for step, *_ in outcome.curve] == [1]
    assert events(outcome.directory, "pretrained")[0]["of_step"] == 2 and not events(outcome.directory, "resumed")


def test_an_adapter_goes_on_on_its_base_alone(lab: Laboratory):
    """On the weights of another run, which no checkpoint of it holds; with others it is refused before a step."""
    source = lab.folder / "jobs" / "origin"
    if not source.is_dir():
        lab.ranks.run(lab.plan(TRIAL, TWO.layout), lab.folder, name="origin")
    trial = evolve(TRIAL, steps=1, more="adapter lora { rank = 2 }")
    base = f'checkpoint.pretrained="{source}"'
    begun = lab.ranks.run(lab.plan(trial, (base,)), lab.folder, name="adapter")
    saved = tensors(folder(begun.directory).latest().path)
    assert not [name for name in saved if name.startswith("model.") and "lora_" not in name]
    weights = tensors(folder(source).pointed("model").path)
    assert weights
    for name, value in weights.items():
        np.testing.assert_array_equal(begun.tensors[name.removeprefix("model.")], value.numpy())

    named = f'checkpoint.from="{begun.directory}"'
    later = evolve(trial, steps=2)
    heir = lab.ranks.run(lab.plan(later, (base, named)), lab.folder, name="heir_of_adapter")
    assert [step for step, *_ in heir.curve] == [2] and events(heir.directory, "resumed")
    with pytest.raises(RanksFailed, match=r"trained on the base [0-9a-f]{16}, but the weights that were read are the"):
        lab.ranks.run(lab.plan(later, (named,)), lab.folder, name="stranger")
    with pytest.raises(RanksFailed, match="the checkpoint holds an adapter without the model under it"):
        other = evolve(TRIAL, steps=2)
        lab.ranks.run(lab.plan(other, (f'checkpoint.pretrained="{begun.directory}"',)), lab.folder, name="whole")
