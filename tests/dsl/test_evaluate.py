"""Arithmetic, units, functions and constants."""

import pytest

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText
from xtrain.dsl.evaluation.evaluate import Evaluator, Names
from xtrain.dsl.syntax.parser import parse_expression
from xtrain.dsl.values import Quantity


def evaluate(text):
    diagnostics = Diagnostics()
    node = parse_expression(SourceText("spec", text), 0, len(text), diagnostics)
    value = Evaluator(diagnostics).value(node, Names()) if node is not None else None
    return value.data if value is not None else None, diagnostics


@pytest.mark.parametrize(("text", "value"), [
    ("1 + 2 * 3", 7),
    ("(1 + 2) * 3", 9),
    ("4096 / 8", 512),
    ("10 / 4", 2.5),
    ("7 // 2", 3),
    ("7 % 4", 3),
    ("-7 // 2", -4),
    ("2 ** 10", 1024),
    ("2 ** 3 ** 2", 512),
    ("-2 ** 2", -4),
    ("2 ** -1", 0.5),
    ("4 ** 0.5", 2.0),
    ('"data/" + "web"', "data/web"),
    ("2 * 4k steps", Quantity(8000, "steps")),
    ("4k steps * 2", Quantity(8000, "steps")),
    ("4k steps + 1 step", Quantity(4001, "steps")),
    ("4k steps / 2", Quantity(2000, "steps")),
    ("7 steps // 2", Quantity(3, "steps")),
    ("4k steps / 2k steps", 2),
    ("7 steps // 2 steps", 3),
    ("7 steps % 4 steps", Quantity(3, "steps")),
    ("-(3 steps)", Quantity(-3, "steps")),
    ("10% * 2", Quantity(20, "%")),
    ("10% + 5%", Quantity(15, "%")),
    ("10% * 2k steps", Quantity(200, "steps")),
    ("50% / 10%", 5),
    ("1 GiB / 2 MiB", 512),
    ("min(3, 1, 2)", 1),
    ("max(2 steps, 3 steps)", Quantity(3, "steps")),
    ("round(2.6)", 3),
    ("round(2.345, 2)", 2.35 if round(2.345, 2) == 2.35 else 2.34),
    ("ceil(7 steps / 2)", Quantity(4, "steps")),
    ("floor(7 / 2)", 3),
    ("sqrt(16)", 4),
    ("sqrt(2)", 2**0.5),
    ('env("XTRAIN_NO_SUCH_VARIABLE", 3)', 3),
])  # fmt: skip
def test_values(text, value):
    found, diagnostics = evaluate(text)
    assert not diagnostics, diagnostics.render()
    assert found == value
    assert type(getattr(found, "value", found)) is type(getattr(value, "value", value))


@pytest.mark.parametrize(("text", "code", "marked"), [
    ("4 steps + 2 tokens", "X303", "4 steps + 2 tokens"),
    ("4 steps + 2", "X303", "4 steps + 2"),
    ("2 steps * 3 steps", "X303", "2 steps * 3 steps"),
    ("1 / 2 steps", "X303", "1 / 2 steps"),
    ("2 steps ** 2", "X303", "2 steps ** 2"),
    ("min(1, 2 steps)", "X303", "min(1, 2 steps)"),
    ("1 / 0", "X307", "0"),
    ("1 % (1 - 1)", "X307", "1 - 1"),
    ("9 ** 9 ** 9", "X307", "9 ** 9 ** 9"),
    ("10.0 ** 400", "X307", "10.0 ** 400"),
    ("1e300 * 1e300", "X307", "1e300 * 1e300"),
    ("0 ** -1", "X307", "0 ** -1"),
    ("(-8) ** 0.5", "X307", None),
    ("sqrt(-1)", "X307", "sqrt(-1)"),
    ("sqrt(2 steps)", "X308", "sqrt(2 steps)"),
    ("min(1)", "X308", "min(1)"),
    ("round(x = 1)", "X308", "x"),
    ("env(3)", "X308", "env(3)"),
    ('2 * "a"', "X309", '"a"'),
    ("true + 1", "X309", "true"),
    ("-[1]", "X309", "[1]"),
    ("2 * width", "X202", "width"),
    ("1e999", "X108", "1e999"),
    ("9" * 400, "X108", "9" * 400),
])  # fmt: skip
def test_mistakes(text, code, marked):
    _, diagnostics = evaluate(text)
    (error,) = diagnostics
    assert error.code == code
    assert marked is None or error.span.text == marked


def test_both_sides_of_a_unit_error_are_pointed_at():
    _, diagnostics = evaluate("4 steps + 2 tokens")
    (error,) = diagnostics
    assert [span.text for _, span in error.notes] == ["4 steps", "2 tokens"]


def test_the_environment_takes_the_type_of_its_default(monkeypatch):
    monkeypatch.setenv("XTRAIN_TEST_VARIABLE", "8k")
    assert evaluate('env("XTRAIN_TEST_VARIABLE", 1)')[0] == 8000
    assert evaluate('env("XTRAIN_TEST_VARIABLE", "a")')[0] == "8k"
    assert evaluate('env("XTRAIN_TEST_VARIABLE")')[0] == "8k"
    _, diagnostics = evaluate('env("XTRAIN_TEST_VARIABLE", 1 step)')
    assert [d.code for d in diagnostics] == ["X301"]
    monkeypatch.setenv("XTRAIN_TEST_VARIABLE", "true")
    assert evaluate('env("XTRAIN_TEST_VARIABLE", false)')[0] is True


def test_deep_nesting_is_an_error_and_not_a_crash():
    assert evaluate("(" * 3000 + "1" + ")" * 3000)[0] == 1
    for text in ("-" * 3000 + "1", "[" * 3000 + "]" * 3000, "+".join("1" * 3000)):
        assert {d.code for d in evaluate(text)[1]} == {"X307"}
