"""The part of a plan that lies in time: phases, what happens every so often, on an event, and when asked."""

from fractions import Fraction

from attrs import frozen

from .units import amount_in_epochs, plural, seconds_text


@frozen(kw_only=True)
class Uncounted:
    """An amount of training that becomes steps once the data is counted: so many epochs, or a share of a budget in
    epochs. One of the two is set."""

    epochs: float | None = None
    fraction: float | None = None


@frozen(kw_only=True)
class Tick:
    """When an action recurs: in a plan one of `steps`, `tokens`, `seconds`, `epochs`, `fraction` is set; `nodes` run
    one after the other, then the run stops if `stop` says so.

    Once the data is counted (`horizon.py`) `tokens` stand beside `epochs`, and `steps` beside a `fraction` of a budget
    in epochs. The tokens of some epochs need not be a whole number.
    """

    nodes: tuple[str, ...]
    steps: int | None = None
    tokens: int | Fraction | None = None
    seconds: float | None = None
    count: int | None = None
    """How often it does something in the whole run, as `planner/counts.py` counts; None where that depends on the clock
    or on unknown data. A node that several ticks name runs once in a step: `count_node` counts these together."""
    stop: bool = False
    epochs: float | None = None
    fraction: float | None = None

    @property
    def period(self) -> str:
        """As people read it: `100 steps`, `0.5 epochs`, `10% of the budget`."""
        if self.epochs is not None:
            return amount_in_epochs(self.epochs)
        if self.fraction is not None:
            return f"{100 * self.fraction:g}% of the budget"
        if self.steps is not None:
            return plural(self.steps, "step")
        return seconds_text(self.seconds or 0.0) if self.tokens is None else plural(int(self.tokens), "token")


@frozen(kw_only=True)
class Reaction:
    """What happens on an event: the nodes to run, and whether the run stops afterwards. count: of `nan`, how many bad
    steps in a row are the event; those before it are left out."""

    event: str
    nodes: tuple[str, ...]
    stop: bool
    count: int | None = None

    @property
    def name(self) -> str:
        """`sigterm`, `nan(3)`."""
        return self.event if self.count in (None, 1) else f"{self.event}({self.count})"


@frozen(kw_only=True)
class Command:
    """What can be asked of the run while it is live: the nodes to run between two steps, and whether it then stops.

    counts: what the number that is given with it counts, empty for a command without one.
    """

    name: str
    nodes: tuple[str, ...]
    stop: bool = False
    counts: str = ""


@frozen(kw_only=True)
class Phase:
    """A stretch of the run, up to the next phase, with one mixture of datasets.

    first: index of its first optimizer step, from 0; None until the data is counted where it begins behind so many
    `epochs`, or at a `fraction` of a budget in them.
    shares: of every dataset that is trained on, of the rows; they add up to 1. lr_scale: factor of the learning rate.
    passes: where weights are in epochs, how often an epoch of this mixture takes all rows of each dataset; `shares`
    then are empty until rows are counted (`passes.counted`).
    """

    name: str
    first: int | None
    fraction: float | None
    shares: dict[str, float]
    lr_scale: float = 1.0
    passes: dict[str, float] | None = None
    epochs: float | None = None

    @property
    def amounts(self) -> dict[str, float]:
        """How much of each dataset that is trained on there is in it: in epochs, or as a share; some of them 0."""
        return self.shares if self.passes is None else self.passes


@frozen(kw_only=True)
class Timeline:
    """The optimizer steps of the run and what happens along them; `steps` is None until the data has been counted.

    phases: at least one, in order; the first begins with step 0. stop_at: the step after which the run stops;
    stop_after: how many steps each start of it trains. stop_at_amount, stop_after_amount: the same in what is not
    counted yet.
    """

    steps: int | None
    tokens: int | None
    epochs: float | None
    phases: tuple[Phase, ...]
    ticks: tuple[Tick, ...]
    reactions: tuple[Reaction, ...]
    stop_at: int | None = None
    stop_after: int | None = None
    commands: tuple[Command, ...] = ()
    stop_at_amount: Uncounted | None = None
    stop_after_amount: Uncounted | None = None
