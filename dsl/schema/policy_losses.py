"""What losses of policies have in common: of tokens that a policy has sampled, with the advantage of each."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from attrs import frozen

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.losses import (
    ADVANTAGES,
    OLD,
    REF,
    Reference,
    ReferredLoss,
    Unit,
    logits_chunk,
    reference_setting,
)
from xtrain.dsl.schema.setting import Conflict, Range, not_negative, positive, setting

POLICY: Final = {
    "policy/ratio": (
        "probability of a label now, divided by that when it was sampled; mean over the valid tokens of the step",
        "",
    ),
    "policy/clipped": ("valid tokens whose loss has no gradient, as their ratio is clipped", "share, 0 to 1"),
    "policy/kl": (
        "divergence of the policy from that which has sampled: mean over valid tokens of ρ − 1 − log ρ, ρ the ratio",
        "nats a token",
    ),
    "policy/entropy": ("entropy of the next token, mean over the valid tokens of the step", "nats a token"),
}
REFERENCE_KL: Final = {
    "policy/reference_kl": ("divergence of the policy from the reference, as `kl` of the loss has it", "nats a token")
}

Normalise = Literal["token", "sequence", "dr_grpo"]


@frozen
class PolicyLoss(ReferredLoss):
    """A loss of tokens that a policy has sampled, with the advantage of each: of the ratio ρ of their probabilities now
    and then."""

    kl: Literal["none", "k1", "k2", "k3"] = setting(
        "estimate, for each token, of the divergence from the reference (column `ref_logprobs`) that is added to the "
        "loss; with d = log of reference / policy: k1: −d; k2: d²/2; k3: e^d − d − 1",
        default="none",
    )
    kl_weight: float = setting("weight of `kl`", default=0.0, check=not_negative)
    reference: Reference = reference_setting()
    chunk: Quantity = logits_chunk()

    may_read: ClassVar[Mapping[str, str]] = {REF: "kl = k3, kl_weight = 0.04"}

    @property
    def columns(self) -> tuple[str, ...]:
        return (OLD, ADVANTAGES, *((REF,) if self.kl != "none" else ()))

    @property
    def measured(self) -> tuple[str, ...]:
        return tuple(name for name in self.metrics if self.kl != "none" or name not in REFERENCE_KL)

    def conflicts(self) -> Iterator[Conflict]:
        if self.kl == "none" and self.kl_weight:
            yield Conflict("kl_weight", "`kl_weight` is the weight of `kl`, and that is none", "add `kl = k3`")
        if self.kl != "none" and not self.kl_weight:
            yield Conflict("kl", f"kl {self.kl} counts nothing, as `kl_weight` is 0", "add `kl_weight = 0.04`")

    def penalty(self) -> str:
        """What is added for the reference, in words."""
        return "" if self.kl == "none" else f" + {self.kl_weight:g} · {self.kl} of the reference"

    @classmethod
    def reads(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        return ("entropy_T",)


def normalise_setting(default: str) -> Any:
    """The setting `normalise` of losses of single tokens of a policy."""
    return setting(
        "token: the mean over all tokens of the step; sequence: the mean over sequences of the mean over the tokens of "
        "each; dr_grpo: the mean over sequences of the sum over their tokens divided by `max_tokens` (2503.20783)",
        default=default,
    )


@frozen
class TokenPolicyLoss(PolicyLoss):
    """One of single tokens."""

    normalise: Normalise = normalise_setting("token")
    max_tokens: int | None = setting(
        "what `normalise = dr_grpo` divides the sum of a sequence by", default=None, check=positive
    )

    metrics: ClassVar[Mapping[str, tuple[str, str]]] = POLICY | REFERENCE_KL

    @property
    def unit(self) -> Unit:
        return "token" if self.normalise == "token" else "sequence"

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.normalise == "dr_grpo" and self.max_tokens is None:
            hint = "add `max_tokens = 1024`, the most tokens of an answer"
            yield Conflict("normalise", "dr_grpo divides by `max_tokens`, and that is not given", hint)
        if self.normalise != "dr_grpo" and self.max_tokens is not None:
            hint = "remove it, or write `normalise = dr_grpo`"
            yield Conflict("max_tokens", f"`max_tokens` is for dr_grpo, and normalise is {self.normalise}", hint)

    def mean(self) -> str:
        """What it is the mean of, in words."""
        return {
            "token": "mean over all tokens of the step",
            "sequence": "mean over sequences of the means over their tokens",
            "dr_grpo": f"mean over sequences of the sums over their tokens divided by {self.max_tokens}",
        }[self.normalise]


@frozen
class ClippedPolicyLoss(TokenPolicyLoss):
    """One that clips ratios as PPO does."""

    clip_low: float = setting("ratios are clipped at 1 − this", default=0.2, check=Range(low=0, below=1))
    clip_high: float = setting("ratios are clipped at 1 + this", default=0.2, check=not_negative)
    dual_clip: float | None = setting(
        "of negative advantages ratios count at most so much (arXiv 1912.09729); none: as much as they are",
        default=None,
        check=Range(above=1),
        example="3.0",
    )

    resuming: ClassVar[Mapping[str, str]] = {"clip_low": "ratios are clipped by it from here on"}

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            hint = f"write more than {1 + self.clip_high:g}"
            yield Conflict("dual_clip", f"it lies above 1 + `clip_high`, which is {1 + self.clip_high:g}", hint)

    def does(self) -> str:
        dual = "" if self.dual_clip is None else f", of A < 0 at most {self.dual_clip:g}"
        clips = f"clipped to {1 - self.clip_low:g} … {1 + self.clip_high:g}{dual}"
        text = f"minimise −ρA of each token, ρ = π / e^`{OLD}` {clips}, A = `{ADVANTAGES}`{self.penalty()}"
        return f"{text}; {self.mean()}"
