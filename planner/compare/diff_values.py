"""Which resolved values two plans have otherwise: by path, with where each came from, in groups of what they are about.

What recurs is compared as it will happen, not by its number in the spec: a tick more does not move the others.
"""

from typing import Final, Literal, get_args

from attrs import frozen

from xtrain.dsl import blocks
from xtrain.dsl.schema.component import members_of
from xtrain.dsl.schema.setting import Role, settings_of
from xtrain.planner.plan import Plan, Provenance

Group = Literal["experiment", "budget", "cadence", "mesh", "execution", "paths", "cluster"]
GROUPS: Final[tuple[Group, ...]] = get_args(Group)
_OF_ROLE: Final[dict[Role, Group]] = {
    Role.EXPERIMENT: "experiment",
    Role.BUDGET: "budget",
    Role.CADENCE: "cadence",
    Role.PATH: "paths",
    Role.MESH: "mesh",
    Role.EXECUTION: "execution",
}
# What is no setting: labels of blocks, and numbers that were derived.
_OF_PATH: Final[dict[str, Group]] = {
    "steps": "budget",
    "tokens_per_step": "experiment",
    "world_size": "mesh",
    "activation.mode": "execution",
    "compile.mode": "execution",
}


@frozen(kw_only=True)
class ValueChange:
    """A value that differs; None where a plan does not have it. Of what recurs, the path is the action."""

    group: Group
    path: str
    before: Provenance | None
    after: Provenance | None


def changed_values(a: Plan, b: Plan) -> tuple[ValueChange, ...]:
    """Every value that differs, group by group, in the order of the schema."""
    before, after = _values(a), _values(b)
    changes = [
        ValueChange(group=group_of(path), path=path, before=before.get(path), after=after.get(path))
        for path in {**before, **after}
        if not _same(before.get(path), after.get(path))
    ]
    return tuple(sorted(changes, key=lambda change: GROUPS.index(change.group)))


def _same(one: Provenance | None, other: Provenance | None) -> bool:
    return one is not None and other is not None and one.value == other.value


def _values(plan: Plan) -> dict[str, Provenance]:
    found = {entry.path: entry for entry in plan.provenance if entry.path.partition(".")[0] not in ("every", "on")}
    for path, value in recurring(plan).items():
        found[path] = Provenance(path=path, value=value, origin="")
    return found


def group_of(path: str) -> Group:
    """What a value is about, by its path in the spec."""
    kind, _, rest = path.partition(".")
    if path in _OF_PATH:
        return _OF_PATH[path]
    if kind.partition(" ")[0] in ("every", "on"):
        return "cadence"
    if kind == "cluster":
        return "cluster"
    if kind not in blocks.KINDS:  # the collate chain
        return "experiment"
    names = rest.split(".")[1:2] if kind in blocks.NAMED else rest.split(".")
    block: type = blocks.KINDS[kind]
    for name in names:
        if members_of(block) is not None and name not in settings_of(block):
            return "execution"  # of a tracker of the user's own
        if name not in settings_of(block):  # a label: the size of an axis, the kind of an optimizer
            return "mesh" if kind == "parallel" else "experiment"
        attribute, setting = settings_of(block)[name]
        if not blocks.is_block(attribute.type):
            return _OF_ROLE[setting.role]
        block = attribute.type
    return "experiment"


def recurring(plan: Plan) -> dict[str, str]:
    """Action → when it happens: `every eval code` → `100 steps`; and event → what happens then."""
    found: dict[str, str] = {}
    for tick in plan.timeline.ticks:
        path = f"every {actions_text(tick.nodes, tick.stop)}"
        found[path] = ", ".join(filter(None, (found.get(path), tick.period)))
    for trigger in plan.timeline.triggers:
        if trigger.nodes or trigger.stop:
            found[f"on {trigger.name}"] = actions_text(trigger.nodes, trigger.stop)
    return found


def actions_text(nodes: tuple[str, ...], stop: bool) -> str:
    """`eval code then log`, of the nodes that they are."""
    names = []
    for node in nodes:
        kind, _, rest = node.partition(".")
        names.append((rest if kind == "tick" else rest.partition(".")[2]).replace(".", " "))
    return " then ".join((*names, *(("stop",) if stop else ())))
