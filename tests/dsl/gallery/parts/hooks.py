from xtrain import hook


@hook("after_loss")
def each_loss(context):
    """The loss of each microbatch."""
    print(context.loss)
