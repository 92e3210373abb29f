"""Traced strings: every operation gives what it gives of plain strings, and characters keep their origins."""

from collections.abc import Callable
from typing import Any

import pytest
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.runtime.feed.chat.template import compiled, tracing
from xtrain.runtime.feed.chat.traced_text import TracedText, plain, runs_of, traced

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: "<" + a + "|" + b + ">",
    "repeat": lambda a, b: 2 * a + b * 2,
    "slice": lambda a, b: a[1:-1] + b[::-1] + a[::2] + b[-3:],
    "index": lambda a, b: (a or "-")[-1] + (b or "-")[0],
    "iterate": lambda a, b: [*a, *b],
    "strip": lambda a, b: a.strip() + b.lstrip("ab") + a.rstrip() + b.strip("\n "),
    "affixes": lambda a, b: a.removeprefix("a") + b.removesuffix("b") + a.removesuffix(""),
    "split": lambda a, b: [*a.split(), *b.split("a"), *a.split("b", 1), *b.rsplit("a", 1), *a.rsplit(None, 1)],
    "lines": lambda a, b: [*a.splitlines(), *b.splitlines(True)],
    "parts": lambda a, b: [*a.partition("a"), *b.rpartition("b")],
    "replace": lambda a, b: a.replace("a", "xy") + b.replace("b", "", 1) + a.replace("ab", b) + b.replace("", a),
    "case": lambda a, b: a.upper() + b.lower().capitalize() + a.title() + b.swapcase(),
    "join": lambda a, b: a.join([b, "-", a]),
    "percent": lambda a, b: a.replace("%", "") % () + "%s" % b,  # noqa: UP031
}
TEXTS = st.text(alphabet="ab \nßé", max_size=8)


def followed(value: Any, sources: list[str]) -> None:
    """Check that characters with an origin are those that stand there."""
    for text in value if isinstance(value, list | tuple) else [value]:
        at = 0
        for length, source, place in runs_of(text):
            if source >= 0 and place >= 0:
                assert plain(text)[at : at + length].lower() == sources[source][place : place + length].lower()
            at += length
        assert at == len(text)


@given(a=TEXTS, b=TEXTS)
@drawn(30, 500)
def test_operations_are_those_of_strings(a: str, b: str):
    for name, operation in OPERATIONS.items():
        expected, found = operation(a, b), operation(traced(a, 0), traced(b, 1))
        assert found == expected, name
        if name != "case":  # ß becomes two letters
            followed(found, [a, b])


EXPRESSIONS = [
    "a ~ b ~ 3", "[a, b] | join('b')", "'a'.join([a, b])", "a | trim | upper", "'%s-%s' % (a, b)",
    "'{}{}'.format(a, b)",
    "'%s' | format(a)", "{'k': a, 'l': [b, 1.5]} | tojson", "[a, {'k': b}] | tojson(indent=2)", "[a, b] | string",
    "{'k': a} | tojson(ensure_ascii=true, sort_keys=true)", "a | indent(2)", "a | replace('a', b)", "a | truncate(3)",
    "a | center(12)", "[a, b] | map('upper') | list | last", "a | default('x')", "a if a else b", "a | length",
    "a | e", "a | wordwrap(2)", "a in b, a == b, a < b", "[b, a] | sort | first", "{'k': a}.get('k', b)", "[a, b]",
    "a[1:] ~ b[:-1]", "a | list | reverse | join", "a | int(7)", "a | string | title", "a is string, a is mapping",
]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize(("a", "b"), [("ab a", "b"), ('a"\\\né', "ß <b>"), (" a ", "")])
def test_expressions_write_what_they_write_untraced(expression: str, a: str, b: str):
    text = "{{ " + expression + " }}"
    expected = compiled(text).render(a=a, b=b)
    found = tracing(text).render(a=traced(a, 0), b=traced(b, 1))
    assert found == expected
    assert sum(length for length, *_ in runs_of(found)) == len(found)


def test_a_separator_is_no_part_of_what_it_separates():
    assert runs_of("ab".join(["", ""])) == ((2, -1, 0),)
    found = tracing("{{ 'ab'.join([x, y]) }}{{ [x, y] | join('ab') }}").render(x=traced("a", 0), y=traced("b", 1))
    assert runs_of(found) == ((1, 0, 0), (2, -1, 0), (1, 1, 0)) * 2


def test_numbers_are_written_with_their_origin():
    found = tracing("{{ n }};{{ [n, 2] | tojson }};{{ n + 1 }}").render(n=traced(17, 0))
    assert isinstance(found, TracedText) and found == "17;[17, 2];18"
    assert [run for run in runs_of(found) if run[1] == 0] == [(2, 0, 0), (2, 0, 0)]
