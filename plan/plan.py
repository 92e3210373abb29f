"""`Plan`: a validated experiment as a value. Every rank loads the same plan and executes it node by node.

A plan is data: it is compared, hashed, stored as JSON and drawn, and knows nothing of how a node is executed.
"""

from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from attrs import field, frozen

from xtrain.plan.architecture import Architecture
from xtrain.plan.estimates import Estimates, Hardware, Memory, Parameters, Traffic
from xtrain.text.units import amount_in_epochs, plural, seconds_text


@frozen(kw_only=True)
class Axis:
    """One axis of the mesh. `stride` is the distance in rank numbers between neighbours along it."""

    name: str
    size: int
    stride: int
    crosses_nodes: bool


@frozen(kw_only=True)
class Mesh:
    """The ranks as a grid, axes outer to inner, and the expert view of the same ranks."""

    axes: tuple[Axis, ...]
    expert_axes: tuple[Axis, ...]
    world_size: int
    ranks_per_node: int

    def size(self, axis: str) -> int:
        return next(a.size for a in self.axes if a.name == axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on every axis."""
        return {a.name: rank // a.stride % a.size for a in self.axes}

    def group(self, axis: str) -> tuple[int, ...]:
        """Return the ranks that rank 0 talks to along an axis, or along several joined by ` · `, in order."""
        ranks = [0]
        for name in axis.split(" · "):
            found = next(a for a in (*self.axes, *self.expert_axes) if a.name == name)
            ranks = [rank + place * found.stride for rank in ranks for place in range(found.size)]
        return tuple(sorted(ranks))

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows: replicate · fsdp."""
        return self.size("replicate") * self.size("fsdp")

    def data_rank(self, rank: int) -> int:
        place = self.coordinates(rank)
        return place["replicate"] * self.size("fsdp") + place["fsdp"]


@frozen(kw_only=True)
class Uncounted:
    """An amount of training that becomes steps once the data is counted: so many epochs, or a share of a budget in
    epochs. One of the two is set."""

    epochs: float | None = None
    fraction: float | None = None


@frozen(kw_only=True)
class PlanTick:
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
    """How often it does something in the whole run, as `plan/timeline.py` counts; None where that depends on
    the clock or on unknown data. A node that several ticks name runs once in a step: `count_node` counts these
    together."""
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
class Trigger:
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
class PlanPhase:
    """A stretch of the run, up to the next phase, with one mixture of datasets.

    first: index of its first optimizer step, from 0; None until the data is counted where it begins behind so many
    `epochs`, or at a `fraction` of a budget in them. tokens: where the phase begins after so many tokens, from
    which `first` follows, as it does from a `fraction` of a budget in tokens.
    shares: of every dataset that is trained on, of the rows; they add up to 1. lr_scale: factor of the learning rate.
    passes: where weights are in epochs, how often an epoch of this mixture takes all rows of each dataset; `shares`
    then are empty until rows are counted (`passes.counted`). exact_rows: of so many rows, those of a step, each dataset
    has exactly its share; None: shares hold for longer stretches. mtp_weight: of further tokens; None: that of the
    model.
    """

    name: str
    first: int | None
    fraction: float | None
    shares: dict[str, float]
    lr_scale: float = 1.0
    passes: dict[str, float] | None = None
    epochs: float | None = None
    exact_rows: int | None = None
    mtp_weight: float | None = None
    tokens: int | None = None

    @property
    def amounts(self) -> dict[str, float]:
        """How much of each dataset that is trained on there is in it: in epochs, or as a share; some of them 0."""
        return self.shares if self.passes is None else self.passes


@frozen(kw_only=True)
class StepStretch:
    """Steps of a ramp that are alike, from index `first` up to the next stretch: each takes so many rows and tokens.
    tokens_before: those of all steps before `first`."""

    first: int
    rows: int
    tokens: int
    tokens_before: int


@frozen(kw_only=True)
class Timeline:
    """The optimizer steps of the run and what happens along them; `steps` is None until the data has been counted.

    phases: at least one, in order; the first begins with step 0. stop_at: the step after which the run stops;
    stop_after: how many steps each start of it trains. stop_at_amount, stop_after_amount: the same in what is not
    counted yet. stretches: with a ramp how many rows each step takes, the last stretch behind the ramp; else empty.
    budget_tokens, stop_at_tokens, stop_after_tokens: what was declared in tokens, or as a share of a budget in tokens.
    The steps are those of this batch from step 0 on; a resume from another batch counts from the tokens of the
    checkpoint (`horizon.resumed_plan`).
    """

    steps: int | None
    tokens: int | None
    epochs: float | None
    phases: tuple[PlanPhase, ...]
    ticks: tuple[PlanTick, ...]
    triggers: tuple[Trigger, ...]
    stop_at: int | None = None
    stop_after: int | None = None
    commands: tuple[Command, ...] = ()
    stop_at_amount: Uncounted | None = None
    stop_after_amount: Uncounted | None = None
    stretches: tuple[StepStretch, ...] = ()
    budget_tokens: int | None = None
    stop_at_tokens: int | None = None
    stop_after_tokens: int | None = None

    @property
    def full_steps(self) -> float | None:
        """The steps of the run, those of a ramp counted by their tokens: how often the work of a full step is done."""
        if self.tokens is None or not self.stretches:
            return self.steps
        return self.tokens / self.stretches[-1].tokens


FORMAT = 6

NodeKind = Literal["setup", "collate", "step", "tick", "event", "request", "shutdown"]
Status = Literal["pass", "warn", "fail", "unknown"]


@frozen(kw_only=True)
class Node:
    """One operation. `op` is looked up in the runtime's registry and called with `args`; `axes` are the mesh axes it
    works over; `does` says in one line what a person should expect of it, with the numbers."""

    id: str
    kind: NodeKind
    op: str
    args: dict[str, Any] = field(factory=dict)
    axes: tuple[str, ...] = ()
    does: str = ""


@frozen(kw_only=True)
class Edge:
    """`after` starts when `before` has ended; `data` names what it takes from it, empty where only order matters."""

    before: str
    after: str
    data: str = ""


@frozen(kw_only=True)
class Traced:
    """What one rank was seen to hold and send in one step of the real program on tensors without memory."""

    rank: int
    pp: int
    memory: Memory
    traffic: tuple[Traffic, ...]
    seconds: float  # that the trace took


@frozen(kw_only=True)
class Provenance:
    """A resolved value and where it came from: `text`, `default`, `let`, `param`, `set`, `config` of a model's
    `config.json`, or `derived` (then `how`)."""

    path: str
    value: str
    origin: str
    place: str = ""
    how: str = ""


@frozen(kw_only=True)
class Check:
    """One check that was made: its verdict and what it saw."""

    id: str
    status: Status
    evidence: str
    code: str = ""
    place: str = ""


@frozen(kw_only=True)
class ElasticWorld:
    """Another number of ranks that the same run may go on with, with the same rows in every step.

    axes: sizes by name, outer to inner. memory_bytes: of the fullest rank; seconds: of a step, None where not known.
    id: of the plan for this world.
    """

    world: int
    axes: dict[str, int]
    accumulate: int
    memory_bytes: int
    seconds: float | None
    id: str = ""


@frozen(kw_only=True)
class RefusedWorlds:
    """Worlds of an elastic range in which the run cannot go on. worlds: as text, `3, 5..7`."""

    worlds: str
    reason: str


@frozen(kw_only=True)
class PlanOrigin:
    """How a plan that is saved was made, so that a change of the spec or of the code is seen before it is run.

    sets: the `--set` texts. world: that of `--world`, None where the spec says it. version, source: of xtrain, and the
    fingerprint of its source files.
    """

    sets: tuple[str, ...]
    world: int | None
    version: str
    source: str


@frozen(kw_only=True)
class Counted:
    """The data as it was where a plan was made, if it had been counted there. rows: of each dataset that is trained on;
    stores: the keys of the token stores they were counted in."""

    rows: dict[str, int]
    stores: dict[str, str]


@frozen(kw_only=True)
class Plan:
    """Everything a run does. `id` hashes the whole content, `config_id` what makes it this experiment and no other,
    which is `config`.

    elastic: the worlds in which the run may go on after a failure, this one among them, and those `refused`. The id
    knows of them but not of their ids, each of which knows of all worlds alike.

    traced: one rank of every pipeline coordinate, where it was asked for; origin: where the plan was saved; counted:
    where something waits for the data and it was there. They are no part of what is done, nor of the id.
    """

    name: str
    spec: str
    spec_text: str
    seed: int
    architecture: Architecture
    mesh: Mesh
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    timeline: Timeline
    parameters: Parameters
    estimates: Estimates
    provenance: tuple[Provenance, ...]
    checks: tuple[Check, ...]
    workspace: dict[str, Any]
    launch: dict[str, Any]
    cluster: Hardware
    config: dict[str, Any]
    config_id: str
    id: str = ""
    elastic: tuple[ElasticWorld, ...] = ()
    refused: tuple[RefusedWorlds, ...] = ()
    traced: tuple[Traced, ...] = ()
    origin: PlanOrigin | None = None
    counted: Counted | None = None

    @cached_property
    def _by_id(self) -> dict[str, Node]:
        return {node.id: node for node in self.nodes}

    def node(self, node_id: str) -> Node:
        """Return the node of an id. Raises KeyError if the plan has none."""
        return self._by_id[node_id]

    @property
    def serves(self) -> bool:
        """Whether it is that of a server, which has requests in place of steps."""
        return any(node.kind == "request" for node in self.nodes)

    def of_kind(self, kind: NodeKind) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.kind == kind)
