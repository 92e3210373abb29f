"""The written reference is what the schema says, and other generated pages are current."""

import re
from pathlib import Path

from examples import each

from xtrain.dsl.diagnostics.codes import CODES
from xtrain.dsl.evaluation.evaluate import FUNCTIONS
from xtrain.dsl.reference.reference import every_page
from xtrain.dsl.reference.text import markdown
from xtrain.dsl.reference.vocabulary import CONSTANTS as CONSTANTS_SAID
from xtrain.dsl.reference.vocabulary import EVENTS
from xtrain.dsl.reference.vocabulary import FUNCTIONS as FUNCTIONS_SAID
from xtrain.dsl.reference.vocabulary import MULTIPLIERS as MULTIPLIERS_SAID
from xtrain.dsl.reference.vocabulary import STATEMENTS as STATEMENTS_SAID
from xtrain.dsl.reference.vocabulary import UNITS as UNITS_SAID
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.component import registry_of
from xtrain.dsl.schema.data_components import LINKS, SOURCES
from xtrain.dsl.schema.setting import open_setting, settings_of
from xtrain.dsl.syntax.lexer import MULTIPLIERS
from xtrain.dsl.syntax.tree import CONSTANTS, STATEMENTS
from xtrain.dsl.values import UNITS

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference.md").read_text(encoding="utf-8")
LANGUAGE = (DOCS / "language.md").read_text(encoding="utf-8")


def test_the_reference_is_current():
    assert markdown() == REFERENCE, "write it anew: xtrain docs --markdown > docs/reference.md"


def section(name):
    """The text under a heading, up to the next heading."""
    found = re.search(rf"^###+ {name}\n(.*?)(?=^#|\Z)", REFERENCE, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def test_every_setting_stands_in_the_reference():
    pages = (page for page in every_page() if page.fields and page.group != "statement")
    each(((page.path, (page,)) for page in pages), stands_in_the_reference)


def stands_in_the_reference(page):
    rows: dict[str, str] = {}
    for name, row in re.findall(r"^\| `(\w+)` \| (.*) \|$", section(page.name), re.MULTILINE):
        rows[name] = rows.get(name, "") + row
    settings = settings_of(page.block)
    flat = {
        name: meta
        for name, (attribute, meta) in settings.items()
        if not blocks.is_block(attribute.type) or name in blocks.KINDS
    }
    free = open_setting(page.block)
    assert rows.keys() == flat.keys() | ({"NAME"} if free else set())
    for name, meta in flat.items():
        assert meta.doc in rows[name]
        for word in blocks.choices_of(settings[name][0].type):
            assert f"`{word}`" in rows[name]


def test_settings_of_one_name_stand_there_as_each_component_has_them():
    """A line for each way, with the meaning and the default that its components have."""
    for page in every_page():
        if (registry := registry_of(page.block)) is None:
            continue
        row = r"^\| `(\w+)` \| .*? \| (.*?) \| \w+ \| (.*?)(?: \(only ([^()]*)\))? \|$"
        rows = re.findall(row, section(page.name), re.MULTILINE)
        for label, component in registry.items():
            own = {name: (a, meta) for name, (a, meta) in settings_of(component).items() if not blocks.is_block(a.type)}
            for name, (attribute, meta) in own.items():
                mine = [row for row in rows if row[0] == name and (not row[3] or f"`{label}`" in row[3])]
                ((_, default, doc, _),) = mine
                if meta.usual is not None:  # its range follows
                    doc = doc.removesuffix(f": {meta.usual.source} (W433)").rpartition("; usual are ")[0]
                assert doc == meta.doc, (page.name, label, name)
                if isinstance(attribute.default, float):
                    assert float(default.strip("`")) == float(f"{attribute.default:g}"), (page.name, label, name)


def test_every_class_of_the_schema_has_a_page():
    classes = {*blocks.KINDS.values(), *blocks.ACTIONS.values(), *SOURCES.values(), *LINKS.values()}
    classes |= {inner for block in blocks.KINDS.values() for inner in blocks.nested(block).values()}
    assert classes <= {page.block for page in every_page()}


def test_every_word_of_the_language_is_explained():
    assert set(FUNCTIONS_SAID) == set(FUNCTIONS)
    assert {word for words in UNITS_SAID for word in words} == set(UNITS)
    assert {word for words in MULTIPLIERS_SAID for word in words} == set(MULTIPLIERS)
    assert set(EVENTS) == set(blocks.EVENTS)
    assert set(CONSTANTS_SAID) == set(CONSTANTS)
    assert set(STATEMENTS) <= set(STATEMENTS_SAID)


def test_every_code_stands_in_the_reference():
    text = (DOCS / "codes.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| ([XW]\d+) \| (.*) \|$", text, re.MULTILINE))
    titles = {code: page.title for code, page in CODES.items()}
    rows = [f"| {code} | {title} |" for code, title in titles.items() if table.get(code) != title]
    assert not rows and table.keys() == titles.keys(), "write into docs/codes.md:\n" + "\n".join(rows)


def test_what_comes_later_stands_in_the_reference():
    text = REFERENCE.partition("## Reserved words")[2]
    words = [word for names in blocks.RESERVED.values() for word in names]
    rows = re.findall(r"^\| .* \| (.*) \|$", text, re.MULTILINE)[2:]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(words)


def test_no_table_of_the_reference_stands_in_the_guide_as_well():
    assert "| default |" not in LANGUAGE
