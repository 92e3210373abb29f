"""Settings that are written and change nothing on the mesh at hand are said; the plan stays what it is without them."""

import re

import pytest

IDLE = {
    "parallel { tp 1 { loss = false } }": "loss has no effect: tp is 1",
    "parallel { pp 1 { schedule = gpipe } }": "schedule has no effect: pp is 1",
    "parallel { cp 1 { fold = none } }": "fold has no effect: cp is 1",
    "parallel { tp 2, fsdp 1 { reduce = bf16 } }": "reduce has no effect: nothing is sharded",
    "parallel { pp 2, fsdp 1 { reshard = false } }": "reshard has no effect: nothing is sharded",
}
USED = (
    "parallel { tp 2 { loss = false } }",
    "parallel { pp 2 { schedule = gpipe } }",
    "parallel { cp 2 { fold = none } }",
    "parallel { fsdp 2 { reduce = bf16 } }",
    "parallel { fsdp 1 { reduce = bf16, replicate = 2 } }",
    "parallel { cp 2, fsdp 1 { reduce = bf16 } }",
)


def warnings(result) -> list[str]:
    return [d.message for d in result.diagnostics if d.code == "W401"]


@pytest.mark.parametrize(("parallel", "message"), IDLE.items())
def test_what_changes_nothing_is_said(compiled, parallel, message):
    result = compiled(parallel=parallel)
    assert warnings(result) == [message]
    bare = compiled(parallel=re.sub(r" \{ \w+ = \w+ \}", "", parallel))
    assert result.plan is not None and bare.plan is not None
    assert result.plan.nodes == bare.plan.nodes


@pytest.mark.parametrize("parallel", USED)
def test_what_changes_something_is_not(compiled, parallel):
    result = compiled(parallel=parallel)
    assert result.plan is not None and warnings(result) == []


def test_a_reduce_format_is_used_where_only_experts_are_sharded(compiled):
    model = "model qwen3_moe { dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = 8 }"
    assert warnings(compiled(model=model, parallel="parallel { tp 2, fsdp 1 { reduce = bf16 } }")) == []


DELTA = "qwen3_5 { dim = 64, layers = 4, heads = 8, kv_heads = 4"


@pytest.mark.parametrize(("settings", "idle"), [
    ("attention_layers = [0, 1, 2, 3], delta_kernel = 2, delta_value_dim = 8", ["delta_kernel", "delta_value_dim"]),
    ("attention_layers = [], head_dim = 16, rotary_share = 0.5", ["head_dim", "rotary_share"]),
    ("attention_layers = [], rope_theta = 1e5, delta_key_heads = 2", ["kv_heads", "rope_theta"]),
    ("attention_layers = [1], head_dim = 16, rotary_share = 0.5, delta_kernel = 2", []),
    ("head_dim = 16, delta_kernel = 2", []),
])  # fmt: skip
def test_settings_of_layers_that_a_model_has_none_of(compiled, settings, idle):
    found = warnings(compiled(model=f"model {DELTA}, {settings} }}"))
    assert sorted(message.partition(" ")[0] for message in found) == idle
