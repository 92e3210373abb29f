"""`recipe = mxfp8`."""

from xtrain.dsl.schema.precision import BLOCK, RECIPES, Recipe
from xtrain.lazy_attrs import frozen


@RECIPES.register()
@frozen
class Mxfp8(Recipe):
    """`recipe = mxfp8`: a power of two as the scale for every 32 numbers that a product sums over, all in e4m3.

    OCP Microscaling Formats 1.0; Rouhani et al. 2023 (arXiv 2310.10537).
    """

    kind = "mxfp8"

    scales = "block"
    powers_of_two = True
    about = "a scale for each 32 numbers of a row or column, powers of two"
    capability = (10, 0)
    multiple = BLOCK
