"""`loss importance_sampling { … }`: the policy gradient over tokens that another policy has sampled."""

from typing import Literal

from attrs import frozen

from ...dsl.quantity import Quantity
from ...dsl.schema.component import named
from ...dsl.schema.losses import (
    ADVANTAGES,
    OLD,
    KlEstimator,
    Reference,
    TokenPolicyLoss,
    kl_setting,
    kl_weight,
    max_tokens_setting,
    normalise_setting,
    reference_setting,
)
from ...dsl.schema.training import LOSSES, logits_chunk


@LOSSES.register()
@frozen
class ImportanceSampling(TokenPolicyLoss):
    """`loss importance_sampling { … }`: the ratio of a policy, as it is, times the advantage of each token."""

    kind: str = named("importance_sampling")
    normalise: Literal["token", "sequence", "dr_grpo"] = normalise_setting("token")
    max_tokens: int | None = max_tokens_setting()
    kl: KlEstimator = kl_setting()
    kl_weight: float = kl_weight()
    reference: Reference = reference_setting()
    chunk: Quantity = logits_chunk()

    def does(self) -> str:
        text = f"minimise −ρA of each token, ρ = π / e^`{OLD}`, A = `{ADVANTAGES}`{self.penalty()}"
        return f"{text}; {self.mean()}"
