"""Reference as text: pages for a terminal, topics of `xtrain docs WORD`, Markdown, and a user's functions.

`docs/reference.md` is the Markdown. `xtrain docs parts.py` reads the module without running it.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText
from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.reference.reference import ROLES, Field, ReferencePage, every_page, pages
from xtrain.dsl.reference.vocabulary import CONSTANTS, EVENTS, FUNCTIONS, MULTIPLIERS, STATEMENTS, UNITS
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.blocks import RESERVED
from xtrain.dsl.schema.component import COMPUTED
from xtrain.dsl.schema.setting import open_setting, settings_of
from xtrain.dsl.spec_text import value_text
from xtrain.dsl.user_parts.kinds import PART_KINDS
from xtrain.dsl.user_parts.reader import Declared, read_parts
from xtrain.dsl.user_parts.signatures import REQUIRED, Parameter, Weight
from xtrain.lazy_attrs import frozen


@frozen
class TopicWord:
    """A word without a page. written: its form in a spec."""

    kind: Literal["statement", "function", "unit", "multiplier", "constant", "event", "choice"]
    name: str
    written: str
    meaning: str


Topic = ReferencePage | Field | TopicWord


def find(topic: str) -> tuple[Topic, ...]:
    """Return everything with a name: a path (`parallel.fsdp.reduce`), or its last part (`reduce`, `1f1b`).

    A path with a dataset's or phase's name, as `--set` takes it, finds the setting of all datasets or phases.
    """
    name = topic.strip().strip("`")
    parts = name.split(".")
    if parts[0] in blocks.NAMED and len(parts) == 3:
        parts = [parts[0], parts[2]]
    block = blocks.KINDS.get(parts[0])
    if block is not None and len(parts) == 2 and open_setting(block) and parts[1] not in settings_of(block):
        parts = [parts[0], "NAME"]
    path = ".".join(parts)
    pages = tuple(every_page())
    entries = list(_entries(pages))
    found = [entry for key, entry in entries if key == path]
    if found and len(parts) > 1:
        return tuple(found)
    found += [entry for key, entry in entries if key.endswith(f".{path}") and key != f"{path}.{path}"]
    if any(isinstance(entry, ReferencePage) for entry in found):
        return tuple(found)
    return (*found, *_choices(path, pages))


def near(topic: str) -> str | None:
    """Return the topic closest to a wrong one."""
    entries = list(_entries(tuple(every_page())))
    names = [key for key, _ in entries]
    names += [key.rpartition(".")[2] for key in names]
    names += [word for _, entry in entries if isinstance(entry, Field) for word in entry.choices]
    return closest(topic.strip(), dict.fromkeys(names))


def _entries(pages: tuple[ReferencePage, ...]) -> Iterator[tuple[str, Topic]]:
    """Yield path → topic; a path may have several topics, as `checkpoint` is a block and an action."""
    for page in pages:
        yield page.path, page
    for page in pages:
        for field in (*((page.label,) if page.label else ()), *page.fields):
            yield field.path, field
    for word in words():
        yield word.name, word


def words() -> Iterator[TopicWord]:
    """Yield the words that have no page."""
    for name, (written, meaning) in STATEMENTS.items():
        if name not in ("every", "on"):
            yield TopicWord("statement", name, written, meaning)
    for name, (written, meaning) in FUNCTIONS.items():
        yield TopicWord("function", name, written, meaning)
    for names, meaning in UNITS.items():
        for name in names:
            yield TopicWord("unit", name, f"10{name}" if name == "%" else f"10 {name}", meaning)
    for names, meaning in MULTIPLIERS.items():
        for name in names:
            yield TopicWord("multiplier", name, f"8{name}", meaning)
    for name, meaning in CONSTANTS.items():
        yield TopicWord("constant", name, name, meaning)
    for name, (when, default) in EVENTS.items():
        yield TopicWord("event", name, f"on {name} …", f"{when}; default action: {default}")


def _choices(word: str, pages: tuple[ReferencePage, ...]) -> Iterator[TopicWord]:
    """Yield the settings and labels that have a fixed word."""
    for page in pages:
        known = [field for field in (*((page.label,) if page.label else ()), *page.fields) if word in field.choices]
        first = {field.path: field for field in reversed(known)}  # several losses have a `normalise`
        for field in reversed(first.values()):
            yield TopicWord("choice", word, field.path, field.doc)


_BOLD: Final = "\x1b[1m"
_DIM: Final = "\x1b[2m"
_RESET: Final = "\x1b[0m"
_WIDEST: Final = 100


class ReferenceText:
    """Writer of the reference. width: columns of the terminal; color: True if it shows bold and dim."""

    def __init__(self, *, width: int = 80, color: bool = False) -> None:
        self.width, self.color = max(40, min(width, _WIDEST)), color

    def overview(self) -> str:
        """Return the overview of all topics, by kind."""
        found = pages()
        top = [page for page in found if page.group == "block"]
        lines = self._table("Blocks", [(page.name, page.summary) for page in top])
        nested = [(f"{page.name}.{inner.name}", inner.summary) for page in top for inner in page.inner]
        lines += self._table("Blocks inside blocks", nested)
        for title, group in (("Actions, after `every …` and `on …`", "action"), ("Sources of a dataset", "source"),
                             ("Links of `collate`", "link")):  # fmt: skip
            lines += self._table(title, [(page.name, page.summary) for page in found if page.group == group])
        lines += self._table("Statements", [(name, meaning) for name, (_, meaning) in STATEMENTS.items()])
        lines += self._table("Events", [(name, when) for name, (when, _) in EVENTS.items()])
        lines += self._table("Functions", [(name, meaning) for name, (_, meaning) in FUNCTIONS.items()])
        lines += self._table("Units", [(" ".join(names), meaning) for names, meaning in UNITS.items()])
        lines += self._table("Multipliers", [(" ".join(names), meaning) for names, meaning in MULTIPLIERS.items()])
        lines += [self._dim("xtrain docs parallel, xtrain docs parallel.fsdp.reduce, xtrain docs X203")]
        return "\n".join(lines) + "\n"

    def topics(self, found: Iterable[Topic]) -> str:
        """Return the pages of the topics of a word: one setting in full, several in a line each."""
        found = tuple(found)
        paths = {topic.path if isinstance(topic, Field) else "" for topic in found}
        alone = len(paths) == 1  # several topics of one path: a setting that components declare differently
        parts: list[str] = []
        lines: list[tuple[str, str]] = []
        for topic in found:
            if isinstance(topic, ReferencePage):
                parts.append(self.page(topic))
            elif alone and isinstance(topic, Field):
                parts.append(self.field(topic))
            elif isinstance(topic, Field):
                lines.append((topic.path, topic.doc))
            elif topic.kind == "choice":
                lines.append((topic.written, f"knows the word `{topic.name}`: {topic.meaning}"))
            else:
                parts.append(self._word(topic))
        if lines:
            parts.append("\n".join(self._table("Settings", lines)).rstrip("\n") + "\n")
        return "\n".join(parts)

    def page(self, page: ReferencePage) -> str:
        """Return the page of a block, action, source or link with its settings."""
        lines = [
            f"{self._bold(page.path)}  {self._dim(page.group)}",
            "",
            *self._wrapped(_plain(page.written), "  "),
            "",
        ]
        for paragraph in (page.summary, *page.more):
            lines += [*self._wrapped(paragraph, "  "), ""]
        for field in (*((page.label,) if page.label else ()), *page.fields):
            lines += [f"  {self._bold(field.name)}  {self._dim(_facts(field))}", *self._wrapped(field.doc, "      ")]
        if page.label or page.fields:
            lines.append("")
        if page.inner:
            lines += self._table("Blocks inside", [(f"{page.path}.{p.name}", p.summary) for p in page.inner])
        by_origin: dict[str, list[str]] = {}
        for name, origin in page.origins:
            by_origin.setdefault(origin, []).append(name)
        if by_origin:
            lines += self._table("Offered by", [(origin, ", ".join(names)) for origin, names in by_origin.items()])
        return "\n".join(lines).rstrip("\n") + "\n"

    def field(self, field: Field) -> str:
        """Return the page of a setting."""
        lines = [f"{self._bold(field.path)}  {self._dim('label' if field.is_label else 'setting')}", ""]
        lines += [*self._wrapped(field.doc, "  "), ""]
        facts = [("type", field.kind), ("default", field.default if field.default is not None else "must be given")]
        if field.values:
            facts.append(("values", field.values))
        if field.usual:
            facts.append(("usual", f"{field.usual} (W433)"))
        if field.only:
            facts.append(("only for", ", ".join(field.only)))
        if not field.is_label:
            facts.append(("role", f"{field.role.value}, {ROLES[field.role]}"))
        facts.append(("write", field.usage))
        settable = _settable(field)
        if settable:
            facts.append(("or", settable))
        wide = max(len(name) for name, _ in facts)
        for name, text in facts:
            indent = " " * (wide + 4)
            wrapped = self._wrapped(text, indent)
            lines.append(f"  {self._dim(name.ljust(wide))}  {wrapped[0].lstrip()}")
            lines += wrapped[1:]
        return "\n".join(lines) + "\n"

    def _word(self, word: TopicWord) -> str:
        lines = [f"{self._bold(word.name)}  {self._dim(_KINDS[word.kind])}", ""]
        if word.written != word.name:
            lines += [f"  {word.written}", ""]
        return "\n".join([*lines, *self._wrapped(word.meaning, "  ")]) + "\n"

    def _table(self, title: str, rows: list[tuple[str, str]]) -> list[str]:
        """Return two columns under a title; nothing if there are no rows."""
        if not rows:
            return []
        wide = min(max(len(name) for name, _ in rows), 28)
        lines = [self._bold(title)]
        for name, text in rows:
            first, *rest = self._wrapped(text.removesuffix("."), " " * (wide + 4))
            lines += [f"  {name.ljust(wide)}  {first.lstrip()}", *rest]
        return [*lines, ""]

    def _wrapped(self, text: str, indent: str) -> list[str]:
        lines = textwrap.wrap(
            text,
            self.width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        return lines or [indent]

    def _bold(self, text: str) -> str:
        return f"{_BOLD}{text}{_RESET}" if self.color else text

    def _dim(self, text: str) -> str:
        return f"{_DIM}{text}{_RESET}" if self.color else text


_KINDS: Final = {
    "statement": "statement", "function": "function", "unit": "unit", "multiplier": "multiplier",
    "constant": "constant", "event": "event",
}  # fmt: skip


def _settable(field: Field) -> str:
    """Return the setting on a command line; empty if `--set` cannot reach it."""
    kind = field.path.partition(".")[0]
    if field.group in ("action", "statement"):
        return _settable_action(field)
    if field.group != "block" or (kind in blocks.NAMED and field.is_label) or field.is_block:
        return ""
    path = field.path.rpartition(".")[0] if field.is_label else field.path
    dotted = path.replace(f"{kind}.", f"{kind}.NAME.") if kind in blocks.NAMED else path
    return _set_text(f"{dotted}={field.example}")


def _settable_action(field: Field) -> str:
    """Return the `--set` path of a tick's period, of the count of `nan`, or of an action's setting."""
    statements = {"every.every": "every.log", "on.count": "on.nan"}
    kind = field.path.partition(".")[0]
    if field.group == "statement":
        path = statements.get(field.path, "")
    else:
        path = "" if field.is_label else f"{'on.nan' if blocks.ACTIONS[kind].only_nan else 'every'}.{field.path}"
    return _set_text(f"{path}={field.example}") if path else ""


def _set_text(text: str) -> str:
    return f"--set '{text}'" if set(text) & set(' "[](){}*') else f"--set {text}"


def _facts(field: Field) -> str:
    default = f"default {field.default}" if field.default is not None else "required"
    only = f"only {', '.join(field.only)}" if field.only else ""
    return "; ".join(part for part in (_plain(field.kind), field.values, default, only) if part)


def _plain(text: str) -> str:
    return text.replace("` `", " | ").replace("`", "")


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
    """Return the whole reference as Markdown."""
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
    """Return the settings of a page, its label first."""
    rows = [_row(field) for field in (*((page.label,) if page.label else ()), *page.fields)]
    return _table(("setting", "type", "default", "role", "meaning"), rows)


def _row(field: Field) -> tuple[str, ...]:
    name = f"*{field.name}*" if field.is_label else _code(field.name)
    kind = f"{field.kind}; {field.values}" if field.values else field.kind
    default = _code(field.default) if field.default is not None else "required"
    only = f" (only {', '.join(_code(each) for each in field.only)})" if field.only else ""
    usual = f"; usual are {field.usual} (W433)" if field.usual else ""
    return name, kind, default, "label" if field.is_label else field.role.value, field.doc + usual + only


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
    names = {page.block: page.name for page in every_page()}
    intro = "These words are reserved and not supported yet; using one of them is the error X209.\n"
    rows = [
        (f"{_code(name)} of {_code(names[block])}", " ".join(map(_code, words)))
        for (block, name), words in RESERVED.items()
    ]
    return ["## Reserved words\n", intro, _table(("of", "words"), rows)]


def _forms(written: str) -> list[str]:
    """Split `env("NAME"), env("NAME", default)` into its two forms."""
    first, *rest = written.split("), ")
    return [f"{part})" for part in (first, *rest[:-1])] + [rest[-1]] if rest else [first]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"


_WORDS = {int: "whole number", float: "number", str: "string", bool: "true or false"}


def own_functions(path: str, diagnostics: Diagnostics) -> str:
    """Return a paragraph for each function with a decorator of xtrain; mistakes in the file are reported.

    Raises OSError and UnicodeDecodeError.
    """
    source = SourceText.from_bytes(path, Path(path).read_bytes())
    found = read_parts(source, diagnostics) or []
    if not found and not diagnostics.has_errors:
        return f"{path} declares nothing that a spec can use\n"
    return "\n".join(_function(each, path) for each in found)


def _function(declared: Declared, path: str) -> str:
    about = PART_KINDS[declared.kind]
    lines = [f"{declared.name}  {declared.kind}, of {path}:{declared.span.line}", ""]
    lines += [f"  {declared.does}", ""] if declared.does else []
    lines.append(f"  {about.noun} {about.chosen.replace('NAME', declared.name).replace('name', declared.name)}")
    lines += [f"  {name} = {_given(value)}" for name, value in declared.options.items() if value]
    lines += ["", *map(_weight, declared.weights)] if declared.weights else []
    lines += (
        ["", *(f"  {each.name}  {_parameter(each)}" for each in declared.parameters)] if declared.parameters else []
    )
    return "\n".join(lines) + "\n"


def _given(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _parameter(parameter: Parameter) -> str:
    """Return a parameter as text: `number; default 0.9`."""
    if parameter.default is REQUIRED:
        default = "required"
    else:
        default = "default: computed by the code"
        if parameter.default is not COMPUTED:
            default = f"default {value_text(parameter.default)}"
    bounds = f", {parameter.check.words}" if parameter.check is not None else ""
    return f"{_type(parameter.type)}{bounds}; {default}" + (f"  {parameter.doc}" if parameter.doc else "")


def _weight(weight: Weight) -> str:
    cut = f"cut by {weight.cut}" if weight.cut else "whole"
    return f"  {weight.name}  weight {' × '.join(map(str, weight.shape))}, {cut}, {weight.initial}"


def _type(kind: Any) -> str:
    if get_origin(kind) is Union:
        return " or ".join("none" if part is type(None) else _type(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return "list"
    if get_origin(kind) is dict:
        return "map"
    if kind in _WORDS:
        return _WORDS[kind]
    words = get_args(kind)
    return " or ".join(f"`{word}`" for word in words) if words else "any value"
