"""`compute = fp8 { … }` inside `precision`: products of the matrices of blocks in 8-bit floating point."""

from typing import ClassVar, Final, Literal

from attrs import frozen

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import Role, component_name, setting

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
