"""Learning from samples of the policy: `rollout`, which samples them, and `reward`, which says how good they are."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from attrs import frozen

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.losses import ADVANTAGES, OLD
from xtrain.dsl.schema.setting import Role, at_least, between, positive, setting, settings_of

MADE: Final = (ADVANTAGES, OLD)
"""The columns that a rollout makes."""
EXPERTS: Final = "experts"
"""The column, of several numbers a token, of the experts that a token was sent to when it was sampled: of each layer
with experts one after the other their numbers, from 1; 0: that is not known."""
METRICS: Final = {
    "rollout/reward_std": ("standard deviation of the rewards of the step", ""),
    "rollout/no_signal": (
        "groups whose completions all have the same reward, so that their advantages are 0",
        "share, 0 to 1",
    ),
    "rollout/tokens": ("length of a completion with the token that ends it, mean over those of the step", "tokens"),
    "rollout/cut": ("completions that `max_tokens` has cut off", "share, 0 to 1"),
    "rollout/left_out": (
        "with `top_k` or `top_p`: probability of what they leave out, mean over the sampled tokens of the step",
        "share, 0 to 1",
    ),
    "rollout/routing_differs": (
        "with `replay_routing`: choices of an expert that the step would have made otherwise, of those of its tokens",
        "share, 0 to 1",
    ),
    "rollout/logprob_gap": (
        "how far the log-probability that the sampler has recorded for a token is from that which the step computes "
        "for it, mean over the sampled tokens of the step; with `steps` in those that sample",
        "nats",
    ),
    "rollout/logprob_gap_max": ("the same, the largest of the step", "nats"),
}


@frozen
class Rollout:
    """`rollout { … }`: each step samples completions of prompts from the model as it is, has them scored by `reward`,
    and learns from them; the datasets that are trained on give the prompts."""

    group: int = setting("completions of each prompt, which are compared with each other", default=8, check=at_least(1))
    max_tokens: int = setting("tokens of a completion at most", default=256, check=at_least(1))
    temperature: float = setting(
        "sampling temperature; the log-probabilities of the loss are of logits / temperature too",
        default=1.0,
        check=positive,
    )
    top_k: int | None = setting(
        "sample from so many of the most likely tokens; none: from all",
        default=None,
        check=at_least(1),
        example="50",
    )
    top_p: float = setting(
        "nucleus sampling: share of the probability to sample from", default=1.0, check=between(0.01, 1)
    )
    scale_rewards: Literal["group", "none"] = setting(
        "advantages are rewards less the mean of their group; group: divided by the standard deviation of the group; "
        "none: as they are (2503.20783)",
        default="group",
    )
    replay_routing: bool = setting(
        "of mixtures of experts: the step computes each token with the experts that it was sent to when it was sampled",
        default=False,
        added=True,
    )
    mask_truncated: bool = setting(
        "nothing is learned from completions that `max_tokens` has cut off (2503.14476); their rewards count in their "
        "group all the same",
        default=False,
        added=True,
    )
    steps: int = setting(
        "optimizer steps whose completions are sampled at once, by the weights before the first of them; each step "
        "learns from its own",
        default=1,
        check=at_least(1),
        added=True,
    )
    updates: int = setting(
        "optimizer steps that learn from each completion: behind those of `steps`, as many learn from the same "
        "completions again, so often in all",
        default=1,
        check=at_least(1),
        added=True,
    )
    show: Quantity | None = setting(
        "how often completions of a prompt are recorded as samples; none: never",
        default=None,
        units=("steps",),
        check=at_least(1),
        role=Role.CADENCE,
        example="50 steps",
    )

    @property
    def period(self) -> int:
        """Steps from one that samples to the next."""
        return self.steps * self.updates


REWARDS: Final = Registry["Reward"]("reward", "rewards")


# Its op, `rollout.score.NAME`, stands in the module `…_torch` beside it; see `runtime/rollout/scoring.py`.
@REWARDS.base
class Reward(Component):
    """`reward NAME { … }`: how good a completion is that a rollout has sampled; a number from a function of your own,
    or one of these."""

    resuming: ClassVar[Mapping[str, str]] = {}
    """Argument of its node → what becomes of a run that goes on with another value, as a clause. Of those that are not
    here: completions are scored by it from here on."""

    @property
    def model_folder(self) -> str | None:
        """The folder of the model that it scores with, if it does; its op is then given a `Scorer`."""
        return None

    def args(self) -> dict[str, Any]:
        """The JSON arguments of its node beside `kind`."""
        return {name: getattr(self, attribute.name) for name, (attribute, _) in settings_of(type(self)).items()}

    def does(self) -> str:
        """What a completion is scored by, in words."""
        raise NotImplementedError
