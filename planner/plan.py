"""`Plan`: a validated experiment as a value. Every rank loads the same plan and executes it node by node.

A plan is data: it is compared, hashed, stored as JSON and drawn, and knows nothing of how a node is executed.
"""

from typing import Any, Literal

from attrs import field, frozen

from .architecture import Architecture, ParameterSpec

FORMAT = 2

NodeKind = Literal["setup", "collate", "step", "tick", "event", "shutdown"]
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

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows: replicate · fsdp."""
        return self.size("replicate") * self.size("fsdp")

    def data_rank(self, rank: int) -> int:
        place = self.coordinates(rank)
        return place["replicate"] * self.size("fsdp") + place["fsdp"]


@frozen(kw_only=True)
class Tick:
    """When an action recurs. Exactly one of `steps`, `tokens`, `seconds` is set; `nodes` run one after the other, then
    the run stops if `stop` says so."""

    nodes: tuple[str, ...]
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    count: int | None = None  # how often it fires; None where it depends on the clock or on unknown data
    stop: bool = False


@frozen(kw_only=True)
class Reaction:
    """What happens on an event: the nodes to run, and whether the run stops afterwards."""

    event: str
    nodes: tuple[str, ...]
    stop: bool


@frozen(kw_only=True)
class Timeline:
    """The optimizer steps of the run and what happens along them; `steps` is None until the data has been counted."""

    steps: int | None
    tokens: int | None
    epochs: float | None
    ticks: tuple[Tick, ...]
    reactions: tuple[Reaction, ...]


@frozen(kw_only=True)
class Parameters:
    """The inventory: every parameter by name and shape. `active` counts those one token uses."""

    total: int
    active: int
    tensors: tuple[ParameterSpec, ...]


@frozen(kw_only=True)
class RankMemory:
    """Bytes of model state on the ranks of one class (all ranks with the same pipeline coordinate)."""

    pp: int
    parameters: int
    gradients: int
    optimizer: int

    @property
    def total_bytes(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@frozen(kw_only=True)
class Estimates:
    """Closed forms; `sources` says where each formula comes from."""

    tokens_per_step: int
    flops_per_token: int
    flops_per_step: int
    memory: tuple[RankMemory, ...]
    checkpoint_bytes: int
    sources: dict[str, str]


@frozen(kw_only=True)
class Provenance:
    """A resolved value and where it came from: `text`, `default`, `let`, `param`, `set` or `derived` (then `how`)."""

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
class Plan:
    """Everything a run does. `id` hashes the whole content, `config_id` what makes it this experiment and no other."""

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
    config_id: str
    id: str = ""

    def node(self, node_id: str) -> Node:
        return next(n for n in self.nodes if n.id == node_id)

    def of_kind(self, kind: NodeKind) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.kind == kind)
