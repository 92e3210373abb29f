"""Every optimizer computes on layouts what it computes in one process, and goes on as if it had not stopped."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from checkpoints import folder, tensors
from forked_ranks import Mutation, Outcome, saved_tensors
from projects import worst
from topologies import BY_NAME, ELSEWHERE, SHALLOW
from trials import TOLERANCE, Laboratory, Trial, gaps, stray_shapes

from xtrain.dsl.schema import optimizers

OPTIMIZERS = {
    "sgd": "sgd { lr = 0.1, momentum = 0.9, nesterov = true, weight_decay = 0.1",
    "plain sgd": "sgd { lr = 0.1, momentum = 0",
    "lion": "lion { lr = 1e-3, weight_decay = 0.5",
    "muon": "muon { lr = 0.01, adamw_lr = 0.1",
    "normuon": "muon { lr = 0.01, adamw_lr = 0.1, neurons = 0.9, iteration = polar_express",
    "ademamix": "ademamix { lr = 1e-2, eps = 1e-3, alpha_warmup = 3, beta3_warmup = 4",
    "adamw in bf16": "adamw { lr = 1e-2, eps = 1e-3, states = bf16",
    "muon in bf16": "muon { lr = 0.01, adamw_lr = 0.1, states = bf16",
    "adamw8bit": "adamw8bit { lr = 1e-2, eps = 1e-3, block = 16",
    "adafactor": "adafactor { lr = 0.02, weight_decay = 0.1, eps1 = 1e-3",
    "adam_mini": "adam_mini { lr = 1e-2, eps = 1e-3",
    "adam_mini in bf16": "adam_mini { lr = 1e-2, eps = 1e-3, states = bf16",
    "schedule_free": "schedule_free { lr = 1e-2, eps = 1e-3",
    "rounded muon": "muon { lr = 0.01, adamw_lr = 0.1, stochastic_rounding = true",
    "plain muon": "muon { lr = 0.01, nesterov = false, scale = original, routers = true, heads = true",
    "cautious muon": "muon { lr = 0.01, adamw_lr = 0.1, weight_decay = 1, cautious_decay = true",
    "cautious lion": "lion { lr = 1e-3, weight_decay = 5, cautious_decay = true",
    "groups": "adamw { lr = 1e-2, eps = 1e-3",
    "parametrization": "adamw { lr = 1e-2, eps = 1e-3",
}
GROUPS = {
    "groups": """
group "embed_tokens" { lr_scale = 0.5, weight_decay = 0.3 }
group "layers.*.self_attn" { weight_decay = 0.2, optimizer muon { lr = 0.01, adamw_lr = 0.1 } }
group "layers.1.mlp" { lr_scale = 0.5, optimizer sgd { lr = 0.1, weight_decay = 0.1 } }
""",
    "parametrization": """
group "layers.*.mlp" { lr_scale = 0.5, optimizer lion { lr = 1e-3 } }
parametrization { kind = complete_p, base_width = 8, base_depth = 1 }
""",
}
# Settings of the model, where the small ones of the table would leave nothing to do.
WIDER = {"adamw8bit": ("model.dim=64",), "parametrization": ("model.tie_embeddings=false",)}
LAYOUTS = (
    "fsdp 2 (dense)", "fsdp 4 (dense)", "tp 2 (dense)", "pp 2, gpipe (dense)", "fsdp 2 · tp 2 (dense)",
    "fsdp 2 · ep 2 (moe)", "fsdp 4 · ep 2 (moe)", "replicate 2 · fsdp 2 (dense)", "pp 2 · fsdp 2 · tp 2 · ep 2 (moe)",
    "fsdp 2 · ring 2 · tp 2 · ep 2 (moe)",
)  # fmt: skip
# Where a run begins and where it goes on: by default the first, of a state in blocks, in sums, and of groups.
MOVES = {
    "schedule_free": (("fsdp 2 (dense)", "tp 2 (dense)"), ("fsdp 2 · tp 2 (dense)", "tp 2 (dense)")),
    "normuon": (("fsdp 2 · tp 2 (dense)", "tp 2 (dense)"), ("fsdp 2 (dense)", "fsdp 2 · tp 2 (dense)")),
    "adafactor": (("fsdp 2 (dense)", "tp 2 (dense)"), ("fsdp 2 · tp 2 (dense)", "replicate 2 · fsdp 2 (dense)")),
    "adam_mini": (("fsdp 4 (dense)", "tp 2 (dense)"), ("fsdp 2 · tp 2 (dense)", "fsdp 2 (dense)")),
    "adamw in bf16": (("tp 2 (dense)", "fsdp 2 (dense)"), ("tp 2 (dense)", "fsdp 2 · tp 2 (dense)")),
    "adamw8bit": (("fsdp 2 · tp 2 (dense)", "fsdp 2 (dense)"), ("fsdp 2 · tp 2 (dense)", "fsdp 4 (dense)")),
    "groups": (("fsdp 2 (dense)", "tp 2 (dense)"), ("fsdp 2 · tp 2 (dense)", "tp 2 (dense)")),
}
MOVED = ("adamw8bit",)
# Whose state goes on bit for bit by default; that of blocks of 8 bits moves to another layout.
KINDS = ("rounded muon",)
Runs = Callable[[str, str], Outcome]
CASES = [
    pytest.param(name, layout, marks=() if layout in ELSEWHERE[name] else pytest.mark.matrix)
    for name in OPTIMIZERS
    if "rounding" not in OPTIMIZERS[name]
    for layout in LAYOUTS
]


def trial_of(name: str, layout: str) -> Trial:
    trial = BY_NAME[layout].trial("fp64", shallow=True)
    settings = (*trial.settings, *WIDER.get(name, ()))
    return evolve(trial, optimizer=OPTIMIZERS[name], more=GROUPS.get(name, ""), settings=settings)


@pytest.fixture(scope="module")
def trained(lab: Laboratory):
    """By optimizer and layout: two steps, of which the last one is saved where a run goes on elsewhere."""

    @cache
    def run(name: str, layout: str) -> Outcome:
        saves = layout in (first for first, _ in MOVES.get(name, ()))
        return lab.run(trial_of(name, layout), BY_NAME[layout].layout, saves=saves)

    return run


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_layout_updates_as_one_process_does(lab: Laboratory, trained: Runs, name: str, layout: str):
    topology, trial = BY_NAME[layout], trial_of(name, layout)
    alone, outcome = lab.alone(trial), trained(name, layout)
    found = gaps(outcome, alone)
    limit = TOLERANCE["fp64"]
    assert not found.beyond(limit)
    assert not stray_shapes(lab.plan(trial, topology.layout), outcome)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "fault", "layout"),
    [
        ("muon", "own_pieces", "fsdp 2 (dense)"),
        ("muon", "own_pieces", "tp 2 (dense)"),
        ("normuon", "own_means", "tp 2 (dense)"),
        ("normuon", "own_means", "fsdp 4 · ep 2 (moe)"),
        ("adafactor", "own_means", "fsdp 2 (dense)"),
        ("adafactor", "own_means", "fsdp 4 · ep 2 (moe)"),
        ("adam_mini", "own_means", "fsdp 4 (dense)"),
        ("adam_mini", "own_means", "tp 2 (dense)"),
    ],
)
def test_faults_of_optimizers_are_seen(lab: Laboratory, name: str, fault: str, layout: str):
    topology = BY_NAME[layout]
    trial = evolve(topology.trial("fp64", shallow=True), optimizer=OPTIMIZERS[name])
    found = gaps(lab.run(trial, topology.layout, mutation=Mutation(fault), saves=False), lab.alone(trial))
    assert found.worst_tensor > 1e3 * TOLERANCE["fp64"]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["tp 2 (dense)", "fsdp 2 · tp 2 (dense)"])
def test_weights_are_rounded_alike_on_layouts(lab: Laboratory, layout: str):
    """Lion moves by signs, which hardly depend on the order of sums: whoever rounds otherwise differs in half of all
    weights, as one does that takes the place in its piece for that in the whole."""
    settings = (*SHALLOW, "precision.params=bf16", "precision.compute=fp32")
    optimizer = "lion { lr = 1e-3, weight_decay = 0, stochastic_rounding = true"
    trial = Trial(params="bf16", steps=2, optimizer=optimizer, settings=settings)
    alone = lab.alone(trial).tensors
    weights = [name for name in alone if name.startswith("layers.") and "norm" not in name]

    def differ(layout: str, fault: Mutation | None = None) -> float:
        found = lab.run(trial, BY_NAME[layout].layout, saves=False, mutation=fault).tensors
        numbers = sum(int((alone[name] != found[name]).sum()) for name in weights)
        return numbers / sum(alone[name].size for name in weights)

    assert differ(layout) < 0.02 < 0.1 < differ("fsdp 2 (dense)", Mutation("own_places"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.matrix) for name in OPTIMIZERS]
)
def test_a_run_goes_on_with_its_state(lab: Laboratory, name: str):
    params = "bf16" if "rounding" in OPTIMIZERS[name] else "fp64"
    settings = (*SHALLOW, *WIDER.get(name, ()))
    trial = Trial(optimizer=OPTIMIZERS[name], params=params, more=GROUPS.get(name, ""), steps=4, settings=settings)
    lab.resumed(trial, (), name.replace(" ", "-"))


@pytest.mark.matrix
@pytest.mark.parametrize("layouts", [
    ("fsdp 2 (dense)", "tp 2 (dense)", "one rank, four microbatches (dense)"),
    ("one rank, four microbatches (dense)", "tp 2 (dense)", "fsdp 2 · tp 2 (dense)", "fsdp 2 (dense)"),
], ids=len)  # fmt: skip
def test_what_muon_stores_moves_exactly(lab: Laboratory, layouts: tuple[str, ...]):
    """A step on each layout: every one begins with the momentum of the one before bit for bit, and all of them are as
    many steps on one process."""
    steps, job = len(layouts), f"muon-by-{len(layouts)}"
    trial = Trial(optimizer=OPTIMIZERS["muon"], steps=steps, settings=SHALLOW, more="checkpoint { keep = none }")
    alone = lab.alone(trial)
    for number, layout in enumerate(layouts, start=1):
        plan = lab.plan(trial, (*BY_NAME[layout].layout, f"experiment.budget={number} steps"))
        moved = lab.ranks.run(plan, lab.folder, name=job, mutation=Mutation("loaded"))
        if number > 1:
            saved = state(folder(moved.directory).path(number - 1))
            assert any(name.endswith("momentum_buffer") for name in saved)
            ranks = saved_tensors(moved.directory / "loaded", plan.mesh.world_size)
            assert {name for rank in ranks for name in rank} >= saved.keys()
            both = [(rank[name], saved[name]) for rank in ranks for name in rank.keys() & saved.keys()]
            assert all(np.array_equal(loaded, stored) for loaded, stored in both)
    moved = evolve(moved, evals=moved.evals[-1:])
    assert gaps(moved, alone).worst < TOLERANCE["fp64"]


def state(checkpoint: Path) -> dict[str, np.ndarray]:
    """Weights and moments of a checkpoint, named as ranks name them."""
    found = {name: value.numpy() for name, value in tensors(checkpoint).items() if not name.endswith(".step")}
    return {name.removeprefix("model."): found[name] for name in found if name.startswith(("model.", "optimizer."))}


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        pytest.param(name, *move, marks=pytest.mark.matrix if place or name not in MOVED else ())
        for name, moves in MOVES.items()
        for place, move in enumerate(moves)
    ],
)
def test_a_state_moves_to_another_layout(lab: Laboratory, trained: Runs, name: str, first: str, second: str):
    """Two steps on one layout and two on the other are four steps on one process."""
    trial, job = evolve(trial_of(name, first), steps=4), f"{name} moves from {first} to {second}".replace(" ", "-")
    lab.take_checkpoint(trained(name, first), 2, job)
    moved = lab.ranks.run(lab.plan(trial, BY_NAME[second].layout), lab.folder, name=job)
    alone = lab.alone(trial)
    assert max(worst(trained(name, first).curve, alone.curve[:2])) < TOLERANCE["fp64"]
    assert gaps(moved, evolve(alone, curve=alone.curve[2:], routing=alone.routing[2:])).worst < TOLERANCE["fp64"]


CLIPPED = "none, clip_spikes = 0.1, clip_value = 2e-3"


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["fsdp 2 (dense)", "fsdp 2 · tp 2 (dense)"])
def test_spikes_and_elements_are_clipped_alike_on_layouts(lab: Laboratory, monkeypatch: pytest.MonkeyPatch, name: str):
    """Statistics are those of all ranks, and a run goes on with them: the norm of the second step is a spike against
    that of the first."""
    monkeypatch.setattr(optimizers, "SPIKE_STEPS", 1)
    trial = Trial(optimizer="sgd { lr = 1e-4", clip=CLIPPED, steps=3, settings=SHALLOW)
    layout = BY_NAME[name].layout
    whole = lab.run(trial, layout)
    assert gaps(whole, lab.alone(trial)).worst < TOLERANCE["fp64"]
    unclipped = lab.alone(evolve(trial, clip="none"))
    for each in ("clip_spikes = 0.1", "clip_value = 2e-3"):
        assert gaps(lab.alone(evolve(trial, clip=f"none, {each}")), unclipped).worst > 1e-6, each

    def train(*sets: str) -> Outcome:
        return lab.ranks.run(lab.plan(trial, (*layout, *sets)), lab.folder, name=f"clipped-{len(layout)}")

    train("experiment.budget=1 steps")
    ended = train()
    assert ended.curve == whole.curve
    assert not [name for name in whole.tensors if not np.array_equal(ended.tensors[name], whole.tensors[name])]
