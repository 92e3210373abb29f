"""`Plan`: a validated experiment as a value. Every rank loads the same plan and executes it node by node.

A plan is data: it is compared, hashed, stored as JSON and drawn. It does not depend on how a node is executed.
"""

from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from attrs import field

from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.estimates import Estimates, Hardware, Memory, Parameters, Traffic
from xtrain.text.units import amount_in_epochs, plural, seconds_text


@frozen(kw_only=True)
class Axis:
    """Axis of the mesh. `stride` is the distance in rank numbers between neighbors along it."""

    name: str
    size: int
    stride: int
    crosses_nodes: bool


@frozen(kw_only=True)
class Mesh:
    """Grid of the ranks, axes outer to inner, and the expert view of the same ranks."""

    axes: tuple[Axis, ...]
    expert_axes: tuple[Axis, ...]
    world_size: int
    ranks_per_node: int

    def size(self, axis: str) -> int:
        return next(a.size for a in self.axes if a.name == axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on every axis."""
        return {a.name: rank // a.stride % a.size for a in self.axes}

    def group(self, axis: str) -> tuple[int, ...]:
        """Return the ranks that communicate with rank 0 along an axis, or along several joined by ` · `, in order."""
        ranks = [0]
        for name in axis.split(" · "):
            found = next(a for a in (*self.axes, *self.expert_axes) if a.name == name)
            ranks = [rank + place * found.stride for rank in ranks for place in range(found.size)]
        return tuple(sorted(ranks))

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different rows: replicate · fsdp."""
        return self.size("replicate") * self.size("fsdp")

    def data_rank(self, rank: int) -> int:
        place = self.coordinates(rank)
        return place["replicate"] * self.size("fsdp") + place["fsdp"]


@frozen(kw_only=True)
class Uncounted:
    """Amount of training that becomes steps once the data is counted: epochs, or a share of a budget in epochs. One of
    the two is set."""

    epochs: float | None = None
    fraction: float | None = None


@frozen(kw_only=True)
class PlanTick:
    """Recurring action. A plan sets one of `steps`, `tokens`, `seconds`, `epochs`, `fraction`; `nodes` run one after
    the other, then the run stops if `stop` is set.

    Once the data is counted (`plan/timeline.py`), `tokens` are set in addition to `epochs` or a `fraction` of a budget
    in epochs. They need not be a whole number.
    """

    nodes: tuple[str, ...]
    steps: int | None = None
    tokens: int | Fraction | None = None
    seconds: float | None = None
    count: int | None = None
    """Number of times it acts in the whole run, as counted by `plan/timeline.py`; None if that depends on the clock or
    on unknown data. A node that several ticks name runs once in a step: `count_node` counts it over all ticks."""
    stop: bool = False
    epochs: float | None = None
    fraction: float | None = None

    @property
    def period(self) -> str:
        """Period as text: `100 steps`, `0.5 epochs`, `10% of the budget`."""
        if self.epochs is not None:
            return amount_in_epochs(self.epochs)
        if self.fraction is not None:
            return f"{100 * self.fraction:g}% of the budget"
        if self.steps is not None:
            return plural(self.steps, "step")
        return seconds_text(self.seconds or 0.0) if self.tokens is None else plural(int(self.tokens), "token")


@frozen(kw_only=True)
class Trigger:
    """Reaction to an event: the nodes to run, and whether the run stops afterwards. count: for `nan`, the number of bad
    steps in a row that make up the event; the earlier ones are skipped."""

    event: str
    nodes: tuple[str, ...]
    stop: bool
    count: int | None = None

    @property
    def name(self) -> str:
        """Event as text: `sigterm`, `nan(3)`."""
        return self.event if self.count in (None, 1) else f"{self.event}({self.count})"


@frozen(kw_only=True)
class Command:
    """Command accepted by a running run: the nodes to run between two steps, and whether the run then stops.

    counts: what the command's number counts; empty for a command without a number.
    """

    name: str
    nodes: tuple[str, ...]
    stop: bool = False
    counts: str = ""


@frozen(kw_only=True)
class PlanPhase:
    """Stretch of the run, up to the next phase, with one mixture of datasets.

    first: index of its first optimizer step, from 0; None until the data is counted if it begins after `epochs` epochs,
    or at a `fraction` of a budget in epochs. tokens: number of tokens after which it begins, which gives `first`; so
    does a `fraction` of a budget in tokens. shares: of the rows, for every training dataset; they add up to 1.
    lr_scale: factor of the learning rate. passes: for weights in epochs, how often an epoch of this mixture takes all
    rows of each dataset; `shares` are then empty until rows are counted (`plan/arithmetic.py`). exact_rows: number of
    rows (one step) in which each dataset has exactly its share; None: shares hold over longer stretches. mtp_weight:
    weight of further tokens; None: the model's. router: settings of routers that differ from the model's, by name.
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
    router: dict[str, float] = field(factory=dict)

    @property
    def learned(self) -> tuple[object, ...]:
        """Everything that a phase changes but the rows."""
        return self.lr_scale, self.mtp_weight, *sorted(self.router.items())

    @property
    def amounts(self) -> dict[str, float]:
        """Amount of each training dataset, in epochs or as a share; some may be 0."""
        return self.shares if self.passes is None else self.passes


@frozen(kw_only=True)
class StepStretch:
    """Equal steps of a ramp, from index `first` up to the next stretch, with the rows and tokens of each.
    tokens_before: of all steps before `first`."""

    first: int
    rows: int
    tokens: int
    tokens_before: int


@frozen(kw_only=True)
class Timeline:
    """Optimizer steps of the run and the events along them; `steps` is None until the data is counted.

    phases: at least one, in order; the first begins with step 0. stop_at: the step after which the run stops.
    stop_after: how many steps each start of the run trains. stop_at_amount, stop_after_amount: the same in amounts that
    are not counted yet. stretches: rows of each step with a ramp, the last stretch after the ramp; otherwise empty.
    budget_tokens, stop_at_tokens, stop_after_tokens: amounts declared in tokens, or as a share of a budget in tokens.
    The steps are those of this batch from step 0 on; a resume from another batch counts from the tokens of the
    checkpoint (`resumed_plan`).
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
        """Steps of the run with the steps of a ramp counted by their tokens: how often the work of a full step is
        done."""
        if self.tokens is None or not self.stretches:
            return self.steps
        return self.tokens / self.stretches[-1].tokens


FORMAT = 6

NodeKind = Literal["setup", "collate", "step", "tick", "event", "request", "shutdown"]
Status = Literal["pass", "warn", "fail", "unknown"]


@frozen(kw_only=True)
class Node:
    """Operation of a plan. The runtime looks `op` up in its registry and calls it with `args`. `axes` are the mesh axes
    it works over. `does` describes it in one line, with the numbers."""

    id: str
    kind: NodeKind
    op: str
    args: dict[str, Any] = field(factory=dict)
    axes: tuple[str, ...] = ()
    does: str = ""


@frozen(kw_only=True)
class Edge:
    """Dependency: `after` starts when `before` has ended. `data` names the value passed on; empty if only the order
    matters."""

    before: str
    after: str
    data: str = ""


@frozen(kw_only=True)
class Traced:
    """Memory and traffic of one rank in one step, observed in the real program on meta tensors."""

    rank: int
    pp: int
    memory: Memory
    traffic: tuple[Traffic, ...]
    seconds: float  # duration of the trace


@frozen(kw_only=True)
class Provenance:
    """Resolved value and its origin: `text`, `default`, `let`, `param`, `set`, `config` of a model's `config.json`, or
    `derived` (then `how`)."""

    path: str
    value: str
    origin: str
    place: str = ""
    how: str = ""


@frozen(kw_only=True)
class Check:
    """Check with its verdict and evidence."""

    id: str
    status: Status
    evidence: str
    code: str = ""
    place: str = ""


@frozen(kw_only=True)
class ElasticWorld:
    """Another number of ranks on which the same run may resume, with the same rows in every step.

    axes: sizes by name, outer to inner. memory_bytes: of the fullest rank. seconds: of a step, None if unknown. id: of
    the plan for this world.
    """

    world: int
    axes: dict[str, int]
    accumulate: int
    memory_bytes: int
    seconds: float | None
    id: str = ""


@frozen(kw_only=True)
class RefusedWorlds:
    """Worlds of an elastic range on which the run cannot resume. worlds: as text, `3, 5..7`."""

    worlds: str
    reason: str


@frozen(kw_only=True)
class PlanOrigin:
    """Origin of a saved plan, which shows changes of the spec or the code before the plan is run.

    sets: the `--set` texts. world: of `--world`, None if the spec sets it. version, source: of xtrain, and the
    fingerprint of its source files.
    """

    sets: tuple[str, ...]
    world: int | None
    version: str
    source: str


@frozen(kw_only=True)
class Counted:
    """Data as it was counted where the plan was made. rows: of each training dataset; stores: keys of the token stores
    in which they were counted."""

    rows: dict[str, int]
    stores: dict[str, str]


@frozen(kw_only=True)
class Plan:
    """Everything a run does. `id` hashes the whole content, `config_id` hashes `config`, which identifies the
    experiment.

    elastic: the worlds on which the run may resume after a failure, including this one; `refused`: the others. The id
    depends on these worlds but not on their ids.

    traced: one rank of every pipeline coordinate, if requested. origin: set in a saved plan. counted: set if something
    waits for the data and it was counted. None of the three affects execution or the id.
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
        """Return the node with an id. Raises KeyError if the plan has none."""
        return self._by_id[node_id]

    def args(self, op: str) -> dict[str, Any]:
        """Return the arguments of the first node with an op; empty if the plan has none."""
        return next((node.args for node in self.nodes if node.op == op), {})

    def value(self, path: str) -> str | None:
        """Return the value at a path of the provenance, as text; None if the plan has none."""
        return next((entry.value for entry in self.provenance if entry.path == path), None)

    @property
    def serves(self) -> bool:
        """True for the plan of a server, which has requests instead of steps."""
        return any(node.kind == "request" for node in self.nodes)

    def of_kind(self, kind: NodeKind) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.kind == kind)
