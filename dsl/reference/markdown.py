"""The reference as Markdown: `docs/reference.md` is this text."""

from collections.abc import Iterable, Sequence
from typing import Final

from xtrain.dsl.reference.reference import ROLES, Field, ReferencePage, every_page, pages
from xtrain.dsl.reference.vocabulary import CONSTANTS, EVENTS, FUNCTIONS, MULTIPLIERS, STATEMENTS, UNITS
from xtrain.dsl.schema import later

_INTRODUCTION: Final = """\
# Reference of the language

Every block, setting, unit and word. `xtrain docs` prints the same in a terminal, `xtrain docs parallel.fsdp.reduce` one
setting, and `xtrain schema` all of it for programs. [language.md](language.md) explains how they work together, and
[codes.md](codes.md) lists the codes of diagnostics.

This file is made of the schema by `xtrain docs --markdown > docs/reference.md`; do not edit it.

*Required* settings have no default, `auto` is derived (the plan says how), and `none` switches off. The role of a
setting says whether a run with another value is another experiment:
"""


def markdown() -> str:
    """The whole reference."""
    found = pages()
    parts = [_INTRODUCTION, _table(("role", "what it is about"), [(role.value, text) for role, text in ROLES.items()])]
    parts += _statements(found)
    parts.append("## Blocks\n")
    for page in found:
        if page.group == "block":
            parts += _page(page, "###")
    for title, group, intro in _GROUPS:
        parts += [f"## {title}\n", intro]
        members = [page for page in found if page.group == group]
        parts.append(_table((group, "meaning"), [(page.written, page.summary) for page in members]))
        for page in members:
            if page.fields:
                parts += [f"### {page.name}\n", _fields(page)]
    parts += [*_words(), *_later()]
    return "\n".join(parts)


_GROUPS: Final = (
    ("Actions", "action", "Actions follow `every …` and `on …`, joined by `then`.\n"),
    ("Sources of a dataset", "source", "Patterns are relative to the working folder.\n"),
    ("Links of collate", "link", "Links are joined by `->`, in this order.\n"),
)


def _statements(found: Iterable[ReferencePage]) -> list[str]:
    rows = [(_code(written), meaning) for written, meaning in STATEMENTS.values()]
    tick = next(page for page in found if page.name == "every")
    (amount,) = tick.fields
    return [
        "## Statements\n",
        _table(("statement", "meaning"), rows),
        f"The amount of `every` is of {amount.kind}, {amount.values}: {amount.doc}.\n",
        "## Events\n",
        _table(("event", "when", "default action"), [(_code(n), *texts) for n, texts in EVENTS.items()]),
    ]


def _page(page: ReferencePage, level: str) -> list[str]:
    parts = [f"{level} {page.name}\n", f"{page.written}: {page.summary}\n", *(f"{text}\n" for text in page.more)]
    if page.label or page.fields:
        parts.append(_fields(page))
    if page.inner:
        names = ", ".join(f"[{_code(inner.name)}](#{inner.name})" for inner in page.inner)
        parts.append(f"Blocks inside: {names}.\n")
    for inner in page.inner:
        parts += _page(inner, f"{level}#")
    return parts


def _fields(page: ReferencePage) -> str:
    """The settings of a page, its label first."""
    rows = [_row(field) for field in (*((page.label,) if page.label else ()), *page.fields)]
    return _table(("setting", "type", "default", "role", "meaning"), rows)


def _row(field: Field) -> tuple[str, ...]:
    name = f"*{field.name}*" if field.is_label else _code(field.name)
    kind = f"{field.kind}; {field.values}" if field.values else field.kind
    default = _code(field.default) if field.default is not None else "required"
    only = f" (only {', '.join(_code(each) for each in field.only)})" if field.only else ""
    return name, kind, default, "label" if field.is_label else field.role.value, field.doc + only


def _words() -> list[str]:
    units = [(" ".join(_code(name) for name in names), meaning) for names, meaning in UNITS.items()]
    multipliers = [(" ".join(_code(name) for name in names), meaning) for names, meaning in MULTIPLIERS.items()]
    functions = [(" ".join(_code(f) for f in _forms(written)), meaning) for written, meaning in FUNCTIONS.values()]
    return [
        "## Functions\n", _table(("function", "result"), functions),
        "## Units\n", _table(("unit", "of"), units),
        "## Multipliers\n", _table(("multiplier", "meaning"), multipliers),
        "## Constants\n", _table(("word", "meaning"), [(_code(name), text) for name, text in CONSTANTS.items()]),
    ]  # fmt: skip


def _later() -> list[str]:
    rows = [("block", later.KINDS), ("action", later.ACTIONS), ("event", later.EVENTS),
            ("source", later.SOURCES), ("link", later.LINKS)]  # fmt: skip
    names = {page.block: page.name for page in every_page()}
    rows += [(f"setting of {_code(names[block])}", settings) for block, settings in later.SETTINGS.items()]
    rows += [(f"{_code(name)} of {_code(names[block])}", words) for (block, name), words in later.WORDS.items()]
    intro = "These words are reserved and not supported yet; using one of them is the error X209.\n"
    listed = [(what, " ".join(_code(word) for word in words)) for what, words in rows if words]
    return ["## Reserved words\n", intro, _table(("of", "words"), listed)]


def _forms(written: str) -> list[str]:
    """`env("NAME"), env("NAME", default)` as its two forms."""
    first, *rest = written.split("), ")
    return [f"{part})" for part in (first, *rest[:-1])] + [rest[-1]] if rest else [first]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"
