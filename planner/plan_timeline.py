"""The part of a plan that lies in time: phases, what happens every so often, on an event, and when asked."""

from attrs import frozen


@frozen(kw_only=True)
class Tick:
    """When an action recurs. Exactly one of `steps`, `tokens`, `seconds` is set; `nodes` run one after the other, then
    the run stops if `stop` says so."""

    nodes: tuple[str, ...]
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    count: int | None = None
    """How often it does something in the whole run, as `planner/counts.py` counts; None where that depends on the clock
    or on unknown data. A node that several ticks name runs once in a step: `count_node` counts these together."""
    stop: bool = False


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

    first: index of its first optimizer step, from 0; None where it is a `fraction` of steps that are not counted yet.
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

    @property
    def amounts(self) -> dict[str, float]:
        """How much of each dataset that is trained on there is in it: in epochs, or as a share; some of them 0."""
        return self.shares if self.passes is None else self.passes


@frozen(kw_only=True)
class Timeline:
    """The optimizer steps of the run and what happens along them; `steps` is None until the data has been counted.

    phases: at least one, in order; the first begins with step 0. stop_at: the step after which the run stops;
    stop_after: how many steps each start of it trains.
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
