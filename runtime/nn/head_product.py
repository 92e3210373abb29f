"""Product of hidden states and the vocabulary head, in pieces of the tokens, with the adapters of tasks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import define, frozen
from torch import Tensor

from xtrain.runtime.base.collectives import all_reduce


class HeadFactors(NamedTuple):
    """An adapter's summand of the logits of consecutive tokens, possibly none: scale · (x · Aᵀ) · Bᵀ. first: the first
    token; end: one after the last."""

    a_RD: Tensor
    b_VR: Tensor
    scale: float
    first: int
    end: int


class HeadSpan(NamedTuple):
    """Tokens of a piece that go through an adapter. number: the adapter; own: among all tokens; inside: in the
    piece."""

    number: int
    own: slice
    inside: slice


@frozen(eq=False)
class HeadProduct:
    """x · Wᵀ plus the summands of `factors`. needs: True for each of hidden states, W, and A and B of each that needs a
    gradient."""

    hidden_TD: Tensor
    weight_VD: Tensor
    factors: tuple[HeadFactors, ...]
    needs: tuple[bool, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All inputs, in the order of `needs`."""
        return (self.hidden_TD, self.weight_VD, *(factor for own in self.factors for factor in (own.a_RD, own.b_VR)))

    def with_tensors(self, tensors: Sequence[Tensor]) -> "HeadProduct":
        """Return the product of other tensors, as a backward gets them."""
        hidden_TD, weight_VD, *rest = tensors
        pairs = zip(rest[::2], rest[1::2], self.factors, strict=True)
        factors = tuple(own._replace(a_RD=a_RD, b_VR=b_VR) for a_RD, b_VR, own in pairs)
        return HeadProduct(hidden_TD, weight_VD, factors, self.needs)

    def logits(self, part: slice) -> Tensor:
        """Return the logits [t, V] of this rank's piece of the vocabulary."""
        logits_tV = F.linear(self.hidden_TD[part], self.weight_VD)
        for number, own, inside in self._spans(part):
            logits_tV[inside].addmm_(self.low(number, own), self.factors[number].b_VR.t())
        return logits_tV

    def low(self, number: int, own: slice) -> Tensor:
        """Return scale · x · Aᵀ, [n, R]."""
        factors = self.factors[number]
        low_nR = F.linear(self.hidden_TD[own], factors.a_RD)
        return low_nR if factors.scale == 1 else low_nR * factors.scale

    def _spans(self, part: slice) -> Iterator[HeadSpan]:
        for number, span in enumerate(self.factors):
            first, end = max(span.first, part.start), min(span.end, part.stop)
            if first < end:
                yield HeadSpan(number, slice(first, end), slice(first - part.start, end - part.start))

    def gradients(self, exact: torch.dtype, temperature: float = 1.0) -> "HeadGradients":
        """Return empty gradients. temperature: later divisor of the logits."""
        hidden, *rest = self.needs
        return HeadGradients(
            self,
            torch.empty_like(self.hidden_TD) if hidden else None,
            tuple(
                torch.zeros_like(tensor, dtype=exact) if needed else None
                for tensor, needed in zip(self.tensors[1:], rest, strict=True)
            ),
            temperature,
        )

    def add_factors(
        self, part: slice, grad_tV: Tensor, hidden_TD: Tensor | None, sums: Sequence[Tensor | None]
    ) -> None:
        """Add the factors' part of a piece's gradient to the gradients of hidden states, and of A and B, `sums`."""
        for number, own, inside in self._spans(part):
            factors, (a_sum, b_sum) = self.factors[number], sums[2 * number : 2 * number + 2]
            grad_nV = grad_tV[inside]
            low_nR = grad_nV @ factors.b_VR
            low_nR = low_nR if factors.scale == 1 else low_nR * factors.scale
            if hidden_TD is not None:
                hidden_TD[own].addmm_(low_nR, factors.a_RD)
            if a_sum is not None:
                _add_product(a_sum, low_nR, self.hidden_TD[own])
            if b_sum is not None:
                _add_product(b_sum, grad_nV, self.low(number, own))


@frozen(eq=False)
class HeadGradients:
    """Gradients of a product's inputs, from logit gradients piece by piece; None for those not needed.

    sums: of the weight, and of A and B of each adapter, summed in at least fp32. temperature: divisor of the logits.
    """

    product: HeadProduct
    hidden_TD: Tensor | None
    sums: tuple[Tensor | None, ...]
    temperature: float

    def add(self, part: slice, grad_tV: Tensor) -> Tensor:
        """Add the products of a piece of tokens; returns `grad_tV`, overwritten, in the format of the products."""
        product, (weight_VD, *factors) = self.product, self.sums
        if self.temperature != 1:
            grad_tV.div_(self.temperature)
        grad_tV = grad_tV.to(product.hidden_TD.dtype)
        if self.hidden_TD is not None:
            torch.mm(grad_tV, product.weight_VD, out=self.hidden_TD[part])
        if weight_VD is not None:
            _add_product(weight_VD, grad_tV, product.hidden_TD[part])
        product.add_factors(part, grad_tV, self.hidden_TD, factors)
        return grad_tV

    def found(self) -> tuple[Tensor | None, ...]:
        """Return all gradients, in the order and formats of the inputs."""
        rest = zip(self.sums, self.product.tensors[1:], strict=True)
        return (self.hidden_TD, *(None if total is None else total.to(tensor.dtype) for total, tensor in rest))


def _add_product(sum_MN: Tensor, left_tM: Tensor, right_tN: Tensor) -> None:
    if left_tM.dtype == sum_MN.dtype:
        sum_MN.addmm_(left_tM.t(), right_tN)  # without a temporary for the product
    else:
        sum_MN.add_(left_tM.t() @ right_tN)


def product_of(hidden_TD: Tensor, weight_VD: Tensor, factors: Sequence[HeadFactors] = ()) -> HeadProduct:
    """Return the product, with the gradients that are needed.

    This must run outside a custom forward, where gradients are off and the inputs claim to need one even under no_grad.
    """
    product = HeadProduct(hidden_TD, weight_VD, tuple(factors), ())
    enabled = torch.is_grad_enabled()
    return HeadProduct(
        hidden_TD, weight_VD, product.factors, tuple(enabled and tensor.requires_grad for tensor in product.tensors)
    )


class ChangesProduct(Protocol):
    """An adapter's replacement for a `Linear`. scales: it changes the product without the bias."""

    scales: bool

    def applied(self, x_BSD: Tensor, out_BSF: Tensor) -> Tensor:
        """Return the product of the matrix with the adapter's summand, [B, S, F]."""
        ...

    def factors(self, first: int, end: int) -> HeadFactors:
        """Return the adapter's summand of logits, for tokens from `first` to before `end`."""
        ...


@define(eq=False)
class TaskRouting:
    """Assignment of rows to adapters; one object for all modules of a model.

    names: of the tasks. of_dataset: index of each training dataset's task. whole: task of all rows in batches without
    dataset numbers; None: no adapter. counts: number of rows per task in the current block; empty: no adapter. part:
    tasks that take part in a backward, with or without rows on this rank; None: all.
    """

    names: tuple[str, ...]
    of_dataset: tuple[int, ...] = ()
    whole: int | None = None
    counts: tuple[int, ...] = ()
    part: frozenset[int] | None = None

    def of_rows(self, datasets: Sequence[int] | None, rows: int) -> tuple[int, ...]:
        """Return the number of rows of each task in a microbatch. datasets: numbers of the rows' datasets, if known."""
        if datasets is not None:
            places = [self.of_dataset[number] for number in datasets]
            assert places == sorted(places), "rows of a task are adjacent"
            return tuple(places.count(place) for place in range(len(self.names)))
        return () if self.whole is None else tuple(rows * (place == self.whole) for place in range(len(self.names)))

    @contextmanager
    def all_of(self, task: str | None) -> Iterator[None]:
        """Route all rows within the block through the adapter of a task; None: through none."""
        before, self.whole = self.whole, None if task is None else self.names.index(task)
        try:
            yield
        finally:
            self.whole = before

    def applied(self, adapters: "Sequence[ChangesProduct | None]", x_BSD: Tensor, out_BSF: Tensor) -> Tensor:
        """Return the product with the summand of each row's adapter. adapters: one per task, None without one here.

        Adapters without rows may take part as well, so that each has a gradient in every microbatch.
        """
        if not self.counts:
            return out_BSF
        outputs, each = [], len(x_BSD) // sum(self.counts)  # transformers' code may flatten rows into tokens
        counts = [count * each for count in self.counts]
        pieces = zip(adapters, x_BSD.split(counts), out_BSF.split(counts), strict=True)
        for place, (adapter, x, out) in enumerate(pieces):
            if adapter is not None and self.takes_part(place, len(x)):
                out = adapter.applied(x, out)
            outputs.append(out)
        return torch.cat(outputs)

    def takes_part(self, place: int, rows: int) -> bool:
        """Return True if the adapter of a task computes, with this number of rows."""
        return rows > 0 or (torch.is_grad_enabled() and (self.part is None or place in self.part))

    def as_in(self, rows: Sequence[int]) -> list[int]:
        """Return rows per expert as rows per expert and task, if all computed rows are of one task."""
        return [count * (own > 0) for count in rows for own in self.counts]

    def task_T(self, rows: int, positions: int, device: torch.device) -> Tensor | None:
        """Return the task of each token of flattened rows, int64; None if no adapter is used."""
        if not self.counts:
            return None
        assert sum(self.counts) == rows
        parts = [
            torch.full((n * positions,), place, dtype=torch.int64, device=device) for place, n in enumerate(self.counts)
        ]
        return torch.cat(parts)


# Tokens that a sampler has recorded: those that it kept, and the likeliest with their probabilities. T tokens, V of a
# rank's piece of the vocabulary, K recorded tokens; `first` is the first id of the piece.

LEFT_OUT: Final = -1e30  # a logit whose exponential is 0, and whose product with 0 is


def own_positions(ids: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the index of each id in a vocabulary piece of `width` from `first` on, 0 outside, and whether it is
    inside. Any shape."""
    position = ids - first
    own = (position >= 0) & (position < width)
    return torch.where(own, position, 0), own


def leave_out(logits_TV: Tensor, kept_TK: Tensor, first: int) -> None:
    """Give all tokens but the kept ones the probability 0, in place. kept_TK: ids from 1, 0: none."""
    if not (width := logits_TV.shape[1]):
        return
    at_TK, own_TK = own_positions(kept_TK.long() - 1, first, width)
    logits_TK = logits_TV.gather(1, at_TK).masked_fill_(~own_TK, LEFT_OUT)
    # The maximum is independent of the order, so torch supports it in deterministic mode.
    logits_TV.fill_(LEFT_OUT).scatter_reduce_(1, at_TK, logits_TK, "amax")


def shares_of(softmax_TV: Tensor, ids_TK: Tensor, first: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the probabilities of tokens and of all others together, fp32 [T, K + 1]. group: ranks with pieces
    of the vocabulary."""
    at_TK, own_TK = own_positions(ids_TK, first, softmax_TV.shape[1])
    chosen_TK = softmax_TV.gather(1, at_TK) * own_TK if softmax_TV.shape[1] else torch.zeros_like(ids_TK)
    shares_TK1 = torch.cat((chosen_TK.double(), softmax_TV.sum(-1, keepdim=True, dtype=torch.float64)), 1)
    if group is not None:
        shares_TK1 = all_reduce(shares_TK1, group)
    shares_TK1[:, -1] -= shares_TK1[:, :-1].sum(-1)
    return shares_TK1.clamp_(min=0).float()


@frozen(eq=False)
class ComparedTokens:
    """Distributions of a sampler. ids_TK: its most probable tokens. shares_TK1: see `shares_of`. apart_T: receives the
    divergences, fp64."""

    ids_TK: Tensor
    shares_TK1: Tensor
    apart_T: Tensor

    def compare(self, softmax_TV: Tensor, first: int, group: dist.ProcessGroup | None, part: slice) -> None:
        """Set the divergences KL(sampler ‖ model) of some tokens, Σ s log(s / p) − s + p: with the last two terms,
        whose sum is 0, rounding of single probabilities counts squared."""
        sampler_TK1 = self.shares_TK1[part].double()
        own_TK1 = shares_of(softmax_TV, self.ids_TK[part].long(), first, group).double()
        ratio_TK1 = sampler_TK1 / own_TK1.clamp(min=torch.finfo(torch.float32).tiny)
        self.apart_T[part] = (torch.xlogy(sampler_TK1, ratio_TK1) - sampler_TK1 + own_TK1).sum(-1)
