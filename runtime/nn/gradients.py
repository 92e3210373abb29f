"""Gradients of the whole model: sums that no parallelism makes itself, the norm, and gradients of tasks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xtrain.plan.architecture import task_in
from xtrain.plan.mesh import groups
from xtrain.plan.plan import Mesh, Plan
from xtrain.runtime.base.device import numbers
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.batch import NonFinite, Step, StepCall
from xtrain.runtime.nn.moe import Experts
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.records import Records
from xtrain.text.units import plural

TIED = "embed_tokens.weight"
# torch adds squares sequentially on a CPU: the norm of a tensor of 2^24 numbers in fp32 is 6e-4 too small. So they are
# added in rows of this length.
EXACT = 2**12


class GradientNorm:
    """Global gradient norm, measured with one all-reduce that includes the loss of the step.

    A rank adds the square of its shard divided by the number of ranks with the same shard, so that the sum over all
    ranks counts each element once, however it is sharded or replicated.
    """

    def __init__(self, model: ModelParts, rank: Rank, pieces: Callable[[], list[Tensor]] | None = None) -> None:
        """Prepare the measurement. pieces: returns this rank's own gradients, if they are not the parameters'."""
        self._pieces = pieces
        self._parameters, self._rank = [parameter for _, parameter in model.trained()], rank
        weights = [1.0 / count for count in copies_of(model, rank, trained=True)]
        self._weights = torch.tensor(weights, dtype=torch.float64, device=rank.device)
        self._grads: list[Tensor] = []
        self.value = float("nan")

    @torch.no_grad()
    def measure(self, loss_sums: Tensor) -> list[float]:
        """Measure the norm of the current gradients; returns `loss_sums` [n] summed over all ranks."""
        if self._pieces is None:
            assert all(p.grad is not None for p in self._parameters), "every trained parameter is part of every step"
            self._grads = [local_gradient(p.grad) for p in self._parameters]
            squares = squares_of(self._grads, self._weights) @ self._weights
        else:
            self._grads = self._pieces()
            squares = squares_of(self._grads, self._weights).sum()
        sums = torch.cat((squares[None], loss_sums.double()))
        if self._rank.world_size > 1:
            dist.all_reduce(sums)
        squared, *totals = numbers(sums, [1.0] * len(sums))
        self.value = math.sqrt(squared) if squared >= 0 else float("nan")
        return totals

    @torch.no_grad()
    def scale(self, max_norm: float) -> None:
        """Scale the measured gradients down to `max_norm` if their norm is larger."""
        if self.value > max_norm and self._grads:
            factor = clip_factor(self.value, max_norm)
            torch._foreach_mul_(self._grads, factor)  # pyright: ignore[reportPrivateImportUsage]
        self._grads = []


def squares_of(gradients: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the squared norm of each of this rank's tensors, in fp64 on the device of `like`."""
    if not gradients:  # of a stage without trained parameters
        return like.new_zeros(0)
    squares: dict[int, Tensor] = {}
    kinds: dict[bool, list[int]] = {True: [], False: []}
    for place, grad in enumerate(gradients):
        if grad.is_cpu and grad.numel() > EXACT:
            squares[place] = _square_by_rows((grad.float() if _is_narrow(grad) else grad).flatten())
        else:
            kinds[_is_narrow(grad)].append(place)
    for narrow, own in kinds.items():
        if own:  # kernels add narrow numbers in fp32, without copies of them
            given, wider = [gradients[place] for place in own], torch.float32 if narrow else None
            found = torch.stack(torch._foreach_norm(given, 2, wider)).double().square()  # pyright: ignore[reportPrivateImportUsage]
            if len(own) == len(gradients):
                return found.to(like.device)
            squares |= zip(own, found.unbind(), strict=True)
    return torch.stack([squares[place] for place in range(len(gradients))]).to(like.device)


def _is_narrow(gradient: Tensor) -> bool:
    return gradient.dtype not in (torch.float32, torch.float64)


def _square_by_rows(gradient: Tensor) -> Tensor:
    rows, rest = gradient.split([gradient.numel() // EXACT * EXACT, gradient.numel() % EXACT])
    norms = torch.linalg.vector_norm(rows.view(-1, EXACT), dim=1).double()
    return norms.square().sum() + torch.linalg.vector_norm(rest).double().square()


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that limits gradients of this norm to `max_norm`."""
    return max_norm / (norm + 1e-6) if norm > max_norm else 1.0


def copies_of(model: ModelParts, rank: Rank, *, trained: bool) -> list[int]:
    """Return the number of ranks with the same elements, for each (trained) parameter of this rank."""
    tied = rank.pipeline_ranks > 1 and model.parts[0].arch.embeds_behind
    ranks = rank.world_size // rank.pipeline_ranks
    named = model.trained() if trained else model.named_parameters()
    return [copies_of_parameter(p, ranks) * (2 if tied and name == TIED else 1) for name, p in named]


def copies_of_parameter(parameter: Tensor, ranks: int) -> int:
    """Return how many of the `ranks` of a pipeline stage have the same elements as this one."""
    if not isinstance(parameter, DTensor):
        return ranks
    mesh, placements = parameter.device_mesh, parameter.placements
    shards = math.prod(mesh.size(i) for i, placement in enumerate(placements) if not placement.is_replicate())
    return ranks // shards


@op("step.tensor_grad_sync")
def sum_partial(model: ModelParts, axes: list[str]) -> StepCall:
    """Sum the gradients of which every tensor-parallel rank has one summand; with fsdp, fsdp does this."""
    assert axes == ["tp"]

    @torch.no_grad()
    def sum_gradients(step: Step) -> None:
        for parameter in model.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)

    return sum_gradients


@op("step.context_grad_sync")
def sum_over_context(model: ModelParts, meshes: Meshes, axes: list[str]) -> StepCall:
    """Sum dense gradients over the context axes that fsdp does not cover: each rank had other positions."""
    experts = {p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    dense = [parameter for parameter in model.parameters() if parameter not in experts]
    every = [meshes.group(axis) for axis in axes]

    @torch.no_grad()
    def sum_gradients(step: Step) -> None:
        for group in every:
            _sum([local_gradient(p.grad) for p in dense if p.grad is not None], group)

    return sum_gradients


@op("step.tied_grad_sync")
def sum_tied(plan: Plan, model: ModelParts, rank: Rank, axes: list[str]) -> StepCall:
    """Sum the gradient of an embedding that is also the head over the stages that have it."""
    assert axes == ["pp"]
    parameters = dict(model.named_parameters())
    ends = _ends(plan.mesh, rank)

    @torch.no_grad()
    def sum_gradient(step: Step) -> None:
        if ends is not None:
            grad = parameters[TIED].grad
            assert grad is not None
            _sum([local_gradient(grad)], ends)

    return sum_gradient


def _ends(mesh: Mesh, rank: Rank) -> dist.ProcessGroup | None:
    """Return the group of the first and last rank of this rank's pipeline, if it is one of them. Collective: every rank
    makes all groups."""
    own = None
    for pipeline in groups(mesh, "pp"):
        pair = [pipeline[0], pipeline[-1]]
        group = dist.new_group(pair, group_desc="ends of the pipeline")
        if rank.rank in pair:
            assert isinstance(group, dist.ProcessGroup)
            own = group
    return own


def _sum(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors if tensor.numel()]
    for work in works:
        assert work is not None
        work.wait()


def local_gradient(grad: Tensor | nn.Parameter | None) -> Tensor:
    assert grad is not None
    return grad.to_local() if isinstance(grad, DTensor) else grad


@frozen(kw_only=True)
class TaskNumbers:
    """Values of a task in a step, over all ranks: the unscaled norm of its gradients, its sum of cross-entropies and
    its number of valid tokens."""

    norm: float
    loss_sum: float
    tokens: int

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm) and math.isfinite(self.loss_sum)


class TaskGradients:
    """The gradients of each task, measured together with one all-reduce."""

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
        """Return the values of each task; the loss's metrics are recorded for all tasks together. Collective."""
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
        totals = numbers(sums, [1.0] * len(sums))
        squares, losses, tokens = totals[:count], totals[count : 2 * count], totals[2 * count : 3 * count]
        step.record(self._measured, totals[3 * count :], step.valid_tokens)  # losses of tasks are over tokens
        norms = [math.sqrt(square) if square >= 0 else math.nan for square in squares]
        of_each = zip(norms, losses, map(int, tokens), strict=True)
        return {
            name: TaskNumbers(norm=norm, loss_sum=loss, tokens=valid)
            for name, (norm, loss, valid) in zip(self.names, of_each, strict=True)
        }

    @torch.no_grad()
    def scale(self, factors: Mapping[str, float]) -> None:
        """Multiply the gradients of tasks by factors."""
        for name, factor in factors.items():
            place = self.names.index(name)
            own = [p.grad for p, owner in zip(self._parameters, self._of_task, strict=True) if owner == place]
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
    """Scale the gradients of each task to the loss over its own valid tokens, and clip them to its own norm.

    tasks: of each its `datasets`, and `max_norm` if it clips. A task without a valid token leaves the step out; with a
    `limit` above 1 a task whose loss or norm is not finite does too, and the others continue. Raises NonFinite when
    this happens for the `limit`-th time in a row; `step.check_finite` handles steps in which no task is finite.
    """
    gradients = TaskGradients(plan, model, rank, tasks)

    def scale_tasks(step: Step) -> None:
        measured = gradients.measure(step)
        learning = {name: task for name, task in measured.items() if task.tokens}
        bad = {name for name, task in learning.items() if not task.finite}
        isolates = limit > 1 and len(bad) < len(learning)
        good = {name: task for name, task in learning.items() if not (isolates and name in bad)}
        step.loss = sum(task.loss_sum for task in good.values()) / sum(task.tokens for task in good.values())
        shares = {name: step.valid_tokens / task.tokens for name, task in good.items()}
        step.task_norms = {name: task.norm * shares[name] for name, task in good.items()}
        step.grad_norm = math.sqrt(sum(norm * norm for norm in step.task_norms.values()))
        step.left_out = frozenset(measured.keys() - good.keys())
        most = {name: tasks[name].get("max_norm", math.inf) for name in good}
        gradients.scale({n: shares[n] * clip_factor(norm, most[n]) for n, norm in step.task_norms.items()})
        for name in learning:
            progress.bad_tasks[name] = progress.bad_tasks.get(name, 0) + 1 if name in bad else 0
        for name in sorted(bad) if isolates else ():
            task, in_a_row = measured[name], progress.bad_tasks[name]
            numbers_text = f"loss {task.loss_sum / task.tokens:g}, gradient norm {task.norm:g}"
            if in_a_row >= limit:
                report = f"task {name}: {plural(in_a_row, 'step')} in a row without a finite loss and gradient norm"
                raise NonFinite(step.index + 1, step.loss, step.grad_norm, f"{report}; the last has {numbers_text}")
            if records is not None:
                message = f"task {name} leaves this step out: {numbers_text}; {in_a_row} in a row of {limit}"
                records.warn(message, step=step.index + 1)

    return scale_tasks
