"""`loss ppo { … }`: proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), over data."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from attrs import frozen

from ...dsl.quantity import Quantity
from ...dsl.schema.component import named
from ...dsl.schema.losses import (
    ClippedPolicyLoss,
    KlEstimator,
    Reference,
    clip_setting,
    dual_setting,
    kl_setting,
    kl_weight,
    max_tokens_setting,
    normalise_setting,
    reference_setting,
)
from ...dsl.schema.training import LOSSES, logits_chunk


@LOSSES.register()
@frozen
class Ppo(ClippedPolicyLoss):
    """`loss ppo { … }`: the clipped ratio of a policy times the advantage of each token."""

    kind: str = named("ppo")
    clip_low: float = clip_setting("low")
    clip_high: float = clip_setting("high")
    dual_clip: float | None = dual_setting()
    normalise: Literal["token", "sequence", "dr_grpo"] = normalise_setting("token")
    max_tokens: int | None = max_tokens_setting()
    kl: KlEstimator = kl_setting()
    kl_weight: float = kl_weight()
    reference: Reference = reference_setting()
    chunk: Quantity = logits_chunk()

    resuming: ClassVar[Mapping[str, str]] = {"clip_low": "ratios are clipped by it from here on"}
