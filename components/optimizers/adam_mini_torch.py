"""`setup.optimizer` of adam_mini: the formula of the authors' library for sharded blocks."""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.optim import Optimizer

from xtrain.components.optimizers.adam_mini import AdamMini, Blocks, blocks_in, summed_dims
from xtrain.components.optimizers.adamw8bit import pattern_of
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.axes import local, start_of
from xtrain.runtime.nn.optimizer import Storage, groups_of, storage_of, updated
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.updates import row_ranges, wide
from xtrain.runtime.nn.weights import first_state
from xtrain.runtime.nn.whole_matrices import SumsOverPieces


@define(eq=False, kw_only=True)
class BlockedParameter:
    """A parameter and its blocks of elements with a shared average.

    heads: of queries or keys, otherwise 1. expert: a stack of experts. cuts: axes of the ranks with the other pieces,
    name → dim. sums: of this step's squared gradients, one per block.
    """

    name: str
    parameter: Tensor
    blocks: Blocks
    heads: int
    expert: bool
    group: dict[str, Any] = field(init=False)
    cuts: dict[str, int] = field(init=False)
    sums: Tensor = field(init=False)

    @property
    def dims(self) -> tuple[int, ...]:
        """Dims along which a block lies."""
        return summed_dims(self.blocks, self.parameter.dim(), self.expert)

    @property
    def numbers(self) -> int:
        """Number of elements in a block, over all ranks."""
        return prod(self.parameter.shape[dim] for dim in self.dims) // self.heads

    def head_R(self) -> Tensor:
        """Return the head index of each row of this rank."""
        own = local(self.parameter)
        rows = torch.arange(own.shape[0], device=own.device) + start_of(self.parameter)[0]
        return rows // (self.parameter.shape[0] // self.heads)

    def sum_squares(self) -> None:
        """Sum the squares of this rank's pieces. Queries and keys have sums for all heads, because a rank may have rows
        of only some."""
        own = local(self.parameter)
        like = wide(own[:0], self.parameter)
        if self.blocks == "heads":
            self.sums, head_R = like.new_zeros(self.heads), self.head_R()
            for rows in row_ranges(own):
                self.sums.index_add_(0, head_R[rows], self.squares(rows).sum(1))
            return
        self.sums = like.new_zeros([1 if dim in self.dims else extent for dim, extent in enumerate(own.shape)])
        for rows in row_ranges(own):
            self.sums[slice(None) if 0 in self.dims else rows] += self.squares(rows).sum(self.dims, keepdim=True)

    def gradients(self, rows: slice) -> Tensor:
        """Return the gradient rows in the format of an update."""
        assert self.parameter.grad is not None
        return wide(local(self.parameter.grad)[rows], self.parameter)

    def squares(self, rows: slice) -> Tensor:
        return self.gradients(rows).square()

    def means(self, rows: slice) -> Tensor:
        """Return the means with which the averages of some rows are updated."""
        if self.blocks == "elements":
            return self.squares(rows)
        means = self.sums / self.numbers
        if self.blocks == "heads":
            return means[self.head_R()[rows], None]
        return means if 0 in self.dims else means[rows]


class AdamMiniOptimizer(Optimizer):
    """Adam-mini: m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) · mean of g² over a block; w ← (1 − lr · decay) w − lr · m̂
    / (√v̂ + eps), with m̂ and v̂ corrected for their start at 0.

    Collective: sums go over the ranks that share a block.
    """

    def __init__(
        self,
        params: Any,
        found: Iterable[BlockedParameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        device: torch.device,
        args: Mapping[str, Any],
        storage: Storage | None = None,
    ) -> None:
        """Initialize the optimizer. found: all parameters of the groups. device: device for the sums. args: the node's
        arguments, as `state` reads them."""
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self._found, self._sums = tuple(found), SumsOverPieces(device)
        self._betas, self._eps = betas, eps
        self._args, self._storage = args, storage or Storage()
        group_of = {id(parameter): group for group in self.param_groups for parameter in group["params"]}
        for each in self._found:
            each.group, each.cuts = group_of[id(each.parameter)], self._sums.cuts_of(each.parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters. closure: not used."""
        used = [each for each in self._found if each.parameter.grad is not None]
        averaged = [each for each in used if each.blocks != "elements"]
        for each in averaged:
            each.sum_squares()
        self._sums.sum_up((each.sums, each.cuts, each.dims) for each in averaged)
        for each in used:
            self._update(each)

    def _begin(self, each: BlockedParameter) -> dict[str, Tensor]:
        state = self.state[each.parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=each.parameter.device)
            for tensor in AdamMini.state(self._args, each.name):
                state[tensor.name] = first_state(each.parameter, tensor)
        state["step"] += 1
        return state

    def _update(self, each: BlockedParameter) -> None:
        state, (stays, stays_squared) = self._begin(each), self._betas
        count, lr = state["step"].double(), each.group["lr"]
        of_momentum, of_squares = 1 - stays**count, 1 - stays_squared**count
        for rows in row_ranges(local(each.parameter)):
            stored = local(each.parameter)[rows]
            weights = wide(stored, each.parameter)
            momentum = self._moved(each, "exp_avg", rows, each.gradients(rows), 1 - stays)
            squares = self._moved(each, "block_avg_sq", rows, each.means(rows), 1 - stays_squared)
            if each.group["weight_decay"]:
                weights.mul_(1 - lr * each.group["weight_decay"])
            # A 0-dim fp64 tensor does not change the dtype of the result.
            size = squares.sqrt().div_(of_squares.sqrt()).add_(self._eps).mul_(of_momentum)
            weights.sub_((momentum / size).mul_(lr))
            self._storage.write(each.parameter, rows.start, stored, weights)

    def _moved(self, each: BlockedParameter, name: str, rows: slice, new: Tensor, share: float) -> Tensor:
        """Update rows of an average with a share of new values; return them in the format of the update."""
        stored = local(self.state[each.parameter][name])
        own = stored[rows]
        value = wide(own, each.parameter)
        value.lerp_(new.expand_as(value), share)
        if value is not own:
            own.copy_(value)
        return value


@op("setup.optimizer.adam_mini", gives="optimizer")
def build_adam_mini(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    progress: Progress,
    lr: float,
    betas: list[float],
    eps: float,
    weight_decay: float,
    heads: dict[str, int],
    rows: list[str],
    columns: list[str],
    whole: list[str],
    averages: str = "",
    states: str = "",
    stochastic_rounding: bool = False,
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay and shared averages per
    parameter."""
    args = {"heads": heads, "rows": rows, "columns": columns, "whole": whole, "averages": averages, "states": states}
    experts = {each.name for each in plan.parameters.tensors if each.expert}
    found = (
        BlockedParameter(
            name=name,
            parameter=parameter,
            blocks=blocks_in(args, name),
            heads=heads.get(pattern_of(name), 1),
            expert=name in experts,
        )
        for name, parameter in updated(plan, model)
    )
    groups = groups_of(plan, model, weight_decay)
    storage = storage_of(plan, model, progress, states, stochastic_rounding)
    return AdamMiniOptimizer(groups, found, lr, (betas[0], betas[1]), eps, rank.device, args, storage)
