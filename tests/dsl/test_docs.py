"""The written reference says what the schema says: every setting with its line of doc, every code with its title."""

import re
from pathlib import Path

import pytest

from xtrain.dsl import blocks
from xtrain.dsl.codes import CODES
from xtrain.dsl.schema import later
from xtrain.dsl.schema.setting import settings_of

DOCS = Path(__file__).parents[2] / "docs"
LANGUAGE = (DOCS / "language.md").read_text(encoding="utf-8")


def described():
    """(heading of a section, class) of everything that has settings."""
    for kind, block in blocks.KINDS.items():
        yield kind, block
        yield from blocks.nested(block).items()
    yield from ((name, action) for name, action in blocks.ACTIONS.items() if settings_of(action))
    yield "pack", blocks.LINKS["pack"]


def section(name):
    """The text under a heading, up to the next heading."""
    found = re.search(rf"^###+ {name}\n(.*?)(?=^#|\Z)", LANGUAGE, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


@pytest.mark.parametrize(("name", "block"), list(described()), ids=lambda each: each if isinstance(each, str) else "")
def test_every_setting_stands_in_the_reference(name, block):
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section(name), re.MULTILINE))
    settings = settings_of(block)
    flat = {each: meta for each, (attribute, meta) in settings.items() if not blocks.is_block(attribute.type)}
    assert flat.keys() <= rows.keys()
    assert rows.keys() <= settings.keys()
    for each, meta in flat.items():
        assert meta.doc in rows[each], each
        for word in blocks.choices_of(settings[each][0].type):
            assert f"`{word}`" in rows[each], (each, word)


def test_every_code_stands_in_the_reference():
    text = (DOCS / "codes.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| ([XW]\d+) \| (.*) \|$", text, re.MULTILINE))
    assert table == {code: page.title for code, page in CODES.items()}


def test_what_comes_later_stands_in_the_reference():
    text = LANGUAGE.partition("## Kept for later")[2]
    words = [*later.KINDS, *later.ACTIONS, *later.EVENTS, *later.SOURCES, *later.LINKS]
    words += [name for names in later.SETTINGS.values() for name in names]
    words += [word for names in later.WORDS.values() for word in names]
    named = set(re.findall(r"`(\w+)`", text))
    assert set(words) <= named
    known = {*blocks.KINDS, *blocks.LINKS, "use", "method", "schedule", "kind", "pp", *words}
    assert named <= known
