"""`recipe = rowwise`."""

from xtrain.dsl.schema.precision import RECIPES, Recipe
from xtrain.lazy_attrs import frozen


@RECIPES.register()
@frozen
class Rowwise(Recipe):
    """`recipe = rowwise`: a scale for every multiplied row and column, powers of two, all in e4m3."""

    kind = "rowwise"

    scales = "row"
    powers_of_two = True
    about = "a scale for each row and column, powers of two"
