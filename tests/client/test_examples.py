"""The programs of `examples/` learn, each against a server on a CPU."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from served import KEY, listening, served, server_plan

from xtrain.client import Server
from xtrain.server.engine_interface import Engine

pytestmark = pytest.mark.distributed

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "llama { dim = 64, layers = 2, heads = 4, kv_heads = 2, ffn = 128, init_std = 0.1 }"
OF_THE_SPEC = "llama { dim = 128, layers = 3, heads = 4, kv_heads = 2, ffn = 384, init_std = 0.1 }"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def learned(engine: Engine, folder: Path, steps: dict[str, int]) -> dict[str, Any]:
    """On the first rank: what programs give that take so many steps, one after the other on one server."""
    found = {}
    with listening(engine, folder / "server") as url, Server(url, key=KEY) as server:
        for name, count in steps.items():
            found[name] = example(name).train(server, count)
    return found


def train(tmp_path: Path, model: str, alpha: float, **steps: int) -> dict[str, Any]:
    plan = server_plan(tmp_path, "precision.params=fp32", f"adapter.alpha={alpha}", model=model, rank=32, rows=4)
    return served(plan, learned, tmp_path / "run", steps)


def test_programs_learn_in_a_few_steps(tmp_path: Path) -> None:
    found = train(tmp_path, SMALL, 1.0, supervised=6, dpo=6, grpo=8)
    losses, _ = found["supervised"]
    assert losses[-1] < 0.7 * losses[0]
    losses, margins = found["dpo"]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < 0.9 * losses[0] and min(margins) > 0
    assert found["grpo"][-1] > 3 * found["grpo"][0], found["grpo"]


@pytest.mark.slow
def test_programs_learn_all(tmp_path: Path) -> None:
    found = train(tmp_path, OF_THE_SPEC, 0.1, supervised=40, dpo=20, grpo=15)
    losses, answers = found["supervised"]
    assert losses[-1] < 0.05 and answers == example("supervised").TALKS
    losses, margins = found["dpo"]
    assert losses[-1] < 0.2 and min(margins) > 2
    assert found["grpo"][-1] > 0.8
