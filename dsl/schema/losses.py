"""`loss`: the objective, and shared parts of pair losses and of losses with a reference model."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import (
    Conflict,
    Role,
    file_path,
    is_unspoken,
    not_negative,
    positive,
    setting,
    settings_of,
    values_of,
)
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen

LOSSES: Final = Registry["Loss"]("loss", "losses", op="setup.loss")

WEIGHTS: Final = "weights"
"""Column with the weight of each label."""
REF: Final = "ref_logprobs"
"""Column with the reference model's log-probability of each label."""
MISMATCHED: Final = "mismatched_ref_logprobs"
"""Column with the reference model's log-probability of each label after the prompt of another document of the same row.
"""
OLD: Final = "logprobs"
"""Column with the log-probability under the policy that sampled the tokens."""
ADVANTAGES: Final = "advantages"
TEACHER_IDS: Final = "teacher_ids"
"""Column with the teacher's most probable tokens at each position."""
TEACHER_LOGPROBS: Final = "teacher_logprobs"
"""Column with the log-probabilities of those tokens, followed by the log-probability of all other tokens together."""
LATER: Final = "later_ids"
"""Column for modules that predict further tokens, with `/` and the module's number appended: the token that many
positions later in the same document, which the module reads; 0 if there is none."""
LATER_LABELS: Final = "later_labels"
"""Column with the label of that token."""

FURTHER: Final = "mtp"


def further_metrics(modules: int) -> tuple[str, ...]:
    """Return the metric names of the modules that predict further tokens: `mtp/1`, …"""
    return tuple(f"{FURTHER}/{number}" for number in range(1, modules + 1))


Unit = Literal["token", "sequence", "pair"]
TAKEN_ELSEWHERE: Final = ("z_loss", "chunk", "reference", "kl_target", "kl_gain")
"""Settings of losses that nodes of the model, the data and the step take."""
HeadKind = Literal["vocabulary", "reward"]
"""Output of a model's head: logits of the next token at each position, or one number at the last token of a sequence.
"""


def z_weight() -> Any:
    """Declare the setting `z_loss`, which every loss has."""
    return setting("weight of the mean squared log-sum-exp of the logits", default=0.0, check=not_negative)


def logits_chunk() -> Any:
    """Declare the setting `chunk`, which every loss has."""
    return setting(
        "logits are computed in chunks of at most this size in fp32",
        default=Quantity(2**30, "bytes"),
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
    )


@frozen
class WideColumn:
    """A column with several numbers per token. format: `int32` or `float32`."""

    width: int
    format: Literal["int32", "float32"]


@frozen
class Teacher:
    """A model to distill from: its outputs stored by `xtrain data teach`, or computed live for each microbatch. folder:
    folder of the model. top: stored log-probabilities per distribution. temperature: divides the teacher's logits.
    labels: part of the loss is the cross-entropy of labels."""

    folder: str
    top: int
    temperature: float
    live: bool
    labels: bool


@LOSSES.base
class Loss(Component):
    """`loss NAME { … }`: the objective; its mean over all valid tokens of the step (or over sequences or pairs), across
    all ranks."""

    z_loss: float = 0.0
    chunk: Quantity
    across: ClassVar[bool] = False
    """True if the loss is computed from sums over the tokens of each sequence: the forward keeps one number per token
    of the head's product, and the backward computes the product again."""
    head: ClassVar[HeadKind] = "vocabulary"
    """Head that the model needs for it."""
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Metrics of each step → (meaning, unit). They are means over tokens, or over units if the loss is `across` them.
    """
    may_read: ClassVar[Mapping[str, str]] = {}
    """Column that it reads only with certain settings → these settings, as a spec writes them."""

    @property
    def of_logits(self) -> bool:
        """True if it is computed from logits of the next token."""
        return self.head == "vocabulary"

    @property
    def plain(self) -> bool:
        """True if it is the plain cross-entropy of each token, which the model computes itself: a plan has no node for
        it."""
        return False

    @property
    def recorded(self) -> bool:
        """True if the objective differs from the cross-entropy; it is then logged as `objective`."""
        return not self.plain or self.z_loss > 0

    @property
    def unit(self) -> Unit:
        """Unit whose count divides the loss."""
        return "token"

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns that it reads, by the names that datasets give them."""
        return ()

    @property
    def computed(self) -> tuple[str, ...]:
        """Columns that the run computes before the first step, whatever the datasets contain."""
        return ()

    @property
    def values(self) -> tuple[str, ...]:
        """Per-document numbers that it reads, by name."""
        return ()

    @property
    def wide(self) -> Mapping[str, WideColumn]:
        """Additional columns that its teacher provides and datasets do not, by name."""
        return {}

    @property
    def learns_from(self) -> Teacher | None:
        """Model that it distills from, or None."""
        return None

    @property
    def mismatched(self) -> bool:
        """True if each step needs the probability of answers after the prompts of other documents."""
        return False

    def of_data(self) -> tuple[str, ...]:
        """Return the dataset settings, as a spec writes them, that provide what it reads from records with fields;
        empty if any dataset does."""
        found = ('chosen = "chosen"', 'rejected = "rejected"') if self.unit == "pair" else ()
        found += ("oversized = skip",) if self.unit == "sequence" else ()
        given = tuple(name for name in self.columns if name not in self.computed)
        for name, read in (("columns", given), ("values", self.values)):
            fields = ", ".join(f'{each}: "{each}"' for each in read)
            found += (f"{name} = {{ {fields} }}",) if read else ()
        return found

    @property
    def measured(self) -> tuple[str, ...]:
        """Metrics that it has with these settings."""
        return tuple(self.metrics)

    @property
    def summed(self) -> int:
        """If it is `across` tokens, how many numbers of each token are summed: log-probabilities and its other
        inputs."""
        return 1 + len(self.columns) + len(self.reads(self.args()))

    def conflicts(self) -> Iterator[Conflict]:
        """Yield settings that conflict with others."""
        return iter(())

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yield settings without effect, each with the reason."""
        return iter(())

    def args(self) -> dict[str, Any]:
        """Return the JSON arguments of its node without `kind`: all settings except those that other nodes take."""
        taken = {name: kept for name, kept in settings_of(type(self)).items() if name not in TAKEN_ELSEWHERE}
        values = values_of(self)
        return {name: values[name] for name, kept in taken.items() if not is_unspoken(*kept, values[name])}

    def does(self) -> str:
        """Return the description of its node."""
        raise NotImplementedError

    @classmethod
    def reads(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        """Return its inputs in addition to the log-probability of each label, from `user_parts.kinds.STATISTICS`. args:
        arguments of its node."""
        return ()


# Reference models ----------------------------------------------------------------------------------------------------

INITIAL: Final = "initial"
ADAPTER_OFF: Final = "adapter_off"
PRECOMPUTED: Final = "precomputed"
Reference = Literal["initial", "adapter_off", "precomputed"] | str


def reference_setting() -> Any:
    """Declare the setting `reference` of losses that compare with a reference model."""
    return setting(
        "source of the column `ref_logprobs`, computed once before the first step: initial: the initial weights of "
        "the run; adapter_off: the model with the adapter off; a folder: the model in it; precomputed: not computed, "
        "a column of the data",
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
        """Folder of the reference model, if it is a separate model."""
        return self.reference if self.computed and self.reference not in (INITIAL, ADAPTER_OFF) else None

    def idle(self) -> Iterator[tuple[str, str]]:
        if REF not in self.columns:
            yield "reference", f"the loss does not read `{REF}`"


# Pairs and rewards -------------------------------------------------------------------------------------------------

_REWARD: Final = "nats"
PAIR_METRICS: Final = {
    "rewards/chosen": ("reward of preferred answers, mean over the pairs of the step", _REWARD),
    "rewards/rejected": ("reward of rejected answers, mean over the pairs of the step", _REWARD),
    "rewards/margin": ("their difference", _REWARD),
    "rewards/accuracy": ("share of pairs whose preferred answer has the higher reward", "share, 0 to 1"),
}


def beta_setting(
    default: float,
    what: str = "weight of a difference of log-probabilities: β",
    resuming: str = "pairs are compared with it from here on",
) -> Any:
    """Declare the setting `beta` of preference losses."""
    return setting(what, default=default, check=positive, resuming=resuming)


class PairLoss(Loss):
    """A loss of pairs of a preferred and a rejected answer."""

    chunk: Quantity
    across: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = PAIR_METRICS

    @property
    def unit(self) -> Unit:
        return "pair"


class RewardLoss(Loss):
    """A loss of rewards: one number per sequence, from the head at the last token."""

    head: ClassVar[HeadKind] = "reward"
