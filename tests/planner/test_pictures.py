"""Pictures of the graph: text that Graphviz and Mermaid can read, with every node and edge of the plan in it."""

import re
from pathlib import Path

import pytest
from attrs import evolve
from lark import Lark

from xtrain.plan.plan import Edge, Node
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.show import GROUPS, dot, mermaid

SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.xtrain"))

# The DOT language (https://graphviz.org/doc/info/lang.html), without ports, HTML strings and undirected graphs.
DOT = Lark(
    r"""
    start: "strict"? "digraph" id? "{" statements "}"
    statements: (statement ";"?)*
    ?statement: node | edge | attributes | assignment | subgraph
    assignment: id "=" id
    attributes: KIND list+
    node: id list*
    edge: end ("->" end)+ list*
    ?end: id | subgraph
    subgraph: ("subgraph" id?)? "{" statements "}"
    list: "[" (id "=" id (";" | ",")?)* "]"
    id: NAME | NUMBER | STRING
    KIND.2: "graph" | "node" | "edge"
    NAME: /[A-Za-z_][A-Za-z0-9_]*/
    NUMBER: /-?(\.[0-9]+|[0-9]+(\.[0-9]*)?)/
    STRING: /"(\\.|[^"\\])*"/
    %ignore /\s+/
    """,
    parser="lalr",
)
ID = r"n_\w+"
LABEL = r'"[^"]*"'
MERMAID = {
    "node": re.compile(rf"    ({ID})\[({LABEL})\]"),
    "edge": re.compile(rf"  ({ID}) -->(?:\|({LABEL})\|)? ({ID})"),
    "open": re.compile(rf"  subgraph (group_\w+)\[({LABEL})\]"),
    "close": re.compile(r"  end"),
    "direction": re.compile(r"    direction TB"),
    "comment": re.compile(r"  %% .*"),
    "style": re.compile(r"  classDef (\w+) fill:#[0-9a-f]{6},stroke:#[0-9a-f]{6},color:#[0-9a-f]{6}"),
    "class": re.compile(rf"  class ({ID}(?:,{ID})*) (\w+)"),
}


def plan_of(path):
    plan = plan_from_spec(path).plan
    assert plan is not None
    return plan


def unquoted(token):
    return str(token)[1:-1].replace('\\"', '"').replace("\\\\", "\\") if str(token).startswith('"') else str(token)


def read_dot(text):
    """(ids of nodes by their cluster, edges as triples)."""
    tree = DOT.parse(text)
    clusters = {}
    for subgraph in tree.find_data("subgraph"):
        name = unquoted(subgraph.children[0].children[0])
        clusters[name] = [unquoted(node.children[0].children[0]) for node in subgraph.find_data("node")]
    edges = []
    for edge in tree.find_data("edge"):
        before, after = (unquoted(end.children[0]) for end in edge.children[:2])
        label = unquoted(edge.children[2].children[1].children[0]) if len(edge.children) > 2 else ""
        edges.append((before, after, label))
    return clusters, edges


def read_mermaid(text):
    """(labels of nodes by id, subgraph of each, edges); every line is one of those that Mermaid knows."""
    first, *lines = text.splitlines()
    assert first == "flowchart TD"
    labels, groups, edges, inside, classes, styles = {}, {}, [], "", {}, set()
    for line in lines:
        kind, found = next(
            ((kind, match) for kind, rule in MERMAID.items() if (match := rule.fullmatch(line))), ("nothing", None)
        )
        assert found, f"not Mermaid: {line!r}"
        if kind == "open":
            assert not inside
            inside = found[1]
        elif kind == "close":
            assert inside
            inside = ""
        elif kind == "node":
            assert inside and found[1] not in labels
            labels[found[1]], groups[found[1]] = found[2].strip('"'), inside
        elif kind == "edge":
            edges.append((found[1], found[3], (found[2] or "").strip('"')))
        elif kind == "class":
            classes.update(dict.fromkeys(found[1].split(","), found[2]))
        elif kind == "style":
            styles.add(found[1])
    assert not inside and set(classes) == set(labels) and set(classes.values()) == styles
    assert {end for edge in edges for end in edge[:2]} <= set(labels)
    return labels, groups, edges


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_dot_holds_the_whole_graph(path):
    plan = plan_of(path)
    clusters, edges = read_dot(dot(plan))
    assert clusters == {
        f"cluster_{kind}": [node.id for node in plan.of_kind(kind)] for kind in GROUPS if plan.of_kind(kind)
    }
    assert edges == [(edge.before, edge.after, edge.data) for edge in plan.edges]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_mermaid_holds_the_whole_graph(path):
    plan = plan_of(path)
    labels, groups, edges = read_mermaid(mermaid(plan))
    assert [label.split("<br/>")[0] for label in labels.values()] == [
        node.id.partition(".")[2] for kind in GROUPS for node in plan.of_kind(kind)
    ]
    assert set(groups.values()) == {f"group_{kind}" for kind in GROUPS if plan.of_kind(kind)}
    assert len(edges) == len(plan.edges)
    assert sorted(label for *_, label in edges) == sorted(edge.data for edge in plan.edges)


def test_labels_say_axes_and_times(make_plan):
    plan = make_plan(
        parallel="parallel { fsdp 2, tp 2 }", every="every 10 steps eval code", more="on sigterm checkpoint then stop"
    )
    labels, *_ = read_mermaid(mermaid(plan))
    for label in (
        "parallel.tp<br/>tp 2",
        "eval.code<br/>every 10 steps",
        "sigterm.checkpoint<br/>on sigterm, then stop",
    ):
        assert label in labels.values()
    assert 'label="parallel.tp\\ntp 2"' in dot(plan)


def test_signs_that_the_languages_keep_for_themselves(make_plan):
    """Names of datasets and of experiments may hold anything."""
    plan = make_plan()
    odd = 'a "b" \\ <c> & d; #e\nf|g]h`'
    node = Node(id=f"setup.data.{odd}", kind="setup", op="setup.data", does="")
    twin = Node(id=node.id.replace("<", ">"), kind="setup", op="setup.data", does="")
    edge = Edge(before="setup.bootstrap", after=node.id, data=odd)
    more = evolve(plan, name=odd, nodes=(*plan.nodes, node, twin), edges=(*plan.edges, edge))
    clusters, edges = read_dot(dot(more))
    assert clusters["cluster_setup"][-2:] == [each.id.replace("\n", "\\n") for each in (node, twin)]
    assert len(clusters["cluster_setup"]) == len(more.of_kind("setup")) and len(edges) == len(more.edges)
    labels, _, arrows = read_mermaid(mermaid(more))
    assert len(labels) == len(more.nodes) and len(arrows) == len(more.edges)
    assert arrows[-1][2] == "a #34;b#34; \\ #60;c#62; #38; d#59; #35;e<br/>f|g]h#96;"
