"""A running average of the weights: `ema`."""

from attrs import frozen

from xtrain.dsl.schema.setting import Role, at_least, proper_fraction, setting


@frozen
class Ema:
    """`ema { … }`: an exponential moving average of the weights; without this block there is none."""

    decay: float = setting(
        "share of the average that is kept at an update", default=0.999, check=proper_fraction, example="0.9999"
    )
    every: int = setting("steps between two updates of the average", default=1, check=at_least(1))
    eval: bool = setting(
        "evaluate and generate with the averaged weights instead of the trained ones", default=True, role=Role.CADENCE
    )
    publish: bool = setting(
        "the weights saved alone, or loaded by `checkpoint.pretrained`, are the averaged weights",
        default=True,
        role=Role.CADENCE,
    )
