"""Planned memory of a step of models that transformers computes, against what torch's CPU allocator gives out."""

import json
from pathlib import Path

import pytest
from code_models import SINGLE, make

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.loop.executor import Executor

# Of the second step, in which gradients and moments are there. Events of memory lie below those of operators: a list
# of events named `[memory]` has only what is allocated outside of all operators.
HOOKS = '''
import json
from torch.profiler import ProfilerActivity, profile
from xtrain import RunContext, hook
from xtrain.runtime.loop.memory_report import memory_by_category

seen = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
before = []


@hook("before_step")
def begin(context: RunContext):
    """Watch the allocator in the second step."""
    if before:
        seen.start()
    before.append(memory_by_category(context.model, context.optimizer, (), context.rank.device).device)


@hook("after_step")
def end(context: RunContext):
    """Write down what was there before, and the most that was allocated beside it."""
    if len(before) == 1:
        return
    seen.stop()
    queue, changes = [*seen.profiler.kineto_results.experimental_event_tree()], []
    for event in queue:
        queue += event.children
        if hasattr(event.extra_fields, "alloc_size"):
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = most = 0
    for _, size in sorted(changes):
        now += size
        most = max(most, now)
    with open("peak.json", "w") as file:
        json.dump({"held": before[-1], "most": most}, file)
'''
SPEC = """use "parts.py"
experiment peak {{ budget = 2 steps }}
model "model" {{ code = transformers }}
tokenizer bytes
dataset lines {{ source = jsonl("data.jsonl") }}
batch {{ sequence = {sequence}, micro = 2, rows = 4 }}
{collate}
optimizer adamw {{ lr = 1e-3 }}
launch {{ device = cpu }}
checkpoint {{ keep = none }}
hook begin
hook end
"""
# Type → whether it packs documents: factors, norms after layers, one matrix for queries, keys and values, absolute
# positions; experts; latent attention; windows and caps; recurrences, alone and with attention.
KINDS = {
    "granite": True, "olmo3": True, "phi3": True, "gpt2": True,
    "glm4_moe": True, "qwen3_moe": True, "mixtral": True, "deepseek_v3": True,
    "gemma2": True, "cohere2": True,
    "mamba": False, "bamba": False, "nemotron_h": False, "falcon_h1": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("inspected_here")
def test_the_peak_of_a_step_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.chdir(tmp_path)
    sequence = 64 if kind == "mamba" else 256  # transformers' loop over positions
    make(kind, tmp_path / "model")
    (tmp_path / "parts.py").write_text(HOOKS)
    text = json.dumps({"text": "x" * (sequence - 1)})  # and the token of its end: plans count rows of one document
    (tmp_path / "data.jsonl").write_text(f"{text}\n" * 20)
    (tmp_path / "spec.xtrain").write_text(SPEC.format(sequence=sequence, collate="" if KINDS[kind] else SINGLE))
    compiled = plan_from_spec(tmp_path / "spec.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    assert Executor(compiled.plan, tmp_path / "run", rank=0).run() == "done"
    found, planned = json.loads((tmp_path / "peak.json").read_text()), compiled.plan.estimates.fullest.memory
    held = sum(found["held"][name] for name in ("parameters", "optimizer", "buffers"))  # gradients are made anew
    measured = held + found["most"]
    print(json.dumps({"kind": kind, "planned": planned.allocated_bytes, "measured": measured}), planned)
    assert measured == pytest.approx(planned.allocated_bytes, rel=0.1)
