"""DeepSpeed's engine trains as one process does, and its checkpoints are those of every other layout."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from checkpoints import tensors
from forked_ranks import Mutation, Outcome
from projects import events
from topologies import Topology
from trials import TOLERANCE, Laboratory, Trial, gaps

pytestmark = pytest.mark.slow
pytest.importorskip("deepspeed")

SAVED, STEPS, LIMIT = 2, 4, TOLERANCE["fp32"]
MORE = f"every {SAVED} steps checkpoint\ncheckpoint {{ mode = sync, keep = none, model = false }}"
TEXT = 'every 2 steps generate { prompts = ["line 1", "abc def"], tokens = 4, temperature = 0.0 }'
matrix = pytest.mark.matrix


def engine(stage: int, ranks: int = 2, *sets: str, **settings) -> Topology:
    own = ("parallel.stack=deepspeed", f"parallel.deepspeed.stage={stage}", *sets)
    return Topology(replicate=ranks, sets=own, note=f"stage {stage}", **settings)


def offloading(stage: int, ranks: int = 2, *sets: str, params: str = "none", **settings) -> Topology:
    places = (
        f"parallel.deepspeed.{name}={place}"
        for name, place in (("offload_optimizer", "cpu"), ("offload_param", params))
    )
    return engine(stage, ranks, *places, *sets, **settings)


def state(outcome: Outcome, step: int = STEPS) -> dict[str, np.ndarray]:
    """Weights and moments of a checkpoint."""
    path: Path = outcome.directory / "checkpoints" / f"ckpt-s{step:012d}"
    return {name: each.numpy() for name, each in tensors(path).items() if name.startswith(("model.", "optimizer."))}


def hold_together(ours: Outcome, theirs: Outcome, limit: float) -> None:
    """Losses, norms, evaluations; weights and moments that were saved."""
    # Under stage 3 ranks hold no parameters between two steps: what is compared are checkpoints.
    assert not gaps(evolve(ours, whole=[{}]), evolve(theirs, whole=[{}])).beyond(limit)
    saved, expected = state(ours), state(theirs)
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(saved[name] - value).max() < limit * max(np.abs(value).max(), 1e-30), name


def run(lab: Laboratory, trial: Trial, topology: Topology, name: str, mutation: Mutation | None = None) -> Outcome:
    return lab.ranks.run(lab.plan(trial, topology.layout), lab.folder, name=name, mutation=mutation)


def name_of(request: pytest.FixtureRequest) -> str:
    return "ds_" + request.node.callspec.id.replace(" ", "_").replace(",", "")


def trial_of(topology: Topology, more: str = "") -> Trial:
    return evolve(topology.trial("fp32"), steps=STEPS, more=f"{MORE}\n{more}")


@pytest.mark.parametrize(("topology", "more"), [
    pytest.param(engine(0), "", id="stage 0"),
    pytest.param(engine(1), "", id="stage 1"),
    pytest.param(engine(2), "", id="stage 2"),
    pytest.param(engine(3), "", id="stage 3"),
    pytest.param(offloading(2), "", id="offloaded, 2"),
    pytest.param(offloading(3, params="cpu"), "", id="offloaded with parameters, 3"),
    pytest.param(offloading(1), "", id="offloaded, 1", marks=matrix),
    pytest.param(offloading(3), "", id="offloaded, 3", marks=matrix),
    pytest.param(engine(3, 2, "parallel.deepspeed.offload_param=cpu"), "", id="parameters offloaded, 3", marks=matrix),
    pytest.param(offloading(2, 4), "", id="offloaded, 2, 4 ranks", marks=matrix),
    pytest.param(offloading(3, 3, params="cpu", rows=12), "", id="offloaded, 3, 3 ranks", marks=matrix),
    pytest.param(offloading(2, 2, accumulate=1, clip="none"), "", id="offloaded, one microbatch", marks=matrix),
    pytest.param(engine(3, 4), "", id="stage 3, 4 ranks", marks=matrix),
    pytest.param(engine(3, 2, "activation.mode=full"), "", id="computed again, 3", marks=matrix),
    pytest.param(engine(3, 2, model="gemma3"), "", id="gemma3, 3", marks=matrix),
    pytest.param(engine(3), TEXT, id="text, 3", marks=matrix),
    pytest.param(engine(3, 3, rows=12), "", id="3 ranks, 3", marks=matrix),
    pytest.param(engine(1, 3, rows=12), "", id="3 ranks, 1", marks=matrix),
    pytest.param(engine(2, 1), "", id="one rank, 2", marks=matrix),
    pytest.param(engine(3, 1), "", id="one rank, 3", marks=matrix),
    pytest.param(engine(2, 2, "checkpoint.mode=async"), "", id="saved beside", marks=matrix),
    pytest.param(engine(3, 2, "checkpoint.mode=async"), "", id="saved beside, 3", marks=matrix),
    pytest.param(engine(0, 4), "", id="stage 0, 4 ranks", marks=matrix),
    pytest.param(engine(1, 4), "", id="stage 1, 4 ranks", marks=matrix),
    pytest.param(engine(2, 4), "", id="stage 2, 4 ranks", marks=matrix),
    pytest.param(engine(2, 2, clip="none", accumulate=1), "", id="no clipping", marks=matrix),
    pytest.param(engine(1, 2, accumulate=4), "ema { decay = 0.9 }", id="averages", marks=matrix),
    pytest.param(engine(2, 2, model="moe"), "", id="experts", marks=matrix),
    pytest.param(engine(1, 2, "activation.mode=full"), "", id="computed again, 1", marks=matrix),
    pytest.param(engine(2, 2, "activation.mode=full"), "", id="computed again, 2", marks=matrix),
    pytest.param(engine(2), "adapter lora { rank = 3 }", id="adapter", marks=matrix),
    pytest.param(engine(2), 'group "**.*norm*" { lr_scale = 0.5 }', id="groups", marks=matrix),
])  # fmt: skip
def test_it_trains_as_one_process_does(lab: Laboratory, request, topology: Topology, more: str):
    alone = lab.run(trial := trial_of(topology, more), (), alone=True)
    hold_together(run(lab, trial, topology, name_of(request)), alone, LIMIT)


# The layouts of one process's state, of which the first two run with the others.
STATES = [
    pytest.param(engine(2), id="2"),
    pytest.param(engine(3), id="3"),
    pytest.param(engine(0), id="0", marks=matrix),
    pytest.param(engine(1), id="1", marks=matrix),
    pytest.param(offloading(1), id="1 offloaded", marks=matrix),
    pytest.param(offloading(2), id="2 offloaded"),
    pytest.param(offloading(3, params="cpu"), id="3 offloaded"),
]


@pytest.mark.parametrize("topology", STATES)
def test_it_goes_on_bit_for_bit(lab: Laboratory, request, topology: Topology):
    trial = evolve(topology.trial("fp32"), steps=STEPS, more="checkpoint { mode = sync, keep = none, model = false }")
    whole, later = lab.resumed(trial, topology.layout, f"{name_of(request)}_goes_on", step=SAVED)
    assert state(later).keys() == state(whole).keys()
    assert not [name for name, value in state(whole).items() if not np.array_equal(state(later)[name], value)]


@pytest.mark.parametrize(("before", "after"), [
    pytest.param(Topology(fsdp=2), engine(2), id="fsdp to 2"),
    pytest.param(engine(2), Topology(fsdp=2), id="2 to fsdp"),
    pytest.param(engine(1), Topology(fsdp=4), id="1 to fsdp 4", marks=matrix),
    pytest.param(engine(2, 4), engine(1), id="2 on 4 ranks to 1", marks=matrix),
    pytest.param(Topology(tp=2), engine(1), id="tp to 1", marks=matrix),
    pytest.param(engine(0), engine(2), id="0 to 2", marks=matrix),
    pytest.param(engine(3), Topology(fsdp=2), id="3 to fsdp"),
    pytest.param(offloading(3, params="cpu"), Topology(fsdp=2), id="3 offloaded to fsdp", marks=matrix),
    pytest.param(Topology(fsdp=2), offloading(2), id="fsdp to 2 offloaded", marks=matrix),
    pytest.param(Topology(fsdp=2), engine(3), id="fsdp to 3", marks=matrix),
    pytest.param(engine(3, 4), engine(3), id="3 on 4 ranks to 3", marks=matrix),
])  # fmt: skip
def test_a_checkpoint_moves(lab: Laboratory, request, before: Topology, after: Topology):
    trial, name = trial_of(before), name_of(request)
    there = run(lab, trial, before, f"{name}_stays")
    lab.take_checkpoint(there, SAVED, name)
    here = run(lab, trial, after, name)
    assert events(here.directory, "resumed")[-1]["step"] == SAVED
    later = evolve(there, curve=there.curve[SAVED - 1 :], routing=there.routing[SAVED - 1 :])
    hold_together(here, later, LIMIT)


@pytest.mark.parametrize("topology", STATES)
@pytest.mark.parametrize("policy", ["(3) skip", pytest.param("(2) rollback", marks=matrix)])
def test_bad_steps_leave_no_trace(lab: Laboratory, request, topology: Topology, policy: str):
    """What their backward has summed is dropped, and of what is gone back to nothing stays as it was."""
    trial = evolve(trial_of(topology, f"on nan{policy}"), steps=6)
    name = f"{name_of(request)}_bad"
    poison = Mutation("poison", rank=1, portions=[3, 4], kind="activation")
    instead = Mutation("without", steps=[3, 4]) if "skip" in policy else Mutation("further", behind=2, by=2)
    ours = run(lab, trial, topology, name, poison)
    theirs = run(lab, trial, topology, f"{name}_expected", instead)
    assert ours.curve[-1] == theirs.curve[-1]
    saved, expected = state(ours, 6), state(theirs, 6)
    assert not [name for name, value in expected.items() if not np.array_equal(saved[name], value)]


BF16 = "precision { compute = bf16 }"
# Gradients of a microbatch are the same to the last bit, and their sums in fp32 up to its rounding. From the second
# step on that may turn the rounding of a weight to bf16, by 2^-8 of it, where it lies in the middle between two: of one
# weight in 2^16, the bits that fp32 has and bf16 has not. One of the 30,000 here moves losses by less than this; fp32
# throughout is several times as far away.
TURNED = 1e-4


@pytest.mark.parametrize(
    "topology",
    [pytest.param(engine(2), id="stage 2"), pytest.param(engine(3), id="stage 3"),
        pytest.param(engine(3, 4), id="stage 3, 4 ranks", marks=matrix)],
)  # fmt: skip
def test_in_bf16_it_trains_as_fsdp_does(lab: Laboratory, request, topology: Topology):
    trial, name = trial_of(topology, BF16), f"{name_of(request)}_bf16"
    native = Topology(fsdp=topology.replicate)
    ours, theirs = run(lab, trial, topology, name), run(lab, trial, native, f"{name}_native")
    exact = run(lab, trial_of(topology), native, f"{name}_fp32")
    _, loss, norm = ours.curve[0]
    assert abs(loss - theirs.curve[0][1]) < 1e-6 * loss and abs(norm - theirs.curve[0][2]) < LIMIT * norm
    found = gaps(evolve(ours, whole=[{}]), evolve(theirs, whole=[{}]))
    assert not found.beyond(TURNED)
    away = gaps(evolve(exact, whole=[{}]), evolve(theirs, whole=[{}]))
    print(f"bf16: loss {found.loss:.1e}, norm {found.norm:.1e}; fp32 is {away.loss:.1e} and {away.norm:.1e} away")
    assert min(away.loss, away.norm) > TURNED
    saved, expected = state(ours), state(theirs)
    assert saved.keys() == expected.keys() and any(key.startswith("model.") for key in saved)
    for key, value in expected.items():
        assert np.abs(saved[key] - value).max() < 10 * TURNED * max(np.abs(value).max(), 1e-30), key
        assert not key.startswith("model.") or (saved[key].astype(np.float32).view(np.uint32) & 0xFFFF).any(), key


@pytest.mark.parametrize(
    "topology",
    [pytest.param(engine(2), id="2"), pytest.param(engine(3), id="3", marks=matrix),
        pytest.param(offloading(2), id="2 offloaded", marks=matrix),
        pytest.param(offloading(3, params="cpu"), id="3 offloaded", marks=matrix)],
)  # fmt: skip
def test_in_bf16_it_goes_on_bit_for_bit(lab: Laboratory, request, topology: Topology):
    trial = evolve(
        topology.trial("fp32"), steps=STEPS, more=f"checkpoint {{ mode = sync, keep = none, model = false }}\n{BF16}"
    )
    whole, later = lab.resumed(trial, topology.layout, f"{name_of(request)}_bf16_goes_on", step=SAVED)
    assert not [name for name, value in state(whole).items() if not np.array_equal(state(later)[name], value)]


@pytest.mark.parametrize(
    ("stage", "params", "more"),
    [pytest.param(2, "none", BF16, id="2, bf16"), pytest.param(3, "cpu", BF16, id="3, bf16"),
        pytest.param(1, "none", "", id="1", marks=matrix), pytest.param(2, "none", "", id="2", marks=matrix),
        pytest.param(3, "cpu", "", id="3", marks=matrix)],
)  # fmt: skip
def test_offloading_changes_no_bit(lab: Laboratory, request, stage: int, params: str, more: str):
    """Of weights and moments, where nothing is clipped: norms are taken of gradients in one tensor, and so are others
    in their last digits, which in bf16 turn the rounding of weights."""
    topology, name = offloading(stage, params=params, clip="none"), f"{name_of(request)}_offloaded"
    trial = trial_of(topology, more)
    ours, theirs = run(lab, trial, topology, name), run(lab, trial, engine(stage), f"{name}_not")
    assert [loss for _, loss, _ in ours.curve] == [loss for _, loss, _ in theirs.curve]
    saved, expected = state(ours), state(theirs)
    assert saved.keys() == expected.keys()
    assert not [key for key, value in expected.items() if not np.array_equal(saved[key], value)]


@pytest.mark.parametrize(
    ("stage", "params", "more"),
    [pytest.param(2, "none", "", id="2"), pytest.param(3, "cpu", BF16, id="3, bf16"),
        pytest.param(2, "none", BF16, id="2, bf16", marks=matrix), pytest.param(1, "none", "", id="1", marks=matrix),
        pytest.param(3, "none", "", id="3", marks=matrix)],
)  # fmt: skip
def test_host_memory_is_as_planned(lab: Laboratory, request, stage: int, params: str, more: str):
    """Of what a rank updates, as the plan for a GPU counts it: but for what pads groups of parameters, and whole sums
    of parameters, of which it counts the most that a rank can have."""
    topology, name = offloading(stage, params=params), f"{name_of(request)}_weighed"
    run(lab, trial := trial_of(topology, more), topology, name, Mutation("weigh_offloaded"))
    found = max(int((lab.folder / f"{rank}.bytes").read_text()) for rank in range(2))
    planned = lab.plan(trial, (*topology.layout, "launch.device=cuda")).estimates.classes[0].memory.host
    assert 0.9 * planned < found < 1.02 * planned, (found, planned)


# On two ranks the pieces of its matrices, and of three of them by themselves, are large enough for files of 1 MiB.
WIDE = ("model.dim=128", "model.ffn=4096", "model.layers=1")
FILES = Mutation("plain_files")


def in_files(params: str, **settings) -> Topology:
    places = {"offload_optimizer": "nvme", "offload_param": params, "nvme_path": "disk"}
    return engine(3, 2, *(f"parallel.deepspeed.{name}={value}" for name, value in places.items()), **settings)


@pytest.mark.parametrize(
    ("topology", "more"),
    [pytest.param(in_files("none", clip="none"), "", id="state"),
        pytest.param(in_files("nvme"), "", id="state and parameters"),
        pytest.param(in_files("cpu", clip="none"), BF16, id="state, bf16", marks=matrix),
        pytest.param(in_files("cpu"), BF16, id="state, bf16, clipped", marks=matrix)],
)  # fmt: skip
def test_in_files_it_trains_as_in_memory(lab: Laboratory, request, topology: Topology, more: str):
    """To the last bit where nothing is clipped, as norms are taken of other tensors, whose last digits turn roundings
    of bf16: clipped it is held against host memory, where they are taken of the same; and it goes on bit for bit.
    DeepSpeed's files are read and written by Python here."""
    trial, name = evolve(trial_of(topology, more), settings=WIDE), f"{name_of(request)}_files"
    ours = run(lab, trial, topology, name, FILES)
    found = max(int((lab.folder / f"{rank}.files").read_text()) for rank in range(2))
    planned = lab.plan(trial, topology.layout).node("setup.parallel.deepspeed").args["files"]
    assert 0.9 * planned["bytes"] < found < 1.02 * planned["bytes"], (found, planned)
    clips = topology.clip != "none"
    theirs = run(lab, trial, offloading(3, params="cpu") if clips and more else engine(3), f"{name}_in_memory")
    hold_together(ours, theirs, LIMIT)
    saved, expected = state(ours), state(theirs)
    assert clips or not [key for key, value in expected.items() if not np.array_equal(saved[key], value)]
    lab.take_checkpoint(ours, SAVED, f"{name}_goes_on")
    later = run(lab, trial, topology, f"{name}_goes_on", FILES)
    assert later.curve == ours.curve[SAVED - 1 :]
    assert not [key for key, value in saved.items() if not np.array_equal(state(later)[key], value)]


def test_files_that_could_not_be_read_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where libaio is missing, and where a build that was killed has left a lock, which DeepSpeed would wait for."""
    from xtrain.components.stacks.deepspeed_run import check_files
    from xtrain.runtime.base.errors import EnvironmentFault

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    builder: Any = type(import_module("deepspeed.accelerator").get_accelerator().create_op_builder("AsyncIOBuilder"))
    monkeypatch.setattr(builder, "is_compatible", lambda self: False)
    with pytest.raises(EnvironmentFault, match="no libaio that a C compiler finds"):
        check_files()
    monkeypatch.setattr(builder, "is_compatible", lambda self: True)
    check_files()
    (lock := tmp_path / "async_io" / "lock").touch()
    check_files()  # a build may be under way
    os.utime(lock, (0, 0))
    with pytest.raises(EnvironmentFault, match="async_io/lock, left by an unfinished build of async_io"):
        check_files()
