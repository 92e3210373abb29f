"""Kinds of user functions: the options of each decorator, what the run fills in, and where hooks are called."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import field

from xtrain.dsl.schema.data_components import KINDS as LINK_KINDS
from xtrain.dsl.schema.model import ExpertTransformer
from xtrain.dsl.schema.setting import settings_of
from xtrain.lazy_attrs import frozen

NOTHING: Final = "nothing"
GRADIENTS: Final = "gradients"
PARAMETERS: Final = "parameters"
CHANGES: Final = (NOTHING, GRADIENTS, PARAMETERS)

Place = Literal[
    "before_init", "after_init", "before_train", "after_train", "before_epoch", "after_epoch", "before_phase",
    "after_phase", "before_step", "before_backward", "before_loss", "after_loss", "after_backward", "before_optimizer",
    "after_optimizer", "after_step", "before_evaluation", "after_evaluation", "before_checkpoint", "after_checkpoint",
    "at_failure", "at_end",
]  # fmt: skip
# Place → description of when.
PLACES: Final[dict[Place, str]] = {
    "before_init": "at each start, when ranks have met and nothing else is set up: there is no model yet",
    "after_init": "at each start, when everything is set up and loaded",
    "before_train": "at each start, before its first step",
    "after_train": "after the last step of each start, before the actions of `on finish` or of a stop",
    "before_epoch": "before the first step that begins in each epoch of the data",
    "after_epoch": "after the last step that begins in each epoch of the data",
    "before_phase": "before the first step of each phase",
    "after_phase": "after the last step of each phase",
    "before_step": "before each step, when its rows have been read",
    "before_backward": "before the forward and backward of each step",
    "before_loss": "before the forward of each microbatch",
    "after_loss": "after the forward of each microbatch, when its loss is known on this rank, before its backward",
    "after_backward": "after the backward of each step, when gradients are summed over ranks and not yet clipped",
    "before_optimizer": "before the optimizer in each step, when gradients are clipped",
    "after_optimizer": "after the optimizer in each step",
    "after_step": "at the end of each step, after measurement",
    "before_evaluation": "before each evaluation",
    "after_evaluation": "after each evaluation",
    "before_checkpoint": "before each save of the full state",
    "after_checkpoint": "after each save of the full state has begun, or has ended if training waits for it",
    "at_failure": "when the run fails, on each rank that still can",
    "at_end": "when the run ends or stops without a failure",
}
# What hooks may change, and at which places.
MAY_CHANGE: Final[dict[str, tuple[Place, ...]]] = {
    GRADIENTS: ("after_backward", "before_optimizer"),
    PARAMETERS: ("before_optimizer", "after_optimizer", "after_step"),
}
IN_STEP: Final[tuple[Place, ...]] = (
    "before_epoch", "after_epoch", "before_phase", "after_phase", "before_step", "before_backward", "after_backward",
    "before_optimizer", "after_optimizer", "after_step",
)  # fmt: skip
AROUND: Final[tuple[Place, ...]] = ("before_evaluation", "after_evaluation", "before_checkpoint", "after_checkpoint")
# Around the forward of each microbatch, inside the node of the forward and backward.
AROUND_LOSS: Final[tuple[Place, ...]] = ("before_loss", "after_loss")


def may_change(place: str, changes: str) -> bool:
    """Return True if hooks of a place may change something."""
    return changes == NOTHING or place in MAY_CHANGE[changes]


Kind = Literal[
    "source",
    "collator",
    "loss",
    "reward",
    "environment",
    "optimizer",
    "schedule",
    "hook",
    "action",
    "step",
    "evaluation_step",
    "train",
    "epoch",
    "tracker",
    "family",
    "layer",
]
# Choices of a spec that a part may require in addition to its own: blocks whose label is a kind, and the stack.
GOES_WITH: Final = ("model", "optimizer", "scheduler", "loss", "adapter", "reward", "stack")
# A parameter of a collator that the run fills: random numbers of the row.
GENERATOR: Final = "generator"
# A parameter of `reset` of an environment that the run fills: random numbers of the episode.
RANDOM: Final = "random"
# Decorator of the methods of an environment that the model may call.
TOOL: Final = "tool"
# Inputs of a loss per token, each [T]. First parameter: log-probability of the label. Filled by the run: mean of the
# log-probabilities of the whole vocabulary, their entropy, log-sum-exp of the logits.
LOGPROB: Final = "logprob_T"
STATISTICS: Final = ("mean_logprob_T", "entropy_T", "lse_T")
# Input of a loss of sequences or pairs: the number of labels in the sums, [U] or [2, U].
COUNTS: Final = "tokens_U"
UNITS: Final = ("token", "sequence", "pair")


@frozen
class Option:
    """An argument of a decorator, read from the text.

    words: allowed words; empty: any number of names. what: noun for such a word, in the singular. required: there is no
    default; otherwise the default is None for a word, and () for names. fills: the run fills parameters of these names.
    """

    words: tuple[str, ...] = ()
    what: str = "name"
    required: bool = False
    fills: bool = False


@frozen
class PartKind:
    """A kind of user function. name: of the decorator. example: how it is written.

    inputs: names of the first parameters of a function, which the run passes by position. filled: names of parameters
    that the run passes to a function that has them. refused: names that a parameter must not have, and what to do
    instead. options: the arguments of the decorator. chosen: where a spec names it, in words. block: the kind of block
    whose label names it; empty for calls. composes: its body is evaluated from its text. methods: for a class, the
    methods it may have in addition to the one that `opens` it (at least one, and those it `needs`), with their
    parameters. For a class, inputs and filled describe the parameters of that method after `self`.
    """

    name: Kind
    example: str
    chosen: str
    inputs: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(factory=dict)
    options: Mapping[str, Option] = field(factory=dict)
    block: str = ""
    methods: Mapping[str, tuple[str, ...]] = field(factory=dict)
    opens: str = "open"
    needs: tuple[str, ...] = ()
    composes: bool = False

    def filled_with(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of parameters that the run fills, given the arguments of the decorator."""
        named = (options[name] or () for name, option in self.options.items() if option.fills)
        return (*self.filled, *(each for names in named for each in names))

    @property
    def noun(self) -> str:
        """Name with its article."""
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"


_LABEL: Final = {"kind": "rename it: the label of the block is its kind"}
_NAME: Final = {"name": "rename it: the label of the block is its name"}
PART_KINDS: Final[dict[Kind, PartKind]] = {
    kind.name: kind
    for kind in (
        PartKind("source", "@source", "is the `source` of a dataset"),
        PartKind(
            "collator",
            f'@collator(takes="{LINK_KINDS[3]}")',
            "is a link of `collate`",
            inputs=("samples",),
            filled=(GENERATOR,),
            options={
                "takes": Option(LINK_KINDS, "kind of value", required=True),
                "gives": Option(LINK_KINDS, "kind of value"),
            },
        ),
        PartKind(
            "loss",
            "@loss",
            "is chosen by `loss NAME { … }`",
            inputs=(LOGPROB,),
            filled=(*STATISTICS, COUNTS),
            options={
                "unit": Option(UNITS, "unit"),
                "columns": Option(fills=True),
                "values": Option(fills=True),
            },
            refused={
                **_LABEL,
                **dict.fromkeys(("z_loss", "chunk"), "rename it: every `loss` block has a setting of this name"),
            },
            block="loss",
        ),
        PartKind(
            "reward",
            "@reward",
            "is chosen by `reward NAME { … }`",
            inputs=("prompt", "completion", "record"),
            refused=_LABEL,
            block="reward",
        ),
        PartKind(
            "environment",
            "@environment",
            "is chosen by `environment NAME { … }`",
            inputs=("task",),
            refused={
                **_NAME,
                **dict.fromkeys(
                    ("seconds", "wait", "memory"), "rename it: every `environment` block has a setting of this name"
                ),
            },
            block="environment",
            opens="reset",
            methods={"step": ("text",), "finish": ()},
            needs=("step",),
            filled=(RANDOM,),
        ),
        PartKind(
            "optimizer",
            '@optimizer(state=("momentum",))',
            "is chosen by `optimizer NAME { … }`",
            inputs=("groups",),
            filled=("lr",),
            refused={
                **_LABEL,
                "clip": (
                    "remove it: gradients are clipped before the optimizer is called, as set by `clip` of the block"
                ),
            },
            options={"state": Option(), "scalars": Option()},
            block="optimizer",
        ),
        PartKind(
            "schedule",
            "@schedule",
            "is chosen by `scheduler NAME { … }`",
            inputs=("step", "total"),
            refused=_LABEL,
            block="scheduler",
        ),
        PartKind(
            "hook",
            '@hook("after_backward")',
            "is chosen by `hook NAME { … }`",
            inputs=("context",),
            refused=_NAME,
            options={
                "place": Option(tuple(PLACES), "place", required=True),
                "changes": Option(CHANGES, "thing to change"),
            },
            block="hook",
        ),
        PartKind(
            "action",
            "@action",
            "follows `every …` or `on …`",
            inputs=("context",),
            block="action",
        ),
        PartKind(
            "step",
            "@step",
            "is chosen by `step NAME { … }`",
            inputs=("context",),
            refused=_NAME,
            block="step",
        ),
        PartKind(
            "evaluation_step",
            "@evaluation_step",
            "is chosen by `evaluation_step NAME { … }`",
            inputs=("context",),
            refused=_NAME,
            block="evaluation_step",
        ),
        PartKind(
            "train",
            "@train",
            "is chosen by `train NAME { … }`",
            inputs=("context",),
            refused=_NAME,
            block="train",
        ),
        PartKind(
            "epoch",
            "@epoch",
            "is chosen by `epoch NAME { … }`",
            inputs=("context",),
            refused=_NAME,
            block="epoch",
        ),
        PartKind(
            "tracker",
            "@tracker",
            "is chosen by `log { NAME { … } }`",
            inputs=("context",),
            block="tracker",
            methods={"metrics": ("record",), "event": ("record",), "close": ("exit_code",)},
        ),
        PartKind(
            "family",
            "@family",
            "is chosen by `model NAME { … }`",
            inputs=("arch",),
            refused=dict.fromkeys(
                ("family", "user", "block", "own", *settings_of(ExpertTransformer)),
                "rename it: `arch` has the settings of every family",
            ),
            block="model",
            composes=True,
        ),
        PartKind(
            "layer",
            "@layer",
            "is called in a function with `@family`",
            inputs=("x",),
            options={"mixes": Option(("causal",), "way to mix positions")},
            composes=True,
        ),
    )
}


def names_of(value: Any) -> tuple[str, ...] | None:
    """Return the value of an option for names as a tuple; None if invalid. A single name may be a plain string."""
    names = (value,) if isinstance(value, str) else value
    good = isinstance(names, list | tuple) and all(isinstance(name, str) and name.isidentifier() for name in names)
    return tuple(names) if good and len(set(names)) == len(names) else None
