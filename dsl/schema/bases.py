"""`base NAME { … }` inside `precision`: how matrices of blocks that are not trained are stored.

A parameter so stored is bytes: of every block its codes, and behind them its scale. The module `…_torch` beside a base
has the functions `encode`, `decode` and `table`, see `runtime/models/quantised.py`.
"""

from math import prod
from typing import Any, ClassVar, Final

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import between, setting, settings_of

BASES: Final = Registry["Base"]("base", "bases")

BLOCKS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# Scales that share a second one, where these are stored in 8 bits.
GROUP: Final = 256
# Numbers of a matrix that are computed at a time.
CHUNK: Final = 2**22


def block_size(default: int) -> Any:
    """The setting `block` that every base has which stores matrices."""
    return setting("numbers that share a scale, a power of two", default=default, check=between(BLOCKS[0], BLOCKS[-1]))


@BASES.base
class Base(Component):
    """`base NAME { … }` inside `precision`: how matrices of blocks that are not trained are stored.

    A matrix is cut into blocks of neighbouring numbers, each with a scale: along its rows where the width of rows is a
    multiple of `block`, else along all of its numbers, row behind row, the last block being filled up. Of a stack of
    experts each is a matrix of its own.
    """

    block: int = 0
    double: bool = False
    """Whether scales are stored in 8 bits, with a second one for `GROUP` of them and one mean for a matrix."""
    stores: ClassVar[bool] = True
    """Whether it stores matrices in another way than the other parameters are."""
    bits: ClassVar[int] = 0
    """Of a code."""
    unpacking: ClassVar[int] = 4
    """Bytes for a number while it is computed from its code, beside the result."""

    @property
    def block_bytes(self) -> int:
        """Of a block with its scale."""
        return self.block * self.bits // 8 + (1 if self.double else 4)

    def in_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether no block of a matrix belongs to two rows."""
        return shape[-1] % self.block == 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the bytes of a matrix, or of a stack of which each matrix has whole blocks in its rows."""
        if self.in_rows(shape):
            return (*shape[:-1], shape[-1] // self.block * self.block_bytes)
        return -(-prod(shape) // self.block), self.block_bytes

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """That of the fp32 numbers beside the bytes of a matrix, or of each of a stack: the mean of its scales, and the
        second scales. Empty where there are none."""
        if not self.double:
            return ()
        blocks = -(-prod(shape[-2:]) // self.block)
        return (*shape[:-2], 1 + -(-blocks // GROUP))

    def scratch(self, numbers: int) -> int:
        """Bytes while so many numbers of a matrix are computed, beside the result."""
        most = min(numbers, CHUNK)
        return most * self.unpacking + most // self.block * 4

    def args(self) -> dict[str, Any]:
        """What a plan says of it, as JSON."""
        values = {name: getattr(self, attribute.name) for name, (attribute, _) in settings_of(type(self)).items()}
        return {"kind": self.kind, **values}

    def words(self) -> str:
        """What it is, for people."""
        scales = "8-bit" if self.double else "fp32"
        return f"{self.kind}, {scales} scales of {self.block} numbers"


def base_of(args: dict[str, Any]) -> Base:
    """The base that `args` of it mean."""
    settings = {name: args[name] for name in settings_of(BASES[args["kind"]])}
    return BASES[args["kind"]](**settings)
