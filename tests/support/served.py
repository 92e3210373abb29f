"""A server's ranks for a test: forked, with a script on the first of them in the place of clients."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranks import on_ranks

from xtrain.plan.plan import Plan
from xtrain.plan.serialise import from_json, to_json
from xtrain.planner.load import plan_from_spec

SPEC = """
experiment served {{ seed = 3 }}
model {model}
tokenizer bytes
{adapter}
serve {{ {trained}, max_tokens = 64, rows = {rows} }}
launch {{ device = cpu }}
"""
ADAPTER = 'adapter lora {{ rank = {rank}, alpha = 16, targets = ["all_linear", "lm_head"] }}'
LLAMA = "llama { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48, init_std = 0.2 }"
Script = Callable[..., Any]


def server_plan(
    folder: Path, *sets: str, rank: int = 8, rows: int = 2, model: str = LLAMA, world: int | None = None
) -> Plan:
    """rank: of the largest adapter; 0: the model itself is trained."""
    path = folder / "served.xtrain"
    adapter = ADAPTER.format(rank=rank) if rank else ""
    trained = "adapters = 4" if rank else "mode = full"
    path.write_text(SPEC.format(model=model, adapter=adapter, trained=trained, rows=rows))
    compiled = plan_from_spec(path, ("precision.params=fp64", *sets), world)
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def served(plan: Plan, script: Script, folder: Path, *args: Any) -> Any:
    """What `script(engine, folder, *args)` gives on the first rank; it stands in a test module."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_json(plan))
    return on_ranks(plan.mesh.world_size, _serve, folder, text, script, folder, args)[0]


def _serve(rank: int, world: int, text: str, script: Script, folder: Path, args: tuple[Any, ...]) -> Any:
    from xtrain.runtime.base.state import Progress, Rank
    from xtrain.runtime.observe.heartbeat import HeartbeatWriter
    from xtrain.runtime.observe.records import Records
    from xtrain.server.engine.ranks import set_up
    from xtrain.server.engine.started import RanksEngine

    plan = from_json(json.loads(text))
    os.chdir(folder)
    here = Rank(
        rank=rank,
        local_rank=rank,
        world_size=world,
        data_rank=plan.mesh.data_rank(rank),
        data_ranks=plan.mesh.data_ranks,
        device=torch.device("cpu"),
        pipeline_ranks=plan.mesh.size("pp"),
        coordinates=plan.mesh.coordinates(rank),
    )
    resources: dict[str, Any] = {
        "plan": plan,
        "rank": here,
        "records": Records.open(folder, rank),
        "progress": Progress(),
        "beat": HeartbeatWriter(),
    }
    ranks = set_up(plan, resources, without=("setup.bootstrap", "setup.watch"))
    if rank:
        ranks.follow()
        return None
    found = script(RanksEngine(plan, ranks.lead), folder, *args)
    ranks.stop()
    return found
