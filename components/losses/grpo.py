"""`loss grpo { … }`: group-relative policy optimization (Shao et al. 2024, arXiv 2402.03300), over data."""

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import LOSSES
from xtrain.dsl.schema.policy import ClippedPolicyLoss, Normalise, normalise_setting
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class Grpo(ClippedPolicyLoss):
    """`loss grpo { … }`: the clipped ratio of a policy times the advantage of each token."""

    kind: str = named("grpo")
    normalise: Normalise = normalise_setting("sequence")
