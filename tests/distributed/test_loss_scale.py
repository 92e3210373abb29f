"""The scale of the loss in fp16: it changes no gradient, on any layout, and what overflows is skipped by all ranks."""

import numpy as np
import pytest
import torch
from attrs import evolve
from forked_ranks import Mutation, Outcome
from projects import events
from topologies import BY_NAME, Topology
from trials import Laboratory, Trial

from xtrain.runtime.base.state import LossScale

HALF = ("precision.compute=fp16",)
ORDINARY = ["fsdp 2 · ep 2 (moe)"]
MORE = [
    "pp 2, 1f1b (dense)",
    "pp 2, zbv (dense)",
    "tp 2 (dense)",
    "ring 2 · ep 2 (moe)",
    "pp 2 · fsdp 2 · tp 2 (dense)",
]
FURTHER = ("model.mtp=1", "model.mtp_weight=0.3")


def half(layout: Topology, *settings: str, steps: int = 2, more: str = "") -> Trial:
    trial = layout.trial("fp32", shallow=True)
    return evolve(trial, steps=steps, more=more, settings=(*trial.settings, *HALF, *settings))


def bits(ours: Outcome, theirs: Outcome) -> None:
    assert ours.curve == theirs.curve
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert not [name for name in theirs.tensors if not np.array_equal(ours.tensors[name], theirs.tensors[name])]


@pytest.mark.parametrize("name", [*ORDINARY, *(pytest.param(each, marks=pytest.mark.matrix) for each in MORE), "one"])
def test_where_numbers_are_wide_a_scale_changes_no_bit(lab: Laboratory, name: str):
    """Of a power of two: every part of the loss has it, and every gradient is divided by it."""
    layout = BY_NAME[name] if name != "one" else Topology(accumulate=1, shared=FURTHER, note="further tokens")
    wide = Mutation("wide_half")
    scaled, plain = (
        lab.run(half(layout, f"precision.fp16.scale={scale}"), layout.layout, mutation=wide) for scale in (65_536, 1)
    )
    bits(scaled, plain)


def test_ranks_skip_together_what_overflows_on_one_and_the_scale_follows(lab: Laboratory):
    layout = BY_NAME["fsdp 2, one microbatch (dense)"]
    trial = half(layout, "precision.fp16.scale=1024", "precision.fp16.interval=2", steps=8)
    outcome = lab.run(trial, layout.layout, mutation=Mutation("overflow", steps=[3, 4]))
    skipped = events(outcome.directory, "skipped")
    assert [event["step"] for event in skipped] == [3, 4]
    assert "the scale of the loss is 1,024 from here on, before 2,048" in skipped[0]["reason"]
    assert "is 512 from here on" in skipped[1]["reason"]
    assert [step for step, *_ in outcome.curve] == [1, 2, 5, 6, 7, 8]


def test_gradients_that_are_0_in_fp16_are_not_with_a_scale(lab: Laboratory):
    layout = Topology(accumulate=1)
    small = ("model.init_std=1e-4", "optimizer.clip=none")
    with_one, without, exact = (
        lab.run(evolve(half(layout, *small, *more), clip="none"), layout.layout)
        for more in ((), ("precision.fp16.scale=1",), ("precision.compute=fp32",))
    )
    norms = [each.curve[0][2] for each in (with_one, without, exact)]
    assert abs(norms[0] / norms[2] - 1) < 2e-3 < abs(norms[1] / norms[2] - 1)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["fsdp 2, one microbatch (dense)", "pp 2, 1f1b (dense)"])
def test_a_resumed_run_has_the_scale_that_it_had(lab: Laboratory, name: str):
    layout = BY_NAME[name]
    # With small scales, which double in each step, another scale makes other gradients 0.
    trial = half(layout, "precision.fp16.scale=1", "precision.fp16.interval=1", "model.init_std=1e-3", steps=7)
    whole, _ = lab.resumed(trial, layout.layout, f"half-{layout.axes[0]}", step=4)
    assert not events(whole.directory, "skipped")


def test_the_scale_follows_torchs_grad_scaler():
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    ours, chance = LossScale(2.0**16), np.random.default_rng(0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflows in chance.random(200) < 0.2:
        theirs.scale(torch.zeros(1))
        parameter.grad = torch.full((1,), float("inf") if overflows else 1.0)
        theirs.step(optimizer)
        theirs.update()
        if overflows:
            ours.overflowed()
        else:
            ours.worked(3)
        assert ours.value == min(theirs.get_scale(), 2.0**24)
        if theirs.get_scale() > 2.0**24:
            break
