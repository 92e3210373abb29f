"""What a sweep may vary: the paths of settings, a step at a time, and the ways to write several values."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs

from xtrain.dsl import blocks
from xtrain.dsl.dimension import Dimension
from xtrain.dsl.schema.setting import open_setting, settings_of
from xtrain.dsl.spec_text import is_plain
from xtrain.dsl.syntax.tokens import Token
from xtrain.lsp.analysis import Analysis
from xtrain.lsp.scope import WORDS, Scope

# Form of the values → text to insert, and its meaning.
VALUES: Final = {
    "[…]": ("[", "these values"),
    "log": ("log(", "numbers between two ends, equally likely in the logarithm"),
    "uniform": ("uniform(", "numbers between two ends"),
}
_TRIALS_OWN: Final = ("workspace", "launch", "launcher", "sweep", "serve")  # trials cannot differ in these


def varies(scope: Scope) -> bool:
    """Return True if the items of a block may be `PATH in VALUES`."""
    free = open_setting(scope.block) if scope.block is not None else None
    return free is not None and Dimension in (free[0].type, *getattr(free[0].type, "__args__", ()))


def is_path(item: Sequence[Token]) -> bool:
    """Return True if the tokens of an item are empty or a path that ends with a dot."""
    return all(t.type in WORDS if number % 2 == 0 else t.type == "_DOT" for number, t in enumerate(item)) and (
        not item or item[-1].type == "_DOT"
    )


def next_steps(analysis: Analysis, item: Sequence[Token]) -> Iterator[tuple[str, str, str]]:
    """Yield the next steps of the path in an item: label, text, detail."""
    spec, before = analysis.spec, [token.text for token in item if token.type != "_DOT"]
    if not before:
        reading = analysis.loaded.reading
        for each in reading.definitions if reading is not None else ():
            if each.kind == "param":
                yield each.name.text, f"{each.name.text} in ", f"`param`, {each.expression.span.text}"
        for kind in blocks.KINDS:
            if kind not in _TRIALS_OWN:
                yield kind, f"{kind}.", "a setting of this block"
        return
    if before == ["dataset"] and spec is not None:
        yield from ((name, f"{name}.", "dataset") for name in spec.datasets if is_plain(name))
    block: Any = blocks.KINDS.get(before[0])
    given = getattr(spec, before[0], None)
    rest = before[2:] if before[0] == "dataset" else before[1:]
    if before == ["dataset"] or block is None:
        return
    block = type(given) if given is not None and attrs.has(type(given)) else block
    for name in rest:
        known = settings_of(block)
        if name not in known or not blocks.is_block(known[name][0].type):
            return
        block = known[name][0].type
    for name, (attribute, meta) in settings_of(block).items():
        is_block = blocks.is_block(attribute.type)
        yield name, f"{name}." if is_block else f"{name} in ", meta.doc
