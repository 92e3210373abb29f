"""Binding nodes to ops: the plan and the code cannot drift apart unnoticed."""

import ast
import re
from pathlib import Path

import pytest

from xtrain.plan.architecture import Architecture
from xtrain.plan.graph import RESUMED
from xtrain.plan.plan import Node
from xtrain.planner.review.resumable import rules_of
from xtrain.runtime.base.ops import COMPONENTS, ROOMS, ROOT, Op, PlanMismatch, load_ops, op_files, op_named


def make(model: str, size: int, factor: float = 2.0) -> str:
    return f"{model} {size * factor:g}"


OP = Op("setup.make", make, None)


def node(**args) -> Node:
    return Node(id="setup.make", kind="setup", op="setup.make", args=args)


def test_every_op_that_plans_are_compared_by_has_its_function():
    load_ops()
    assert rules_of("setup.ema", {}) is not None
    assert [name for name in RESUMED if name not in COMPONENTS and op_named(name) is None] == []


def test_arguments_come_from_the_node_then_from_what_was_given():
    assert OP.bind(node(size=3), {"model": "m", "size": 9, "other": 1})() == "m 6"
    assert OP.bind(node(size=3, factor=1), {"model": "m"})() == "m 3"


def test_an_argument_that_the_op_does_not_take_is_a_mismatch():
    with pytest.raises(PlanMismatch, match="gives width"):
        OP.bind(node(size=3, width=1), {"model": "m"})


def test_a_parameter_that_nothing_gives_is_a_mismatch():
    with pytest.raises(PlanMismatch, match="needs `model`"):
        OP.bind(node(size=3), {})


def test_nested_values_are_made_into_their_class():
    def width(architecture: Architecture) -> int:
        return architecture.dim

    arch = {
        "family": "llama", "dim": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 16, "vocab": 10,
        "rope_theta": 1e4, "norm_eps": 1e-6, "tie_embeddings": False, "qk_norm": False, "init_std": 0.02,
    }  # fmt: skip
    assert Op("x", width, None).bind(node(architecture=arch), {})() == 8


def test_every_op_has_a_name_of_its_kind():
    kinds = {name.split(".")[0] for name in load_ops()}
    assert kinds == {"setup", "collate", "step", "rollout", "tick", "event", "request", "shutdown"}


def test_every_op_that_a_graph_names_has_its_function():
    load_ops()
    texts = [path.read_text() for room in ("planner", "components") for path in (ROOT / room).rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'\.add\(\s*"\w+",\s*"([a-z_.]+)"', text)}
    assert len(named) > 50
    assert [name for name in named if name not in COMPONENTS and op_named(name) is None] == []


def test_the_text_of_a_file_shows_that_it_defines_ops():
    def defines(path: Path) -> bool:
        functions = (each for each in ast.walk(ast.parse(path.read_bytes())) if hasattr(each, "decorator_list"))
        calls = (each for function in functions for each in function.decorator_list if isinstance(each, ast.Call))
        return any(ast.unparse(call.func).split(".")[-1] == "op" for call in calls)

    assert op_files() == sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if defines(path))
