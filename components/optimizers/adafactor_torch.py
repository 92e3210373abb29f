"""`setup.optimizer` of adafactor: torch's formula for sharded matrices."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.optim import Optimizer

from xtrain.components.optimizers.adafactor import Adafactor
from xtrain.components.optimizers.adamw8bit import pattern_of
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.optimizer import Storage, groups_of, storage_of, updated
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.updates import row_ranges, wide
from xtrain.runtime.nn.weights import first_state
from xtrain.runtime.nn.whole_matrices import SumsOverPieces


@define(eq=False, kw_only=True)
class CutMatrices:
    """A parameter as matrices or vectors [M, …], of which this rank has pieces.

    M: matrices of a stack, otherwise 1. cuts: axes of the ranks with the other pieces, name → dim of the parameter.
    weights_M, updates_M: sums of squares. rows_MR, columns_MC: sums of squared gradients by rows and columns. mean_M:
    means of the row averages.
    """

    name: str
    parameter: Tensor
    stacked: bool
    factored: bool
    cuts: dict[str, int] = field(init=False)
    group: dict[str, Any] = field(init=False)
    weights_M: Tensor = field(init=False)
    rows_MR: Tensor = field(init=False)
    columns_MC: Tensor = field(init=False)
    mean_M: Tensor = field(init=False)
    updates_M: Tensor = field(init=False)

    @property
    def dims(self) -> tuple[int, ...]:
        """Dims of a single matrix or vector."""
        return tuple(range(1 if self.stacked else 0, self.parameter.dim()))

    @property
    def numbers(self) -> int:
        """Number of elements of one matrix, over all ranks."""
        found = 1
        for dim in self.dims:
            found *= self.parameter.shape[dim]
        return found

    def parts(self) -> Iterable[tuple[slice, slice, slice]]:
        """Yield local row ranges processed together: the rows, the slice of the M matrices, and the rows within
        them."""
        for rows in row_ranges(local(self.parameter)):
            yield (rows, rows, slice(None)) if self.stacked else (rows, slice(None), rows)

    def part(self, tensor: Tensor, rows: slice) -> Tensor:
        """Return rows as [M, …] in the format of an update."""
        own = wide(local(tensor)[rows], self.parameter)
        return own if self.stacked else own[None]

    def averages(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the row averages [M, R] and column averages [M, C]."""
        rows, columns = local(state["row_var"])[..., 0], local(state["col_var"])[..., 0, :]
        return (rows, columns) if self.stacked else (rows[None], columns[None])


class AdafactorOptimizer(Optimizer):
    """Adafactor. With G = g²: R ← (1 − b) R + b · mean of G along rows, likewise C along columns, b = t^beta2_decay; V
    = R Cᵀ / mean R; for vectors V ← (1 − b) V + b · G; u = g / √max(V, eps₁²); w ← (1 − lr · decay) w − a · u /
    max(1, rms u / largest), a = max(eps₂, rms w) · min(lr, 1/√t).

    Means and rms are taken over the whole matrix, for experts over each matrix. Collective: sums go over the ranks that
    share the matrix.
    """

    def __init__(
        self,
        params: Any,
        found: list[CutMatrices],
        lr: float,
        beta2_decay: float,
        eps1: float,
        eps2: float,
        largest: float,
        device: torch.device,
        states: str = "",
        storage: Storage | None = None,
    ) -> None:
        """Initialize the optimizer. found: all parameters of the groups. device: device for the sums. states: format of
        the averages."""
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self._found, self._sums = found, SumsOverPieces(device)
        self._beta2_decay, self._eps1, self._eps2, self._largest = beta2_decay, eps1, eps2, largest
        self._states, self._storage = states, storage or Storage()
        group_of = {id(parameter): group for group in self.param_groups for parameter in group["params"]}
        for each in found:
            each.group, each.cuts = group_of[id(each.parameter)], self._sums.cuts_of(each.parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters. closure: not used."""
        used = [each for each in self._found if each.parameter.grad is not None]
        for each in used:
            self._begin(each)
            self._sum_squares(each)
        matrices = [each for each in used if each.factored]
        self._sums.sum_up(
            [(each.weights_M, each.cuts, each.dims) for each in used]
            + [(each.rows_MR, each.cuts, each.dims[-1:]) for each in matrices]
            + [(each.columns_MC, each.cuts, each.dims[-2:-1]) for each in matrices]
        )
        for each in matrices:
            self._average(each)
        self._sums.sum_up([(each.mean_M, each.cuts, each.dims[-2:-1]) for each in matrices])
        for each in matrices:
            each.mean_M.div_(each.parameter.shape[-2]).clamp_(min=self._eps1)
        for each in used:
            each.updates_M = torch.zeros_like(each.weights_M)
            for rows, among, along in each.parts():
                each.updates_M[among] += self._update(each, rows, among, along).square().flatten(1).sum(1)
        self._sums.sum_up([(each.updates_M, each.cuts, each.dims) for each in used])
        for each in used:
            self._write(each)

    def _begin(self, each: CutMatrices) -> None:
        state = self.state[each.parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=each.parameter.device)
            args = {"states": self._states, "factored": [pattern_of(each.name)] if each.factored else []}
            for tensor in Adafactor.state(args, each.name):
                state[tensor.name] = first_state(each.parameter, tensor)
        state["step"] += 1

    def _share(self, each: CutMatrices) -> Tensor:
        """Return the weight of this step's squares in the averages."""
        step = self.state[each.parameter]["step"]
        return step.to(each.weights_M.dtype) ** self._beta2_decay

    def _sum_squares(self, each: CutMatrices) -> None:
        """Sum the squares of this rank's pieces; update the averages of vectors."""
        own, state = local(each.parameter), self.state[each.parameter]
        count = own.shape[0] if each.stacked else 1
        like = wide(own[:0], each.parameter)
        each.weights_M = like.new_zeros(count)
        if each.factored:
            each.rows_MR, each.columns_MC = like.new_zeros(count, own.shape[-2]), like.new_zeros(count, own.shape[-1])
        for rows, among, along in each.parts():
            each.weights_M[among] += each.part(each.parameter, rows).square().flatten(1).sum(1)
            squares = each.part(each.parameter.grad, rows).square()  # pyright: ignore[reportArgumentType]
            if each.factored:
                each.rows_MR[among, along] = squares.sum(-1)
                each.columns_MC[among] += squares.sum(-2)
            else:
                stored = local(state["variance"])[rows]
                stored.copy_(wide(stored, each.parameter).lerp(squares.view(stored.shape), self._share(each)))

    def _average(self, each: CutMatrices) -> None:
        """Update the averages; `mean_M` is the sum over this rank's rows."""
        rows, columns = each.averages(self.state[each.parameter])
        share, (count, length) = self._share(each), each.parameter.shape[-2:]
        for stored, sums in ((rows, each.rows_MR / length), (columns, each.columns_MC / count)):
            stored.copy_(wide(stored, each.parameter).lerp(sums, share))
        each.mean_M = wide(rows, each.parameter).sum(-1)

    def _update(self, each: CutMatrices, rows: slice, among: slice, along: slice) -> Tensor:
        """Return the update [M, …] before scaling."""
        state = self.state[each.parameter]
        gradient = each.part(each.parameter.grad, rows)  # pyright: ignore[reportArgumentType]
        if each.factored:
            by_row, by_column = (wide(average, each.parameter) for average in each.averages(state))
            estimate = by_row[among, along, None] * by_column[among, None] / each.mean_M[among, None, None]
        else:
            estimate = each.part(state["variance"], rows)
        return gradient * estimate.clamp(min=self._eps1**2).rsqrt()

    def _write(self, each: CutMatrices) -> None:
        lr, numbers = each.group["lr"], each.numbers
        step = self.state[each.parameter]["step"].to(each.weights_M.dtype)
        size_M = (each.weights_M / numbers).sqrt().clamp(min=self._eps2) * step.rsqrt().clamp(max=lr)
        scale_M = size_M / ((each.updates_M / numbers).sqrt() / self._largest).clamp(min=1)
        for rows, among, along in each.parts():
            stored = local(each.parameter)[rows]
            weights, update = wide(stored, each.parameter), self._update(each, rows, among, along)
            if each.group["weight_decay"]:
                weights.mul_(1 - lr * each.group["weight_decay"])
            scale = scale_M[among].view(-1, *(1 for _ in update.shape[1:]))
            weights.sub_((update * scale).view(stored.shape))
            self._storage.write(each.parameter, rows.start, stored, weights)


def matrices_of(name: str, parameter: Tensor, *, expert: bool) -> CutMatrices:
    """Return the matrices of a parameter. expert: the parameter is a stack of experts."""
    factored = parameter.dim() == (3 if expert else 2)
    return CutMatrices(name=name, parameter=parameter, stacked=expert, factored=factored)


@op("setup.optimizer.adafactor", gives="optimizer")
def build_adafactor(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    progress: Progress,
    lr: float,
    beta2_decay: float,
    eps1: float,
    eps2: float,
    largest: float,
    weight_decay: float,
    factored: list[str],
    states: str = "",
    stochastic_rounding: bool = False,
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay and factored matrices per
    parameter."""
    experts = {each.name for each in plan.parameters.tensors if each.expert}
    found = [matrices_of(name, parameter, expert=name in experts) for name, parameter in updated(plan, model)]
    groups = groups_of(plan, model, weight_decay)
    storage = storage_of(plan, model, progress, "", stochastic_rounding)
    return AdafactorOptimizer(groups, found, lr, beta2_decay, eps1, eps2, largest, rank.device, states, storage)
