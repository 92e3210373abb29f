"""Table of components and choices by stack, axis and number format, computed by the rules of the planner.

No list of supported combinations exists here: each cell is the verdict on a spec, and the columns come from the schema.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Final, get_args, get_origin

import attrs
from attrs import evolve, field

from xtrain.dsl.load import Loaded, load_spec
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.actions import ACTIONS, OnEvent, saving
from xtrain.dsl.schema.component import Registry, members_of, registry_of
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.dsl.schema.losses import LOSSES
from xtrain.dsl.schema.parallel import STACKS, Parallel
from xtrain.dsl.schema.policy import REWARDS, PolicyLoss
from xtrain.dsl.schema.precision import Precision
from xtrain.dsl.schema.run import Tracker
from xtrain.dsl.schema.setting import Role, Setting, settings_of, spelled
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.planner.data.training import rows_of_prompts
from xtrain.planner.rules.validate import check_spec

YES: Final = "yes"
IDLE: Final = "–"
_IDLE_CODE: Final = "W401"
_NAME: Final = "probe.xtrain"
# Required blocks, with components; a row replaces one of the lines.
_LINES: Final[dict[str, str]] = {
    "experiment": "experiment probe { budget = 1000 steps }",
    "tokenizer": "tokenizer bytes",
    "dataset": "dataset text { source = synthetic(documents = 1000, length = 64), holdout = 10% }",
    "batch": "batch { sequence = 64, rows = 8 }",
    "every": f"every 1000 steps {saving().kind}",
}


@frozen
class CapabilityRow:
    """Component or choice. where: the block, or the path of a setting. origin: the package that offers it, "" if it is
    not a component. cells: `YES`, `IDLE`, or the codes that refuse it, by column."""

    where: str
    name: str
    origin: str
    cells: dict[str, str]


@frozen
class _SpecChange:
    """Column: a change of a spec and its number of ranks.

    usual: lines of the probing spec that the column supports, so that a row is refused only for its own sake.
    """

    name: str
    change: Callable[[Spec], Spec]
    world: int
    usual: dict[str, str] = field(factory=dict)


def capabilities() -> list[CapabilityRow]:
    """Return all rows: components first, then choices of how something is computed and on which ranks."""
    columns = [evolve(column, usual=_supported(column)) for column in _columns()]
    return [*_components(columns), *_choices(columns)]


def text() -> str:
    """Return the table, a line for each row, and the meaning of its cells."""
    rows = capabilities()
    columns = list(rows[0].cells)
    head = ["", "", *columns, "from"]
    lines, before = [], ""
    for row in rows:
        where = "" if row.where == before else row.where
        before = row.where
        lines.append([where, row.name, *(row.cells[column] for column in columns), row.origin])
    widths = [max(map(len, each)) for each in zip(head, *lines, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
             for line in (head, *lines)]  # fmt: skip
    legend = [
        f"{YES}: the rules of the planner allow it; {IDLE}: it has no effect there; a code: it is refused, and",
        "`xtrain docs CODE` says why. Stacks and axes have two ranks; fp64, bf16: parameters in that format; →fp64,",
        "→bf16, →fp16, →fp8: parameters in fp32 on two ranks of fsdp, computed in that format; loader, export: two",
        "ranks of fsdp, with two processes that read rows for each; the finished model or adapter as a folder.",
    ]
    return "\n".join([*table, "", *legend]) + "\n"


def _text(lines: dict[str, str]) -> str:
    """Return the probing spec with other lines for some of its blocks."""
    return "\n".join((_LINES | lines).values()) + "\n"


def _probes() -> Iterator[dict[str, str]]:
    """Yield lines of the required blocks that are components: all combinations of their choices.

    A model with experts comes first, which the axis `ep` cuts, then the defaults.
    """
    of_kind = []
    for kind in blocks.REQUIRED:
        registry = registry_of(blocks.KINDS[kind])
        if registry is not None:
            chosen = sorted(registry.items(), key=lambda named, usual=registry.default: (
                "experts" not in settings_of(named[1]), named[1] is not usual
            ))  # fmt: skip
            of_kind.append([(kind, _written(kind, each, name)) for name, each in chosen])
    return (dict(chosen) for chosen in product(*of_kind))


def _supported(column: _SpecChange) -> dict[str, str]:
    """Return the first probe that a column supports; the first of all if it supports none."""
    for lines in _probes():
        loaded = load_spec(_NAME, [], {_NAME: _text(lines)})
        if not any(each.severity == "error" for each in check_spec(column.change(loaded.require()), column.world)):
            return lines
    return next(_probes())


def _columns() -> Iterator[_SpecChange]:
    """Yield the columns: one rank, every stack, every axis, every format, and what a run reads and writes."""
    yield _SpecChange("alone", lambda spec: spec, 1)
    for stack in (stack for stack in STACKS if STACKS[stack] is not STACKS.default):
        yield _SpecChange(stack, lambda spec, stack=stack: evolve(spec, parallel=evolve(spec.parallel, stack=stack)), 2)
    for axis in (name for name, block in blocks.nested(Parallel).items() if blocks.label_of(block) is not None):
        yield _SpecChange(
            axis,
            lambda spec, axis=axis: evolve(
                spec, parallel=evolve(spec.parallel, **{axis: evolve(getattr(spec.parallel, axis), size=2)})
            ),
            2,
        )
    for params in _others(Precision, "params"):
        yield _SpecChange(params, lambda spec, params=params: _with_formats(spec, params=params), 1)
    for compute in _others(Precision, "compute"):
        if compute != Precision().params:
            yield _SpecChange(f"→{compute}", lambda spec, compute=compute: _with_formats(spec, compute=compute), 2)
    yield _SpecChange("loader", lambda spec: evolve(spec, batch=evolve(spec.batch, workers=2)), 2)
    name, publishing = next((name, kind) for name, kind in ACTIONS.items() if kind.publishes)
    yield _SpecChange(name, lambda spec: _with_published(spec, publishing), 2)


def _with_published(spec: Spec, publishing: Any) -> Spec:
    event = OnEvent(event="finish", actions=(publishing(to="model", adapter=spec.is_adapted),))
    return evolve(spec, events=(*spec.events, event))


def _others(block: type, name: str) -> list[str]:
    """Return the words of a setting other than its default."""
    attribute = getattr(attrs.fields(block), name)
    return [word for word in blocks.choices_of(attribute.type) if word != attribute.default]


def _label(block: type) -> attrs.Attribute:
    label = blocks.label_of(block)
    assert label is not None
    return label


def _with_formats(spec: Spec, **formats: Any) -> Spec:
    return evolve(spec, precision=evolve(spec.precision, **formats))


def _components(columns: list[_SpecChange]) -> Iterator[CapabilityRow]:
    for kind, block in blocks.KINDS.items():
        registry = registry_of(block)
        if registry is not None:
            for name in registry:
                yield _row(kind, name, registry.origin(name), columns, {kind: _written(kind, registry[name], name)})
        members = members_of(block)
        for name in members or ():
            assert members is not None
            lines = {kind: f"{kind} {{ {_member(members[name], name)} }}"}
            yield _row(members.word, name, members.origin(name), columns, lines)
    for name in ACTIONS:
        yield _row("action", name, ACTIONS.origin(name), columns, {"every": _action(ACTIONS, name)})


def _written(kind: str, block: type, name: str) -> str:
    """Return a block with its required settings."""
    needed = [
        f"{spelled(attribute)} = {meta.example}"
        for attribute, meta in settings_of(block).values()
        if (attribute.default is attrs.NOTHING and (not meta.only or name in meta.only)) or name in meta.required_by
    ]
    return f"{kind} {name} {{ {', '.join(needed)} }}"


def _action(registry: Registry[Any], name: str) -> str:
    """Return a tick or an event with the action; its label is the probing spec's if it names a dataset."""
    kind = registry[name]
    label = blocks.label_of(kind)
    named = "" if label is None else '("true")' if kind.called else " text"
    needed = _written("", kind, "").strip()
    more = f" {needed}" if needed != "{  }" else ""
    return kind.example.format(f"{name}{named}{more}") + f"\n{_LINES['every']}"


def _member(component: type[Tracker], name: str) -> str:
    """Return an enabled tracker as in `log`: a switch, or a block with all settings that have an example."""
    kind, _ = component.in_log()
    if not blocks.is_block(kind):
        return f"{name} = true"
    examples = [f"{each} = {meta.example}" for each, (_, meta) in settings_of(kind).items() if meta.example]
    return f"{name} {{ {', '.join(examples)} }}"


def _around_reward(source: str) -> dict[str, str]:
    """Return the lines that a reward or an engine needs: a rollout, a reward, a loss that learns from it, and prompts
    with answers."""
    loss = next(name for name, each in LOSSES.items() if issubclass(each, PolicyLoss))
    answers = 'prompt = "prompt", response = "answer", template = "plain", oversized = skip, holdout = 10%'
    return {
        "dataset": f'dataset text {{ source = {source}("*"), {answers} }}',
        "collate": rows_of_prompts(),
        "loss": f"loss {loss}",
        "rollout": "rollout { group = 2, max_tokens = 8 }",
        "reward": _written("reward", REWARDS.default, next(iter(REWARDS))),
    }


def _choices(columns: list[_SpecChange]) -> Iterator[CapabilityRow]:
    """Yield choices of how something is computed, or on which ranks; a switch counts when it is on."""
    usual = load_spec(_NAME, [], {_NAME: _text(columns[0].usual)}).require()
    for path, attribute, meta in _settings():
        words = blocks.choices_of(attribute.type) or (("true",) if attribute.default is False else ())
        if meta.role in (Role.EXECUTION, Role.MESH):
            rows = [
                _row(path, word, meta.registry.origin(word) if meta.registry else "", columns, {}, f"{path}={word}")
                for word in words
                if word != _value(usual, path)
            ]
            yield from (row for row in rows if set(row.cells.values()) != {IDLE})


def _value(spec: Spec, path: str) -> Any:
    """Return a setting by its path; for a block, its label."""
    found: Any = spec
    for name in path.split("."):
        found = getattr(found, name)
    return getattr(found, _label(type(found)).name) if blocks.is_block(type(found)) else found


def _settings() -> Iterator[tuple[str, attrs.Attribute, Setting]]:
    """Yield the path of every setting of one word, and of every block with a label that is not a component."""
    for kind, block in blocks.KINDS.items():
        if kind not in (*blocks.NAMED, *blocks.OPTIONAL):
            label = blocks.label_of(block)
            if label is not None and registry_of(block) is None and kind not in blocks.REQUIRED:
                yield kind, label, Setting(doc="", role=Role.EXECUTION)
            yield from _inside(kind, block)


def _inside(path: str, block: type) -> Iterator[tuple[str, attrs.Attribute, Setting]]:
    for name, (attribute, meta) in settings_of(block).items():
        if blocks.is_block(attribute.type):
            if attribute.default is not None:
                yield from _inside(f"{path}.{name}", attribute.type)
        elif not any(get_origin(part) is tuple for part in get_args(attribute.type)):
            yield f"{path}.{name}", attribute, meta


def _row(
    where: str, name: str, origin: str, columns: list[_SpecChange], lines: dict[str, str], set_text: str = ""
) -> CapabilityRow:
    probes = list({_key(column.usual): column.usual for column in columns}.values())
    loaded = {_key(probe): _loaded(probe | lines, set_text) for probe in probes}
    cells = {}
    for column in columns:
        order = [column.usual, *(probe for probe in probes if probe != column.usual)]
        answers = (_cell(loaded[_key(probe)], column, bool(set_text)) for probe in order)
        first = next(answers)
        cells[column.name] = first if first in (YES, IDLE) or YES not in answers else YES
    return CapabilityRow(where, name, origin, cells)


def _key(lines: dict[str, str]) -> tuple[str, ...]:
    return tuple(lines.values())


def _cell(loaded: Loaded, column: _SpecChange, may_be_idle: bool) -> str:
    """Return the verdict on one spec in a column."""
    codes = [each.code for each in loaded.diagnostics if each.severity == "error"]
    idle = False
    if loaded.spec is not None and not codes:
        said = list(check_spec(column.change(loaded.spec), column.world))
        codes = [each.code for each in said if each.severity == "error"]
        idle = may_be_idle and any(each.code == _IDLE_CODE for each in said)
    return " ".join(dict.fromkeys(codes)) or (IDLE if idle else YES)


def _loaded(lines: dict[str, str], set_text: str) -> Loaded:
    """Load the probing spec with other lines, and with the data that its loss or reward reads."""
    sets = [set_text] if set_text else []
    loaded = load_spec(_NAME, sets, {_NAME: _text(lines)})
    source = next(name for name, each in SOURCES.items() if each.records == "fields")
    if loaded.spec is not None and (loaded.spec.reward is not None or loaded.spec.engine is not None):
        return load_spec(_NAME, [], {_NAME: _text(_around_reward(source) | lines)})
    if loaded.spec is not None and (read := loaded.spec.loss.of_data()):
        data = f'dataset text {{ source = {source}("*"), holdout = 10%, {", ".join(read)} }}'
        return load_spec(_NAME, sets, {_NAME: _text(lines | {"dataset": data})})
    return loaded
