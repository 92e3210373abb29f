"""`step.task_gradients`: what a step does with the gradients of several adapters, each by itself.

The loss of a step is divided by the valid tokens of all tasks, and that of a task in a run of its own by those of its
rows. As the gradients of an adapter are of its own rows alone, they are brought from one to the other by a factor.
Shapes: T tasks.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from xtrain.planner.architecture import task_in
from xtrain.planner.plan import Plan
from xtrain.planner.units import plural
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.fake import numbers
from xtrain.runtime.parallelize.gradients import clip_factor, copies_of, local_gradient, squares_of
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Progress, Rank
from xtrain.runtime.step_state import NonFinite, Step, StepCall


@frozen(kw_only=True)
class TaskNumbers:
    """Of a task in a step, over all ranks: the norm of its gradients as they are, its cross-entropies and its valid
    tokens."""

    norm: float
    loss_sum: float
    tokens: int

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm) and math.isfinite(self.loss_sum)


class TaskGradients:
    """The gradients of each task, and what is measured of them with one all-reduce."""

    def __init__(self, plan: Plan, model: ModelParts, rank: Rank, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        self.names, self._rank = tuple(tasks), rank
        trained = list(model.trained())
        place = {name: number for number, name in enumerate(self.names)}
        self._parameters = [parameter for _, parameter in trained]
        self._of_task = [place[task_in(name)] for name, _ in trained]
        weights = [1.0 / count for count in copies_of(model, rank, trained=True)]
        self._weights = torch.tensor(weights, dtype=torch.float64, device=rank.device)
        self._measured = model.measured
        self._places = torch.tensor(self._of_task, dtype=torch.int64, device=rank.device)
        datasets = plan.node("setup.loader").args["datasets"]
        reads = {name: place[task] for task, args in tasks.items() for name in args["datasets"]}
        self._task_of_dataset = torch.tensor([reads[name] for name in datasets], device=rank.device)

    @torch.no_grad()
    def measure(self, step: Step) -> dict[str, TaskNumbers]:
        """The numbers of each task; what the loss measures beside itself is recorded of all together. Collective."""
        count = len(self.names)
        sums_3T = torch.zeros(3, count, dtype=torch.float64, device=self._rank.device)
        assert all(parameter.grad is not None for parameter in self._parameters), "every task is part of every step"
        sums_3T[0].index_add_(
            0, self._places, squares_of([local_gradient(p.grad) for p in self._parameters], sums_3T) * self._weights
        )
        if self._rank.is_tp_first:
            for rows in step.row_losses:
                place_B = self._task_of_dataset[rows.dataset_B]
                sums_3T[1].index_add_(0, place_B, rows.cross_entropy_B)
                sums_3T[2].index_add_(0, place_B, rows.valid_B)
        assert step.loss_sums is not None
        objective = step.loss_sums[1:].double() * self._rank.is_tp_first
        sums = torch.cat((sums_3T.flatten(), objective))
        if self._rank.world_size > 1:
            dist.all_reduce(sums)
        found = numbers(sums, [1.0] * len(sums))
        squares, losses, tokens = found[:count], found[count : 2 * count], found[2 * count : 3 * count]
        step.record(self._measured, found[3 * count :], step.valid_tokens)  # losses of tasks are of tokens
        norms = [math.sqrt(square) if square >= 0 else math.nan for square in squares]
        of_each = zip(norms, losses, map(int, tokens), strict=True)
        return {
            name: TaskNumbers(norm=norm, loss_sum=loss, tokens=valid)
            for name, (norm, loss, valid) in zip(self.names, of_each, strict=True)
        }

    @torch.no_grad()
    def scale(self, factors: Mapping[str, float]) -> None:
        """Multiply the gradients of tasks."""
        for name, factor in factors.items():
            place = self.names.index(name)
            own = [p.grad for p, of in zip(self._parameters, self._of_task, strict=True) if of == place]
            if own and factor != 1.0:
                torch._foreach_mul_([local_gradient(grad) for grad in own], factor)  # pyright: ignore[reportPrivateImportUsage]


@op("step.task_gradients")
def task_gradients(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    progress: Progress,
    tasks: dict[str, dict[str, Any]],
    limit: int,
    records: Records | None = None,
) -> StepCall:
    """Bring the gradients of each task to the loss over its own valid tokens, and clip them to its own norm.

    tasks: of each its `datasets`, and `max_norm` if it clips. A task without a valid token leaves the step out, and
    with a `limit` above 1 so does one whose loss or norm is not a number: the others go on. Raises NonFinite where
    that is so for the `limit`-th time in a row; `step.check_finite` sees to steps in which no task has numbers.
    """
    gradients = TaskGradients(plan, model, rank, tasks)

    def run(step: Step) -> None:
        found = gradients.measure(step)
        learning = {name: of for name, of in found.items() if of.tokens}
        bad = {name for name, of in learning.items() if not of.finite}
        isolates = limit > 1 and len(bad) < len(learning)
        good = {name: of for name, of in learning.items() if not (isolates and name in bad)}
        step.loss = sum(of.loss_sum for of in good.values()) / sum(of.tokens for of in good.values())
        shares = {name: step.valid_tokens / of.tokens for name, of in good.items()}
        step.task_norms = {name: of.norm * shares[name] for name, of in good.items()}
        step.grad_norm = math.sqrt(sum(norm * norm for norm in step.task_norms.values()))
        step.left_out = frozenset(found.keys() - good.keys())
        most = {name: tasks[name].get("max_norm", math.inf) for name in good}
        gradients.scale({n: shares[n] * clip_factor(norm, most[n]) for n, norm in step.task_norms.items()})
        for name in learning:
            progress.bad_tasks[name] = progress.bad_tasks.get(name, 0) + 1 if name in bad else 0
        for name in sorted(bad) if isolates else ():
            of, in_a_row = found[name], progress.bad_tasks[name]
            numbers_text = f"loss {of.loss_sum / of.tokens:g}, gradient norm {of.norm:g}"
            if in_a_row >= limit:
                report = f"task {name}: {plural(in_a_row, 'step')} in a row without a finite loss and gradient norm"
                raise NonFinite(step.index + 1, step.loss, step.grad_norm, f"{report}; the last has {numbers_text}")
            if records is not None:
                message = f"task {name} leaves this step out: {numbers_text}; {in_a_row} in a row of {limit}"
                records.warn(message, step=step.index + 1)

    return run
