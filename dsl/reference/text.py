"""The reference as text for a terminal: an overview, a page for each block, and one for each setting."""

import textwrap
from collections.abc import Iterable
from typing import Final

from xtrain.dsl import blocks
from xtrain.dsl.reference.reference import ROLES, Field, ReferencePage, pages
from xtrain.dsl.reference.topics import Topic, TopicWord
from xtrain.dsl.reference.vocabulary import EVENTS, FUNCTIONS, MULTIPLIERS, STATEMENTS, UNITS

_BOLD: Final = "\x1b[1m"
_DIM: Final = "\x1b[2m"
_RESET: Final = "\x1b[0m"
_WIDEST: Final = 100


class ReferenceText:
    """Writes the reference. width: columns of the terminal; color: whether it shows bold and dim."""

    def __init__(self, *, width: int = 80, color: bool = False) -> None:
        self.width, self.color = max(40, min(width, _WIDEST)), color

    def overview(self) -> str:
        """What there is, by kind."""
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
        """The pages of what a word speaks of: one setting in full, several in a line each."""
        found = tuple(found)
        paths = {topic.path if isinstance(topic, Field) else "" for topic in found}
        alone = len(paths) == 1  # several of one path: a setting that components have in different ways
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
        """A block, action, source or link with its settings."""
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
        """A setting with all that is known of it."""
        lines = [f"{self._bold(field.path)}  {self._dim('label' if field.is_label else 'setting')}", ""]
        lines += [*self._wrapped(field.doc, "  "), ""]
        facts = [("type", field.kind), ("default", field.default if field.default is not None else "must be given")]
        if field.values:
            facts.append(("values", field.values))
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
        """Two columns under a title; nothing if there are no rows."""
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
    "constant": "constant", "event": "event", "later": "reserved",
}  # fmt: skip


def _settable(field: Field) -> str:
    """The setting on a command line; empty where `--set` does not reach."""
    kind = field.path.partition(".")[0]
    if field.group in ("action", "statement"):
        return _settable_action(field)
    if field.group != "block" or (kind in blocks.NAMED and field.is_label) or field.is_block:
        return ""
    path = field.path.rpartition(".")[0] if field.is_label else field.path
    dotted = path.replace(f"{kind}.", f"{kind}.NAME.") if kind in blocks.NAMED else path
    return _set_text(f"{dotted}={field.example}")


def _settable_action(field: Field) -> str:
    """The period of a tick, the number behind `nan`, a setting of an action."""
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
