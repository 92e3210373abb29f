"""Every form of the language, as a tree."""

import attrs
import pytest

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText, Span
from xtrain.dsl.syntax import table
from xtrain.dsl.syntax import tree as s
from xtrain.dsl.syntax.parser import TreeBuilder, parse_expression, parse_file
from xtrain.dsl.values import Quantity


def test_the_parse_table_follows_the_grammar():
    assert table.KEPT.read_text() == table.computed()
    methods = [(rule.method, rule.single) for rule in table.table().rules]
    assert all(method is None or single or hasattr(TreeBuilder, method) for method, single in methods)


def test_lark_computes_the_table_of_a_grammar_that_has_changed(monkeypatch: pytest.MonkeyPatch):
    before = table.table()
    monkeypatch.setattr(table, "digest_of", lambda grammar: "another")
    assert table.table.__wrapped__() == before


NOWHERE = Span(SourceText("", ""), 0, 0)


def at(kind, *arguments):
    """A node without a place: places do not count in comparisons."""
    return kind(NOWHERE, *arguments)


def name(text):
    return at(s.Name, text)


def ref(text):
    return at(s.Reference, tuple(text.split(".")))


def num(value):
    return at(s.Number, value)


def items(text):
    diagnostics = Diagnostics()
    file = parse_file(SourceText("spec", text), diagnostics)
    assert not diagnostics, diagnostics.render()
    return file.items


def expression(text):
    diagnostics = Diagnostics()
    node = parse_expression(SourceText("spec", text), 0, len(text), diagnostics)
    assert not diagnostics, diagnostics.render()
    return node


def block(kind, *labels, body=None):
    return at(s.Block, name(kind), labels, at(s.Body, tuple(body)) if body is not None else None)


def assign(key, value):
    return at(s.Assign, name(key), value)


@pytest.mark.parametrize(("text", "item"), [
    ("seed = 42", assign("seed", num(42))),
    ("batch", block("batch")),
    ("tokenizer bytes", block("tokenizer", name("bytes"))),
    ("a = b { c = 1 }", at(s.Assign, name("a"), ref("b"), at(s.Body, (assign("c", num(1)),)))),
    ('tokenizer "a/b"', block("tokenizer", at(s.String, "a/b"))),
    ("ep 8", block("ep", num(8))),
    ("fsdp auto", block("fsdp", at(s.FixedWord, "auto"))),
    ("ema { }", block("ema", body=[])),
    ("tp 2 { a = 1 }", block("tp", num(2), body=[assign("a", num(1))])),
    ('x a 1 "b" auto', block("x", name("a"), num(1), at(s.String, "b"), at(s.FixedWord, "auto"))),
    ("let a = 1", at(s.Let, name("a"), num(1))),
    ("param a = 1", at(s.Param, name("a"), num(1))),
    ('include "a"', at(s.Include, at(s.String, "a"))),
    ('use "a.py"', at(s.Use, at(s.String, "a.py"))),
    ("use a.b", at(s.Use, ref("a.b"))),
    ("every 10 steps log", at(s.Every, num(Quantity(10, "steps")), (block("log"),))),
    ("every step log", at(s.Every, ref("step"), (block("log"),))),
    ("every 2 * n eval code { batches = 50 } then log", at(s.Every, at(s.Binary, "*", num(2), ref("n")),
            (block("eval", name("code"), body=[assign("batches", num(50))]), block("log")))),
    ("on nan(3) rollback", at(s.On, name("nan"), (at(s.Argument, None, num(3)),), (block("rollback"),))),
    ("on sigterm checkpoint then stop", at(s.On, name("sigterm"), (), (block("checkpoint"), block("stop")))),
])  # fmt: skip
def test_statements(text, item):
    assert items(text) == (item,)


@pytest.mark.parametrize(("text", "value"), [
    ("true", at(s.FixedWord, "true")),
    ("none", at(s.FixedWord, "none")),
    ("width", ref("width")),
    ("eval.code.loss", ref("eval.code.loss")),
    ("let", ref("let")),
    ("then", ref("then")),
    ("[1, 2,]", at(s.ListOf, (num(1), num(2)))),
    ("[]", at(s.ListOf, ())),
    ("f()", at(s.Call, name("f"), ())),
    ("pack(multipack, group = 100k)", at(s.Call, name("pack"),
            (at(s.Argument, None, ref("multipack")), at(s.Argument, name("group"), num(100_000))))),
    ("a -> b(1) -> c",
        at(s.ChainExpression, (ref("a"), at(s.Call, name("b"), (at(s.Argument, None, num(1)),)), ref("c")))),
    ("{}", at(s.Map, ())),
    ('{ web: 1, "c d": { x: 2 } }', at(s.Map, (at(s.Entry, name("web"), num(1)),
                at(s.Entry, at(s.String, "c d"), at(s.Map, (at(s.Entry, name("x"), num(2)),)))))),
    ("(1)", num(1)),
    ("1 + 2 * 3", at(s.Binary, "+", num(1), at(s.Binary, "*", num(2), num(3)))),
    ("1 - 2 - 3", at(s.Binary, "-", at(s.Binary, "-", num(1), num(2)), num(3))),
    ("2 ** 3 ** 2", at(s.Binary, "**", num(2), at(s.Binary, "**", num(3), num(2)))),
    ("-2 ** 2", at(s.Negative, at(s.Binary, "**", num(2), num(2)))),
    ("2 ** -1", at(s.Binary, "**", num(2), at(s.Negative, num(1)))),
    ("7 // 2 % 3", at(s.Binary, "%", at(s.Binary, "//", num(7), num(2)), num(3))),
    ("10 % 3", at(s.Binary, "%", num(10), num(3))),
    ("10%3", at(s.Binary, "%", num(10), num(3))),
    ("10% * 2", at(s.Binary, "*", num(Quantity(10, "%")), num(2))),
    ("n % 3", at(s.Binary, "%", ref("n"), num(3))),
    ("2..4", at(s.IntervalExpression, num(2), num(4))),
    ("2 .. n.a", at(s.IntervalExpression, num(2), ref("n.a"))),
    ("1 + 1..2 * 4", at(s.IntervalExpression, at(s.Binary, "+", num(1), num(1)), at(s.Binary, "*", num(2), num(4)))),
    ("1.5..-2", at(s.IntervalExpression, num(1.5), at(s.Negative, num(2)))),
    ("a..b -> c", at(s.ChainExpression, (at(s.IntervalExpression, ref("a"), ref("b")), ref("c")))),
])  # fmt: skip
def test_expressions(text, value):
    assert expression(text) == value


@pytest.mark.parametrize(("text", "value"), [
    ("42", 42),
    ("1_000", 1000),
    ("3e-4", 3e-4),
    ("0.95", 0.95),
    ("2.0", 2.0),
    ("1e9", 10**9),
    ("8k", 8000),
    ("8Ki", 8192),
    ("1.5k", 1500),
    ("3M", 3 * 10**6),
    ("20B", 20 * 10**9),
    ("2T", 2 * 10**12),
    ("1Mi", 2**20),
    ("1Gi", 2**30),
    ("4k steps", Quantity(4000, "steps")),
    ("1 step", Quantity(1, "steps")),
    ("20B tokens", Quantity(20 * 10**9, "tokens")),
    ("3 epochs", Quantity(3, "epochs")),
    ("0.5 epochs", Quantity(0.5, "epochs")),
    ("7 samples", Quantity(7, "samples")),
    ("30 s", Quantity(30, "seconds")),
    ("30min", Quantity(1800, "seconds")),
    ("2 h", Quantity(7200, "seconds")),
    ("1 d", Quantity(86400, "seconds")),
    ("4 B", Quantity(4, "bytes")),
    ("1.5 GiB", Quantity(3 * 2**29, "bytes")),
    ("10%", Quantity(10, "%")),
    ("2.5 %", Quantity(2.5, "%")),
])  # fmt: skip
def test_numbers(text, value):
    found = expression(text)
    assert found == num(value)
    assert isinstance(found, s.Number)
    amount, wanted = (getattr(v, "value", v) for v in (found.value, value))
    assert type(amount) is type(wanted)


@pytest.mark.parametrize(("text", "value"), [
    ('"a b"', "a b"),
    (r'"\" \\ \n \t \u{1F600}"', '" \\ \n \t 😀'),
    ('""', ""),
    ('"""two\nlines "quoted" """', 'two\nlines "quoted" '),
    ('""""""', ""),
])  # fmt: skip
def test_strings(text, value):
    assert expression(text) == at(s.String, value)


@pytest.mark.parametrize(
    "text",
    ["a { x = 1, y = 2 }", "a {\n  x = 1\n  y = 2\n}", "a { x = 1, y = 2, }",
        "a {\n\n  x = 1,\n\n  # comment\n  y = 2 # comment\n\n}", "a { x = 1,\n y = 2 }\n\n\n",
        "\ufeffa { x = 1\r\n y = 2 }\r\n"],
)  # fmt: skip
def test_a_new_line_or_a_comma_ends_an_item(text):
    source = SourceText.from_bytes("spec", text.encode())
    diagnostics = Diagnostics()
    found = parse_file(source, diagnostics).items
    assert not diagnostics
    assert found == (block("a", body=[assign("x", num(1)), assign("y", num(2))]),)


def test_new_lines_mean_nothing_in_parentheses_and_brackets():
    spread = items("a = [\n1,\n\n2\n]\nb = f(\n1,\n  k = 2,\n)\nc = (1\n+ 2)\nd = {\n x: 1\n y: 2\n}")
    assert spread == items("a = [1, 2]\nb = f(1, k = 2)\nc = (1 + 2)\nd = { x: 1, y: 2 }")


def test_words_that_start_statements_are_names_elsewhere():
    assert items("a = { let: on, use: every }\nb = f(param = include)")


def test_every_node_has_the_span_of_its_text():
    text = "a = [1, f(x = 2 * width)]"
    seen = []

    def walk(node):
        if isinstance(node, s.SyntaxNode):
            seen.append(node.span.text)
            for attribute in attrs.fields(type(node)):
                walk(getattr(node, attribute.name))
        elif isinstance(node, tuple):
            for each in node:
                walk(each)

    walk(items(text))
    for part in (
        text,
        "a",
        "[1, f(x = 2 * width)]",
        "1",
        "f(x = 2 * width)",
        "f",
        "x = 2 * width",
        "2 * width",
        "width",
    ):
        assert part in seen


def test_columns_count_characters():
    source = SourceText("spec", "é = 1\n数据 x")
    span = source.span(source.text.index("x"), source.text.index("x") + 1)
    assert (span.line, span.column, span.end_column) == (2, 4, 5)
    assert str(span) == "spec:2:4"
