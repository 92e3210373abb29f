"""`recipe = tensorwise`."""

from xtrain.dsl.schema.precision import RECIPES, Recipe
from xtrain.lazy_attrs import frozen


@RECIPES.register()
@frozen
class Tensorwise(Recipe):
    """`recipe = tensorwise`: one scale per tensor, gradients in e5m2; the fastest.

    Micikevicius et al. 2022 (arXiv 2209.05433), with scales of the multiplied numbers instead of earlier ones.
    """

    kind = "tensorwise"

    wide_gradients = True
    about = "a scale for each tensor, gradients in e5m2"
