"""What a product in fp8 takes beside one in the format of all else: copies in memory, and scales that ranks share; as
`runtime/models/fp8.py` computes it.

Shapes: T tokens, K inputs and N outputs of a matrix, on a rank.
"""

from collections.abc import Iterator
from typing import Final

from attrs import frozen

from xtrain.dsl.schema.fp8 import Recipe
from xtrain.planner.costs.op_trace import CollectiveCall

NODE: Final = "setup.float8"
EXACT: Final = 4  # bytes of a number that is scaled
Axes = tuple[str, ...]


@frozen(kw_only=True)
class Fp8Product:
    """One of T tokens. width: bytes of a number that it takes and gives; exact: of one that is multiplied where fp8 is
    emulated, 0 where kernels multiply it. inputs, outputs, spread: axes whose ranks have the other inputs, outputs and
    tokens. trained: the matrix is."""

    recipe: Recipe
    tokens: int
    outputs_wide: int
    inputs_wide: int
    width: int
    exact: int
    inputs: Axes = ()
    outputs: Axes = ()
    spread: Axes = ()
    trained: bool = True

    # Scales -----------------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[CollectiveCall]:
        """Those of the forward."""
        if self.recipe.scales == "row":
            return list(self._shared((self.tokens, self.inputs), (self.outputs_wide, self.inputs)))
        return list(self._shared((1, (*self.inputs, *self.spread)), (1, (*self.inputs, *self.outputs))))

    @property
    def input_calls(self) -> list[CollectiveCall]:
        """Those of the gradient of what is multiplied."""
        recipe = self.recipe
        rows = (self.tokens, self.outputs)
        gradient = rows if recipe.scales == "row" else (1, (*self.outputs, *self.spread))
        whole = recipe.scales == "tensor" or recipe.whole_weight
        weight = (1, (*self.inputs, *self.outputs)) if whole else (self.inputs_wide, self.outputs)
        return list(self._shared(gradient, weight))

    @property
    def weight_calls(self) -> list[CollectiveCall]:
        """Those of the gradient of the matrix."""
        if not self.recipe.weight_gradient or not self.trained:
            return []
        if self.recipe.scales == "row":
            return list(self._shared((self.outputs_wide, self.spread), (self.inputs_wide, self.spread)))
        return list(self._shared((1, (*self.outputs, *self.spread)), (1, (*self.inputs, *self.spread))))

    def _shared(self, one: tuple[int, Axes], other: tuple[int, Axes]) -> Iterator[CollectiveCall]:
        """Largest numbers of two matrices: in one message where the same ranks share both."""
        pairs = [(one[0] + other[0], one[1])] if one[1] == other[1] else [one, other]
        for numbers, axes in pairs:
            for axis in axes:
                yield CollectiveCall(axis, "all_reduce", NODE, numbers * self.width)

    # Memory -----------------------------------------------------------------------------------------------------------

    @property
    def scratch(self) -> tuple[int, int]:
        """Bytes that are alive for a while beside what goes in and comes out: in the forward, and in the backward
        beside both gradients."""
        x, weight, y = (
            self.tokens * self.inputs_wide,
            self.outputs_wide * self.inputs_wide,
            self.tokens * self.outputs_wide,
        )
        made = x * self.width + (weight * self.width if self.trained else 0)
        inputs = self._product(y, weight, x, turned=weight)
        weights = x * self.width
        if self.trained and self.recipe.weight_gradient:
            weights += self._product(y, x, weight, turned=y + x)
        elif self.trained:
            weights += weight * self.width
        return self._product(x, weight, y) - y * self.width, max(inputs, weights) - made

    def _product(self, one: int, other: int, out: int, *, turned: int = 0) -> int:
        """The most bytes while two matrices of so many numbers are scaled and multiplied, the result among them.
        turned: numbers that kernels want in another order."""
        scaled = 1 if self.width == EXACT else 2  # copies of all numbers in fp32 while codes are made
        coding = max(one + scaled * EXACT * one, one + other + scaled * EXACT * other)
        result = out * self.width
        if not self.exact:
            return max(coding, one + other + turned + result)
        cast = out * self.exact if self.exact != self.width else 0
        multiplying = self.exact * (one + other) + one + other + max(result, cast)
        return max(coding, multiplying, cast + result + one + other)
