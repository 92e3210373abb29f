"""Reinforcement learning: policy losses, rollouts and rewards."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from xtrain.dsl.schema.component import Component, Registry, UserComponent
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
from xtrain.dsl.schema.setting import (
    Conflict,
    Range,
    Role,
    at_least,
    between,
    file_name,
    label,
    not_negative,
    positive,
    server_url,
    setting,
    values_of,
    variable_name,
)
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen

POLICY: Final = {
    "policy/ratio": (
        "current probability of a label divided by its sampling probability; mean over the valid tokens of the step",
        "",
    ),
    "policy/clipped": (
        "share of valid tokens whose loss has no gradient because their ratio is clipped",
        "share, 0 to 1",
    ),
    "policy/kl": (
        "divergence of the policy from the sampling policy: mean over valid tokens of ρ − 1 − log ρ, ρ the ratio",
        "nats a token",
    ),
    "policy/entropy": ("entropy of the next token, mean over the valid tokens of the step", "nats a token"),
}
REFERENCE_KL: Final = {
    "policy/reference_kl": (
        ("divergence of the policy from the reference, in the form of the loss's `kl`"),
        "nats a token",
    )
}

KL_WEIGHT: Final = "policy/kl_weight"
POLICY_METRICS: Final = (
    POLICY | REFERENCE_KL | {KL_WEIGHT: ("with `kl_target`: weight of the divergence from the reference", "")}
)

Normalise = Literal["token", "sequence", "dr_grpo"]


@frozen
class PolicyLoss(ReferredLoss):
    """A loss of tokens sampled by a policy, with an advantage each and the ratio ρ of current to sampling
    probability."""

    kl: Literal["none", "k1", "k2", "k3"] = setting(
        "estimate, for each token, of the divergence from the reference (column `ref_logprobs`) that is added to the "
        "loss; with d = log of reference / policy: k1: −d; k2: d²/2; k3: e^d − d − 1",
        default="none",
    )
    kl_weight: float = setting("weight of `kl`", default=0.0, check=not_negative)
    kl_target: float | None = setting(
        "divergence (`policy/reference_kl`) that `kl_weight` is adapted to: each step multiplies it by 1 + kl_gain · "
        "clip(KL / kl_target − 1, −0.2, 0.2) (1909.08593, section 2.2); none: `kl_weight` is constant",
        default=None,
        check=positive,
        example="6.0",
        added=True,
    )
    kl_gain: float = setting(
        "gain K_β of `kl_target`; batch / horizon of TRL's and verl's controllers",
        default=0.1,
        check=Range(above=0, below=5),
        added=True,
    )
    entropy_weight: float = setting(
        "weight of the entropy of the next token, which is subtracted from the loss: a policy with more of it tries "
        "more",
        default=0.0,
        check=not_negative,
        added=True,
        resuming="the entropy counts by it from here on",
    )
    reference: Reference = reference_setting()
    chunk: Quantity = logits_chunk()

    may_read: ClassVar[Mapping[str, str]] = {REF: "kl = k3, kl_weight = 0.04"}

    @property
    def columns(self) -> tuple[str, ...]:
        return (OLD, ADVANTAGES, *((REF,) if self.kl != "none" else ()))

    @property
    def measured(self) -> tuple[str, ...]:
        known = (name for name in self.metrics if name != KL_WEIGHT)
        return tuple(name for name in known if self.kl != "none" or name not in REFERENCE_KL)

    def conflicts(self) -> Iterator[Conflict]:
        if self.kl == "none" and self.kl_weight:
            yield Conflict("kl_weight", "`kl_weight` has no effect, because `kl` is none", "add `kl = k3`")
        if self.kl != "none" and not self.kl_weight:
            yield Conflict("kl", f"kl {self.kl} has no effect, because `kl_weight` is 0", "add `kl_weight = 0.04`")
        if self.kl == "none" and self.kl_target is not None:
            yield Conflict("kl_target", "`kl_target` has no effect, because `kl` is none", "add `kl = k3`")

    def idle(self) -> Iterator[tuple[str, str]]:
        yield from super().idle()
        if self.kl_target is None:
            yield "kl_gain", "`kl_weight` is constant without `kl_target`"

    def penalty(self) -> str:
        """Return a description of the terms of reference and entropy."""
        term = "" if self.kl == "none" else f" + {self.kl_weight:g} · {self.kl} of the reference"
        term += "" if self.kl_target is None else f" ({self.kl_weight:g} at first, adapted to {self.kl_target:g} of it)"
        return f"{term} − {self.entropy_weight:g} · entropy" if self.entropy_weight else term

    @classmethod
    def reads(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        return ("entropy_T",)


def normalise_setting(default: str) -> Any:
    """Declare the setting `normalise` of per-token policy losses."""
    return setting(
        "token: the mean over all tokens of the step; sequence: the mean over sequences of the mean over the tokens of "
        "each; dr_grpo: the mean over sequences of the sum over their tokens divided by `max_tokens` (2503.20783)",
        default=default,
    )


@frozen
class TokenPolicyLoss(PolicyLoss):
    """A policy loss of single tokens."""

    normalise: Normalise = normalise_setting("token")
    max_tokens: int | None = setting(
        "divisor of the sum of a sequence with `normalise = dr_grpo`", default=None, check=positive
    )

    metrics: ClassVar[Mapping[str, tuple[str, str]]] = POLICY_METRICS

    @property
    def unit(self) -> Unit:
        return "token" if self.normalise == "token" else "sequence"

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.normalise == "dr_grpo" and self.max_tokens is None:
            hint = "add `max_tokens = 1024`, the maximum length of an answer"
            yield Conflict("normalise", "dr_grpo needs `max_tokens`, which is not set", hint)
        if self.normalise != "dr_grpo" and self.max_tokens is not None:
            hint = "remove it, or write `normalise = dr_grpo`"
            yield Conflict("max_tokens", f"`max_tokens` is for dr_grpo, but normalise is {self.normalise}", hint)

    def mean(self) -> str:
        """Return a description of its mean."""
        return {
            "token": "mean over all tokens of the step",
            "sequence": "mean over sequences of the means over their tokens",
            "dr_grpo": f"mean over sequences of the sums over their tokens divided by {self.max_tokens}",
        }[self.normalise]


@frozen
class ClippedPolicyLoss(TokenPolicyLoss):
    """A policy loss that clips ratios as PPO does."""

    clip_low: float = setting(
        "ratios are clipped at 1 − this",
        default=0.2,
        check=Range(low=0, below=1),
        resuming="ratios are clipped by the new value from now on",
    )
    clip_high: float = setting("ratios are clipped at 1 + this", default=0.2, check=not_negative)
    dual_clip: float | None = setting(
        "limit of ratios with negative advantages (arXiv 1912.09729); none: no limit",
        default=None,
        check=Range(above=1),
        example="3.0",
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            hint = f"write more than {1 + self.clip_high:g}"
            yield Conflict("dual_clip", f"it is above 1 + `clip_high`, which is {1 + self.clip_high:g}", hint)

    def does(self) -> str:
        dual = "" if self.dual_clip is None else f", of A < 0 at most {self.dual_clip:g}"
        clips = f"clipped to {1 - self.clip_low:g} … {1 + self.clip_high:g}{dual}"
        text = f"minimize −ρA of each token, ρ = π / e^`{OLD}` {clips}, A = `{ADVANTAGES}`{self.penalty()}"
        return f"{text}; {self.mean()}"


MADE: Final = (ADVANTAGES, OLD)
"""Columns that a rollout produces."""
EXPERTS: Final = "experts"
"""Column with the experts that each token was routed to when it was sampled: the expert numbers from 1, layer after
layer; 0: unknown."""
KEPT: Final = "kept_tokens"
"""Column with the tokens that a token was sampled from: their ids from 1; 0: none."""
SEEN: Final = "sampler_tokens"
"""Column with the sampler's most probable tokens where a token was sampled."""
SHARES: Final = "sampler_shares"
"""Column with the sampler's probabilities of these tokens, followed by the probability of all others together."""
METRICS: Final = {
    "rollout/reward_std": ("standard deviation of the rewards of the step", ""),
    "rollout/no_signal": (
        "share of groups whose completions all have the same reward, so that their advantages are 0",
        "share, 0 to 1",
    ),
    "rollout/replaced": (
        "with `attempts`: groups that were replaced because their rewards were all equal, per group of the step",
        "groups",
    ),
    "rollout/replayed": ("with `replay_prompts`: share of the prompts of the step that were drawn", "share, 0 to 1"),
    "rollout/solved": (
        "with `replay_prompts`: share of the completions of the step whose reward is at least `solved`",
        "share, 0 to 1",
    ),
    "rollout/overlong": ("with `overlong`: what rewards include for the length of a completion, mean of the step", ""),
    "rollout/tokens": (
        "length of a completion including the final token, mean over the completions of the step; of an episode, the "
        "tokens of all its turns",
        "tokens",
    ),
    "rollout/cut": (
        "completions cut off at `max_tokens`; episodes with such a turn, or without room for another one",
        "share, 0 to 1",
    ),
    "rollout/left_out": (
        "with `top_k` or `top_p`: probability of the excluded tokens, mean over the sampled tokens of the step",
        "share, 0 to 1",
    ),
    "rollout/turns": ("with an `environment`: turns of an episode, mean over the episodes of the step", "turns"),
    "rollout/lost": (
        "with an `environment`: episodes that ended because a call exceeded its limits or ended its process",
        "share, 0 to 1",
    ),
    "rollout/routing_differs": (
        "with `replay_routing`: share of expert choices of the step's tokens that the step would have made differently",
        "share, 0 to 1",
    ),
    "rollout/age": (
        "with an `engine`: optimizer steps between the weights that sampled the completions and those that learn from "
        "them, mean over the completions of the step",
        "steps",
    ),
    "rollout/logprob_gap": (
        "distance between the recorded log-probability of a sampled token and the one that the step computes, mean "
        "over the sampled tokens of the step; with `steps` and `stale` in those whose completions the current weights "
        "have sampled",
        "nats",
    ),
    "rollout/logprob_gap_max": ("the same, maximum of the step", "nats"),
    "rollout/divergence": (
        "with `compare`: divergence KL(sampler ‖ step) of the distribution that a token was sampled from, over the "
        "`compare` most probable tokens of the sampler and all others as one; mean over the sampled tokens of the step",
        "nats a token",
    ),
    "rollout/divergence_max": ("the same, maximum of the step", "nats"),
}


@frozen
class Rollout:
    """`rollout { … }`: each step samples completions of prompts from the current model, scores them with `reward`, and
    trains on them; the training datasets provide the prompts."""

    group: int = setting("completions per prompt, which are compared with each other", default=8, check=at_least(1))
    max_tokens: int = setting(
        "maximum number of tokens of a completion, with an `environment` of a turn", default=256, check=at_least(1)
    )
    environment: str | None = setting(
        "environment that completions are conversations with; none: a completion is one answer",
        default=None,
        block="environment",
        added=True,
        example="guessing",
    )
    turns: int = setting(
        "with an `environment`: maximum number of turns of an episode, each a completion of the model",
        default=8,
        check=at_least(1),
        added=True,
    )
    temperature: float = setting(
        "sampling temperature; the log-probabilities of the loss are of logits / temperature too",
        default=1.0,
        check=positive,
    )
    top_k: int | None = setting(
        "sample from this many most probable tokens; none: from all",
        default=None,
        check=at_least(1),
        example="50",
    )
    top_p: float = setting(
        "nucleus sampling: share of the probability to sample from", default=1.0, check=between(0.01, 1)
    )
    logprobs: Literal["raw", "processed"] = setting(
        "log-probabilities of sampler and loss: raw: over all tokens; processed: over the tokens that `top_k` and "
        "`top_p` leave, which the step keeps (2512.02556, section 3.1); both of logits / temperature",
        default="raw",
        added=True,
    )
    compare: int | None = setting(
        "most probable tokens whose probabilities are compared between sampler and step, and all others as one "
        "(`rollout/divergence`); none: only sampled tokens are compared",
        default=None,
        check=at_least(1),
        example="64",
        added=True,
    )
    scale_rewards: Literal["group", "none"] = setting(
        "advantages are rewards minus the mean of their group; group: divided by the standard deviation of the "
        "group; none: not divided (2503.20783)",
        default="group",
    )
    replay_routing: bool = setting(
        "for mixtures of experts: the step routes each token to the experts that it was sampled with",
        default=False,
        added=True,
    )
    mask_truncated: bool = setting(
        "do not train on completions cut off at `max_tokens` (2503.14476); their rewards still count in their group",
        default=False,
        added=True,
    )
    overlong: int | None = setting(
        "tokens before `max_tokens` in which completions are punished for their length: 0 at the first of them, −1 at "
        "the last (2503.14476, equation 13); none: no length is punished",
        default=None,
        check=at_least(1),
        example="64",
        added=True,
    )
    attempts: int = setting(
        "groups sampled for a place in the step at most: one whose rewards are all equal is replaced by the group of "
        "another prompt (dynamic sampling, 2503.14476); 1: none is replaced",
        default=1,
        check=at_least(1),
        added=True,
    )
    replay_prompts: float = setting(
        "share of the prompts of a step that are drawn from earlier ones by their `difficulty`, instead of new ones",
        default=0.0,
        check=Range(low=0, below=1),
        added=True,
        example="0.25",
    )
    difficulty: Literal["unsolved", "learnable"] = setting(
        "weight of a prompt whose completions succeeded with share s when it was last sampled: unsolved: 1 − s "
        "(2501.12599); learnable: s (1 − s) (2502.12272)",
        default="unsolved",
        added=True,
    )
    solved: float = setting(
        "with `replay_prompts`: least reward of a completion that succeeds", default=1.0, added=True
    )
    steps: int = setting(
        "optimizer steps whose completions are sampled together, with the weights before the first of them; each "
        "step trains on its own",
        default=1,
        check=at_least(1),
        added=True,
    )
    updates: int = setting(
        "optimizer steps per completion: the `steps` are repeated on the same completions this many times in all",
        default=1,
        check=at_least(1),
        added=True,
    )
    stale: int = setting(
        "with an `engine`: optimizer steps that completions are requested ahead, by weights that are older by as many; "
        "0: by the current weights, which wait for them",
        default=0,
        check=not_negative,
        added=True,
    )
    show: Quantity | None = setting(
        "interval at which completions of a prompt are recorded as samples; none: never",
        default=None,
        units=("steps",),
        check=at_least(1),
        role=Role.CADENCE,
        example="50 steps",
    )

    @property
    def period(self) -> int:
        """Steps between two steps that sample."""
        return self.steps * self.updates


ENGINES: Final = Registry["SamplingEngine"]("engine", "engines")


# The module `…_run` next to an engine has a function `connect`; see `runtime/sampling/engines.py`.
@ENGINES.base
@frozen
class SamplingEngine(Component):
    """`engine NAME { … }`: a program elsewhere that samples the completions of rollouts; without the block the ranks of
    the run do."""

    url: str = setting("address of the engine", check=server_url, role=Role.EXECUTION, example='"http://gpu2:8000"')
    key: str | None = setting(
        "name of the environment variable with the key that the engine asks for; none: it asks for none",
        default=None,
        check=variable_name,
        role=Role.EXECUTION,
        example='"ENGINE_KEY"',
    )
    patience: Quantity = setting(
        "time for which a request is repeated while the engine is away or busy, and for which its answer is awaited",
        default=Quantity(600, "seconds"),
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="10 min",
    )

    title: ClassVar[str] = ""
    reads_files: ClassVar[bool] = True
    """True if it reads weights from a folder, which it must see under the same path; False if they are sent to it."""
    keeps_models: ClassVar[bool] = False
    """True if it samples with several versions of a whole model at once; with adapters every engine does."""


@frozen
class Environment(UserComponent):
    """`environment NAME { … }`: a class of your own with `@environment` that rollouts have conversations with. Its
    other settings are the parameters of `reset`."""

    name: str = label(check=file_name)
    seconds: Quantity = setting(
        "processor time of a call of `reset`, `step`, `finish` or a tool; an episode that exceeds it ends",
        default=Quantity(5, "seconds"),
        units=("seconds",),
        check=positive,
        example="5 s",
    )
    wait: Quantity = setting(
        "time to wait for such a call; an episode that exceeds it ends",
        default=Quantity(60, "seconds"),
        units=("seconds",),
        check=positive,
        example="60 s",
    )
    memory: Quantity = setting(
        "memory that the process of an episode may allocate in addition to its size at the start",
        default=Quantity(1 << 29, "bytes"),
        units=("bytes",),
        check=positive,
        example="512 MiB",
    )

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Functions that the model may call, as chat templates take them."""
        return self.declared.get("tools", ())  # a class with mistakes has none


REWARDS: Final = Registry["Reward"]("reward", "rewards", op="rollout.score")


# Its op, `rollout.score.NAME`, is in the module `…_torch` next to it; see `runtime/sampling/scoring.py`.
@REWARDS.base
class Reward(Component):
    """`reward NAME { … }`: score of a sampled completion: a function of your own, or one of these."""

    @property
    def model_folder(self) -> str | None:
        """Folder of the model that it scores with, if any; its op then gets a `Scorer`."""
        return None

    def args(self) -> dict[str, Any]:
        """Return the JSON arguments of its node without `kind`."""
        return values_of(self)

    def does(self) -> str:
        """Return a description of the score."""
        raise NotImplementedError
