"""Optimizers that update every element by itself, and how what they update is stored between two steps."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.optim import Optimizer

from xtrain.dsl.schema.state_tensors import StateTensor
from xtrain.planner.plan import Plan
from xtrain.planner.update_work import rows_at_once
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.models.tensors import first_state
from xtrain.runtime.parallel.tensor import local
from xtrain.runtime.state import Progress
from xtrain.runtime.training.stochastic_rounding import StochasticRounding


@frozen(eq=False)
class Storage:
    """How weights and moments are stored. states: the format of moments; empty: that of the weights. rounding: of
    weights; None: to the nearest number."""

    states: str = ""
    rounding: StochasticRounding | None = None

    @property
    def converts(self) -> bool:
        """Whether numbers are brought into another format for an update."""
        return bool(self.states) or self.rounding is not None

    def first(self, parameter: Tensor, moment: str) -> Tensor:
        """A moment as it begins."""
        return first_state(parameter, StateTensor(moment, self.states))

    def write(self, parameter: Tensor, first: int, stored: Tensor, value: Tensor) -> None:
        """New weights of rows of this rank's piece of a parameter, from row `first` on."""
        if value is stored:
            return
        if self.rounding is None:
            stored.copy_(value)
        else:
            self.rounding.write(parameter, first, stored, value)


def storage_of(
    plan: Plan, model: ModelParts, progress: Progress, states: str = "", stochastic_rounding: bool = False
) -> Storage:
    """states, stochastic_rounding: of the optimizer's node."""
    if not stochastic_rounding:
        return Storage(states)
    return Storage(states, StochasticRounding(model.trained(), plan.seed, progress))


def wide(tensor: Tensor, parameter: Tensor) -> Tensor:
    """In the format of an update of `parameter`: fp32 or finer; itself if it is already."""
    return tensor.to(torch.promote_types(parameter.dtype, torch.float32))


def row_ranges(tensor: Tensor) -> Iterator[slice]:
    """Rows of a rank's piece that are updated at once; of one without rows, none of them."""
    rows = rows_at_once(tensor.shape)
    return (slice(first, first + rows) for first in range(0, max(1, tensor.shape[0]), rows))


def decay_cautiously(weights: Tensor, updates: Tensor, share: float) -> None:
    """w ← w − share · w where `updates`, which will be subtracted from the weights, do not move them away from 0
    (Chen et al. 2025, arXiv 2510.12402)."""
    for rows in row_ranges(weights):
        weight, update = weights[rows], updates[rows]
        toward_zero = (weight.sign() * update.sign() >= 0).to(weight.dtype)
        weight.mul_(toward_zero.mul_(-share).add_(1))


class LocalOptimizer(Optimizer):
    """An optimizer whose update of an element needs that element alone: a rank updates its pieces, as plain tensors,
    and nothing is sent.

    As DTensors torch would derive their layout anew from that of all parameters, which in the first step takes a second
    for a few hundred of them, and some of that again in each step.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[bool] = False

    def __init__(
        self, params: Any, defaults: dict[str, Any], storage: Storage | None = None, cautious_decay: bool = False
    ) -> None:
        super().__init__(params, {"weight_decay": 0.0, **defaults})
        self._storage, self._cautious_decay = storage or Storage(), cautious_decay

    @property
    def converts(self) -> bool:
        """Whether numbers are brought into another format for an update, some rows at a time."""
        return self._storage.converts

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: Sequence[list[Tensor]],
        counts: list[Tensor],
    ) -> None:
        """Update weights and moments in place. moments: for each of the names in `moments`, of all weights. counts: of
        updates, with this one, if it counts them."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. closure: not used."""
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not used:
                continue
            for parameter in used:
                self._begin(parameter)
            counts = [self.state[parameter]["step"] for parameter in used] if self.counts else []
            if counts:
                torch._foreach_add_(counts, 1)  # pyright: ignore[reportPrivateImportUsage]
            if self.converts:
                for place, parameter in enumerate(used):
                    self._update_converted(group, parameter, counts[place : place + 1])
                continue
            moments = [[local(self.state[parameter][name]) for parameter in used] for name in self.moments]
            self.update(group, list(map(local, used)), [local(each.grad) for each in used], moments, counts)

    def _begin(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if self.counts and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in self.moments:
            if name not in state:
                self.begin(parameter, name)

    def begin(self, parameter: Tensor, moment: str) -> None:
        """Make a moment as it begins."""
        self.state[parameter][moment] = self._storage.first(parameter, moment)

    def load(self, parameter: Tensor, moment: str, rows: slice) -> Tensor:
        """Rows of a moment of this rank's piece of a parameter, in the format of an update."""
        return wide(local(self.state[parameter][moment])[rows], parameter)

    def store(self, parameter: Tensor, moment: str, rows: slice, value: Tensor) -> None:
        """Put back what `load` gave, with the numbers of the update."""
        stored = local(self.state[parameter][moment])[rows]
        if stored.dtype != value.dtype:  # else the update was in place
            stored.copy_(value)

    def _update_converted(self, group: dict[str, Any], parameter: Tensor, counts: list[Tensor]) -> None:
        """Some rows after the other, in the format of the update meanwhile."""
        weights, gradients = local(parameter), local(parameter.grad)  # pyright: ignore[reportArgumentType]
        for rows in row_ranges(weights):
            piece, moments = weights[rows], [self.load(parameter, name, rows) for name in self.moments]
            weight = wide(piece, piece)
            self.update(group, [weight], [wide(gradients[rows], piece)], [[each] for each in moments], counts)
            for name, moment in zip(self.moments, moments, strict=True):
                self.store(parameter, name, rows, moment)
            self._storage.write(parameter, rows.start, piece, weight)
