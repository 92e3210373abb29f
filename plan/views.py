"""Views of a plan: values that differ from another plan or from the defaults, and memory headroom.

Recurring ticks are compared by their actions, not by their number in the spec, so an added tick does not move the
others.
"""

from typing import Any, Final, Literal, get_args

from attrs import NOTHING, Factory

from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.blocks import label_of
from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.dsl.schema.component import Component, UserComponent, members_of
from xtrain.dsl.schema.data_components import Link, Source
from xtrain.dsl.schema.setting import Auto, Role, settings_of
from xtrain.dsl.spec_text import value_text
from xtrain.lazy_attrs import frozen
from xtrain.plan.estimates import RankClass
from xtrain.plan.plan import Plan, Provenance
from xtrain.text.units import bytes_text

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
# Values that are not settings: labels of blocks, and derived numbers.
_OF_PATH: Final[dict[str, Group]] = {
    "steps": "budget",
    "tokens_per_step": "experiment",
    "world_size": "mesh",
    "activation.mode": "execution",
    "compile.mode": "execution",
}


@frozen(kw_only=True)
class ValueChange:
    """Value that differs; None if a plan does not have it. For a recurring action, the path is the action."""

    group: Group
    path: str
    before: Provenance | None
    after: Provenance | None


def changed_values(a: Plan, b: Plan) -> tuple[ValueChange, ...]:
    """Return every value that differs, group by group, in the order of the schema."""
    before, after = _values(a), _values(b)
    changes = [
        ValueChange(group=group_of(path), path=path, before=before.get(path), after=after.get(path))
        for path in {**before, **after}
        if path not in before or path not in after or before[path].value != after[path].value
    ]
    return tuple(sorted(changes, key=lambda change: GROUPS.index(change.group)))


def _values(plan: Plan) -> dict[str, Provenance]:
    found = {entry.path: entry for entry in plan.provenance if entry.path.partition(".")[0] not in ("every", "on")}
    for path, value in recurring(plan).items():
        found[path] = Provenance(path=path, value=value, origin="")
    return found


def group_of(path: str) -> Group:
    """Return the group of a value, from its path in the spec."""
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
            return "execution"  # of a user's own tracker
        if name not in settings_of(block):  # a label: the size of an axis, the kind of an optimizer
            return "mesh" if kind == "parallel" else "experiment"
        attribute, setting = settings_of(block)[name]
        if not blocks.is_block(attribute.type):
            return _OF_ROLE[setting.role]
        block = attribute.type
    return "experiment"


def recurring(plan: Plan) -> dict[str, str]:
    """Return action → its period (`every eval code` → `100 steps`), and event → its actions."""
    found: dict[str, str] = {}
    for tick in plan.timeline.ticks:
        path = f"every {actions_text(tick.nodes, tick.stop)}"
        found[path] = ", ".join(filter(None, (found.get(path), tick.period)))
    for trigger in plan.timeline.triggers:
        if trigger.nodes or trigger.stop:
            found[f"on {trigger.name}"] = actions_text(trigger.nodes, trigger.stop)
    return found


def actions_text(nodes: tuple[str, ...], stop: bool) -> str:
    """Return actions as text, from their nodes: `eval code then log`."""
    names = []
    for node in nodes:
        kind, _, rest = node.partition(".")
        names.append((rest if kind == "tick" else rest.partition(".")[2]).replace(".", " "))
    return " then ".join((*names, *(("stop",) if stop else ())))


WRITTEN: Final = ("text", "let", "param", "set", "config")


def non_defaults(plan: Plan) -> tuple[Provenance, ...]:
    """Return every written value that differs from its default, in the order of the schema."""
    return tuple(
        entry for entry in plan.provenance if entry.origin in WRITTEN and entry.value != default_text(entry.path)
    )


def default_text(path: str) -> str | None:
    """Return the default of a setting as a spec would write it; None if it has none, or if the planner derives it."""
    kind, _, rest = path.partition(".")
    # The collate chain and recurring actions have no default; that of `compile` holds if the block is written.
    if kind not in blocks.KINDS or path == "compile.mode":
        return None
    block: type = blocks.KINDS[kind]
    default: object = NOTHING
    for name in rest.split(".")[1:] if kind in blocks.NAMED else rest.split("."):
        if name not in settings_of(block):  # a label: the size of an axis, the kind of an optimizer
            return None
        attribute, _ = settings_of(block)[name]
        default = attribute.default
        if blocks.is_block(attribute.type):
            block = attribute.type
    # The meaning of `auto` is derived.
    if default is NOTHING or default == "auto" or isinstance(default, Factory):  # type: ignore[arg-type]
        return None
    return spell(default)


Verdict = Literal["fits", "tight", "does not fit", "unknown"]
TIGHT: Final = 0.08  # share of the device that should stay free in a run that lasts days


@frozen(kw_only=True)
class Headroom:
    """Fullest ranks, free memory of their device (bytes, negative if they do not fit), and the verdict."""

    worst: RankClass
    free: int | None
    verdict: Verdict
    text: str


def headroom(plan: Plan) -> Headroom:
    """Judge the fullest rank; unknown if the device's memory is unknown, or the memory of a step in addition to the
    states."""
    worst = plan.estimates.fullest
    device, need = plan.cluster.memory_bytes, worst.memory.total_bytes
    where = f"on {ranks_text(plan, worst.pp)}"
    if device is None:
        return Headroom(worst=worst, free=None, verdict="unknown", text=f"{bytes_text(need)} {where}, device unknown")
    free = device - need
    share = f"{bytes_text(need)} of {bytes_text(device)} ({need / device:.0%}) {where}"
    if free < 0:
        return Headroom(worst=worst, free=free, verdict="does not fit", text=f"{share}, {bytes_text(-free)} too much")
    verdict: Verdict = "tight" if free < TIGHT * device else "fits"
    return Headroom(worst=worst, free=free, verdict=verdict, text=f"{share}, {bytes_text(free)} free")


def no_times(plan: Plan) -> str:
    """Return the reason why a plan has no step time."""
    cluster = plan.cluster
    if not CLUSTERS[cluster.preset].known:
        return "no `cluster` is given"
    needed = ["flops"]
    if any(call.seconds is None for ranks in plan.estimates.classes for call in ranks.traffic):
        needed += ["link", "network"] if plan.launch["nodes"] > 1 else ["link"]
    missing = [name for name in needed if getattr(cluster, name) is None]
    return f"cluster has no {', '.join(missing)}" if missing else "not estimated"


def ranks_text(plan: Plan, pp: int) -> str:
    """Return the ranks of a pipeline coordinate as text: `every rank`, or `pp 3 (ranks 3,072 to 4,095)`."""
    size = plan.mesh.size("pp")
    if size == 1:
        return "every rank" if plan.mesh.world_size > 1 else "the only rank"
    each = plan.mesh.world_size // size
    first, last = pp * each, (pp + 1) * each - 1
    return f"pp {pp} ({f'ranks {first:,} to {last:,}' if each > 1 else f'rank {first:,}'})"


def spell(value: Any) -> str:
    """Return a value as `--set` takes it: as in a spec, but strings have no quotes and calls no default arguments."""
    match value:
        case float():
            short = f"{value:g}"
            return short if float(short) == value else repr(value)
        case str() if not isinstance(value, Auto):
            return value
        case tuple() if value and all(isinstance(item, Component) for item in value):
            return " -> ".join(spell(item) for item in value)
        case UserComponent():
            return value_text(value)
        case Source():
            return _spell_source(value)
        case Link():
            return value.written
        case Component():
            return value.kind
    return value_text(value)


def _spell_source(value: Source) -> str:
    """Return a source as text, without defaults: `jsonl(data/*.jsonl)`, `synthetic(length = 64)`."""
    label = label_of(type(value))
    first = getattr(value, label.name) if label is not None else ()
    arguments = [spell(each) for each in (first if isinstance(first, tuple) else (first,))]
    for setting, (attribute, _) in settings_of(type(value)).items():
        given = getattr(value, attribute.name)
        if given != attribute.default:
            arguments.append(f"{setting} = {spell(given)}")
    return f"{value.kind}({', '.join(arguments)})" if arguments else value.kind
