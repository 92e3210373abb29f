"""Faults that tests/mutants.py plants: every kind, where it is found, and nothing in texts and annotations."""

import ast

import pytest
from faults import faults


@pytest.mark.parametrize(("code", "planted"), [
    ("a < b", {"a <= b"}),
    ("a == b", {"a != b"}),
    ("a not in b", {"a in b"}),
    ("a and b", {"((b))", "((a))"}),
    ("z = x if a else y", {"z = x if not (a) else y", "z = x if True else y", "z = x if False else y"}),
    ("[x for x in y if x]", {"[x for x in y if True]"}),
    ("x[1:]", {"x[2:]"}),
    ("x = True", {"x = False"}),
    ("x = 0.5", {"x = 1.0"}),
    ("a - b", {"a + b"}),
    ("f'{a}' + b", set()),
    ("f(a, b=c)", {"None"}),
    ("x = f(a, b)", {"x = f(b, a)"}),
    ("x = min(a, b)", {"x = a", "x = b"}),
    ("x = sorted(a)", {"x = (a)"}),
    ("x = a.sum(d)", {"x = a"}),
    ("x['rows']", {"x['rowx']"}),
    ("x = 'a text for people'", set()),
    ("x = f(help='rows', strict=True, kw_only=True, init=False, maxsize=2)", set()),
    ("assert a < b and c", set()),
    ("Kind = Literal['rows', 'columns']", set()),
    ("x: 'Text' = a", set()),
    ("__all__ = ['a']", set()),
    ("é = 'x'; a < b", {"é = 'y'; a < b", "é = 'x'; a <= b"}),
])  # fmt: skip
def test_faults_of_a_line(code: str, planted: set[str]):
    text = f"{code}\n".encode()
    found = {fault.planted(text).decode().strip() for fault in faults(text)}
    assert found == planted
    assert all(ast.parse(each) for each in found)
