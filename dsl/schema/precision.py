"""Number formats: `precision`, fp8 products, rounding (`qat`), and quantized storage of frozen matrices (`base`)."""

from math import prod
from typing import Any, ClassVar, Final, Literal

import attrs

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import Role, at_least, between, component_name, setting, settings_of, values_of
from xtrain.lazy_attrs import frozen

BASES: Final = Registry["Base"]("base", "bases")

BLOCKS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# Scales that share a second scale, if scales are stored in 8 bits.
GROUP: Final = 256
# Numbers of a matrix that are decoded at a time.
CHUNK: Final = 2**22


def block_size(default: int) -> Any:
    """Declare the setting `block`, which every quantized base has."""
    return setting("numbers that share a scale, a power of two", default=default, check=between(BLOCKS[0], BLOCKS[-1]))


@BASES.base
class Base(Component):
    """`base NAME { … }` inside `precision`: how frozen matrices of blocks are stored.

    A matrix is divided into blocks of adjacent numbers with a scale each: along its rows if the row width is a multiple
    of `block`, else along all numbers in row order with the last block padded. Each matrix of a stack of experts is
    separate.
    """

    block: int = 0
    double: bool = False
    """True if scales are stored in 8 bits, with a second scale per `GROUP` scales and one mean per matrix."""
    stores: ClassVar[bool] = True
    """True if it stores matrices differently from other parameters."""
    bits: ClassVar[int] = 0
    """Bits per code."""
    unpacking: ClassVar[int] = 4
    """Bytes per number while it is decoded, in addition to the result."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block including its scale."""
        return self.block * self.bits // 8 + (1 if self.double else 4)

    def in_rows(self, shape: tuple[int, ...]) -> bool:
        """Return True if no block of a matrix crosses a row."""
        return shape[-1] % self.block == 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored bytes of a matrix, or of a stack whose matrices have whole blocks in their
        rows."""
        if self.in_rows(shape):
            return (*shape[:-1], shape[-1] // self.block * self.block_bytes)
        return -(-prod(shape) // self.block), self.block_bytes

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the fp32 numbers next to the bytes of a matrix, or of each matrix of a stack: the mean of
        its scales, then the second scales. Empty if there are none."""
        if not self.double:
            return ()
        blocks = -(-prod(shape[-2:]) // self.block)
        return (*shape[:-2], 1 + -(-blocks // GROUP))

    def scratch(self, numbers: int) -> int:
        """Return the temporary bytes while this many numbers of a matrix are decoded, in addition to the result."""
        most = min(numbers, CHUNK)
        return most * self.unpacking + most // self.block * 4

    def args(self) -> dict[str, Any]:
        """Return its JSON in a plan."""
        return {"kind": self.kind, **values_of(self)}

    def words(self) -> str:
        """Return a description of it."""
        scales = "8-bit" if self.double else "fp32"
        return f"{self.kind}, {scales} scales of {self.block} numbers"


def base_of(args: dict[str, Any]) -> Base:
    """Return the base that `args` describe."""
    settings = {name: args[name] for name in settings_of(BASES[args["kind"]])}
    return BASES[args["kind"]](**settings)


RECIPES: Final = Registry["Recipe"]("recipe", "recipes")

# Kernels take runs of 16 numbers.
MULTIPLE: Final = 16
# Numbers that share a scale in mxfp8.
BLOCK: Final = 32
Scales = Literal["tensor", "row", "block"]
"""Scales of a product: one per tensor, one per row and column, or one per `BLOCK` numbers of these."""


@RECIPES.base
@frozen
class Recipe(Component):
    """`recipe = NAME`: the scales of products of 8-bit numbers.

    y = x · Wᵀ takes three products: y, the gradient of x (gradient of y times W), and the gradient of W (transposed
    gradient of y times x). The largest number that shares a scale becomes the largest of e4m3, 448; the attributes
    follow torchao's recipe of the same name.
    """

    scales: ClassVar[Scales] = "tensor"
    """Granularity of the scales in y and in the gradient of x."""
    whole_weight: ClassVar[bool] = False
    """True if W has a single scale for the gradient of x, regardless of y."""
    wide_gradients: ClassVar[bool] = False
    """True if gradients are e5m2, whose largest number is 57344, instead of e4m3."""
    powers_of_two: ClassVar[bool] = False
    """True if scales are rounded down to powers of two."""
    weight_gradient: ClassVar[bool] = True
    """True if the gradient of W is an 8-bit product too; else it is computed in the format of everything else."""
    about: ClassVar[str] = ""
    """Description in the line of a node."""
    capability: ClassVar[tuple[int, int]] = (8, 9)
    """First CUDA compute capability with kernels."""
    multiple: ClassVar[int] = MULTIPLE
    """Widths of matrices on a rank are divisible by it."""

    @property
    def shares_scales(self) -> bool:
        """True if numbers of several ranks may share a scale."""
        return self.scales != "block"

    @property
    def scales_over_tokens(self) -> bool:
        """True if numbers of different tokens share a scale, so that results depend on the composition of a
        microbatch."""
        return self.scales == "tensor" or self.weight_gradient

    @property
    def needs(self) -> str:
        """The first CUDA compute capability, in words."""
        return ".".join(map(str, self.capability))


@frozen
class Fp8:
    """`compute = fp8 { … }`: products of the matrices of blocks in 8-bit floating point, with scales that are computed
    for each product."""

    recipe: str = component_name(RECIPES)
    rest: Literal["bf16", "fp32", "fp64"] = setting(
        "format of everything else: norms, attention, the head, and inputs and outputs of products", default="bf16"
    )
    skip: tuple[str, ...] = setting(
        "matrices whose products use that format too: parts of their names, as in `targets` of an adapter",
        default=(),
        example='["layers.0", "down_proj"]',
    )

    @property
    def chosen(self) -> Recipe:
        """Chosen recipe."""
        return RECIPES[self.recipe]()

    def unfit(self, outputs: int, inputs: int) -> int:
        """Return the width of a matrix that kernels do not support; 0 if they support both."""
        return next((width for width in (outputs, inputs) if width % self.chosen.multiple), 0)


# Of Apex: beyond it a larger scale keeps no gradient from becoming 0.
LARGEST_SCALE: Final = 2**24


@frozen
class Fp16:
    """`compute = fp16 { … }`: the loss is multiplied by a scale, so that small gradients are not 0 in fp16, and
    gradients are divided by it again before anything reads them.

    A step whose gradients overflow is skipped and the scale halved; after `interval` steps without overflow it is
    doubled (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2; numbers as in torch's `GradScaler`).
    """

    scale: int = setting("scale of the first step", default=65_536, check=between(1, LARGEST_SCALE))
    interval: int = setting("steps without overflow until the scale is doubled", default=2_000, check=at_least(1))


ROW: Final = "row"
# 4-bit floating point (E2M1), and how many numbers of a row share a scale.
FLOATS: Final = {"mxfp4": 32, "nvfp4": 16}


@frozen
class Qat:
    """`qat { … }`: quantization-aware training. Products of the matrices of blocks take weights, and with `activations`
    inputs, that are rounded to integers or to 4-bit floats · scale; gradients pass through the rounding. Parameters are
    not rounded."""

    weights: Literal["none", "int4", "int8", "mxfp4", "nvfp4"] = setting(
        "numbers that weights are rounded to, with a scale per group; none: they are not rounded", default="none"
    )
    group: int | Literal["row"] = setting(
        "numbers of a row of a matrix that share a scale; row: all of them. mxfp4 has groups of 32, nvfp4 of 16",
        default=128,
        check=at_least(2),
    )
    activations: Literal["none", "int8", "mxfp4", "nvfp4"] = setting(
        "numbers that the inputs of these products are rounded to: int8, with a scale and a zero point per token, or "
        "the floats of the weights",
        default="none",
    )
    skip: tuple[str, ...] = setting(
        "matrices that are not rounded: parts of their names, as in `targets` of an adapter",
        default=(),
        example='["layers.0", "down_proj"]',
    )

    @property
    def floats(self) -> bool:
        """True if numbers are rounded to 4-bit floats instead of integers."""
        return self.weights in FLOATS

    @property
    def scales_over_tokens(self) -> bool:
        """True if numbers of different tokens share a scale, so that results depend on the composition of a
        microbatch."""
        return self.activations == "nvfp4"

    @property
    def inputs_in_integers(self) -> bool:
        """True if inputs are rounded to integers, with a scale and a zero point per token."""
        return self.activations not in ("none", *FLOATS)

    @property
    def bits(self) -> int:
        """Bits of the integers of weights."""
        return int(self.weights.removeprefix("int"))

    def unfit(self, outputs: int, inputs: int) -> int:
        """Return the width of rows that groups do not divide; 0 if they do."""
        return 0 if self.group == ROW else inputs % int(self.group) and inputs

    def words(self) -> str:
        """Return a description of it."""
        scales = "row" if self.group == ROW else f"{self.group} numbers of a row"
        whole = " and one for the matrix" if self.weights == "nvfp4" else ""
        inputs = "in the same way" if self.floats else "to int8, with a scale and a zero point for each token"
        inputs = "" if self.activations == "none" else f"; inputs {inputs}"
        return f"{self.weights}, with a scale for each {scales}{whole}{inputs}"


Products = Fp8 | Qat
"""Products of the matrices of blocks that are not multiplied as stored."""


@frozen
class Precision:
    """`precision { … }`: number formats."""

    params: Literal["fp32", "fp64", "bf16"] = setting("format of parameters and optimizer state", default="fp32")
    compute: Literal["auto", "fp32", "fp64", "bf16", "fp16", "fp8"] = setting(
        "format of forward and backward; auto: the parameters' format; fp16: with a scale of the loss; fp8: for "
        "products of blocks only",
        default="auto",
    )
    fp16: Fp16 = setting("settings of `compute = fp16`", default=Fp16(), added=True)
    fp8: Fp8 = setting("settings of `compute = fp8`", default=Fp8(), added=True)
    qat: Qat = setting("quantization-aware training", default=Qat(), added=True)
    base: Base = setting(
        "storage of frozen matrices of blocks",
        default=attrs.Factory(lambda: BASES.default()),
        added=True,
    )
    matmul: Literal["auto", "highest", "high", "medium"] = setting(
        "fp32 matmul precision; auto: the fastest setting that keeps fp32 accuracy in a test on the device",
        default="auto",
        role=Role.EXECUTION,
    )
    deterministic: bool = setting(
        "compute the same numbers each time on the same machine; an operation without a deterministic algorithm in "
        "torch is an error",
        default=False,
        role=Role.EXECUTION,
        added=True,
    )

    batch_invariant: bool = setting(
        "compute the same numbers for a token whatever else is in its batch: a rollout's sampler and the step then "
        "have the same log-probabilities, bit for bit",
        default=False,
        added=True,
        resuming="tokens are computed by other kernels from here on",
    )

    @property
    def loss_scale(self) -> Fp16 | None:
        """Settings of the scale of the loss; None without one."""
        return self.fp16 if self.compute == "fp16" else None

    @property
    def scaled(self) -> Fp8 | None:
        """Settings of fp8 products of blocks; None without fp8."""
        return self.fp8 if self.compute == "fp8" else None

    @property
    def rounded(self) -> Qat | None:
        """Settings of quantization-aware training, with the group that counts; None without it."""
        if self.qat.weights == "none":
            return None
        return attrs.evolve(self.qat, group=FLOATS.get(self.qat.weights, self.qat.group))
