"""Number formats: `precision`, fp8 products, and quantized storage of frozen matrices (`base`)."""

from math import prod
from typing import Any, ClassVar, Final, Literal

import attrs
from attrs import frozen

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import Role, between, component_name, setting, settings_of

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


RECIPES: Final = Registry["Recipe"]("recipe", "recipes")

# A kernel takes runs of 16 numbers.
MULTIPLE: Final = 16
Scales = Literal["tensor", "row"]
"""A scale for a whole tensor, or for every row and column of what is multiplied."""


@RECIPES.base
@frozen
class Recipe(Component):
    """`recipe = NAME`: which scales make of a product one of 8-bit numbers.

    Of y = x · Wᵀ these are three: y, the gradient of x, which is that of y times W, and the gradient of W, which is
    that of y, turned, times x. The largest number that shares a scale becomes the largest of e4m3, 448; the rest of
    this class says what torchao's recipe of the same name does.
    """

    scales: ClassVar[Scales] = "tensor"
    """What shares a scale in y, and in the gradient of x."""
    whole_weight: ClassVar[bool] = False
    """Whether W has one scale for the gradient of x, whatever it has for y."""
    wide_gradients: ClassVar[bool] = False
    """Whether gradients are e5m2, whose largest number is 57344, not e4m3."""
    powers_of_two: ClassVar[bool] = False
    """Whether scales are rounded down to powers of two."""
    weight_gradient: ClassVar[bool] = True
    """Whether the gradient of W is such a product as well; else it is computed in the format of everything else."""
    about: ClassVar[str] = ""
    """What it does, for the line of a node."""

    @property
    def scales_over_tokens(self) -> bool:
        """Whether numbers of different tokens share a scale, so that results depend on what is in a microbatch."""
        return self.scales == "tensor" or self.weight_gradient


@frozen
class Fp8:
    """`compute = fp8 { … }`: products of the matrices of blocks in 8-bit floating point, with scales that are computed
    for each product."""

    recipe: str = component_name(RECIPES, role=Role.EXPERIMENT)
    rest: Literal["bf16", "fp32", "fp64"] = setting(
        "format of all else: of norms, attention and the head, and of what products take and give", default="bf16"
    )
    skip: tuple[str, ...] = setting(
        "matrices whose products are computed in that format too: parts of their names, as of `targets` of an adapter",
        default=(),
        example='["layers.0", "down_proj"]',
    )

    @property
    def chosen(self) -> Recipe:
        """The recipe of that name."""
        return RECIPES[self.recipe]()


@frozen
class Precision:
    """`precision { … }`: number formats."""

    params: Literal["fp32", "fp64", "bf16"] = setting("format of parameters and optimizer state", default="fp32")
    compute: Literal["auto", "fp32", "fp64", "bf16", "fp8"] = setting(
        "format of forward and backward; auto: that of the parameters; fp8: that of products of blocks alone",
        default="auto",
    )
    fp8: Fp8 = setting("settings of `compute = fp8`", default=Fp8(), added=True)
    base: Base = setting(
        "how matrices of blocks that are not trained are stored",
        default=attrs.Factory(lambda: BASES.default()),
        added=True,
    )
    matmul: Literal["auto", "highest", "high", "medium"] = setting(
        "fp32 matmul precision; auto: the fastest setting that keeps fp32 accuracy in a test on the device",
        default="auto",
        role=Role.EXECUTION,
    )
    deterministic: bool = setting(
        "compute the same numbers each time on the same machine; an operation that torch has no such algorithm for is "
        "an error",
        default=False,
        role=Role.EXECUTION,
        added=True,
    )

    @property
    def scaled(self) -> Fp8 | None:
        """How products of blocks are computed in fp8; None where they are not."""
        return self.fp8 if self.compute == "fp8" else None
