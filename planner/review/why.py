"""`xtrain plan --why SETTING`: a value, where it was set, and what would change with neighboring values.

Dependents are found by planning: the spec is planned again with a neighboring value, and both plans are compared.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import attrs
from attrs import evolve

from xtrain.dsl.checking.overrides import of_ticks
from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.schema.blocks import NAMED, choices_of
from xtrain.dsl.schema.setting import Auto, Setting, at_least, attributes_of, open_setting, settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.findings import is_unknown, rule_inputs
from xtrain.plan.plan import Plan, Provenance
from xtrain.plan.views import spell
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.changes import changed_figures
from xtrain.planner.review.diff import node_changes
from xtrain.text.page import Page, clip
from xtrain.text.units import plural


@frozen(kw_only=True)
class Slot:
    """Place of a value in a spec: its block, its attribute there, and its schema."""

    path: str
    block: Any
    attribute: attrs.Attribute
    value: Any

    @property
    def setting(self) -> Setting | None:
        """Schema of the setting; None for the label of a block, such as the size of an axis."""
        return self.attribute.metadata.get("setting")

    @property
    def doc(self) -> str:
        """Description in one line; for a label, its block's."""
        if self.setting is not None:
            return self.setting.doc
        return (type(self.block).__doc__ or "").partition("\n")[0]


def find_slot(spec: Spec, path: str) -> Slot | None:
    """Return the place that a path of the provenance names; None if there is none, as for values that are only
    derived."""
    steps = _steps(spec, path)
    if steps is None:
        return None
    owner = spec
    for name in steps[:-1]:
        owner = _get(owner, name)
    free = open_setting(type(spec.mixture)) if owner is spec.mixture.weights else None
    if free is not None:
        attribute = free[0]
    else:
        attribute = next((each for each in attributes_of(type(owner)) if each.name == steps[-1]), None)
    return (
        None if attribute is None else Slot(path=path, block=owner, attribute=attribute, value=_get(owner, steps[-1]))
    )


def replaced(spec: Spec, path: str, value: Any) -> Spec:
    """Return the spec with another value at a path that `find_slot` finds."""
    steps = _steps(spec, path)
    assert steps is not None, path
    return _with(spec, steps, value)


# Field of `Spec` for the first word of a path.
_WORDS = {**NAMED, "every": "ticks", "on": "events"}


def _steps(spec: Spec, path: str) -> list[str] | None:
    """Return a path as the names to follow from the spec; None if it leads nowhere."""
    head, _, rest = path.partition(".")
    if head in NAMED:
        name = next((name for name in getattr(spec, NAMED[head]) if rest.startswith(f"{name}.")), None)
        steps = None if name is None else [NAMED[head], name, *rest[len(name) + 1 :].split(".")]
    elif head == "mixture" and rest not in settings_of(type(spec.mixture)):
        steps = ["mixture", "weights", rest]
    elif path == "tokenizer":
        steps = ["tokenizer", "source"]
    else:
        steps = [_WORDS.get(head, head), *(rest.split(".") if rest else [])]
    if steps and steps[-1] == "from":
        steps[-1] = "from_"  # as the attribute is named
    owner: Any = spec
    for name in steps or []:
        owner = _get(owner, name)
        if owner is _NOWHERE:
            return None
    return steps


_NOWHERE = object()


def _get(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return owner.get(name, _NOWHERE)
    if isinstance(owner, tuple):
        return owner[int(name)] if name.isdecimal() and int(name) < len(owner) else _NOWHERE
    return getattr(owner, name, _NOWHERE) if attrs.has(type(owner)) else _NOWHERE


def _with(owner: Any, steps: list[str], value: Any) -> Any:
    name, rest = steps[0], steps[1:]
    inner = _with(_get(owner, name), rest, value) if rest else value
    if isinstance(owner, dict):
        return {**owner, name: inner}
    if isinstance(owner, tuple):
        return (*owner[: int(name)], inner, *owner[int(name) + 1 :])
    return evolve(owner, **{name: inner})


def neighbours(slot: Slot, derived: str = "") -> Iterator[Any]:
    """Yield other values of a slot that the schema accepts, the most informative first.

    derived: the plan's value for `auto`, from which others are derived.
    """
    value = _typed(derived) if isinstance(slot.value, Auto) else slot.value
    check = slot.setting.check if slot.setting else None
    if slot.setting is None and isinstance(value, int):  # a label: the size of an axis
        check = at_least(1)
    for other in _others(slot, value):
        if other != value and (check is None or check(other) is None):
            yield other


def _typed(derived: str) -> Any:
    """Return the plan's text for `auto` as a value; None if it is empty."""
    if derived in ("true", "false"):
        return derived == "true"
    if derived.replace(",", "").isdecimal():
        return int(derived.replace(",", ""))
    return derived or None


def _others(slot: Slot, value: Any) -> Iterator[Any]:
    words = choices_of(slot.attribute.type)
    match value:
        case bool():
            yield not value
        case int():
            yield from dict.fromkeys((value * 2, value // 2, value + 1, value - 1))
        case float():
            yield from (value * 2, value / 2, 0.5 if value == 0 else 0.0)
        case Quantity() if value.value == 0:
            yield Quantity(1, value.unit)
        case Quantity():
            number = value.value
            half = number // 2 if isinstance(number, int) and number % 2 == 0 else number / 2
            yield from (evolve(value, value=number * 2), evolve(value, value=half))
        case str() if words:
            yield from (word for word in words if word != "auto")
        case dict() if value:
            name, weight = next(iter(value.items()))
            more = evolve(weight, value=weight.value * 2 or 1) if isinstance(weight, Quantity) else weight * 2 or 1.0
            yield {**value, name: more}
        case tuple() if value and all(isinstance(item, float) for item in value):
            yield tuple(item / 2 for item in value)
        case None if not words:
            yield from (1, 1.0)


TRIES = 4  # neighboring values that are planned before giving up
MOST = 40
# Settings that the label of a block stands for, in the order in which they are tried.
LABELS: Final = ("size", "kind", "family", "mode", "preset", "every", "event", "name")
# Derived values without a setting of their own: description, and the settings that change them.
DERIVED: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "steps": ("optimizer steps of the whole run", ("experiment.budget",)),
    "tokens_per_step": (
        "tokens that all ranks see in one optimizer step",
        ("batch.rows", "batch.accumulate", "batch.sequence"),
    ),
    "world_size": ("ranks of the run", ()),
}


AXES: Final = (
    "parallel.tp.size",
    "parallel.pp.size",
    "parallel.cp.size",
    "parallel.fsdp.size",
    "parallel.fsdp.replicate",
)

Option = tuple[str, Spec, int | None]  # its text, the spec, and the ranks to plan it for


class NoSuchValue(Exception):
    """Path of no value in the plan, and the start of none."""


def show_why(plan: Plan, spec: Spec | None, name: str, *, world: int | None = None, color: bool = False) -> str:
    """Render a page about the value at a path of the provenance, or a list of values whose paths start with `name`.

    spec: the spec that the plan was made from for `world` ranks; None for a saved plan without its text, which cannot
    be planned again. Raises NoSuchValue.
    """
    entries = {entry.path: entry for entry in plan.provenance}
    name = _of_tick(spec, name) or name
    entry = next((entries[p] for p in (name, *(f"{name}.{label}" for label in LABELS)) if p in entries), None)
    entry = entry or _unspoken(spec, name)
    below = [each for each in plan.provenance if each.path.startswith(f"{name}.") and each is not entry]
    page = Page(color=color)
    if entry is not None:
        _value(page, plan, spec, entry, world)
    elif not below:
        raise NoSuchValue(f"the plan has no value `{name}`; {_hint(name, entries)}")
    if below:
        page.heading(name, plural(len(below), "setting") + (" more" if entry else ""))
        page.table(
            [(each.path, clip(each.value, 40), _from(each)) for each in below[:MOST]], styles=("", "cyan", "dim")
        )
    return str(page).lstrip("\n")


def _unspoken(spec: Spec | None, path: str) -> Provenance | None:
    """Return the default of a setting that plans do not show."""
    slot = find_slot(spec, path) if spec is not None else None
    if slot is None or slot.setting is None or not slot.setting.added:
        return None
    return Provenance(path=path, value=spell(slot.value), origin="default")


def _of_tick(spec: Spec | None, name: str) -> str | None:
    """Return the path of the tick that `--set` calls `every.eval.web`."""
    head, _, address = name.partition(".")
    places = of_ticks(spec).places(address) if spec is not None and head == "every" else []
    return f"every.{places[0][0]}.every" if len(places) == 1 else None


def _hint(name: str, entries: dict[str, Provenance]) -> str:
    """Return the path of the value that was probably meant: by its path, or only the end of it."""
    parts: dict[str, str] = {}
    for path in entries:
        words = path.split(".")
        for end in range(len(words), 0, -1):
            for start in range(end):
                parts.setdefault(".".join(words[start:end]), ".".join(words[:end]))
    found = parts.get(name) or parts.get(closest(name, parts) or "")
    block, _, last = name.rpartition(".")
    if not found and (
        inner := closest(last, [path[len(block) + 1 :] for path in entries if path.startswith(f"{block}.")])
    ):
        found = f"{block}.{inner}"  # a setting of the same block with a similar name
    return f"did you mean `{found}`?" if found else "`xtrain plan SPEC --part values` lists them"


def _from(entry: Provenance) -> str:
    return f"{entry.origin}{f' {entry.place}' if entry.place else ''}" + (f" = {entry.how}" if entry.how else "")


def _value(page: Page, plan: Plan, spec: Spec | None, entry: Provenance, world: int | None) -> None:
    page.line(f"{entry.path} = {clip(entry.value, 70)}", "bold")
    slot = find_slot(spec, entry.path) if spec is not None else None
    rows = [("from", _from(entry))]
    doc = slot.doc if slot else DERIVED.get(entry.path, ("", ()))[0]
    if doc:
        rows.append(("what", doc))
    if slot and slot.setting:
        rows.append(("role", _ROLES[slot.setting.role]))
    if slot is not None and entry.origin == "derived":
        rows.append(("written", f"{spell(slot.value)}: the planner derives it"))
    page.described(rows)
    if spec is not None:
        _source(page, spec, entry.path)
        _rules(page, plan, spec, entry.path)
        _dependents(page, plan, spec, entry, world)
    else:
        page.line()
        page.line("  dependents are found by planning again, which needs the spec", "dim")


_ROLES: Final = {
    "experiment": "changes what is learned",
    "budget": "how long",
    "cadence": "how often something is measured, logged or saved",
    "path": "where files are",
    "mesh": "how the work is divided",
    "execution": "how it is computed",
}


def _source(page: Page, spec: Spec, path: str) -> None:
    """Show the line of a value, and the lines of the names that it came through."""
    origin = spec.origins.get(path)
    if origin is None or origin.span is None:
        return
    for span in (origin.span, *(place for _, place in origin.notes if place is not None)):
        if span.source.text.strip():
            page.line(f"    {span.source.path}:{span.line} | {clip(span.source.line(span.line).strip(), 70)}", "dim")


def _rules(page: Page, plan: Plan, spec: Spec, path: str) -> None:
    """Show the checks whose verdict may depend on the value."""
    unknown = frozenset({path})
    found = []
    for check in plan.checks:
        rests = list(rule_inputs(check.id, spec))
        if rests != ["*"] and any(is_unknown(rule_input, unknown) for rule_input in rests):
            found.append((f"{check.status} {check.id}", check.evidence))
    if found:
        page.heading("RULES", "that use this value")
        page.described(found)


@frozen(kw_only=True)
class _Trial:
    """Plan with a neighboring value, and the value as text; None with the errors of values that have no plan."""

    value: str
    plan: Plan | None
    refused: tuple[str, ...]


def _dependents(page: Page, plan: Plan, spec: Spec, entry: Provenance, world: int | None) -> None:
    trial = _try(plan, spec, entry, world)
    if trial is None:
        page.heading("DEPENDS ON IT", "unknown: there is no neighboring value to try")
        return
    if trial.plan is None:
        page.heading("DEPENDS ON IT", "no neighboring value has a valid plan, so the whole plan")
        page.described([("", text) for text in trial.refused])
        return
    page.heading("DEPENDS ON IT", f"what would differ with {trial.value}")
    rows, renamed = _change_rows(plan, trial.plan), plan.config_id != trial.plan.config_id
    if rows or renamed:
        page.described([*rows, ("experiment", "different" if renamed else "the same")])
    else:
        page.line("  nothing in the plan: no node, no figure")


def _try(plan: Plan, spec: Spec, entry: Provenance, world: int | None) -> _Trial | None:
    """Return the first neighboring value that has a plan; None if there is no value to try."""
    if entry.path == "world_size":
        return _planned([(f"--world {n}", spec, n) for n in (plan.mesh.world_size * 2, plan.mesh.world_size // 2) if n])
    targets = (entry.path,) if find_slot(spec, entry.path) else DERIVED.get(entry.path, ("", ()))[1]
    options = [option for target in targets for option in _options(plan, spec, target, world)]
    return _planned(options) if options else None


def _options(plan: Plan, spec: Spec, target: str, world: int | None) -> list[Option]:
    slot = find_slot(spec, target)
    assert slot is not None, target
    derived = plan.value(target) or ""
    values = list(neighbours(slot, derived))[:TRIES]
    options: list[Option] = [(f"{target} = {spell(value)}", replaced(spec, target, value), world) for value in values]
    if target in AXES and derived.isdecimal():  # the same other axes on more or fewer ranks
        for value in values[:2]:
            ranks = plan.mesh.world_size * value // int(derived)
            options.append((f"{target} = {value} on {ranks:,} ranks", replaced(spec, target, value), ranks))
    return options


def _planned(options: list[Option]) -> _Trial:
    refused = []
    for text, spec, world in options:
        compiled = compile_plan(spec, world=world)
        if compiled.plan is not None:
            return _Trial(value=text, plan=compiled.plan, refused=())
        first = compiled.diagnostics.errors[0]
        refused.append(f"{text}: {first.code} {first.message}")
    return _Trial(value="", plan=None, refused=tuple(refused))


def _change_rows(before: Plan, after: Plan) -> list[tuple[str, str]]:
    """Return the nodes and figures that differ."""
    changes = {change.id: change for change in node_changes(before, after)}
    rows = [("gone", id) for id, change in changes.items() if change.after is None]
    rows += [("new", id) for id, change in changes.items() if change.before is None]
    for id, change in changes.items():
        if change.before is not None and change.after is not None:
            arguments = [
                ("axes", *(" · ".join(side) or "none" for side in pair)) if name == "over" else (name, *pair)
                for name, pair in change.arguments.items()
            ]
            arguments.sort(key=lambda each: each[0] not in ("op", "axes"))
            rows.append((id, ", ".join(f"{name} {_plain(old)} → {_plain(new)}" for name, old, new in arguments)))
    others = {node.id: node for node in after.nodes if node.id not in changes}
    if numbers := [node.id for node in before.nodes if node.id in others and node != others[node.id]]:
        rows.append(("other figures in", ", ".join(numbers)))
    return rows + [(name, f"{old} → {new}") for name, (old, new) in changed_figures(before, after).items()]


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return clip(f"[{', '.join(_plain(item) for item in value)}]", 36)
    return clip(value if isinstance(value, str) else json.dumps(value).replace("null", "none"), 36)
