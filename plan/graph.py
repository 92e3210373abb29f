"""Nodes and edges of a plan: their builder, and the nodes of actions, launcher, replica groups and trackers."""

from collections.abc import Callable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from attrs import field

from xtrain.dsl.schema.actions import ENDINGS, EventName
from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.dsl.schema.cluster import LAUNCHERS, Launcher
from xtrain.dsl.schema.component import Registry, UserComponent
from xtrain.dsl.schema.parallel import stack_of_node
from xtrain.dsl.schema.run import OP
from xtrain.dsl.schema.setting import AUTO, Auto, Role, at_least, resuming_of, setting, settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import define, frozen
from xtrain.plan.plan import Edge, Node, NodeKind, Plan

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


PAGE: Final = 16  # positions per page
STATES: Final = 0  # instead of the window of layers: layers with states, of which a sample has one page
SETUP: Final = "setup.serve"
WHOLE: Final = 0  # the rank of a server that trains the model itself


# Events that are alerts; each has a setting of the same name in `alerts`.
ALERTS: Final[tuple[EventName, ...]] = (
    "loss_spike", "loss_above", "slow", "starvation", "memory", "disk", "stalled",
)  # fmt: skip


Effect = Literal["none", "rounding", "learning"]
"""Difference between a resumed run and a run that had the new value from its start. none: the runs are equal bit for
bit. rounding: equal but for rounding. learning: the runs learn different things."""
STAYS: Final = "training does not change"
ORDER: Final = "sums are computed in another order"
OTHER_CODE: Final = "the run calls other code, or the same with other arguments"
LEARNS: Final = "the optimizer uses the new value from here on"
INITIAL: Final = "it only affects the initial weights, which came from A"


@frozen
class Rule:
    """Allowed change. path: the setting; text: the reason, as a clause."""

    path: str
    effect: Effect
    text: str


def learns(path: str, text: str) -> Rule:
    """Return the rule of a setting that changes what is learned."""
    return Rule(path, "learning", text)


def rounds(path: str, text: str) -> Rule:
    """Return the rule of a setting that changes rounding only."""
    return Rule(path, "rounding", text)


def stays(path: str, text: str = "") -> Rule:
    """Return the rule of a setting that changes nothing that is trained. text: what it changes instead."""
    return Rule(path, "none", f"{text}, {STAYS}" if text else STAYS)


# Argument → the rule of a change. None: the argument is compared as a part of the model, the data or the layout.
Rules = Mapping[str, Rule | None]
_Add = TypeVar("_Add", bound=Callable[..., Any])
# Op → the rules of the arguments of its node.
RESUMED: Final[dict[str, Callable[[Mapping[str, Any]], Rules]]] = {}
# Op → the module that declares its rules; a package's module that failed to import is imported again.
_DECLARED: Final[dict[str, str]] = {}
# Ops of nodes that a setting adds, not the layout or a number format.
SWITCHES: Final[set[str]] = set()


def resumes(
    ops: str,
    fixed: str = "",
    *,
    harmless: str = "",
    switch: bool = False,
    by: Callable[[Mapping[str, Any]], Rules] | None = None,
    **effects: Rule,
) -> Callable[[_Add], _Add]:
    """Declare the nodes that a function adds, and the effect of their changed arguments on a resumed run.

    A change of an argument that is not declared makes a checkpoint incompatible. ops: names separated by spaces. fixed:
    arguments that are compared as a part of the model, the data or the layout. harmless: paths of settings that do not
    affect training, or `argument=path`. switch: a setting adds the node. by: returns the rules, if they depend on the
    arguments.
    """
    named = (pair if "=" in pair else f"{pair.rpartition('.')[2]}={pair}" for pair in harmless.split())
    stay = {name: stays(path) for name, path in (pair.split("=") for pair in named)}
    rules: Rules = {**dict.fromkeys(fixed.split()), **stay, **effects}

    def declare(add: _Add) -> _Add:
        for op in ops.split():
            declared = _DECLARED.setdefault(op, add.__module__)
            assert declared == add.__module__, f"the rules of {op} are declared twice"
            RESUMED[op] = by or (lambda _: rules)
        if switch:
            SWITCHES.update(ops.split())
        return add

    return declare


def component_rules(registry: Registry[Any], args: Mapping[str, Any], usual: str) -> dict[str, Rule]:
    """Return the rules of the arguments of a component's node, as its settings declare `resuming`. usual: the effect of
    the others, as a clause."""
    own = resuming_of(registry.get(args["kind"])) if "user" not in args else {"user": OTHER_CODE}
    return {name: learns(f"{registry.word}.{name}", own.get(name, usual)) for name in args}


class GraphError(Exception):
    """Plan that cannot be executed: a bug of the planner, not an error of the spec."""


@define
class Builder:
    """Builder of nodes and edges; nodes keep the order in which they were added."""

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
        """Append a node and its incoming edges; return its id. `after` holds ids, or (id, name of the value taken from
        it)."""
        node = Node(id=id or op, kind=kind, op=op, args=args or {}, axes=axes, does=does)
        self.nodes.append(node)
        for before in after:
            source, data = (before, "") if isinstance(before, str) else before
            self.edges.append(Edge(before=source, after=node.id, data=data))
        return node.id


def check_matches(node: Node) -> None:
    """Check that every rule of a node matches a module on some pipeline coordinate. Raises GraphError."""
    for rule in (node.args, *node.args.get("rules", ())):
        if "matches" in rule and not sum(rule["matches"]):
            raise GraphError(f"rule `{rule.get('pattern', node.op)}` of {node.id} matches nothing in the whole model")


def check_graph(nodes: tuple[Node, ...], edges: tuple[Edge, ...], root: str) -> str:
    """Check that ids are unique, edges join known nodes, rules match, there are no cycles, and all nodes follow `root`.

    Returns the result as text. Raises GraphError.
    """
    before: dict[str, set[str]] = {node.id: set() for node in nodes}
    after: dict[str, set[str]] = {node.id: set() for node in nodes}
    if len(before) != len(nodes):
        raise GraphError("two nodes have the same id")
    for edge in edges:
        if edge.before not in before or edge.after not in before:
            raise GraphError("an edge joins a missing node")
        before[edge.after].add(edge.before)
        after[edge.before].add(edge.after)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        raise GraphError(f"the graph has a cycle: {' -> '.join(error.args[1])}") from error
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
    return f"{len(nodes)} nodes, {len(edges)} edges, no cycles, all reached from {root}"


# Event of the nodes of `xtrain control`.
CONTROL: Final = "control"


@frozen(kw_only=True)
class ActionPlace:
    """Place of an action. event: "" for a tick. stops: the run stops after it."""

    event: str = ""
    stops: bool = False

    @property
    def ends(self) -> bool:
        """True if no step of the run follows."""
        return self.stops or self.event in ENDINGS

    @property
    def asked(self) -> bool:
        """True for a command of `xtrain control`."""
        return self.event == CONTROL


@frozen
class ActionNode:
    """Op, arguments and description of an action's node. name: its id in a tick, if the op is not specific enough.
    after: (node, name of the value taken from it)."""

    op: str
    args: dict[str, Any]
    does: str
    name: str = ""
    after: tuple[tuple[str, str], ...] = ()


@frozen
class StepNode:
    """Node that an action needs in every step, directly before the node `before`. It observes the state of the step
    there, or takes the values that the action works with."""

    before: str
    op: str
    args: dict[str, Any]
    does: str


def averaged_weights(resolved: "Resolved") -> tuple[dict[str, Any], str]:
    """Return the argument and the words for evaluations and texts that use averaged weights; both are empty if they use
    the trained weights."""
    averaged = resolved.spec.ema is not None and resolved.spec.ema.eval
    return ({"averaged": True}, ", of the averaged weights") if averaged else ({}, "")


# Few enough ranks to look at their traces, and enough to represent all of them.
MOST_BY_ITSELF: Final = 8


def ranks_setting(what: str) -> Any:
    """Return the setting `ranks`. what: the activity of these ranks."""
    return setting(
        f"how many ranks {what}, evenly spread; auto: 8, or one per pipeline rank if those are more",
        default=AUTO,
        check=at_least(1),
        role=Role.CADENCE,
        example="2",
    )


def recorded_ranks(ranks: int | Literal["first", "all"] | Auto, world: int, pipeline: int) -> list[int] | None:
    """Return ranks spread evenly over all ranks, including the first; None: all.

    pipeline: number of pipeline coordinates, the outermost axis; with at least that many ranks, each coordinate has
    one.
    """
    if ranks == "all":
        return None
    number = max(MOST_BY_ITSELF, pipeline) if isinstance(ranks, Auto) else 1 if ranks == "first" else int(ranks)
    return None if number >= world else [index * world // number for index in range(number)]


@frozen
class RecordedRanks:
    """Ranks of a setting in a run: None if they are all `world` ranks."""

    ranks: list[int] | None
    world: int

    @classmethod
    def of(cls, ranks: int | Literal["first", "all"] | Auto, resolved: "Resolved") -> "RecordedRanks":
        world = resolved.layout.mesh.world_size
        return cls(recorded_ranks(ranks, world, resolved.size("pp")), world)

    @property
    def count(self) -> int:
        return self.world if self.ranks is None else len(self.ranks)

    @property
    def text(self) -> str:
        """Text of the ranks: `the rank`, `both ranks`, `8 of 1,024 ranks`."""
        if self.world == 1:
            return "the rank"
        if self.count == self.world:
            return f"all {self.world} ranks" if self.world > 2 else "both ranks"
        return "the first rank" if self.count == 1 else f"{self.count} of {self.world:,} ranks"


def groups_node(plan: Plan) -> Node | None:
    """Return the node of a stack whose copies of the model are replica groups; None for other stacks."""
    for node in plan.nodes:
        stack = stack_of_node(node.op)
        if stack is not None and stack.groups:
            return node
    return None


def launcher_args(launcher: Launcher) -> dict[str, Any]:
    """Return every setting by name; quantities as number and unit, `auto` as that word."""
    values = ((name, getattr(launcher, name)) for name in settings_of(type(launcher)))
    return {"kind": launcher.kind, **{name: _plain(value) for name, value in values}}


def _plain(value: Any) -> Any:
    if isinstance(value, Auto):
        return "auto"
    if isinstance(value, Quantity):
        return [value.value, value.unit]
    return list(value) if isinstance(value, tuple) else value


class UnknownLauncher(Exception):
    """Launcher that is not installed here, or that has other settings here: the plan comes from another xtrain. The
    message is a clause about its settings."""


def launcher_of(plan: Plan) -> Launcher | None:
    """Return the launcher of the plan; None if it has none. Raises UnknownLauncher."""
    args = plan.launch.get("launcher")
    return None if args is None else launcher_from(args)


def restarts_of(plan: Plan) -> tuple[str, int]:
    """Return the setting that limits restarts of all ranks after a failure, and the limit; an empty name if nothing
    restarts them.

    xtrain itself restarts the ranks of a single machine and of replica groups; a launcher restarts several machines.
    """
    try:
        launcher = launcher_of(plan)
    except UnknownLauncher:
        launcher = None
    if plan.launch["nodes"] == 1 or groups_node(plan) is not None or (launcher is not None and launcher.obeys_restarts):
        return "fault_tolerance.restarts", plan.launch["restarts"]
    return (launcher.own_restarts() if launcher is not None else None) or ("", 0)


def obeying_launchers() -> str:
    """Return the launchers that restart several machines as often as `fault_tolerance.restarts` says."""
    return " or ".join(name for name, each in LAUNCHERS.items() if each.obeys_restarts)


def launcher_from(args: dict[str, Any]) -> Launcher:
    """Return the launcher with the values of `launcher_args`. Raises UnknownLauncher."""
    try:
        kind = LAUNCHERS[args["kind"]]
        settings = settings_of(kind)
        values = {name: _typed(value, settings[name][1].units) for name, value in args.items() if name != "kind"}
        return kind(**values)
    except (LookupError, TypeError, ValueError) as error:
        raise UnknownLauncher(f"settings that launcher {args.get('kind')} does not have here") from error


def _typed(value: Any, units: tuple[str, ...]) -> Any:
    if value == "auto":
        return AUTO
    if isinstance(value, list):
        return Quantity(*value) if units else tuple(value)
    return value


def add_trackers(graph: Builder, spec: Spec, last: str) -> str:
    """Add a node for each enabled tracker; return the last node of the setup."""
    for tracker in spec.log.trackers():
        op = f"{OP}user" if isinstance(tracker, UserComponent) else f"{OP}{tracker.kind}"
        does = f"the first rank {tracker.does()}, during training"
        last = graph.add("setup", op, does, id=f"{OP}{tracker.kind}", args=tracker.args(), after=(last,))
    return last


def window_pages(window: int) -> int:
    """Return the largest number of pages that a window touches, wherever it begins."""
    return (window + PAGE - 2) // PAGE + 1


def slots_of(plan: Plan) -> tuple[str, ...]:
    """Return the names of the slots of a server's plan; empty if it trains the model itself."""
    adapter = plan.architecture.adapter
    return tuple(adapter.tasks) if isinstance(adapter, TaskAdapters) else ()
