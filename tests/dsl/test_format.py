"""The one style."""

from pathlib import Path

import pytest

from xtrain.dsl.diagnostics import SpecErrors
from xtrain.dsl.format import format_source
from xtrain.dsl.source import Source

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(
    ("before", "after"),
    [
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
        ("collate=a->b( 1 )->c", "collate = a -> b(1) -> c\n"),
        ('x = """a\n   b"""', 'x = """a\n   b"""\n'),
        ("best = eval . code", "best = eval.code\n"),
        ("a = { b: 1\n c: 2 }", "a = {\n  b: 1\n  c: 2\n}\n"),
        ("a { b { x = 1\n } }", "a { b {\n  x = 1\n} }\n"),
    ],
)
def test_style(before, after):
    assert format_source(Source("spec", before)) == after
    assert format_source(Source("spec", after)) == after


def test_the_formatted_data_stays_as_it_is():
    text = (DATA / "quickstart.xtrain").read_text(encoding="utf-8")
    assert format_source(Source("spec", text)) == text


def test_a_broken_spec_is_refused_with_all_its_syntax_errors():
    with pytest.raises(SpecErrors) as raised:
        format_source(Source("spec", "a = \nb { c = 1\n"))
    assert [d.code for d in raised.value.diagnostics] == ["X106", "X103"]


def test_names_are_no_business_of_the_formatter():
    assert format_source(Source("spec", "nonsense { lr = }".replace("lr = ", "lr = 1"))) == "nonsense { lr = 1 }\n"
