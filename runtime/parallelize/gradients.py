"""Gradients of the whole model: sums that no layer of parallelism makes by itself, and the norm.

Expert gradients never need a sum here: tokens of every rank of a row came to the experts, and expert FSDP covers the
rest.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xtrain.planner.mesh.mesh import groups
from xtrain.planner.plan import Mesh, Plan
from xtrain.runtime.models.moe import Experts
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.fake import numbers
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.state import Rank
from xtrain.runtime.step_state import Step, StepCall

TIED = "embed_tokens.weight"
# torch adds up squares one after the other on a CPU: the norm of a tensor of 2^24 numbers in fp32 is 6e-4 too small. So
# they are added up in rows of so many numbers.
EXACT = 2**12


class GradientNorm:
    """Measures the global norm with one all-reduce, which carries the loss of the step along.

    A rank adds the square of its shard divided by the number of ranks that hold the same shard, so that the sum over
    all ranks counts each element once, whatever is sharded or replicated over what.
    """

    def __init__(self, model: ModelParts, rank: Rank, pieces: Callable[[], list[Tensor]] | None = None) -> None:
        """pieces: what this rank alone has of the gradients, where they are not those of the parameters."""
        self._pieces = pieces
        self._parameters, self._rank = [parameter for _, parameter in model.trained()], rank
        weights = [1.0 / count for count in copies_of(model, rank, trained=True)]
        self._weights = torch.tensor(weights, dtype=torch.float64, device=rank.device)
        self._grads: list[Tensor] = []
        self.value = float("nan")

    @torch.no_grad()
    def measure(self, loss_sums: Tensor) -> list[float]:
        """Take the norm of the gradients as they are now; returns `loss_sums` [n] summed over all ranks."""
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
        """Shrink the measured gradients to `max_norm`; smaller ones stay as they are."""
        if self.value > max_norm and self._grads:
            factor = clip_factor(self.value, max_norm)
            torch._foreach_mul_(self._grads, factor)  # pyright: ignore[reportPrivateImportUsage]
        self._grads = []


def squares_of(gradients: Sequence[Tensor], like: Tensor) -> Tensor:
    """fp64, on the device of `like`: the square of the norm of each, as a rank has it."""
    grads = [_at_least_fp32(gradient) for gradient in gradients]
    if not grads:  # of a stage that has nothing to train
        return like.new_zeros(0)
    long = [grad.is_cpu and grad.numel() > EXACT for grad in grads]
    short = [grad.new_zeros(0) if apart else grad for grad, apart in zip(grads, long, strict=True)]
    squares = torch.stack(torch._foreach_norm(short)).double().square()  # pyright: ignore[reportPrivateImportUsage]
    for place, grad in enumerate(grads):
        if long[place]:
            squares[place] = _square_by_rows(grad.flatten())
    return squares.to(like.device)


def _square_by_rows(gradient: Tensor) -> Tensor:
    rows, rest = gradient.split([gradient.numel() // EXACT * EXACT, gradient.numel() % EXACT])
    norms = torch.linalg.vector_norm(rows.view(-1, EXACT), dim=1).double()
    return norms.square().sum() + torch.linalg.vector_norm(rest).double().square()


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied with, so that theirs is at most `max_norm`."""
    return max_norm / (norm + 1e-6) if norm > max_norm else 1.0


def copies_of(model: ModelParts, rank: Rank, *, trained: bool) -> list[int]:
    """Of every parameter of this rank, or of those that are trained, how many ranks hold the same elements."""
    tied = rank.pipeline_ranks > 1 and model.parts[0].arch.embeds_behind
    ranks = rank.world_size // rank.pipeline_ranks
    named = model.trained() if trained else model.named_parameters()
    return [copies_of_parameter(p, ranks) * (2 if tied and name == TIED else 1) for name, p in named]


def copies_of_parameter(parameter: Tensor, ranks: int) -> int:
    """How many of the `ranks` that share a pipeline stage hold the same elements as this one."""
    if not isinstance(parameter, DTensor):
        return ranks
    mesh, placements = parameter.device_mesh, parameter.placements
    shards = math.prod(mesh.size(i) for i, placement in enumerate(placements) if not placement.is_replicate())
    return ranks // shards


@op("step.tensor_grad_sync")
def sum_partial(model: ModelParts, axes: list[str]) -> StepCall:
    """Sum the gradients that every tensor-parallel rank has one summand of; fsdp, where it is, does that itself."""
    assert axes == ["tp"]

    @torch.no_grad()
    def run(step: Step) -> None:
        for parameter in model.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)

    return run


@op("step.context_grad_sync")
def sum_over_context(model: ModelParts, meshes: Meshes, axes: list[str]) -> StepCall:
    """Sum dense gradients over the context axes that fsdp does not cover: each rank saw other positions."""
    experts = {p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    dense = [parameter for parameter in model.parameters() if parameter not in experts]
    every = [meshes.group(axis) for axis in axes]

    @torch.no_grad()
    def run(step: Step) -> None:
        for group in every:
            _sum([local_gradient(p.grad) for p in dense if p.grad is not None], group)

    return run


@op("step.tied_grad_sync")
def sum_tied(plan: Plan, model: ModelParts, rank: Rank, axes: list[str]) -> StepCall:
    """Sum the gradient of an embedding that is also read behind the last block over the stages that hold it."""
    assert axes == ["pp"]
    parameters = dict(model.named_parameters())
    ends = _ends(plan.mesh, rank)

    @torch.no_grad()
    def run(step: Step) -> None:
        if ends is not None:
            grad = parameters[TIED].grad
            assert grad is not None
            _sum([local_gradient(grad)], ends)

    return run


def _ends(mesh: Mesh, rank: Rank) -> dist.ProcessGroup | None:
    """First and last rank of this rank's pipeline, if it is one of them. Collective: every rank makes all groups."""
    found = None
    for pipeline in groups(mesh, "pp"):
        pair = [pipeline[0], pipeline[-1]]
        group = dist.new_group(pair, group_desc="ends of the pipeline")
        if rank.rank in pair:
            assert isinstance(group, dist.ProcessGroup)
            found = group
    return found


def _sum(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors if tensor.numel()]
    for work in works:
        assert work is not None
        work.wait()


def local_gradient(grad: Tensor | nn.Parameter | None) -> Tensor:
    assert grad is not None
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _at_least_fp32(grad: Tensor) -> Tensor:
    return grad if grad.dtype in (torch.float32, torch.float64) else grad.float()
