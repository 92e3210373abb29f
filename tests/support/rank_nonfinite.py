"""Numbers that are none, put into one rank alone, and runs that leave steps out though nothing is wrong in them."""

import os
import signal
from typing import Any

import torch
from rank_mutations import StepCall, mutation, rebind
from torch import Tensor

from xtrain.runtime.feed.loader import RowLoader, StepRows
from xtrain.runtime.nn.batch import SkipStep, Step

LEARNING = ("step.forward_backward", "step.pipeline")


@mutation
def poison(rank: int, portions: list[int], kind: str = "gradient", value: float = float("nan"), **also: Any) -> None:
    """On one rank something is `value` in each step that is given certain rows.

    portions: those that the n-th step of an undisturbed run is given, from 1. kind: `gradient`: one element; `loss`;
    `activation`: what comes out of the first block on this rank, before and behind which all is computed as ever.
    also: another mutation that is put in as well, by name, with its arguments.
    """
    from rank_mutations import MUTATIONS

    for name, arguments in also.items():
        MUTATIONS[name](**arguments)
    now = {"bad": False}

    def watch(call: StepCall, given: dict[str, Any]) -> StepCall:
        loader = given["feed"].loader

        def run(step: Step) -> None:
            now["bad"] = loader.curriculum.rows_before(step.index) // loader.rows_per_step + 1 in portions
            call(step)

        return run

    def spoil(call: StepCall, given: dict[str, Any]) -> StepCall:
        if given["rank"].rank != rank:
            return call
        model = given["model"] if "model" in given else given["pipeline"].model
        if kind == "activation":
            first = next(iter(model.parts[0].layers.values()))
            first.register_forward_hook(lambda module, args, out: out * value if now["bad"] else out)

        def run(step: Step) -> None:
            call(step)
            if now["bad"] and kind == "gradient":
                parameter = max(model.parameters(), key=lambda p: local(p).numel())
                assert parameter.grad is not None
                local(parameter.grad).view(-1)[0] = value
            if now["bad"] and kind == "loss":
                assert step.loss_sums is not None
                step.loss_sums = step.loss_sums * value

        return run

    rebind("step.fetch", watch)
    for op in LEARNING:
        rebind(op, spoil)


@mutation
def rotten(rank: int, updates: list[int]) -> None:
    """On one rank an element of the weights is no number after certain updates, counted from 1 in this process."""
    count = [0]

    def spoil(call: StepCall, given: dict[str, Any]) -> StepCall:
        parameters = [parameter for group in given["optimizer"].param_groups for parameter in group["params"]]

        @torch.no_grad()
        def run(step: Step) -> None:
            call(step)
            count[0] += 1
            if count[0] in updates and os.environ.get("RANK", "0") == str(rank):
                # Of a norm, which every token passes: an embedding may be that of a byte that never comes.
                parts = [local(parameter) for parameter in parameters if local(parameter).numel()]
                min(parts, key=torch.numel).view(-1)[0] = float("nan")

        return run

    rebind("step.optimizer", spoil)


@mutation
def without(steps: list[int]) -> None:
    """These steps, from 1, are left out before anything is computed in them."""

    def pass_over(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(step: Step) -> None:
            call(step)
            if step.index + 1 in steps:
                raise SkipStep("it is left out")

        return run

    rebind("step.agree", pass_over)


@mutation
def further(behind: int, by: int) -> None:
    """Every step behind the first `behind` is given the rows of the step that comes `by` later."""
    original = RowLoader.step_rows

    def step_rows(self: RowLoader, step: int) -> StepRows:
        return original(self, step + by if step >= behind else step)

    RowLoader.step_rows = step_rows


@mutation
def dies(step: int, time: int = 1) -> None:
    """All ranks are killed in a step, counted from 1, when it is reached for the `time`-th time."""
    count = [0]

    def die(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(now: Step) -> None:
            if now.index + 1 == step:
                count[0] += 1
                if count[0] == time:
                    os.kill(os.getpid(), signal.SIGKILL)
            call(now)

        return run

    rebind("step.schedule", die)


def local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


@mutation
def hurts(saved: int) -> None:
    """A byte of the checkpoint of a step is another one as soon as the run needs to go back."""

    def spoil(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(step: Step) -> None:
            saver = given["saver"]
            saver.settle()
            if saver.records.rank == 0:
                file = max(saver.folder.path(saved).glob("__*"))  # of the last rank
                content = bytearray(file.read_bytes())
                content[len(content) // 2] ^= 255
                file.write_bytes(content)
            call(step)

        return run

    rebind("event.rollback", spoil)
