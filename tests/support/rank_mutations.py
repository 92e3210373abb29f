"""Faults that the tests put into ranks before these execute a plan: the table of topologies has to notice each.

A rank lives for one job, so nothing has to be undone.
"""

import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve

from xtrain.runtime.ops import OPS, load_ops, op_named
from xtrain.runtime.parallel.tensor import local
from xtrain.runtime.parallelize import fsdp, gradients
from xtrain.runtime.state import Step

StepCall = Callable[[Step], None]
MUTATIONS: dict[str, Callable[..., None]] = {}


def mutation(function: Callable[..., None]) -> Callable[..., None]:
    MUTATIONS[function.__name__] = function
    return function


def rebind(name: str, change: Callable[[StepCall, dict[str, Any]], StepCall]) -> None:
    """Let a step op give `change(its callable, what it was given)` instead of its callable."""
    load_ops()
    original = op_named(name)
    assert original is not None

    @wraps(original.function)
    def factory(**given: Any) -> StepCall:
        return change(original.function(**given), given)

    OPS[name] = evolve(original, function=factory)


@mutation
def average() -> None:
    """FSDP divides dense gradients by its ranks, as torch does unless told otherwise."""
    vars(fsdp)["sum_gradients"] = lambda module: None


@mutation
def skip(op: str) -> None:
    """A node of the step does nothing."""
    rebind(op, lambda call, given: lambda step: None)


@mutation
def own_tokens() -> None:
    """Every rank divides by its own valid tokens: a mean of means."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(step: Step) -> None:
            call(step)
            step.valid_tokens = sum(m.num_valid for m in step.microbatches) * given["rank"].data_ranks

        return run

    rebind("step.agree", change)


@mutation
def divide_experts(by: int) -> None:
    """Expert gradients are taken for sums over too many ranks."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(step: Step) -> None:
            call(step)
            for name, parameter in given["model"].named_parameters():
                if ".experts." in name:
                    with torch.no_grad():
                        if parameter.grad is not None:
                            parameter.grad.to_local().div_(by)

        return run

    rebind("step.forward_backward", change)


@mutation
def own_summands() -> None:
    """Weights that tensor-parallel ranks use for their parts of the work keep their summand of the gradient."""
    from xtrain.runtime.models import layers, router

    for module in (layers, router):
        vars(module)["local"] = lambda parameter, partial=False: local(parameter)


@mutation
def own_statistics() -> None:
    """The balance loss takes the counts of this rank's positions for those of the whole row."""
    from xtrain.runtime.models import router

    vars(router)["all_reduce"] = lambda counts, group: counts


@mutation
def clip_per_stage(stages: int) -> None:
    """The norm is taken over the ranks of a pipeline stage; the loss is still that of all ranks."""

    class Distributed:
        group = None

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, tensor: torch.Tensor, **options: Any) -> Any:
            if options or tensor.numel() != 2:
                return dist.all_reduce(tensor, **options)
            if self.group is None:
                self.group, _ = dist.new_subgroups(dist.get_world_size() // stages)
            own = tensor.clone()
            dist.all_reduce(own, group=self.group)
            dist.all_reduce(tensor)
            tensor[0] = own[0]
            return None

    vars(gradients)["dist"] = Distributed()


@mutation
def shard_over(axis: str) -> None:
    """Parameters are sharded, and their gradients summed, over another axis of the mesh."""
    from xtrain.runtime.parallel.mesh import Meshes

    setattr(Meshes, "fsdp", property(lambda meshes: meshes.dense[axis]))  # noqa: B010


@mutation
def sync_context_over(axis: str) -> None:
    """The sum over context axes runs over another one."""
    load_ops()
    original = OPS["step.context_grad_sync"]

    @wraps(original.function)
    def factory(**given: Any) -> StepCall:
        return original.function(**{**given, "axes": [axis]})

    OPS["step.context_grad_sync"] = evolve(original, function=factory)


@mutation
def fail(rank: int, how: str) -> None:
    """One rank does not come through its second step: `raise`, `abort` or `hang`."""

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(step: Step) -> None:
            call(step)
            if step.index == 1 and int(os.environ["RANK"]) == rank:
                if how == "raise":
                    raise RuntimeError("the optimizer has left the building")
                if how == "abort":
                    os.abort()
                _wait_for_ever()

        return run

    rebind("step.optimizer", change)


def _wait_for_ever() -> None:
    while True:
        time.sleep(60)
