"""A checkpoint of any layout is gone on with on any other: the same state, and the steps that would have followed."""

from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from checkpoints import tensors
from forked_ranks import Mutation, Outcome, saved_tensors
from projects import events
from topologies import SCHEDULES, Topology
from trials import TOLERANCE, Laboratory, gaps

SAVED, STEPS = 2, 4
# A text at the end, drawn without chance: it is continued alike wherever it is.
MORE = f"""
every {SAVED} steps checkpoint
every {STEPS} steps generate {{ prompts = ["line 1", "abc def ghi abc"], tokens = 6, temperature = 0.0 }}
checkpoint {{ mode = sync, keep = none, model = false }}
"""
# Documents are laid into rows alike everywhere: a ring of two wants them at multiples of four.
ALIGN = "collate=to_tensor -> flatten -> shift_tokens -> pack(sequential, align = 4)"
ROUTER = ("model.router.score=sigmoid", "model.router.bias_speed=1e-2", "model.shared_experts=1")
# Checkpoints then hold the adapter and what is trained in full beside it.
ADAPTER = 'adapter lora { rank = 3, alpha = 6, train = ["layers.1.input_layernorm"] }'
ADAPTED = "adapter, "
moe = partial(Topology, model="moe", shared=(*ROUTER, ALIGN))
dense = partial(Topology, shared=(ALIGN,))

# Every axis, with all that is sharded over several of them.
LAYOUTS = {
    "one process": moe(accumulate=1),
    "one process, one file": moe(accumulate=1, sets=("checkpoint.backend=file",)),
    "fsdp": moe(fsdp=4),
    "1f1b and fsdp": moe(pp=2, fsdp=2, sets=SCHEDULES["1f1b"]),
    "zbv": moe(pp=2, sets=SCHEDULES["zbv"]),
    "ep and tp": moe(fsdp=2, tp=2, ep=4),
    "two ranks, ep and tp": moe(tp=2, ep=2),
    "ring, ulysses and ep": moe(ring=2, ulysses=2, ep=2),
    "hsdp": moe(replicate=2, fsdp=2),
    "pp, fsdp and tp": moe(pp=2, fsdp=2, tp=2),
    "dense, one process": dense(accumulate=1),
    "dense, tp and pp": dense(tp=2, pp=2, sets=("parallel.tp.sequence=false",)),
    "dense, ddp": dense(replicate=2, sets=("parallel.stack=ddp",)),
    "adapter, one process": dense(accumulate=1),
    "adapter, fsdp": dense(fsdp=2),
    "adapter, tp": dense(tp=2),
    "adapter, tp and pp": dense(tp=2, pp=2),
}
# Adapters move in test_adapters.py.
ORDINARY = (("one process, one file", "zbv"),)


def moves() -> list:
    """Every pair of layouts that train the same: 90 of the MoE model, 6 of the dense one, 12 of an adapter of that."""
    pairs = [pair for pair in permutations(LAYOUTS, 2) if len({trains(name) for name in pair}) == 1]
    return [
        pytest.param(*pair, id=" to ".join(pair), marks=() if pair in ORDINARY else pytest.mark.matrix)
        for pair in pairs
    ]


def trains(name: str) -> tuple[str, bool]:
    """The model, and whether an adapter of it is trained."""
    return LAYOUTS[name].model, name.startswith(ADAPTED)


@pytest.fixture(scope="module")
def stayed(lab: Laboratory):
    """By name of the layout: the run that saves and goes on there."""
    runs: dict[str, Outcome] = {}

    def run(name: str) -> Outcome:
        if name not in runs:
            runs[name] = lab.ranks.run(plan_of(lab, name), lab.folder, name=slug("stays", name))
        return runs[name]

    return run


def plan_of(lab: Laboratory, name: str):
    layout = LAYOUTS[name]
    more = f"{ADAPTER}\n{MORE}" if name.startswith(ADAPTED) else MORE
    trial = evolve(layout.trial("fp64"), steps=STEPS, more=more, align=1)
    return lab.plan(trial, layout.layout)


def state(checkpoint: Path) -> dict[str, np.ndarray]:
    """Weights, buffers and moments of a checkpoint, named as ranks name them."""
    found = {name: value.numpy() for name, value in tensors(checkpoint).items() if not name.endswith(".step")}
    return {name.removeprefix("model."): found[name] for name in found if name.startswith(("model.", "optimizer."))}


def slug(*words: str) -> str:
    return " ".join(words).replace(" ", "_").replace(",", "")


def samples(outcome: Outcome) -> list[dict[str, str]]:
    return events(outcome.directory, "generate")[-1]["samples"]


@pytest.mark.parametrize(("before", "after"), moves())
def test_a_run_that_moves_is_the_run_that_stayed(lab: Laboratory, stayed, before: str, after: str):
    there: Outcome = stayed(before)
    name = slug(before, "to", after)
    taken = lab.take_checkpoint(there, SAVED, name)
    here = lab.ranks.run(plan_of(lab, after), lab.folder, name=name, mutation=Mutation("loaded"))
    assert events(here.directory, "resumed")[-1]["step"] == SAVED

    saved = state(taken)
    found: set[str] = set()
    for rank in saved_tensors(here.directory / "loaded", LAYOUTS[after].world):
        found |= rank.keys() & saved.keys()
        assert [name for name in rank.keys() & saved.keys() if not np.array_equal(rank[name], saved[name])] == []
    assert found == saved.keys()

    # The checkpoint has brought the record of its own step along.
    later = evolve(there, curve=there.curve[SAVED - 1 :], routing=there.routing[SAVED - 1 :])
    assert [step for step, *_ in here.curve] == list(range(SAVED, STEPS + 1))
    assert gaps(here, later).worst < TOLERANCE["fp64"]
    assert samples(here) == samples(there)
