"""`loss`: what is minimised; and what losses of pairs and those with a reference model have in common."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from attrs import frozen

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import Conflict, Role, file_path, not_negative, positive, setting, settings_of
from xtrain.dsl.values import Quantity

LOSSES: Final = Registry["Loss"]("loss", "losses")

WEIGHTS: Final = "weights"
"""The column of how much labels count."""
REF: Final = "ref_logprobs"
"""The column of log-probabilities that the reference model gives labels."""
MISMATCHED: Final = "mismatched_ref_logprobs"
"""Those that it gives labels behind the prompt of another document, of the same row."""
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


Unit = Literal["token", "sequence", "pair"]
TAKEN_ELSEWHERE: Final = ("z_loss", "chunk", "reference")
"""Settings of losses that nodes of the model and of the data take."""
HeadKind = Literal["vocabulary", "reward"]
"""What the head of a model gives: logits of the next token at each position, or one number at the last one of a
sequence."""


def z_weight() -> Any:
    """The setting `z_loss` that every loss has."""
    return setting("weight of the mean squared log-sum-exp of the logits", default=0.0, check=not_negative)


def logits_chunk() -> Any:
    """The setting `chunk` that every loss has."""
    return setting(
        "logits are computed in chunks of at most this size in fp32",
        default=Quantity(2**30, "bytes"),
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
    )


@frozen
class WideColumn:
    """Numbers of tokens of which each token has several. format: `int32` or `float32`."""

    width: int
    format: Literal["int32", "float32"]


@frozen
class Teacher:
    """A model that a loss learns from: by what `xtrain data teach` has stored of it, or live, as it computes each
    microbatch beside the model. folder: of the model. top: tokens whose log-probabilities are stored of each
    distribution. temperature: what its logits are divided by before."""

    folder: str
    top: int
    temperature: float
    live: bool = False


@LOSSES.base
class Loss(Component):
    """`loss NAME { … }`: what is minimised: its mean over all valid tokens of the step, or its sequences or pairs, on
    all ranks together."""

    z_loss: float = 0.0
    chunk: Quantity
    across: ClassVar[bool] = False
    """Whether it is computed from sums over the tokens of each sequence: what is left of the head's product is then one
    number a token, and the backward computes the product a second time."""
    head: ClassVar[HeadKind] = "vocabulary"
    """The head that the model has for it."""
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """What it measures at each step → what that is, and its unit. Means over tokens, or over units if it is `across`
    these."""
    resuming: ClassVar[Mapping[str, str]] = {}
    """Argument of its node → what becomes of a run that is resumed with another value, as a clause."""
    may_read: ClassVar[Mapping[str, str]] = {}
    """Column that it reads only with certain settings → these settings, as a spec has them."""

    @property
    def plain(self) -> bool:
        """Whether it is the cross-entropy of each token, which the model gives by itself: a plan has no node for it."""
        return False

    @property
    def recorded(self) -> bool:
        """Whether something else than the cross-entropy is minimised, which is then logged as `objective`."""
        return not self.plain or self.z_loss > 0

    @property
    def unit(self) -> Unit:
        """What it is divided by the number of."""
        return "token"

    @property
    def columns(self) -> tuple[str, ...]:
        """Numbers of tokens that it reads, by the names that datasets give them."""
        return ()

    @property
    def computed(self) -> tuple[str, ...]:
        """Those of its columns that the run computes before the first step, whatever datasets have."""
        return ()

    @property
    def values(self) -> tuple[str, ...]:
        """The same of numbers of documents."""
        return ()

    @property
    def wide(self) -> Mapping[str, WideColumn]:
        """Columns that it reads beside those, which no dataset has but its teacher gives, by name."""
        return {}

    @property
    def learns_from(self) -> Teacher | None:
        """The model that it learns from, if there is one."""
        return None

    @property
    def mismatched(self) -> bool:
        """Whether each step needs to know how likely answers are behind the prompts of others."""
        return False

    def of_data(self) -> tuple[str, ...]:
        """Settings of a dataset whose records have fields, as a spec has them, that give what it reads; none where any
        dataset does."""
        found = ('chosen = "chosen"', 'rejected = "rejected"') if self.unit == "pair" else ()
        found += ("oversized = skip",) if self.unit == "sequence" else ()
        given = tuple(name for name in self.columns if name not in self.computed)
        for name, read in (("columns", given), ("values", self.values)):
            fields = ", ".join(f'{each}: "{each}"' for each in read)
            found += (f"{name} = {{ {fields} }}",) if read else ()
        return found

    @property
    def measured(self) -> tuple[str, ...]:
        """Those of its metrics that it has with these settings."""
        return tuple(self.metrics)

    @property
    def summed(self) -> int:
        """If it is `across` tokens, how many numbers of each of them are summed: log-probabilities, and what it
        reads."""
        return 1 + len(self.columns) + len(self.reads(self.args()))

    def conflicts(self) -> Iterator[Conflict]:
        """Settings that do not fit the others."""
        return iter(())

    def idle(self) -> Iterator[tuple[str, str]]:
        """The settings that change nothing beside the others, and why."""
        return iter(())

    def args(self) -> dict[str, Any]:
        """The JSON arguments of its node beside `kind`: all of its settings but those that other nodes take."""
        values = {name: getattr(self, attribute.name) for name, (attribute, _) in settings_of(type(self)).items()}
        return {name: value for name, value in values.items() if name not in TAKEN_ELSEWHERE}

    def does(self) -> str:
        """What its node does, in words."""
        raise NotImplementedError

    @classmethod
    def reads(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        """What it is computed from beside the log-probability of each label, of `user_parts.kinds.STATISTICS`. args: of
        its node."""
        return ()


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


# Pairs and rewards -------------------------------------------------------------------------------------------------

_REWARD: Final = "nats"
PAIR_METRICS: Final = {
    "rewards/chosen": ("reward of preferred answers, mean over the pairs of the step", _REWARD),
    "rewards/rejected": ("the same of rejected answers", _REWARD),
    "rewards/margin": ("their difference", _REWARD),
    "rewards/accuracy": ("pairs whose preferred answer has the higher reward", "share, 0 to 1"),
}


def beta_setting(default: float, what: str = "how much a difference of log-probabilities counts: β") -> Any:
    """The setting `beta` of losses of preferences."""
    return setting(what, default=default, check=positive)


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
