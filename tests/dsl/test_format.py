"""The one style, and that it changes nothing else: not what a text says, no comment, and nothing the second time."""

import random
import re
from pathlib import Path

import pytest
from examples import drawn
from hypothesis import HealthCheck, assume, given
from spec_texts import spec_texts, write

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText, SpecErrors
from xtrain.dsl.syntax.format import FormatFault, comments, format_source, same
from xtrain.dsl.syntax.lexer import tokenize
from xtrain.dsl.syntax.parser import parse_file

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
GALLERY = Path(__file__).parent / "gallery"


@pytest.mark.parametrize(("before", "after"), [
    ("", ""),
    ("\n\n# only a comment", "# only a comment\n"),
    ("let   a=1+2*-3", "let a = 1 + 2 * -3\n"),
    ("x=-3**-2", "x = -3 ** -2\n"),
    ("x=(a-b)-(-c)", "x = (a - b) - (-c)\n"),
    ("x = [ 1 ,2, ]", "x = [1, 2]\n"),
    ("x = f( a,k=1, )", "x = f(a, k = 1)\n"),
    ("x={a :1,b:{c:2}}", "x = { a: 1, b: { c: 2 } }\n"),
    ("a{ }", "a {}\n"),
    ("a{\n\n}", "a {}\n"),
    ("a{x=1,}", "a { x = 1 }\n"),
    ("a{x=1,\ny=2\n}", "a {\n  x = 1\n  y = 2\n}\n"),
    ("a{\nx=1,y=2,\n\n\n\nz=3}", "a {\n  x = 1, y = 2\n\n  z = 3\n}\n"),
    ("x=[1,\n2 # two\n]", "x = [\n  1,\n  2,  # two\n]\n"),
    ("x=(1+\n2)", "x = (\n  1 +\n  2\n)\n"),
    ("a {\n # c\n}", "a {\n  # c\n}\n"),
    ("a = 1 # c   \n#d\n\n\n\nb = 2", "a = 1  # c\n#d\n\nb = 2\n"),
    ("every 30min log then  eval a{b=1}", "every 30 min log then eval a { b = 1 }\n"),
    ("x = 4k   steps", "x = 4k steps\n"),
    ("x = 10 %", "x = 10%\n"),
    ("x = 8Ki", "x = 8Ki\n"),
    ("x = 1GiB", "x = 1 GiB\n"),
    ("on nan (3)  rollback", "on nan(3) rollback\n"),
    ('model hub ( "a/b",revision="v" ) {}', 'model hub("a/b", revision = "v") {}\n'),
    ('tokenizer hub(\n"a/b"\n)', 'tokenizer hub(\n  "a/b",\n)\n'),
    ("collate=a->b( 1 )->c", "collate = a -> b(1) -> c\n"),
    ("a = 2 .. 4", "a = 2..4\n"),
    ("a = 2 steps..-n*2", "a = 2 steps..-n * 2\n"),
    ('x = """a\n   b"""', 'x = """a\n   b"""\n'),
    ("best = eval . code", "best = eval.code\n"),
    ("a = { b: 1\n c: 2 }", "a = {\n  b: 1\n  c: 2\n}\n"),
    ("a{x=b{ y=1 }}", "a { x = b { y = 1 } }\n"),
    ("a { b { x = 1\n } }", "a { b {\n  x = 1\n} }\n"),
])  # fmt: skip
def test_style(before, after):
    assert format_source(SourceText("spec", before)) == after
    assert format_source(SourceText("spec", after)) == after


def test_the_formatted_data_stays_as_it_is():
    text = (DATA / "quickstart.xtrain").read_text(encoding="utf-8")
    assert format_source(SourceText("spec", text)) == text


def test_a_broken_spec_is_refused_with_all_its_syntax_errors():
    with pytest.raises(SpecErrors) as raised:
        format_source(SourceText("spec", "a = \nb { c = 1\n"))
    assert [d.code for d in raised.value.diagnostics] == ["X106", "X103"]


def test_names_are_no_business_of_the_formatter():
    assert format_source(SourceText("spec", "nonsense { lr = }".replace("lr = ", "lr = 1"))) == "nonsense { lr = 1 }\n"


# Properties -----------------------------------------------------------------------------------------------------------

FILES = sorted([*(ROOT / "specs").glob("*.xtrain"), *DATA.glob("*.xtrain"), *GALLERY.glob("*.xtrain")])
FILES += sorted((ROOT / "dsl" / "starters").glob("*.xtrain"))


def parsed(text):
    """The items of a text, or None if it has syntax errors."""
    diagnostics = Diagnostics()
    file = parse_file(SourceText("spec", text), diagnostics)
    return None if diagnostics.has_errors else file.items


def words(text):
    """The kinds and values of all tokens but separators: what the text says, looked at without the parser."""
    tokens = tokenize(SourceText("spec", text), Diagnostics())
    skipped = ("_NEWLINE", "_COMMA", "COMMENT")
    return [(t.type, repr(t.value) if t.value is not None else t.text) for t in tokens if t.type not in skipped]


def keeps_everything(text):
    """Format a text that has no syntax errors; what it says, and its comments in their order, are the same."""
    formatted = format_source(SourceText("spec", text))
    assert parsed(formatted) == parsed(text)
    assert words(formatted) == words(text)
    assert comments(SourceText("spec", formatted)) == comments(SourceText("spec", text))
    assert format_source(SourceText("spec", formatted)) == formatted
    return formatted


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_files_keep_what_they_say(path):
    text = path.read_text(encoding="utf-8")
    if parsed(text) is None:
        with pytest.raises(SpecErrors):
            format_source(SourceText("spec", text))
    else:
        keeps_everything(text)


@drawn(40, 800, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(spec_texts())
def test_any_text_of_the_grammar_keeps_what_it_says(text):
    assume(parsed(text) is not None)
    formatted = keeps_everything(text)
    assert not re.search(
        r"\n\n\n|[ \t]\n(?![^\n]*\"\"\")", re.sub(r'"""(?:[^\\]|\\.)*?"""', '""', formatted, flags=re.S)
    )


@pytest.mark.slow
def test_ten_thousand_texts_of_the_grammar_keep_what_they_say():
    read = 0
    for seed in range(10_000):
        text = write(random.Random(seed))
        if parsed(text) is not None:
            keeps_everything(text)
            read += 1
    assert read > 9_000


def test_same_tells_trees_apart():
    """The guard of the formatter sees every kind of difference."""
    base = "a x 1 { b = [1, f(c, k = 2)] }\nevery 10 steps log"
    others = [
        "a x 1 { b = [1, f(c, k = 3)] }\nevery 10 steps log",
        "a x 1 { b = [1, f(c, 2)] }\nevery 10 steps log",
        "a x 1.0 { b = [1, f(c, k = 2)] }\nevery 10 steps log",
        "a x { b = [1, f(c, k = 2)] }\nevery 10 steps log",
        "a x 1 { b = [1, f(c, k = 2)] }\nevery 10 tokens log",
        "a x 1 { b = [1, f(c, k = 2)] }",
        "a x 1 { b = [f(c, k = 2), 1] }\nevery 10 steps log",
    ]
    assert same(parsed(base), parsed(base + "\n# comment"))
    assert not any(same(parsed(base), parsed(other)) for other in others)


def test_a_formatter_that_would_change_the_meaning_is_stopped(monkeypatch):
    monkeypatch.setattr("xtrain.dsl.syntax.format.spelling", lambda text: text.replace("512", "513"))
    assert format_source(SourceText("spec", "a = 1")) == "a = 1\n"
    with pytest.raises(FormatFault):
        format_source(SourceText("spec", "a = 512"))


def test_a_formatter_that_would_lose_a_comment_is_stopped(monkeypatch):
    monkeypatch.setattr("xtrain.dsl.syntax.format._Printer.run", lambda self: "a = 1\n")
    assert format_source(SourceText("spec", "a=1")) == "a = 1\n"
    with pytest.raises(FormatFault):
        format_source(SourceText("spec", "a=1 # c"))


def test_deep_nesting_is_formatted():
    text = "a = " + "[" * 600 + "]" * 600
    assert format_source(SourceText("spec", text)) == text + "\n"
