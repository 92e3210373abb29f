"""Specs for planner tests: a small valid one as text, block by block, of which a test replaces what it is about."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xtrain.components.clusters import here
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.cluster import DeviceSheet, MeasuredMachine
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


SHEET = DeviceSheet(
    memory=16 * 2**30, flops={"fp32": 4e11, "bf16": 8e11}, link=1e9, network=None, capability=0, bandwidth=2e10,
    shared=True,
)  # fmt: skip
MACHINE = MeasuredMachine(device="cpu", name="Any CPU", devices=1, sheet=SHEET, reached=0.5, at="2026-01-02 03:04 UTC")


@pytest.fixture(scope="module")
def known_machine() -> Iterator[None]:
    """`cluster here` is a machine that need not be measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here, "machine_here", lambda: MACHINE)
        yield
