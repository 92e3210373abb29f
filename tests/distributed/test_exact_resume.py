"""A run that is killed and goes on is the run that nothing has stopped, bit for bit, where the layout is the same."""

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve, frozen
from checkpoints import folder, same, state_of
from forked_ranks import TIMEOUT, Mutation, Outcome, RanksFailed
from projects import events
from topologies import BY_NAME, Topology
from trials import Laboratory

from xtrain.plan.plan import Plan
from xtrain.runtime.base.json_lines import trim_after

# What every run does besides; `checkpoint` is the steps from one to the next.
MORE = """
every {checkpoint} steps checkpoint
every 3 steps eval lines {{ batches = 2 }}
checkpoint {{ keep = none, model = false, mode = {mode} }}
"""


@frozen(kw_only=True)
class Pace:
    """How many steps, how many from checkpoint to checkpoint, and in which steps all ranks are killed.

    The step they go on from is a multiple of `checkpoint`; with more than one step in between some are computed twice.
    """

    steps: int
    checkpoint: int
    deaths: tuple[int, ...]
    patience: float = TIMEOUT
    """Seconds that a job may take."""

    @property
    def saved(self) -> list[int]:
        return [(death - 1) // self.checkpoint * self.checkpoint for death in self.deaths]


LONG = Pace(steps=12, checkpoint=4, deaths=(6, 11), patience=5 * TIMEOUT)
SHORT = Pace(steps=5, checkpoint=2, deaths=(4,))
BIAS = ("model.router.score=sigmoid", "model.router.bias_speed=1e-2")
VARYING = ("scheduler=cosine", "scheduler.warmup=2 steps")
# The short run goes on in the middle of it, where the next step takes more rows than the last one: 4, 4, 8, 12, 16.
ROWS, RAMP = 16, ("batch.ramp_from=4", "batch.ramp=4 steps", "batch.pad_to=16")

DENSE = (
    "one rank, four microbatches (dense)", "fsdp 2 (dense)", "fsdp 4 (dense)", "replicate 2, ddp (dense)",
    "replicate 2 · fsdp 2 (dense)", "tp 2 (dense)", "tp 4, uneven vocabulary, tied (dense)", "pp 2, 1f1b (dense)",
    "pp 2, zbv (dense)", "pp 4, interleaved_1f1b (dense)", "ring 2 (dense)", "ulysses 2 (dense)",
    "ring 2 · ulysses 2, fold all (dense)", "pp 2 · fsdp 2 · tp 2 (dense)",
)  # fmt: skip
MOE = (
    "one rank, four microbatches (moe)",
    "replicate 2, ddp (moe)",
    "fsdp 2 (moe)",
    "fsdp 2 · ep 2 (moe)",
    "fsdp 4 · ep 2 (moe)",
    "tp 2 (moe)",
    "pp 2 (moe)",
    "pp 2 · fsdp 2 · ep 2 (moe)",
    "ulysses 2, fold none (moe)",
    "ring 2 · ep 2 (moe)",
    "pp 2 · tp 2, zbv (moe)",
    "pp 2 · fsdp 2 · tp 2 · ep 2, zbv (moe)",
)
ORDINARY = (("fsdp 2 · ep 2 (moe)", "async"),)


def rows() -> list:
    """(layout, mode of saving, pace): all of them at length, saved at once and beside training in turns."""
    slow = [(name, ("sync", "async")[number % 2], LONG) for number, name in enumerate(DENSE + MOE)]
    ordinary = [(*row, SHORT) for row in ORDINARY]
    return [
        pytest.param(BY_NAME[name], mode, pace, id=f"{name}, {mode}, {pace.steps} steps", marks=marks)
        for listed, marks in ((ordinary, ()), (slow, pytest.mark.slow))
        for name, mode, pace in listed
    ]


def samples(outcome: Outcome, world: int) -> list[dict[int, str]]:
    """By rank: step → digest of what it read, of the last time that the step was computed."""
    lines = [(outcome.directory / "samples" / f"{rank}.jsonl").read_text().splitlines() for rank in range(world)]
    return [dict(map(json.loads, each)) for each in lines]


def killed(lab: Laboratory, plan: Plan, name: str, pace: Pace, die_in: int, saved: int) -> None:
    """Run until all ranks are killed; then what the launcher does at the next start."""
    noted = Mutation("noted", die_in=die_in, saved=saved)
    with pytest.raises(RanksFailed, match="signal 9"):
        lab.ranks.run(plan, lab.folder, name=name, mutation=noted, timeout=pace.patience)
    directory = lab.folder / "jobs" / name
    assert trim_after(directory / "metrics.jsonl", saved, directory / "logs" / "superseded.jsonl") > 0


def evals(directory: Path) -> dict[int, tuple[float, int]]:
    return {event["step"]: (event["loss"], event["tokens"]) for event in events(directory, "eval")}


@pytest.mark.parametrize(("layout", "mode", "pace"), rows())
def test_a_run_that_is_killed_is_the_run_that_was_not(lab: Laboratory, layout: Topology, mode: str, pace: Pace):
    flat = (*layout.flat, *RAMP) if pace is SHORT else ()
    settings = (*layout.shared, *flat, *VARYING, *(BIAS if layout.model == "moe" else ()))
    more = MORE.format(checkpoint=pace.checkpoint, mode=mode)
    trial = evolve(layout.trial("fp32"), steps=pace.steps, more=more, settings=settings)
    trial = evolve(trial, rows=ROWS) if pace is SHORT else trial
    plan = lab.plan(trial, layout.layout)
    name = f"exact {layout.name} {mode} {pace.steps}".replace(" ", "_")
    noted, wait = Mutation("noted"), pace.patience
    whole = lab.ranks.run(plan, lab.folder, name=f"{name}-whole", mutation=noted, timeout=wait)
    for death, saved in zip(pace.deaths, pace.saved, strict=True):
        killed(lab, plan, f"{name}-killed", pace, death, saved)
    ended = lab.ranks.run(plan, lab.folder, name=f"{name}-killed", mutation=noted, timeout=wait)

    assert [event["step"] for event in events(ended.directory, "resumed")] == pace.saved
    assert [step for step, *_ in whole.curve] == list(range(1, pace.steps + 1))
    assert ended.curve == whole.curve and ended.routing == whole.routing
    assert samples(ended, layout.world) == samples(whole, layout.world)
    assert evals(ended.directory) == evals(whole.directory)
    for ours, theirs in zip(ended.whole, whole.whole, strict=True):
        assert ours.keys() == theirs.keys()
        assert [key for key in theirs if not np.array_equal(ours[key], theirs[key])] == []
    for step in (*pace.saved, pace.steps):
        paths = [folder(run.directory).path(step) for run in (ended, whole)]
        assert same(*paths) and state_of(paths[0]) == state_of(paths[1]), step
