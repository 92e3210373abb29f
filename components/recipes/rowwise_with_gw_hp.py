"""`recipe = rowwise_with_gw_hp`."""

from attrs import frozen

from xtrain.dsl.schema.fp8 import RECIPES, Recipe


@RECIPES.register()
@frozen
class RowwiseWithWideWeightGradients(Recipe):
    """`recipe = rowwise_with_gw_hp`: as rowwise, with gradients of weights in the format of all else; the most exact.

    No number then shares a scale with one of another token, so that results do not depend on how rows are dealt out.
    """

    kind = "rowwise_with_gw_hp"

    scales = "row"
    whole_weight = True
    powers_of_two = True
    weight_gradient = False
    about = "a scale for each row, powers of two, gradients of weights as all else"
