"""What a word of `xtrain docs WORD` speaks of: a page, a setting, or a word of the language that belongs to neither."""

from collections.abc import Iterator
from typing import Literal

from attrs import frozen

from xtrain.dsl import blocks
from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.reference.reference import Field, ReferencePage, every_page
from xtrain.dsl.reference.vocabulary import CONSTANTS, EVENTS, FUNCTIONS, MULTIPLIERS, STATEMENTS, UNITS
from xtrain.dsl.schema import later
from xtrain.dsl.schema.setting import open_setting, settings_of


@frozen
class TopicWord:
    """A word without a page of its own. written: how it stands in a spec."""

    kind: Literal["statement", "function", "unit", "multiplier", "constant", "event", "later", "choice"]
    name: str
    written: str
    meaning: str


Topic = ReferencePage | Field | TopicWord


def find(topic: str) -> tuple[Topic, ...]:
    """Everything that goes by a name: a path (`parallel.fsdp.reduce`), or a last part of one (`reduce`, `1f1b`).

    A path with a dataset's name, as `--set` takes it, leads to the setting of all datasets; so does one of a phase.
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
    """The topic that a wrong one was probably meant to be."""
    entries = list(_entries(tuple(every_page())))
    names = [key for key, _ in entries]
    names += [key.rpartition(".")[2] for key in names]
    names += [word for _, entry in entries if isinstance(entry, Field) for word in entry.choices]
    return closest(topic.strip(), dict.fromkeys(names))


def _entries(pages: tuple[ReferencePage, ...]) -> Iterator[tuple[str, Topic]]:
    """Path → what it leads to; a path may lead to several things, as `checkpoint` to a block and an action."""
    for page in pages:
        yield page.path, page
    for page in pages:
        for field in (*((page.label,) if page.label else ()), *page.fields):
            yield field.path, field
    for word in words():
        yield word.name, word


def words() -> Iterator[TopicWord]:
    """The words that have no page."""
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
    for kind, names in (("block", later.KINDS), ("action", later.ACTIONS), ("event", later.EVENTS),
                        ("source", later.SOURCES), ("link", later.LINKS)):  # fmt: skip
        for name in names:
            yield TopicWord("later", name, name, f"{kind}; reserved, and not supported by this version (X209)")


def _choices(word: str, pages: tuple[ReferencePage, ...]) -> Iterator[TopicWord]:
    """The settings and labels that know a fixed word."""
    for page in pages:
        known = [field for field in (*((page.label,) if page.label else ()), *page.fields) if word in field.choices]
        for field in {field.path: field for field in reversed(known)}.values():
            yield TopicWord("choice", word, field.path, field.doc)
