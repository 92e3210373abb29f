"""One rank whose parameters FSDP only converts: each is converted once a step."""

import json
from collections import Counter

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from xtrain.planner.load import plan_from_text
from xtrain.runtime.loop.executor import Executor

SPEC = """
experiment one {{ seed = 3, budget = 3 steps }}
model {model}
tokenizer bytes
dataset made {{ source = synthetic(documents = 50, length = 40), holdout = 10% }}
batch {{ sequence = 64, micro = 2, accumulate = 3 }}
optimizer adamw {{ lr = 1e-2, clip = 1.0 }}
precision {{ params = fp32, compute = bf16 }}
parallel {{ fsdp auto {{ {fsdp} }} }}
launch {{ device = cpu }}
every 1 step log
every 2 steps eval made {{ batches = 1 }}
checkpoint {{ enabled = false }}
"""
MODELS = {
    "dense": "llama { dim = 32, layers = 2, heads = 2 }",
    "experts": "qwen3_moe { dim = 32, layers = 2, heads = 2, experts = 4, experts_per_token = 2, expert_ffn = 16 }",
}
UNITS = {"dense": 3, "experts": 5}


def curve(folder, model, fsdp):
    found = plan_from_text(SPEC.format(model=MODELS[model], fsdp=fsdp), "one.xtrain")
    assert found.plan is not None, found.diagnostics.render()
    assert Executor(found.plan, folder, rank=0).run() == "done"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(each.get("loss"), each.get("grad_norm"), each.get("eval.made.loss")) for each in records]


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_converted_once_a_step_and_numbers_stay(tmp_path, monkeypatch, model):
    count, gather = Counter[str](), FSDPParamGroup.wait_for_unshard
    current = ["auto"]

    def counted(group):
        count[current[0]] += group._all_gather_result is not None
        return gather(group)

    monkeypatch.setattr(FSDPParamGroup, "wait_for_unshard", counted)
    kept = curve(tmp_path / "auto", model, "")
    current[0] = "before"
    before = curve(tmp_path / "before", model, "reshard = true, sync = microbatch")
    assert kept == before and len(kept) >= 3
    # three steps, and an evaluation after the second
    assert count["auto"] == 4 * UNITS[model]
    assert count["before"] > 6 * UNITS[model] + count["auto"]
