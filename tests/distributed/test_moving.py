"""A checkpoint of one layout is gone on with on another, and texts are continued alike wherever they are."""

import shutil

import pytest
from attrs import evolve
from projects import events
from topologies import Topology
from trials import TOLERANCE, Laboratory, gaps

pytestmark = pytest.mark.distributed

# Half of the way, then a text that is drawn without chance.
MORE = """
every 2 steps checkpoint
every 4 steps generate { prompts = ["line 1", "abc def ghi abc"], tokens = 6, temperature = 0.0 }
checkpoint { keep = none }
"""
ROUTER = ("model.router.score=sigmoid", "model.router.bias_speed=1e-2", "model.shared_experts=1")
DENSE = {
    "one rank": Topology(accumulate=1),
    "fsdp": Topology(fsdp=4),
    "tp and pp": Topology(tp=2, pp=2, sets=("parallel.tp.sequence=false",)),
    "zbv": Topology(pp=2, sets=("parallel.pp.schedule=zbv", "parallel.pp.stages_per_rank=2")),
}
MOE = {
    "ep and tp": Topology(model="moe", fsdp=2, tp=2, ep=4),
    "pp and ep": Topology(model="moe", fsdp=2, pp=2, ep=2),
    "pp of four": Topology(model="moe", pp=4),
    "ring and ulysses": Topology(model="moe", ring=2, ulysses=2, ep=2),
}
MOVES = [
    (DENSE["one rank"], DENSE["tp and pp"]),
    (DENSE["tp and pp"], DENSE["fsdp"]),
    (DENSE["fsdp"], DENSE["zbv"]),
    (DENSE["zbv"], DENSE["one rank"]),
    (MOE["ep and tp"], MOE["pp and ep"]),
    (MOE["pp and ep"], MOE["ring and ulysses"]),
    (MOE["ring and ulysses"], MOE["pp of four"]),
    (MOE["pp of four"], MOE["ep and tp"]),
]


def samples(outcome) -> list[dict[str, str]]:
    return events(outcome.directory, "generate")[-1]["samples"]


@pytest.mark.parametrize(("before", "after"), MOVES, ids=[f"{a.name} to {b.name}" for a, b in MOVES])
def test_a_run_that_moves_is_the_run_that_stayed(lab: Laboratory, before: Topology, after: Topology):
    settings = ROUTER if before.model == "moe" else ()
    # Documents are laid into rows alike on both sides and in the run they are compared with.
    align = "collate=to_tensor -> flatten -> shift_tokens -> pack(sequential, align = 4)"
    trial = evolve(before.trial("fp64"), steps=4, more=MORE, align=1, settings=(*settings, align))
    alone = lab.alone(trial)
    name = f"move {before.name} to {after.name}".replace(" ", "_")
    first = lab.gang.run(lab.plan(trial, before.layout), lab.folder, name=name)
    assert samples(first) == samples(alone)
    shutil.rmtree(first.directory / "checkpoints" / "ckpt-s000000000004")
    (first.directory / "finished").unlink()
    (first.directory / "metrics.jsonl").unlink()
    second = lab.gang.run(lab.plan(trial, after.layout), lab.folder, name=name)
    assert events(second.directory, "resumed")[-1]["step"] == 2
    later = evolve(alone, curve=alone.curve[2:], routing=alone.routing[2:])
    last = evolve(second, evals=second.evals[-1:])
    found = gaps(last, evolve(later, evals=alone.evals[-1:]))
    assert found.worst < TOLERANCE["fp64"]
    assert samples(second) == samples(alone)
