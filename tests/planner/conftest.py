"""Specs for planner tests: a small valid one as text, block by block, of which a test replaces what it is about."""

from collections.abc import Callable
from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec
from xtrain.dsl.spec import Spec
from xtrain.planner.compile import Compiled, compile_plan

BLOCKS = {
    "experiment": "experiment tiny { seed = 1, budget = 100 steps }",
    "model": "model llama { dim = 64, layers = 4, heads = 8, kv_heads = 4 }",
    "tokenizer": "tokenizer bytes",
    "dataset": "dataset code { source = python_stdlib(), holdout = 1% }",
    "batch": "batch { sequence = 256, accumulate = 4 }",
    "optimizer": "optimizer adamw { lr = 1e-3 }",
}


def spec_text(**blocks: str) -> str:
    return "\n".join({**BLOCKS, **blocks}.values()) + "\n"


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Spec]:
    """`load(batch="batch { … }")`: the small spec with some blocks replaced or added."""

    def build(**blocks: str) -> Spec:
        path = tmp_path / "spec.xtrain"
        path.write_text(spec_text(**blocks))
        loaded = load_spec(path)
        assert loaded.spec is not None, loaded.diagnostics.render()
        return loaded.spec

    return build


@pytest.fixture
def compiled(load: Callable[..., Spec]) -> Callable[..., Compiled]:
    def build(world: int | None = None, **blocks: str) -> Compiled:
        return compile_plan(load(**blocks), world=world)

    return build


@pytest.fixture
def make_plan(compiled: Callable[..., Compiled]):
    """Like `compiled`, for specs that have a plan."""

    def build(world: int | None = None, **blocks: str):
        result = compiled(world, **blocks)
        assert result.plan is not None, result.diagnostics.render()
        return result.plan

    return build
