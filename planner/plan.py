"""`Plan`: a validated experiment as a value. Every rank loads the same plan and executes it node by node.

A plan is data: it is compared, hashed, stored as JSON and drawn, and knows nothing of how a node is executed.
"""

from typing import Any, Literal

from attrs import field, frozen

from .architecture import Architecture
from .plan_figures import Cluster, Estimates, Memory, Parameters, Traffic
from .plan_mesh import Mesh
from .plan_timeline import Timeline

FORMAT = 6

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
class Traced:
    """What one rank was seen to hold and send in one step of the real program on tensors without memory."""

    rank: int
    pp: int
    memory: Memory
    traffic: tuple[Traffic, ...]
    seconds: float  # that the trace took


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
class Made:
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

    traced: one rank of every pipeline coordinate, where it was asked for; made: where the plan was saved; counted:
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
    cluster: Cluster
    config: dict[str, Any]
    config_id: str
    id: str = ""
    elastic: tuple[ElasticWorld, ...] = ()
    refused: tuple[RefusedWorlds, ...] = ()
    traced: tuple[Traced, ...] = ()
    made: Made | None = None
    counted: Counted | None = None

    def node(self, node_id: str) -> Node:
        return next(n for n in self.nodes if n.id == node_id)

    def of_kind(self, kind: NodeKind) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.kind == kind)
