"""`--set path.to.field=value` and `--set name=value` for a `param`: applied last, reported like any other text."""

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from xtrain.dsl import blocks
from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.diagnostics.source import SourceText, Span
from xtrain.dsl.diagnostics.synonyms import ours
from xtrain.dsl.evaluation.evaluate import Definition, Evaluator
from xtrain.dsl.evaluation.includes import ReadStatements
from xtrain.dsl.evaluation.sections import Section, SectionEntry, Tree
from xtrain.dsl.evaluation.values import FAILED, Value, describe
from xtrain.dsl.overrides.paths import PATH, Override, Parts, descend, no_such, text_of, value_of
from xtrain.dsl.overrides.ticks import set_event, set_tick
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.setting import settings_of

if TYPE_CHECKING:
    from xtrain.dsl.checking.user_parts import DeclaredParts

_LAST = 1_000_000  # behind all files


def override_source(sets: Sequence[str]) -> SourceText:
    """All `--set` texts as one source, a line each."""
    return SourceText(PATH, "\n".join(text.replace("\n", " ") for text in sets), order=_LAST)


def read_overrides(source: SourceText, diagnostics: Diagnostics) -> list[Override]:
    """Split each line at its first `=`; a line without is reported."""
    found = []
    offset = 0
    for line in source.text.split("\n") if source.text else []:
        start, end = offset, offset + len(line)
        offset = end + 1
        path, sign, value = line.partition("=")
        whole = Span(source, start, end)
        if not sign or not path.strip() or not value.strip():
            diagnostics.error(
                "X218", "`--set` needs a path and a value", whole, hint="write `--set path.to.setting=value`"
            )
            continue
        parts, at = [], start
        for part in path.split("."):
            name = part.strip()
            begin = at + (len(part) - len(part.lstrip()))
            parts.append((name, Span(source, begin, begin + len(name))))
            at += len(part) + 1
        first = start + len(path) + 1
        text = source.text[first:end]
        begin = first + len(text) - len(text.lstrip())
        found.append(Override(tuple(parts), whole, Span(source, begin, begin + len(text.strip()))))
    return found


def set_params(
    overrides: list[Override], reading: ReadStatements, evaluator: Evaluator, diagnostics: Diagnostics
) -> list[Override]:
    """Apply those that name a `param`; the others come back."""
    rest = []
    for override in overrides:
        name = override.parts[0][0]
        definition = reading.params.get(name) if len(override.parts) == 1 else None
        if definition is None:
            rest.append(override)
        else:
            _set_param(definition, override, reading, evaluator, diagnostics)
    for definition in reading.definitions:
        # What was computed to learn the types of the defaults may rest on values that are replaced now.
        definition.value, definition.used = None, False
    return rest


def _set_param(
    definition: Definition, override: Override, reading: ReadStatements, evaluator: Evaluator, diagnostics: Diagnostics
) -> None:
    """Replace the default of a `param` by a value of the same type and unit."""
    default = evaluator.definition(definition)
    if default.data is FAILED:
        return
    if isinstance(default.data, str):
        value = text_of(override.value, reading, evaluator, diagnostics)
    else:
        value = value_of(override.value, reading, evaluator, diagnostics)
    if value is None or value.data is FAILED:
        return
    given, wanted = value.data, default.data
    if isinstance(wanted, float) and isinstance(given, int) and not isinstance(given, bool):
        given = float(given)
    same = type(given) is type(wanted)
    if isinstance(given, Quantity) and isinstance(wanted, Quantity):
        same = given.unit == wanted.unit
    if not same and given is not None and wanted is not None:
        name = definition.name.text
        diagnostics.error(
            "X310", f"`{name}` is {_kind(wanted)}, not {describe(given)}", override.value,
            notes=[("its default fixes the type", definition.name.span)],
        )  # fmt: skip
        return
    definition.replaced = Value(given, override.value)


def _kind(data: Any) -> str:
    match data:
        case bool():
            return "`true` or `false`"
        case int():
            return "a whole number"
        case float():
            return "a number"
    return describe(data)


def set_fields(
    overrides: list[Override], tree: Tree, parts: "DeclaredParts", reading: ReadStatements, evaluator: Evaluator,
    diagnostics: Diagnostics,
) -> None:  # fmt: skip
    """Apply overrides of settings and labels to the tree; a path that leads nowhere is reported. parts: the user's."""
    for override in overrides:
        _set_field(override, tree, parts, reading, evaluator, diagnostics)


def _set_field(
    override: Override, tree: Tree, parts: "DeclaredParts", reading: ReadStatements, evaluator: Evaluator,
    diagnostics: Diagnostics,
) -> None:  # fmt: skip
    name, span = override.parts[0]
    rest = override.parts[1:]
    if name == "collate" and not rest:
        value = value_of(override.value, reading, evaluator, diagnostics)
        if value is not None:
            tree.root.entries["collate"] = SectionEntry(span, value)
        return
    if name in ("every", "on"):
        apply = set_tick if name == "every" else set_event
        apply(override, tree, parts.actions(), reading, evaluator, diagnostics)
        return
    if name not in blocks.KINDS:
        candidates = (*blocks.KINDS, "collate", "every", "on", *reading.params)
        near = () if rest else _settings_called(name, tree)
        no_such(name, span, candidates, "block" if rest else "param or block", diagnostics, near)
        return
    block = blocks.KINDS[name]
    if name in blocks.NAMED:
        rest = _one_label(rest, tree.named.get(name, {}))
        section = _named(name, rest, tree, span, diagnostics)
        if section is None:
            return
        rest = rest[1:]
        if not rest:
            diagnostics.error("X217", f"`{name}` is a block", override.span, hint=f"set one of its settings: "
                              f"{', '.join(settings_of(block))}")  # fmt: skip
            return
        block = parts.block(block, section)
    else:
        section = tree.root.block(name)
        block = parts.block(block, section)
    descend(block, section, override, rest, reading, evaluator, diagnostics)


def _settings_called(name: str, tree: Tree) -> list[str]:
    """The paths of the settings of this name, or of the one that another trainer calls so: `lr` is `optimizer.lr`.

    Paths in blocks that the spec has, if there are any.
    """
    paths: dict[str, list[str]] = {}
    for kind, block in blocks.KINDS.items():
        labels = [f"{kind}.{label}" for label in tree.named.get(kind, {})] if kind in blocks.NAMED else [kind]
        for setting in settings_of(block):
            paths.setdefault(setting, []).extend(f"{place}.{setting}" for place in labels)
        for inner, nested in blocks.nested(block).items():
            for setting in settings_of(nested) if kind not in blocks.NAMED else ():
                paths.setdefault(setting, []).append(f"{kind}.{inner}.{setting}")
    found = paths.get(name) or paths.get(ours(name, paths) or "", [])
    written = [path for path in found if path.partition(".")[0] in (*tree.root.blocks, *tree.named)]
    return written or found


def _one_label(parts: Parts, known: Container[str]) -> Parts:
    """The parts behind the word of a named block, with one for a label that has dots in it."""
    for count in range(len(parts), 1, -1):
        if (label := ".".join(name for name, _ in parts[:count])) in known:
            return ((label, parts[0][1].to(parts[count - 1][1])), *parts[count:])
    return parts


def _named(
    kind: str, rest: tuple[tuple[str, Span], ...], tree: Tree, span: Span, diagnostics: Diagnostics
) -> Section | None:
    known = tree.named.get(kind, {})
    if not rest:
        diagnostics.error(
            "X217", f"`{kind}` needs a name and a setting", span, hint=f"write `{kind}.NAME.SETTING=value`"
        )
        return None
    label, place = rest[0]
    if label not in known:
        no_such(label, place, known, kind, diagnostics)
        return None
    return known[label]
