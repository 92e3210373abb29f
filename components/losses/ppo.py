"""`loss ppo { … }`: proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347), over data."""

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import LOSSES
from xtrain.dsl.schema.policy import ClippedPolicyLoss
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class Ppo(ClippedPolicyLoss):
    """`loss ppo { … }`: the clipped ratio of a policy times the advantage of each token."""

    kind: str = named("ppo")
