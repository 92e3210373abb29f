"""What losses of one family have in common: those of preferences, and those of policies."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from attrs import frozen

from ..quantity import Quantity
from .names import file_path
from .setting import Range, not_negative, positive, setting
from .training import HeadKind, Loss, Misfit, Unit, logits_chunk

WEIGHTS: Final = "weights"
"""The column of how much labels count."""
REF: Final = "ref_logprobs"
"""The column of log-probabilities that the reference model gives labels."""
OLD: Final = "logprobs"
"""Those that the policy gave them which has sampled the tokens."""
ADVANTAGES: Final = "advantages"
TEACHER_IDS: Final = "teacher_ids"
"""The tokens that a teacher holds most probable in the place of each token, several of them."""
TEACHER_LOGPROBS: Final = "teacher_logprobs"
"""Their log-probabilities, and behind them that of all other tokens together."""
LATER: Final = "later_ids"
"""Of modules that predict further tokens, each with `/` and its number behind: the token so many positions later in the
same document, which it reads; 0 where there is none."""
LATER_LABELS: Final = "later_labels"
"""The label of that."""

FURTHER: Final = "mtp"


def further_metrics(modules: int) -> tuple[str, ...]:
    """What so many modules that predict further tokens measure: `mtp/1`, …"""
    return tuple(f"{FURTHER}/{number}" for number in range(1, modules + 1))


_REWARD: Final = "nats"
PAIR_METRICS: Final = {
    "rewards/chosen": ("reward of preferred answers, mean over the pairs of the step", _REWARD),
    "rewards/rejected": ("the same of rejected answers", _REWARD),
    "rewards/margin": ("their difference", _REWARD),
    "rewards/accuracy": ("pairs whose preferred answer has the higher reward", "share, 0 to 1"),
}
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
DISTILLED: Final = {
    "distill/divergence": (
        "divergence of the student from its teacher, as `form` of the loss has it, of logits / temperature; mean over "
        "the valid tokens of the step",
        "nats a token",
    ),
    "distill/agreement": ("valid tokens whose most probable next token is that of the teacher", "share, 0 to 1"),
}
REFERENCE_KL: Final = {
    "policy/reference_kl": ("divergence of the policy from the reference, as `kl` of the loss has it", "nats a token")
}

Normalise = Literal["token", "sequence", "dr_grpo"]


def beta_setting(default: float, what: str = "how much a difference of log-probabilities counts: β") -> Any:
    """The setting `beta` of losses of preferences."""
    return setting(what, default=default, check=positive)


# Reference models ----------------------------------------------------------------------------------------------------

INITIAL: Final = "initial"
ADAPTER_OFF: Final = "adapter_off"
PRECOMPUTED: Final = "precomputed"
Reference = Literal["initial", "adapter_off", "precomputed"] | str


def reference_setting() -> Any:
    """The setting `reference` of losses that compare with a reference model."""
    return setting(
        "whose log-probabilities the column `ref_logprobs` has, computed once before the first step: initial: those of "
        "the weights that the run begins with; adapter_off: of the model under the adapter; a folder: of the model in "
        "it; precomputed: nothing is computed, they are a column of the data",
        default=INITIAL,
        check=file_path,
        example='"models/sft"',
        added=True,
    )


class ReferredLoss(Loss):
    """A loss that may compare with a reference model."""

    reference: Reference

    @property
    def computed(self) -> tuple[str, ...]:
        return (REF,) if REF in self.columns and self.reference != PRECOMPUTED else ()

    @property
    def reference_folder(self) -> str | None:
        """That of the reference, if it is a model of its own and there is one."""
        return self.reference if self.computed and self.reference not in (INITIAL, ADAPTER_OFF) else None

    def idle(self) -> Iterator[tuple[str, str]]:
        if REF not in self.columns:
            yield "reference", f"the loss does not read `{REF}`"


class PairLoss(Loss):
    """A loss of pairs of a preferred and a rejected answer."""

    chunk: Quantity
    across: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = PAIR_METRICS

    @property
    def unit(self) -> Unit:
        return "pair"


class RewardLoss(Loss):
    """A loss of rewards: numbers that the head of the model gives sequences, each at the last token."""

    head: ClassVar[HeadKind] = "reward"


# Policies ------------------------------------------------------------------------------------------------------------


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

    def misfits(self) -> Iterator[Misfit]:
        if self.kl == "none" and self.kl_weight:
            yield Misfit("kl_weight", "`kl_weight` is the weight of `kl`, and that is none", "add `kl = k3`")
        if self.kl != "none" and not self.kl_weight:
            yield Misfit("kl", f"kl {self.kl} counts nothing, as `kl_weight` is 0", "add `kl_weight = 0.04`")

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

    def misfits(self) -> Iterator[Misfit]:
        yield from super().misfits()
        if self.normalise == "dr_grpo" and self.max_tokens is None:
            hint = "add `max_tokens = 1024`, the most tokens of an answer"
            yield Misfit("normalise", "dr_grpo divides by `max_tokens`, and that is not given", hint)
        if self.normalise != "dr_grpo" and self.max_tokens is not None:
            hint = "remove it, or write `normalise = dr_grpo`"
            yield Misfit("max_tokens", f"`max_tokens` is for dr_grpo, and normalise is {self.normalise}", hint)

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

    def misfits(self) -> Iterator[Misfit]:
        yield from super().misfits()
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            hint = f"write more than {1 + self.clip_high:g}"
            yield Misfit("dual_clip", f"it lies above 1 + `clip_high`, which is {1 + self.clip_high:g}", hint)

    def does(self) -> str:
        dual = "" if self.dual_clip is None else f", of A < 0 at most {self.dual_clip:g}"
        clips = f"clipped to {1 - self.clip_low:g} … {1 + self.clip_high:g}{dual}"
        text = f"minimise −ρA of each token, ρ = π / e^`{OLD}` {clips}, A = `{ADVANTAGES}`{self.penalty()}"
        return f"{text}; {self.mean()}"
