"""Ranks that get on no more, in one way or another, for tests."""

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from rank_mutations import StepCall, mutation, rebind

from xtrain.runtime.feed.microbatch import Microbatch
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.nn.batch import Step

# Ranks that get on no more, in one way or another, for tests ----------------------------------------------------------


def _here(rank: int) -> bool:
    return os.environ.get("RANK", "0") == str(rank)


def _before(op: str, rank: int, step: int, act: Any) -> None:
    """Let one rank do something before a node of one step, counted from 1."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(now: Step) -> None:
            if _here(rank) and now.index + 1 == step:
                act()
            call(now)

        return run

    rebind(op, change)


@mutation
def stop_process(rank: int, step: int, op: str = "step.fetch", seconds: float | None = None) -> None:
    """One rank is stopped by SIGSTOP, and continued after some seconds, if any are given."""

    def act() -> None:
        if seconds is not None and os.fork() == 0:
            time.sleep(seconds)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    _before(op, rank, step, act)


@mutation
def need_memory(rank: int, step: int, op: str = "step.optimizer") -> None:
    """One rank asks for more memory than there is, with a tensor of 3 × 1,000 in its hands."""

    def act() -> None:
        tensor = torch.zeros(3, 1000)
        torch.empty(1 << 60, dtype=tensor.dtype)

    _before(op, rank, step, act)


@mutation
def oversleep(rank: int, step: int, op: str = "step.fetch", seconds: float = 600.0) -> None:
    """One rank sleeps in Python."""
    _before(op, rank, step, lambda: _lie_down(seconds))


def _lie_down(seconds: float) -> None:
    time.sleep(seconds)


@mutation
def hold_python(rank: int, step: int) -> None:
    """One rank sleeps in C code that lets no other thread run Python."""
    _before("step.fetch", rank, step, lambda: ctypes.PyDLL(None).sleep(600))


@mutation
def slow_evaluation(seconds: float) -> None:
    """Every batch of an evaluation takes so long."""
    from xtrain.components.actions import eval_torch as evaluate

    original = evaluate.forwarded

    def forwarded(*given: Any) -> Any:
        for batch in original(*given):
            time.sleep(seconds)
            yield batch

    evaluate.forwarded = forwarded


@mutation
def slow_setup(seconds: float) -> None:
    """The first rank alone prepares the data for a long time, and is slow in its first step."""
    from xtrain.runtime.feed import setup as feed

    original = feed.prepared_from

    def prepared_from(*given: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return original(*given, **named)

    feed.prepared_from = prepared_from
    oversleep(0, 1, "step.optimizer", seconds)


@mutation
def slow_publishing(seconds: float) -> None:
    """The first rank takes long to publish a checkpoint, while the others have gone on to the next step."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(now: Step) -> None:
            call(now)
            if _here(0):
                time.sleep(seconds)

        return run

    rebind("tick.checkpoint", change)


@mutation
def sleep_in_forward(rank: int, step: int) -> None:
    """One rank sleeps in a hook of the model, in the middle of the forward."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        now = [0]

        def hook(*args: Any) -> None:
            if _here(rank) and now[0] == step:
                _lie_down(600)

        layers = [part for part in given["model"].whole.modules() if "Block" in type(part).__name__]
        layers[-1].register_forward_pre_hook(hook)

        def run(under_way: Step) -> None:
            now[0] = under_way.index + 1
            call(under_way)

        return run

    rebind("step.forward_backward", change)


# What tests of replica groups put into ranks of one process -----------------------------------------------------------


@mutation
def rows_of_groups(run: str, replicas: int, data_ranks: int) -> None:
    """A process that takes rows one by one takes those of the groups that took part in a step, as the records of `run`
    say, and of none else. data_ranks: of all groups, each with microbatches of one row."""
    lines = (json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines())
    taking_part = {line["step"]: line["replicas"] for line in lines}
    original, own = Feed.microbatches, data_ranks // replicas

    def microbatches(self: Feed, step: int) -> list[Microbatch]:
        rows = enumerate(original(self, step))
        return [row for place, row in rows if place % data_ranks // own in taking_part[step + 1]]

    Feed.microbatches = microbatches
