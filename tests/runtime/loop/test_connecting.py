"""What ranks ask of the store in which they meet: as planner/costs/run.py counts it."""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from xtrain.planner.load import plan_from_text
from xtrain.runtime.loop.bootstrap import bootstrap

SPEC = """
experiment two { seed = 1, budget = 1 steps }
model llama { dim = 16, layers = 1, heads = 2 }
tokenizer bytes
dataset made { source = synthetic(documents = 50, length = 40) }
batch { sequence = 64 }
optimizer adamw { lr = 1e-3 }
launch { device = cpu }
"""
LAZILY = "TORCH_GLOO_LAZY_INIT"


@pytest.fixture(scope="module")
def startup() -> Any:
    path = Path(__file__).parents[3] / "benchmarks/startup.py"
    spec = importlib.util.spec_from_file_location("startup", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ranks_that_connect_at_once_ask_for_every_address(startup, monkeypatch):
    monkeypatch.delenv(LAZILY, raising=False)
    assert startup.requests_of_gloo(5) == {"set": 5, "wait": 25, "get": 25}  # a `get` is two requests of a TCPStore
    monkeypatch.setenv(LAZILY, "1")
    assert startup.requests_of_gloo(5) == {"set": 5}


@pytest.mark.parametrize("lazily", [False, True])
def test_a_rank_connects_as_the_plan_says(lazily, monkeypatch):
    plan = plan_from_text(SPEC, "two.xtrain", world=2).plan
    assert plan is not None
    seen = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: seen.append(os.environ.get(LAZILY)))
    monkeypatch.setenv(LAZILY, "0")
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    args: dict[str, Any] = {**plan.node("setup.bootstrap").args, **({"lazily": True} if lazily else {})}
    store: Any = object()
    events: list[Any] = []
    records: Any = SimpleNamespace(event=events.append)
    monkeypatch.setattr("xtrain.runtime.loop.bootstrap._medium_is_exact", lambda: True)
    assert args["small_products"]  # so that another library is not taken, though it is exact
    bootstrap(plan, requests=SimpleNamespace(), records=records, store=store, **args)  # pyright: ignore[reportArgumentType]
    assert seen == ["1" if lazily else "0"]
    assert [event.matmul for event in events] == ["highest"]
