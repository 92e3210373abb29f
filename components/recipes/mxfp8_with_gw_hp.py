"""`recipe = mxfp8_with_gw_hp`."""

from xtrain.components.recipes.mxfp8 import Mxfp8
from xtrain.dsl.schema.precision import RECIPES
from xtrain.lazy_attrs import frozen


@RECIPES.register()
@frozen
class Mxfp8WithWideWeightGradients(Mxfp8):
    """`recipe = mxfp8_with_gw_hp`: mxfp8, with weight gradients in the compute format.

    No number shares a scale with a number of another token, so results do not depend on how rows are distributed.
    """

    kind = "mxfp8_with_gw_hp"

    weight_gradient = False
    about = "a scale for each 32 numbers of a row, powers of two, weight gradients not in fp8"
