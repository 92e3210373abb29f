"""Nodes and edges of a plan: their builder, and the nodes of actions, launcher, replica groups and trackers."""

from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import define, field, frozen

from xtrain.dsl.schema.actions import ENDINGS, EventName
from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.dsl.schema.cluster import LAUNCHERS, Launcher
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.parallel import stack_of_node
from xtrain.dsl.schema.run import OP
from xtrain.dsl.schema.setting import AUTO, Auto, Role, at_least, setting, settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.plan.findings import Findings
from xtrain.plan.plan import Edge, Node, NodeKind, Plan

if TYPE_CHECKING:
    from xtrain.planner.resolved import Resolved


PAGE: Final = 16  # positions of a page
SETUP: Final = "setup.serve"
WHOLE: Final = 0  # the rank of a server that trains the model itself


# The events that are alerts; each has the setting of `alerts` of its name.
ALERTS: Final[tuple[EventName, ...]] = ("loss_spike", "slow", "starvation", "memory", "disk", "stalled")


class GraphError(Exception):
    """The planner put together something that cannot be executed: a mistake of the planner, not of the spec."""


@define
class Builder:
    """Nodes in the order in which they were added, each at its first mention."""

    nodes: list[Node] = field(factory=list)
    edges: list[Edge] = field(factory=list)

    def add(
        self,
        kind: NodeKind,
        op: str,
        does: str,
        *,
        id: str = "",
        args: dict[str, Any] | None = None,
        axes: tuple[str, ...] = (),
        after: tuple[str | tuple[str, str], ...] = (),
    ) -> str:
        """Append a node and the edges that lead to it; its id. `after` holds ids, or (id, what is taken from it)."""
        node = Node(id=id or op, kind=kind, op=op, args=args or {}, axes=axes, does=does)
        self.nodes.append(node)
        for before in after:
            source, data = (before, "") if isinstance(before, str) else before
            self.edges.append(Edge(before=source, after=node.id, data=data))
        return node.id


def check_matches(node: Node) -> None:
    """Prove that every rule of a node means some module on some pipeline coordinate. Raises GraphError."""
    for rule in (node.args, *node.args.get("rules", ())):
        if "matches" in rule and not sum(rule["matches"]):
            raise GraphError(f"rule `{rule.get('pattern', node.op)}` of {node.id} matches nothing in the whole model")


def check_graph(nodes: tuple[Node, ...], edges: tuple[Edge, ...], root: str) -> str:
    """Prove that ids are unique, edges join known nodes, rules match, nothing runs in a circle, all follows `root`.

    The proof in words. Raises GraphError.
    """
    before: dict[str, set[str]] = {node.id: set() for node in nodes}
    after: dict[str, set[str]] = {node.id: set() for node in nodes}
    if len(before) != len(nodes):
        raise GraphError("two nodes have the same id")
    for edge in edges:
        if edge.before not in before or edge.after not in before:
            raise GraphError("an edge joins a node that is not there")
        before[edge.after].add(edge.before)
        after[edge.before].add(edge.after)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        raise GraphError(f"the graph runs in a circle: {' -> '.join(error.args[1])}") from error
    for node in nodes:
        check_matches(node)
    reached, open_nodes = {root}, [root]
    while open_nodes:
        following = after[open_nodes.pop()] - reached
        reached |= following
        open_nodes += following
    lost = before.keys() - reached
    if lost:
        raise GraphError(f"nothing leads from {root} to {', '.join(sorted(lost))}")
    return f"{len(nodes)} nodes, {len(edges)} edges, no circle, all reached from {root}"


# The event that the nodes of `xtrain control` are of.
CONTROL: Final = "control"


@frozen(kw_only=True)
class ActionPlace:
    """Where an action stands. event: "" of a tick. stops: the run stops behind it."""

    event: str = ""
    stops: bool = False

    @property
    def ends(self) -> bool:
        """Whether the run has no step behind it."""
        return self.stops or self.event in ENDINGS

    @property
    def asked(self) -> bool:
        """Whether it is a command of `xtrain control`."""
        return self.event == CONTROL


@frozen
class ActionNode:
    """op, arguments, what it does. name: the id in a tick, where the op does not say enough. after: (node, what is
    taken from it)."""

    op: str
    args: dict[str, Any]
    does: str
    name: str = ""
    after: tuple[tuple[str, str], ...] = ()


@frozen
class StepNode:
    """A node of every step that an action needs, right before the one that `before` names: what the step has come to
    is seen there, or what the action works with is taken."""

    before: str
    op: str
    args: dict[str, Any]
    does: str


def averaged_weights(run: "Resolved") -> tuple[dict[str, Any], str]:
    """Whose weights evaluations and texts are of: an argument of their nodes, and words, both empty where it is those
    that are trained."""
    averaged = run.spec.ema is not None and run.spec.ema.eval
    return ({"averaged": True}, ", of the averaged weights") if averaged else ({}, "")


# So many ranks say what all of them do, and their traces can be looked at.
MOST_BY_ITSELF: Final = 8


def ranks_setting(what: str) -> Any:
    """The setting `ranks`. what: the ranks do."""
    return setting(
        f"how many ranks {what}, evenly spread; auto: 8, or one per pipeline rank if those are more",
        default=AUTO,
        check=at_least(1),
        role=Role.CADENCE,
        example="2",
    )


def recorded_ranks(ranks: int | Literal["first", "all"] | Auto, world: int, pipeline: int) -> list[int] | None:
    """Ranks evenly spread over all of them, the first one among them; None: all.

    pipeline: pipeline coordinates, which are the outermost axis: of so many ranks or more each has one.
    """
    if ranks == "all":
        return None
    number = max(MOST_BY_ITSELF, pipeline) if isinstance(ranks, Auto) else 1 if ranks == "first" else int(ranks)
    return None if number >= world else [index * world // number for index in range(number)]


@frozen
class RecordedRanks:
    """The ranks of a setting in a run: None where they are all `world`."""

    ranks: list[int] | None
    world: int

    @classmethod
    def of(cls, ranks: int | Literal["first", "all"] | Auto, run: "Resolved") -> "RecordedRanks":
        world = run.layout.mesh.world_size
        return cls(recorded_ranks(ranks, world, run.size("pp")), world)

    @property
    def count(self) -> int:
        return self.world if self.ranks is None else len(self.ranks)

    @property
    def text(self) -> str:
        """`the rank`, `both ranks`, `8 of 1,024 ranks`."""
        if self.world == 1:
            return "the rank"
        if self.count == self.world:
            return f"all {self.world} ranks" if self.world > 2 else "both ranks"
        return "the first rank" if self.count == 1 else f"{self.count} of {self.world:,} ranks"


def groups_node(plan: Plan) -> Node | None:
    """The node of the stack whose copies of the model are replica groups; None under all others."""
    for node in plan.nodes:
        stack = stack_of_node(node.op)
        if stack is not None and stack.groups:
            return node
    return None


def launcher_args(launcher: Launcher) -> dict[str, Any]:
    """Every setting by name; quantities as number and unit, `auto` as that word."""
    values = ((name, getattr(launcher, name)) for name in settings_of(type(launcher)))
    return {"kind": launcher.kind, **{name: _plain(value) for name, value in values}}


def _plain(value: Any) -> Any:
    if isinstance(value, Auto):
        return "auto"
    if isinstance(value, Quantity):
        return [value.value, value.unit]
    return list(value) if isinstance(value, tuple) else value


class UnknownLauncher(Exception):
    """A launcher that is not here, as that of a package, or that has other settings here: another xtrain has written
    it. The message is a clause about its settings."""


def launcher_of(plan: Plan) -> Launcher | None:
    """That of the spec; None where it has none. Raises UnknownLauncher."""
    args = plan.launch.get("launcher")
    return None if args is None else launcher_from(args)


def restarts_of(plan: Plan) -> tuple[str, int]:
    """What says how often all ranks are started again after a failure, and how often that is; empty: nothing does.

    A single machine is started again by xtrain itself, and so are replica groups; several machines by their launcher.
    """
    try:
        launcher = launcher_of(plan)
    except UnknownLauncher:
        launcher = None
    if plan.launch["nodes"] == 1 or groups_node(plan) is not None or (launcher is not None and launcher.obeys_restarts):
        return "fault_tolerance.restarts", plan.launch["restarts"]
    return (launcher.own_restarts() if launcher is not None else None) or ("", 0)


def obeying_launchers() -> str:
    """Those that start several machines again as often as `fault_tolerance.restarts` says."""
    return " or ".join(name for name, each in LAUNCHERS.items() if each.obeys_restarts)


def launcher_from(args: dict[str, Any]) -> Launcher:
    """From what `launcher_args` has made. Raises UnknownLauncher."""
    try:
        kind = LAUNCHERS[args["kind"]]
        settings = settings_of(kind)
        values = {name: _typed(value, settings[name][1].units) for name, value in args.items() if name != "kind"}
        return kind(**values)
    except (LookupError, TypeError, ValueError) as error:
        raise UnknownLauncher(f"settings that no launcher {args.get('kind')} has here") from error


def _typed(value: Any, units: tuple[str, ...]) -> Any:
    if value == "auto":
        return AUTO
    if isinstance(value, list):
        return Quantity(*value) if units else tuple(value)
    return value


def add_trackers(graph: Builder, spec: Spec, last: str) -> str:
    """Add a node for each that is on; the last node of the setup."""
    for tracker in spec.log.trackers():
        op = f"{OP}user" if isinstance(tracker, UserComponent) else f"{OP}{tracker.kind}"
        does = f"the first rank {tracker.does()}, beside training"
        last = graph.add("setup", op, does, id=f"{OP}{tracker.kind}", args=tracker.args(), after=(last,))
    return last


def check_trackers(spec: Spec, found: Findings) -> None:
    """What trackers can tell of their settings before a run."""
    for tracker in spec.log.written():
        tracker.check(found)


def window_pages(window: int) -> int:
    """The most pages that a window touches, wherever it begins."""
    return (window + PAGE - 2) // PAGE + 1


def slots_of(plan: Plan) -> tuple[str, ...]:
    """The names of the slots of a server's plan; none where it trains the model itself."""
    adapter = plan.architecture.adapter
    return tuple(adapter.tasks) if isinstance(adapter, TaskAdapters) else ()
