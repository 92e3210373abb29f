"""The product of hidden states and the head of a vocabulary, a piece of the tokens at a time, with what adapters add to
it, and its gradients.

Shapes: T tokens, t of a piece, n of those that go through an adapter, D dim, V vocabulary of this rank, R rank of an
adapter.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor


class HeadFactors(NamedTuple):
    """What an adapter adds to the logits of neighbouring tokens, which may be none: scale · (x · Aᵀ) · Bᵀ. first: the
    first of them; end: the one behind the last."""

    a_RD: Tensor
    b_VR: Tensor
    scale: float
    first: int
    end: int


class HeadSpan(NamedTuple):
    """Tokens of a piece that go through an adapter. number: of it; own: among all tokens; inside: in the piece."""

    number: int
    own: slice
    inside: slice


@frozen(eq=False)
class HeadProduct:
    """x · Wᵀ and what `factors` add. needs: of hidden states, W, and A and B of each, whether they have a gradient."""

    hidden_TD: Tensor
    weight_VD: Tensor
    factors: tuple[HeadFactors, ...]
    needs: tuple[bool, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it is a function of, in the order of `needs`."""
        return (self.hidden_TD, self.weight_VD, *(each for own in self.factors for each in (own.a_RD, own.b_VR)))

    def with_tensors(self, tensors: Sequence[Tensor]) -> "HeadProduct":
        """The same of others, as a backward is given them."""
        hidden_TD, weight_VD, *rest = tensors
        pairs = zip(rest[::2], rest[1::2], self.factors, strict=True)
        factors = tuple(own._replace(a_RD=a_RD, b_VR=b_VR) for a_RD, b_VR, own in pairs)
        return HeadProduct(hidden_TD, weight_VD, factors, self.needs)

    def logits(self, part: slice) -> Tensor:
        """[t, V], of this rank's piece of the vocabulary."""
        logits_tV = F.linear(self.hidden_TD[part], self.weight_VD)
        for number, own, inside in self._spans(part):
            logits_tV[inside].addmm_(self.low(number, own), self.factors[number].b_VR.t())
        return logits_tV

    def low(self, number: int, own: slice) -> Tensor:
        """scale · x · Aᵀ, [n, R]."""
        factors = self.factors[number]
        low_nR = F.linear(self.hidden_TD[own], factors.a_RD)
        return low_nR if factors.scale == 1 else low_nR * factors.scale

    def _spans(self, part: slice) -> Iterator[HeadSpan]:
        for number, each in enumerate(self.factors):
            first, end = max(each.first, part.start), min(each.end, part.stop)
            if first < end:
                yield HeadSpan(number, slice(first, end), slice(first - part.start, end - part.start))

    def gradients(self, exact: torch.dtype, temperature: float = 1.0) -> "HeadGradients":
        """With nothing in them yet. temperature: what logits are divided by behind this."""
        hidden, *rest = self.needs
        return HeadGradients(
            self,
            torch.empty_like(self.hidden_TD) if hidden else None,
            tuple(
                torch.zeros_like(each, dtype=exact) if needed else None
                for each, needed in zip(self.tensors[1:], rest, strict=True)
            ),
            temperature,
        )

    def add_factors(
        self, part: slice, grad_tV: Tensor, hidden_TD: Tensor | None, sums: Sequence[Tensor | None]
    ) -> None:
        """What the gradient of the logits of a piece adds to that of hidden states, and to those of A and B, `sums`."""
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
    """Gradients of what a product is of, from those of logits piece by piece; None what is not asked for. sums: of the
    weight, and of A and B of each adapter, added up in at least fp32. temperature: what logits were divided by."""

    product: HeadProduct
    hidden_TD: Tensor | None
    sums: tuple[Tensor | None, ...]
    temperature: float

    def add(self, part: slice, grad_tV: Tensor) -> Tensor:
        """The products of a piece of tokens; `grad_tV`, which is overwritten, as they take it."""
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
        """All of them, in the order and in the formats of what they are of."""
        rest = zip(self.sums, self.product.tensors[1:], strict=True)
        return (self.hidden_TD, *(None if each is None else each.to(of.dtype) for each, of in rest))


def _add_product(sum_MN: Tensor, left_tM: Tensor, right_tN: Tensor) -> None:
    if left_tM.dtype == sum_MN.dtype:
        sum_MN.addmm_(left_tM.t(), right_tN)  # no second one for the product
    else:
        sum_MN.add_(left_tM.t() @ right_tN)


def product_of(hidden_TD: Tensor, weight_VD: Tensor, factors: Sequence[HeadFactors] = ()) -> HeadProduct:
    """What needs a gradient is asked here: inside a custom forward gradients are off, and the inputs say they need one
    even under no_grad."""
    found = HeadProduct(hidden_TD, weight_VD, tuple(factors), ())
    enabled = torch.is_grad_enabled()
    return HeadProduct(
        hidden_TD, weight_VD, found.factors, tuple(enabled and each.requires_grad for each in found.tensors)
    )
