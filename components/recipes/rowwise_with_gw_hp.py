"""`recipe = rowwise_with_gw_hp`."""

from xtrain.dsl.schema.precision import RECIPES, Recipe
from xtrain.lazy_attrs import frozen


@RECIPES.register()
@frozen
class RowwiseWithWideWeightGradients(Recipe):
    """`recipe = rowwise_with_gw_hp`: rowwise, with weight gradients in the compute format; the most accurate.

    No number shares a scale with a number of another token, so results do not depend on how rows are distributed.
    """

    kind = "rowwise_with_gw_hp"

    scales = "row"
    whole_weight = True
    powers_of_two = True
    weight_gradient = False
    about = "a scale for each row, powers of two, weight gradients not in fp8"
