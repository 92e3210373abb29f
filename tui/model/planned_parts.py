"""The pieces of a plan, as `plan.json` has them."""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

Json = Mapping[str, Any]


@frozen(kw_only=True)
class PlannedNode:
    """One operation of the plan. kind: `setup`, `collate`, `step`, `tick`, `event` or `shutdown`."""

    id: str
    kind: str
    op: str
    args: Json
    axes: tuple[str, ...]
    does: str


@frozen(kw_only=True)
class PlannedEdge:
    """`after` starts when `before` has ended; `data` names what it takes from it, empty where only order matters."""

    before: str
    after: str
    data: str


@frozen(kw_only=True)
class PlannedAxis:
    """One axis of the mesh. `stride` is the distance in rank numbers between neighbours along it."""

    name: str
    size: int
    stride: int
    crosses_nodes: bool


@frozen(kw_only=True)
class PlannedTraffic:
    """Calls of one collective by one rank in one step, for one node. bytes, seconds: of all calls."""

    axis: str
    op: str
    node: str
    count: int
    bytes: int
    exposed: bool
    seconds: float | None


@frozen(kw_only=True)
class PlannedClass:
    """What a step costs on the `ranks` ranks with one pipeline coordinate `pp`, each figure that of the fullest rank.

    memory: bytes by category, as MEMORY names them and in that order. total_bytes: on the device, at the
    peak of a step; allocated_bytes: of them those of tensors, as a run's `memory_bytes` has them. flops,
    hardware_flops: operations of a step, without and with what is computed a second time.
    """

    pp: int
    ranks: int
    memory: Mapping[str, int]
    total_bytes: int | None
    allocated_bytes: int | None
    offloaded: bool
    flops: int
    hardware_flops: int
    traffic: tuple[PlannedTraffic, ...]


@frozen(kw_only=True)
class PlannedTimes:
    """Seconds of one step on the slowest rank: `step` is the likely one between `fast` and `slow`. computing: products;
    exposed: communication nothing is computed beside. mfu: a share."""

    computing: float | None
    exposed: float | None
    step: float | None
    fast: float | None
    slow: float | None
    tokens_per_second: float | None
    mfu: float | None


@frozen(kw_only=True)
class PlannedTick:
    """When an action recurs: one of `steps`, `tokens`, `seconds` is set, and until the data is counted (`counted.py`)
    `epochs` or a `fraction` of the budget alone. count: how often, None where nobody knows."""

    nodes: tuple[str, ...]
    steps: int | None
    tokens: int | float | None
    seconds: float | None
    count: int | None
    stop: bool
    epochs: float | None = None
    fraction: float | None = None


@frozen(kw_only=True)
class PlannedTrigger:
    """What happens on an event: the nodes to run, and whether the run stops afterwards."""

    event: str
    nodes: tuple[str, ...]
    stop: bool
    count: int | None


@frozen(kw_only=True)
class PlannedCommand:
    """What a live run can be asked for. counts: what the number that is given with it counts, else empty."""

    name: str
    nodes: tuple[str, ...]
    stop: bool
    counts: str


@frozen(kw_only=True)
class PlannedPhase:
    """A stretch of the run. first: index of its first step, from 0, None where it is a `fraction` of unknown steps.

    shares: of rows, empty where the weights are in epochs: `passes` says how often an epoch takes each dataset."""

    name: str
    first: int | None
    fraction: float | None
    shares: Mapping[str, float]
    lr_scale: float
    passes: Mapping[str, float] = field(factory=dict)


@frozen(kw_only=True)
class PlannedCheck:
    """One check that was made. status: `pass`, `warn`, `fail` or `unknown`."""

    id: str
    status: str
    evidence: str
    code: str
    place: str
