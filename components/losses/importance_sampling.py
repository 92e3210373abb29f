"""`loss importance_sampling { … }`: the policy gradient over tokens sampled by another policy."""

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import ADVANTAGES, LOSSES, OLD
from xtrain.dsl.schema.policy import TokenPolicyLoss
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class ImportanceSampling(TokenPolicyLoss):
    """`loss importance_sampling { … }`: the unclipped ratio of a policy times the advantage of each token."""

    kind: str = named("importance_sampling")

    def does(self) -> str:
        text = f"minimize −ρA of each token, ρ = π / e^`{OLD}`, A = `{ADVANTAGES}`{self.penalty()}"
        return f"{text}; {self.mean()}"
