"""Ranges as values of a setting: read, written out again, and described to programs."""

import re

import pytest

from xtrain.dsl.load import load_spec
from xtrain.dsl.reference.json_schema import json_schema
from xtrain.dsl.spec_text import spec_json
from xtrain.dsl.values import Interval


def test_a_range_of_constants_is_that_of_their_values(load):
    loaded = load("let n = 2\nfault_tolerance { restarts = 1, elastic = n..2 * n + 1 }")
    assert loaded.spec is not None and loaded.spec.fault_tolerance.elastic == Interval(2, 5)


def test_a_range_is_set_from_the_command_line(load):
    loaded = load("", "fault_tolerance.elastic=3..9", "fault_tolerance.restarts=1")
    assert loaded.spec is not None and loaded.spec.fault_tolerance.elastic == Interval(3, 9)


def test_a_param_may_be_an_end_and_is_replaced(load):
    loaded = load("param most = 4\nfault_tolerance { elastic = 1..most }", "most=8")
    assert loaded.spec is not None and loaded.spec.fault_tolerance.elastic == Interval(1, 8)


def test_the_resolved_text_gives_the_same_spec(load, tmp_path):
    spec = load("fault_tolerance { restarts = 1, elastic = 2 .. 4 }").spec
    assert spec is not None
    text = load("fault_tolerance { restarts = 1, elastic = 2 .. 4 }").resolved_text()
    assert "elastic = 2..4" in text
    path = tmp_path / "again.xtrain"
    path.write_text(text)
    again = load_spec(path).spec
    assert again is not None and again.fault_tolerance == spec.fault_tolerance


def test_programs_see_a_text_of_a_pattern_that_the_schema_has(load):
    spec = load("fault_tolerance { restarts = 1, elastic = 2..4 }").spec
    assert spec is not None
    elastic = spec_json(spec)["fault_tolerance"]["elastic"]
    kinds = json_schema()["properties"]["fault_tolerance"]["properties"]["elastic"]["anyOf"]
    (pattern,) = [kind["pattern"] for kind in kinds if kind["type"] == "string"]
    assert elastic == "2..4" and re.search(pattern, elastic) and not re.search(pattern, "2.4")


def test_both_ends_belong_to_a_range():
    assert [number in Interval(2, 4) for number in range(1, 6)] == [False, True, True, True, False]


@pytest.mark.parametrize(("text", "codes"), [("2..x", ["X202"]), ("2.5..3", ["X306"]), ("4..2", ["X304"])])
def test_each_end_is_reported_once(load, text, codes):
    found = load(f"fault_tolerance {{ elastic = {text} }}").diagnostics
    assert [error.code for error in found.errors if error.code not in ("X204", "X205")] == codes


def test_a_range_where_none_is_wanted_is_called_one(load):
    (error,) = load("launch { ranks_per_node = 2..4 }").diagnostics.errors
    assert error.code == "X301" and "not a range" in error.message
