"""A plan as a list: order, sections, search."""

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_boards import small_plan
from made_runs import plan_text

from xtrain.runtime.loop.node_calls import topological
from xtrain.tui.model.planned import PlannedNode, planned
from xtrain.tui.pages.plan_rows import KINDS, ListSection, execution_order, lines, outline


@pytest.mark.parametrize("shape", ["dense", "pipeline"])
def test_nodes_stand_in_an_order_that_respects_every_edge(shape: str) -> None:
    plan = planned(json.loads(plan_text(shape)))  # type: ignore[arg-type]
    assert plan is not None
    order = [node.id for node in execution_order(plan)]
    assert sorted(order) == sorted(node.id for node in plan.nodes)
    assert all(order.index(edge.before) < order.index(edge.after) for edge in plan.edges)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11))), st.permutations(range(12)))
def test_the_order_is_that_in_which_a_run_walks(pairs: set[tuple[int, int]], rank: list[int]) -> None:
    plan = small_plan()
    ids = [node.id for node in plan.nodes]
    # Edges go from lower to higher in some order of the nodes: no circle.
    edges = [(ids[a], ids[b]) for a, b in pairs if rank[a] < rank[b]]
    graph = {**plan.content["graph"], "edges": [{"before": a, "after": b, "data": ""} for a, b in edges]}
    found = planned({**plan.content, "graph": graph})
    assert found is not None
    walked: Any = SimpleNamespace(nodes=found.nodes, edges=[SimpleNamespace(before=a, after=b) for a, b in edges])
    assert execution_order(found) == topological(walked)


def test_edges_come_before_the_order_of_the_plan() -> None:
    order = [node.id for node in execution_order(small_plan())]
    assert order.index("collate.pack") < order.index("setup.loader")


def test_nodes_of_a_circle_are_not_lost() -> None:
    plan = small_plan()
    graph = dict(plan.content["graph"])
    graph["edges"] = [*graph["edges"], {"before": "shutdown.leave", "after": "step.fetch", "data": ""}]
    found = planned({**plan.content, "graph": graph})
    assert found is not None
    assert sorted(node.id for node in execution_order(found)) == sorted(node.id for node in plan.nodes)


def test_kinds_follow_each_other_as_they_are_executed() -> None:
    found = lines(outline(small_plan()))
    kinds = [line.kind for line in found if isinstance(line, ListSection)]
    assert kinds == list(KINDS)
    assert all(one.kind == two.kind or isinstance(two, ListSection) for one, two in pairwise(found))
    assert [line.nodes for line in found if isinstance(line, ListSection)] == [2, 1, 3, 3, 2, 1]


def test_a_kind_of_another_version_has_a_section_too() -> None:
    plan = small_plan()
    graph = dict(plan.content["graph"])
    graph["nodes"] = [*graph["nodes"], {"id": "new.one", "kind": "new", "op": "new.one"}]
    found = planned({**plan.content, "graph": graph})
    assert found is not None
    assert "new.one" in outline(found).ids


def test_what_belongs_to_a_node() -> None:
    found = outline(small_plan())
    assert [tick.steps for tick in found.ticks["tick.checkpoint"]] == [40, None]
    assert found.when == {
        "event.sigterm.checkpoint": ("on sigterm",),
        "event.control.checkpoint": ("asked: stop", "asked: save"),
    }
    assert [edge.before for edge in found.before["step.fetch"]] == ["setup.loader"]
    assert [(edge.after, edge.data) for edge in found.after["setup.loader"]] == [("step.fetch", "rows")]


def ids(query: str = "", folded: frozenset[str] = frozenset()) -> list[str]:
    found = lines(outline(small_plan()), query=query, folded=folded)
    return [line.id for line in found if isinstance(line, PlannedNode)]


@pytest.mark.parametrize(("query", "found"), [
    ("EVAL", ["tick.eval.web"]),
    ("save ends", ["event.sigterm.checkpoint"]),
    ("asked: stop", ["event.control.checkpoint"]),
    ("fsdp", ["setup.bootstrap", "step.forward_backward"]),
    ("nothing like it", []),
])  # fmt: skip
def test_a_search_looks_at_all_that_a_node_says(query: str, found: list[str]) -> None:
    assert ids(query) == found


def test_folded_sections_keep_their_heading_and_a_search_opens_them() -> None:
    assert "step.fetch" not in ids(folded=frozenset({"step"}))
    found = lines(outline(small_plan()), folded=frozenset({"step"}))
    assert [line.folded for line in found if isinstance(line, ListSection)] == [False, False, True, False, False, False]
    assert ids("fetch", frozenset({"step"})) == ["step.fetch"]


def test_of_a_search_only_sections_with_a_find_are_there() -> None:
    found = [line for line in lines(outline(small_plan()), query="checkpoint") if isinstance(line, ListSection)]
    assert [(line.kind, line.shown, line.nodes) for line in found] == [("tick", 1, 3), ("event", 2, 2)]
