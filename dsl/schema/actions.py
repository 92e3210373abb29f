"""What happens besides training: actions, the ticks (`every`) and events (`on`) that call them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from attrs import frozen

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.precision import Base
from xtrain.dsl.schema.setting import Role, at_least, positive, setting
from xtrain.dsl.values import Quantity

if TYPE_CHECKING:
    from xtrain.dsl.spec import Spec
    from xtrain.plan.graph import ActionNode, ActionPlace, StepNode
    from xtrain.planner.resolved import Resolved

ACTIONS: Final = Registry["Action"]("action", "actions")
TURN_OF_LOG: Final = 1
TURN_OF_SAVE: Final = 2
# The op of all actions that are functions of the user's own.
OF_USERS: Final = "tick.user"


class Action(Component):
    """`every … ACTION`, `on … ACTION`: what happens periodically, or when something occurs.

    The class of an action says what the rest of xtrain asks of it; what it does not say is as here.
    """

    kind: ClassVar[str]  # type: ignore[misc]
    called: ClassVar[bool] = False
    """Its label stands in parentheses: `notify("…")`."""
    example: ClassVar[str] = "every 100 steps {}"
    """Where it may stand, for examples."""

    # When it runs
    default_ticks: ClassVar[int] = 0
    """A run whose spec has no tick with it does it so many times all the same, evenly spread."""
    turn: ClassVar[int] = 0
    """Its place in a step in which several are due: lower turns first, those of equal turn in the order of the spec."""
    records: ClassVar[bool] = False
    """It leaves records of the state as it is: they come before a save of that state."""

    # What it is to the rest of a run
    saves: ClassVar[bool] = False
    """It saves the full state: left out where nothing is saved, and done by every run that ends."""
    stops: ClassVar[bool] = False
    """The run ends after the step. It has no node."""
    informs: ClassVar[bool] = False
    """The first rank alone does it, with nothing but a message, at once: it takes no default's place."""
    reads_parameters: ClassVar[bool] = False
    """It reads parameters of the model by themselves."""
    uses_averages: ClassVar[bool] = False
    """It works with the averaged weights, where the spec says so."""
    publishes: ClassVar[bool] = False
    """It writes weights for others: the averaged ones, where `ema { publish }` says so."""
    writes_beside: ClassVar[bool] = False
    """It writes files of its own, which replica groups would write over each other."""
    lasting: ClassVar[bool | None] = None
    """Whether it may take long without being stuck; None: the first time, as it may compile."""

    hooked: ClassVar[str] = ""
    """Hooks of the user's own are called `before_…` and `after_…` it."""

    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """What it adds to the record of its step: key, with names in capitals, → (meaning, unit)."""

    # What it does about non-finite steps
    only_nan: ClassVar[bool] = False
    """It may stand after `on nan` alone."""
    nan_limit: ClassVar[int | None] = None
    """It decides what is done about non-finite steps, by default at so many in a row."""
    skips: ClassVar[bool] = False
    """It leaves bad steps out, and the run fails at the limit. It has no node."""
    goes_back: ClassVar[bool] = False
    """It goes back to a checkpoint."""
    ends_at_bad: ClassVar[bool] = False
    """Of a tick: the run ends, and saves nothing, behind a bad step that it follows."""

    def node(self, run: "Resolved", place: "ActionPlace") -> "ActionNode":
        """The node that it is in a plan."""
        raise NotImplementedError

    @classmethod
    def in_step(cls, ticks: Sequence["Action"], run: "Resolved") -> Iterator["StepNode"]:
        """Nodes that it needs in every step. ticks: those of its kind that ticks have, one at least."""
        yield from ()

    def allocates(self, run: "Resolved", states: int) -> int:
        """Bytes that a rank has allocated for it when the optimizer has updated its parameters, of which those that
        are trained take `states` bytes."""
        return 0

    @classmethod
    def commands(
        cls, declared: Sequence["Action"], spec: "Spec", training: tuple[str, ...]
    ) -> Iterator[tuple[str, "Action", str]]:
        """(command of `xtrain control`, the action that it runs, what its number counts or ""). declared: all actions
        of the spec, in its order. training: the datasets that are trained on."""
        yield from ()

    def misplaced(self, event: str, following: Sequence["Action"]) -> tuple[str, str] | None:
        """(message, hint) where it cannot stand, else None. event: "" of a tick. following: the actions behind it."""
        return None

    def faults(self, event: str, arch: Any, base: Base) -> dict[str, tuple[str, str, str]]:
        """Why it cannot be done with a model: setting, "" for the action → (code, message, hint). event: "" of a tick.
        arch: the `Architecture` of the plan. base: how matrices that are not trained are stored."""
        return {}

    def idle(self, spec: "Spec", ranks: int) -> dict[str, tuple[str, str]]:
        """The settings that change nothing beside the others: (why, what to do instead)."""
        return {}

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        """Its name on a page of the plan. args: of its node."""
        return cls.kind

    @property
    def reads_gradients(self) -> bool:
        """Whether it reads gradients of parameters by themselves."""
        return False

    def held_out(self) -> str | None:
        """The dataset whose held-out part it reads."""
        return None

    def asks(self) -> str | None:
        """The dataset whose held-out prompts it lets the model answer, in a run with rollouts."""
        return None

    def template(self, spec: "Spec") -> str | None:
        """The chat template that it writes with, as a dataset names one; `auto`: that of the tokenizer."""
        return None

    def length(self, spec: "Spec") -> int:
        """For how many of the following steps it goes on; two of a kind cannot do so at once."""
        return 0

    def needs_steps(self) -> tuple[str, str] | None:
        """(what of it needs further steps, what to write instead); None where the run may end behind it."""
        return None

    @classmethod
    def unrecorded(cls, args: Mapping[str, Any]) -> int | None:
        """Of what records following steps: how many pass before it does, else None. args: of its node, or its own."""
        return None


def action_of(op: str) -> type[Action] | None:
    """The class of the action that an op of a plan belongs to: `tick.eval`, `event.rollback`; None for other ops."""
    if op == OF_USERS:
        return ACTIONS.of_users
    kind, _, name = op.partition(".")
    return ACTIONS.get(name) if kind in ("tick", "event") else None


def by_default() -> list[type[Action]]:
    """The actions that a run has ticks with even if its spec has none, the most frequent first."""
    return sorted((kind for kind in ACTIONS.values() if kind.default_ticks), key=lambda kind: -kind.default_ticks)


def saving() -> Action:
    """The action that a run saves its state with by itself."""
    return next(kind for kind in ACTIONS.values() if kind.saves)()


def stopping() -> Action:
    """The action that a run ends with by itself."""
    return next(kind for kind in ACTIONS.values() if kind.stops)()


@frozen
class Tick:
    """`every QUANTITY action then action`: what happens periodically."""

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
    "slow",
    "starvation",
    "memory",
    "disk",
    "stalled",
    "finish",
]


# Of several at once the first one decides.
SIGNALS: Final[tuple[EventName, ...]] = ("sigint", "sigterm", "sigusr1")
# Event → the settings of `launch`, one of which causes it, as they might be written.
LIMITS: Final[dict[EventName, dict[str, str]]] = {
    "time_limit": {"time_limit": "time_limit = 4 h"},
    "stop_file": {"stop_file": 'stop_file = "STOP"'},
    "stop_at": {"stop_at": "stop_at = 1000 steps", "stop_after": "stop_after = 200 steps"},
}
# With these a run is over.
ENDINGS: Final = ("finish", *SIGNALS, *LIMITS)


@frozen
class OnEvent:
    """`on EVENT action then action`: what happens when something occurs."""

    event: EventName
    actions: tuple[Action, ...]
    count: int | None = setting(
        "the n of `nan(n)`: the action happens at the n-th such step in a row, those before are skipped; default "
        "10 for `skip`, else 1",
        default=None,
        check=at_least(1),
        role=Role.EXECUTION,
        only=("nan",),
        example="3",
    )
