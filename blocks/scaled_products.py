"""Costs of products in fp8 and of rounded matrices: copies in memory, and scales that ranks share.

Shapes: T tokens, K inputs and N outputs of a matrix, on one rank, as in `runtime/nn/number_formats.py` and
`runtime/nn/rounding.py`.
"""

from collections.abc import Iterator
from typing import Final

from xtrain.blocks.op_trace import CollectiveCall
from xtrain.dsl.schema.precision import ROW, Qat, Recipe
from xtrain.lazy_attrs import frozen

NODE: Final = "setup.float8"
EXACT: Final = 4  # bytes of a number that is scaled
Axes = tuple[str, ...]


@frozen(kw_only=True)
class Fp8Product:
    """Product over T tokens. width: bytes of a number of its inputs and outputs. exact: bytes of a multiplied number
    where fp8 is emulated; 0 where kernels multiply fp8. inputs, outputs, spread: axes whose ranks hold the other
    inputs, outputs and tokens. trained: the matrix is trained."""

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

    @property
    def fp8(self) -> bool:
        return True

    @property
    def masks_inputs(self) -> bool:
        return False

    # Scales -----------------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[CollectiveCall]:
        """Collectives of the forward."""
        if self.recipe.scales == "row":
            return list(self._shared((self.tokens, self.inputs), (self.outputs_wide, self.inputs)))
        return list(self._shared((1, (*self.inputs, *self.spread)), (1, (*self.inputs, *self.outputs))))

    @property
    def input_calls(self) -> list[CollectiveCall]:
        """Collectives of the input's gradient."""
        recipe = self.recipe
        rows = (self.tokens, self.outputs)
        gradient = rows if recipe.scales == "row" else (1, (*self.outputs, *self.spread))
        whole = recipe.scales == "tensor" or recipe.whole_weight
        weight = (1, (*self.inputs, *self.outputs)) if whole else (self.inputs_wide, self.outputs)
        return list(self._shared(gradient, weight))

    @property
    def weight_calls(self) -> list[CollectiveCall]:
        """Collectives of the matrix's gradient."""
        if not self.recipe.weight_gradient or not self.trained:
            return []
        if self.recipe.scales == "row":
            return list(self._shared((self.outputs_wide, self.spread), (self.inputs_wide, self.spread)))
        return list(self._shared((1, (*self.outputs, *self.spread)), (1, (*self.inputs, *self.spread))))

    def _shared(self, one: tuple[int, Axes], other: tuple[int, Axes]) -> Iterator[CollectiveCall]:
        """Yield the calls that share the largest numbers of two matrices: one message if the same ranks share both."""
        if not self.recipe.shares_scales:
            return
        pairs = [(one[0] + other[0], one[1])] if one[1] == other[1] else [one, other]
        for numbers, axes in pairs:
            for axis in axes:
                yield CollectiveCall(axis, "all_reduce", NODE, numbers * self.width)

    # Memory -----------------------------------------------------------------------------------------------------------

    @property
    def scratch(self) -> tuple[int, int]:
        """Temporary bytes in addition to inputs and outputs in the forward, and in addition to both gradients in the
        backward."""
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
        """Return the peak bytes while two matrices of `one` and `other` numbers are scaled and multiplied, result
        included. turned: numbers that kernels want in another order."""
        scaled = 1 if self.width == EXACT else 2  # copies of all numbers in fp32 while codes are made
        coding = max(one + scaled * EXACT * one, one + other + scaled * EXACT * other)
        result = out * self.width
        if not self.exact:
            return max(coding, one + other + turned + result)
        if self.recipe.scales == "block":  # each side becomes numbers of the compute format before the other is coded
            own = self.width * one
            second = max(scaled * EXACT * other + other, other + self.width * other)
            return max(one + scaled * EXACT * one, own + second, own + self.width * other + result)
        cast = out * self.exact if self.exact != self.width else 0
        multiplying = self.exact * (one + other) + one + other + max(result, cast)
        return max(coding, multiplying, cast + result + one + other)


ROUNDING: Final = "setup.qat"


@frozen(kw_only=True)
class RoundedProduct:
    """Product over T tokens of a rounded matrix, and of rounded inputs. Fields: see `Fp8Product`."""

    qat: Qat
    tokens: int
    outputs_wide: int
    inputs_wide: int
    width: int
    inputs: Axes = ()
    outputs: Axes = ()
    spread: Axes = ()
    trained: bool = True

    @property
    def fp8(self) -> bool:
        return False

    @property
    def masks_inputs(self) -> bool:
        """True if the gradient of x is masked where inputs saturate."""
        return self.qat.inputs_in_integers

    @property
    def calls(self) -> list[CollectiveCall]:
        """Collectives of the forward. Integers: largest numbers of rows of W, and the ends of the range of each token.
        nvfp4: the largest numbers of W and of the tokens."""
        return [*self._of_weights, *self._of_inputs]

    @property
    def input_calls(self) -> list[CollectiveCall]:
        """Collectives of the input's gradient."""
        return self._of_weights if self.qat.floats else self.calls

    @property
    def weight_calls(self) -> list[CollectiveCall]:
        """Collectives of the matrix's gradient."""
        return [*self._of_inputs, *(() if self.qat.floats else self._of_weights)] if self.trained else []

    @property
    def _of_weights(self) -> list[CollectiveCall]:
        if self.qat.weights == "nvfp4":
            return self._calls(1, (*self.inputs, *self.outputs))
        return self._calls(self.outputs_wide if self.qat.group == ROW else 0, self.inputs)

    @property
    def _of_inputs(self) -> list[CollectiveCall]:
        if self.qat.activations == "nvfp4":
            return self._calls(1, (*self.inputs, *self.spread))
        return self._calls(2 * self.tokens if self.qat.inputs_in_integers else 0, self.inputs)

    def _calls(self, numbers: int, axes: Axes) -> list[CollectiveCall]:
        return [CollectiveCall(axis, "all_reduce", ROUNDING, numbers * self.width) for axis in axes if numbers]

    @property
    def scratch(self) -> tuple[int, int]:
        """Temporary bytes in addition to inputs and outputs in the forward, and in addition to both gradients in the
        backward."""
        width, exact = self.width, max(self.width, EXACT)
        rounding = exact if exact == width else exact + width  # bytes a number while it is rounded
        weight, x = self.outputs_wide * self.inputs_wide, self.tokens * self.inputs_wide
        if self.qat.activations == "none":
            x = 0
        kept = weight * width if self.trained else 0
        if self.qat.floats:
            rounding = 2 * exact
            of_weights = max(rounding * x - kept, width * x) if self.trained else 0
            forward = max(rounding * weight, width * weight + rounding * x)
            return forward, max(rounding * weight - kept, of_weights)
        forward = max(rounding * weight, width * weight + max(rounding, width) * x)
        # The gradients that are made count on their own.
        of_inputs = max(rounding * weight, width * weight, rounding * x) - kept
        of_weights = max(rounding * x - kept, 2 * rounding * weight - kept) if self.trained else 0
        return forward, max(of_inputs, of_weights, 0)
