"""Actions of a run, and the ticks (`every`) and events (`on`) that call them."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import Role, at_least, positive, setting
from xtrain.dsl.values import MeasuredNumber, Quantity
from xtrain.lazy_attrs import frozen

ACTIONS: Final = Registry["Action"]("action", "actions", contract="xtrain.contracts.actions.PlannedAction")
TURN_OF_LOG: Final = 1
TURN_OF_SAVE: Final = 2
# Op shared by all actions that are user functions.
OF_USERS: Final = "tick.user"


class Action(Component):
    """`every … ACTION`, `on … ACTION`: an action that runs periodically or on an event.

    Actions subclass `PlannedAction` (`contracts/actions.py`); a class overrides the facts whose defaults do not fit.
    """

    kind: ClassVar[str]  # type: ignore[misc]
    called: ClassVar[bool] = False
    """Write the label in parentheses: `notify("…")`."""
    example: ClassVar[str] = "every 100 steps {}"
    """Statement in which examples show the action."""

    # When the action runs
    default_ticks: ClassVar[int] = 0
    """Ticks, evenly spread, that a run gets if its spec declares none with this action."""
    default_apart: ClassVar[int] = 1
    """Fewest steps between two default ticks; at most a quarter of the steps of a run."""
    turn: ClassVar[int] = 0
    """Order among actions due in the same step: lower first; equal turns run in the order of the spec."""
    records: ClassVar[bool] = False
    """The action writes records of the current state, so it runs before a save of that state."""

    # Its role in a run
    saves: ClassVar[bool] = False
    """The action saves the full state. It is dropped where nothing is saved, and runs at the end of every run."""
    stops: ClassVar[bool] = False
    """The run ends after the step. The action has no node."""
    informs: ClassVar[bool] = False
    """Only rank 0 runs the action, at once and with a message only; it does not replace a default."""
    alone: ClassVar[bool] = False
    """The action needs no other rank, so it may run when the run fails."""
    changes_base: ClassVar[bool] = False
    """The action changes parameters that are not trained, so checkpoints hold them, and the experiment is another."""
    reads_parameters: ClassVar[bool] = False
    """The action reads individual parameters of the model."""
    reads_token_losses: ClassVar[bool] = False
    """The action needs the cross-entropy of each token of a step."""
    records_digests: ClassVar[bool] = False
    """The action records digests of the model's tensors."""
    uses_averages: ClassVar[bool] = False
    """The action uses the averaged weights if the spec says so."""
    publishes: ClassVar[bool] = False
    """The action exports weights: the averaged ones if `ema { publish }` says so."""
    writes_beside: ClassVar[bool] = False
    """The action writes its own files, which replica groups would overwrite for each other."""
    lasting: ClassVar[bool | None] = None
    """True if the action may take long without being stuck; None: only the first time, because it may compile."""

    hooked: ClassVar[str] = ""
    """Name in the user's hooks `before_…` and `after_…`; empty: no hooks."""

    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Metrics that the action adds to the record of its step: key (names in capitals) → (meaning, unit)."""

    # Its effect on non-finite steps
    only_nan: ClassVar[bool] = False
    """Only valid after `on nan`."""
    nan_limit: ClassVar[int | None] = None
    """Default number of consecutive non-finite steps after which the action runs; None for other actions."""
    skips: ClassVar[bool] = False
    """The action skips bad steps, and the run fails at the limit. It has no node."""
    goes_back: ClassVar[bool] = False
    """The action returns to an earlier checkpoint."""
    ends_at_bad: ClassVar[bool] = False
    """As a tick, the action ends the run without saving if the step before it was bad."""

    def misplaced(self, event: str, following: Sequence["Action"]) -> tuple[str, str] | None:
        """Return (message, hint) if the action is invalid at its place, else None. event: "" for a tick. following: the
        actions after it."""
        return None

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        """Return the name of the action on a plan page. args: arguments of its node."""
        return cls.kind

    @property
    def reads_gradients(self) -> bool:
        """True if the action reads gradients of individual parameters."""
        return False

    def held_out(self) -> str | None:
        """Dataset whose held-out part the action reads."""
        return None

    def measures_like(self, other: "Action", steps: int | None) -> bool:
        """Return True if both measure the same, so that their results are one curve. steps: of the run, if known."""
        return self == other

    def asks(self) -> str | None:
        """Dataset whose held-out prompts the model answers for this action, in a run with rollouts."""
        return None

    def asks_in(self) -> str | None:
        """Environment in which the model answers for this action; None: the one of the rollouts."""
        return None

    def awaits(self) -> tuple[MeasuredNumber, str] | None:
        """Return the metric that decides about the action, and which value is better: `auto`, `lowest` or `highest`;
        None if none does."""
        return None

    def needs_steps(self) -> tuple[str, str] | None:
        """Return (what of the action needs further steps, what to write instead); None if the run may end right after
        it."""
        return None

    @classmethod
    def unrecorded(cls, args: Mapping[str, Any]) -> int | None:
        """Return the number of steps before the action starts recording; None if it records no following steps. args:
        arguments of its node, or its settings."""
        return None


def action_of(op: str) -> type[Action] | None:
    """Return the action class of a plan op (`tick.eval`, `event.rollback`); None for other ops."""
    if op == OF_USERS:
        return ACTIONS.of_users
    kind, _, name = op.partition(".")
    return ACTIONS.get(name) if kind in ("tick", "event") else None


def by_default() -> list[type[Action]]:
    """Return the actions that a run ticks by default, most frequent first."""
    kinds = [ACTIONS[name] for name in (*ACTIONS.constant("TICKED"), *ACTIONS.offered())]
    return sorted((kind for kind in kinds if kind.default_ticks), key=lambda kind: -kind.default_ticks)


def commanded() -> list[type[Action]]:
    """Return the actions that may have commands."""
    return [ACTIONS[name] for name in (*ACTIONS.constant("COMMANDED"), *ACTIONS.offered())]


def saving() -> Action:
    """Return the action with which a run saves its state by default."""
    return ACTIONS[ACTIONS.constant("SAVES")]()


def stopping() -> Action:
    """Return the action that ends a run."""
    return ACTIONS[ACTIONS.constant("STOPS")]()


@frozen
class Tick:
    """`every QUANTITY action then action`: actions that run periodically."""

    actions: tuple[Action, ...]
    every: Quantity = setting(
        "how often; a percentage is a share of the budget",
        units=("steps", "tokens", "epochs", "seconds", "%"),
        check=positive,
        role=Role.CADENCE,
        example="10 steps",
    )


EventName = Literal[
    "sigterm",
    "sigint",
    "sigusr1",
    "time_limit",
    "stop_at",
    "stop_file",
    "nan",
    "loss_spike",
    "loss_above",
    "slow",
    "starvation",
    "memory",
    "disk",
    "stalled",
    "start",
    "failure",
    "finish",
]
START: Final = "start"
FAILURE: Final = "failure"


# If several arrive at once, the first one decides.
SIGNALS: Final[tuple[EventName, ...]] = ("sigint", "sigterm", "sigusr1")
# Event → settings of `launch` that can cause it, as a spec would set them.
LIMITS: Final[dict[EventName, dict[str, str]]] = {
    "time_limit": {"time_limit": "time_limit = 4 h"},
    "stop_file": {"stop_file": 'stop_file = "STOP"'},
    "stop_at": {"stop_at": "stop_at = 1000 steps", "stop_after": "stop_after = 200 steps"},
}
# Events that end a run.
ENDINGS: Final = ("finish", *SIGNALS, *LIMITS)


@frozen
class OnEvent:
    """`on EVENT action then action`: actions that run when an event occurs."""

    event: EventName
    actions: tuple[Action, ...]
    count: int | None = setting(
        "the n of `nan(n)`: the action runs at the n-th consecutive non-finite step, earlier ones are skipped; "
        "default 10 for `skip`, else 1",
        default=None,
        check=at_least(1),
        role=Role.EXECUTION,
        only=("nan",),
        example="3",
    )
