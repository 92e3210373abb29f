"""The action `export` in plans: its node, and where it cannot stand."""

import pytest

ENDS = 'on finish export { to = "models/end" }'


def test_its_node_says_what_is_written_and_where(make_plan):
    every = 'every 40 steps export { to = "models/{step}", dtype = bf16, shard_size = 1 GiB }'
    plan = make_plan(every=f"{every}\n{ENDS}", ema="ema { decay = 0.9 }")
    tick, end = plan.node("tick.export"), plan.node("event.finish.export")
    assert tick.args == {"to": "models/{step}", "dtype": "bf16", "most": 2**30}
    assert end.args == {"to": "models/end", "dtype": None, "most": 5 * 2**30}
    size = plan.parameters.total
    assert tick.does.startswith("write the averaged weights to models/{step} for transformers, as bf16, ")
    assert "as fp32, " in end.does and f"{4 * size / 2**10:.0f} KiB" in end.does
    assert "averaged" not in make_plan(every=ENDS, ema="ema { publish = false }").node("event.finish.export").does
    (own,) = (each for each in plan.timeline.ticks if each.nodes == ("tick.export",))
    assert own.count == 2
    one = make_plan(every='on finish export { to = "m.gguf", dtype = bf16 }').node("event.finish.export")
    assert one.args == {"to": "m.gguf", "dtype": "bf16", "most": 5 * 2**30, "gguf": True}
    assert one.does.startswith("write the weights to m.gguf for llama.cpp, as bf16, vectors and routers as fp32;")
    exact = make_plan(every='on finish export { to = "m.gguf" }', precision="precision { params = fp64 }")
    assert "llama.cpp, as fp32, vectors" in exact.node("event.finish.export").does


GGUF = 'on finish export {{ to = "m.gguf"{0} }}'
MOE = "model qwen3_moe {{ dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = 4, router {{ {0} }} }}"


@pytest.mark.parametrize(("code", "shown", "blocks", "said"), [
    ("X304", '"models/end"', {"every": ENDS.replace("on finish", "every 9 steps")}, 'to = "models/end-{step}"'),
    ("X525", "export", {"every": ENDS, "model": MOE.format("score = sigmoid")}, '`router.score` is "sigmoid"'),
    ("X525", "export", {"every": ENDS, "model": MOE.format("bias_speed = 0.1")}, "of `router.bias_speed`"),
    ("X525", "export", {"every": ENDS, "model": "model llama { dim = 64, layers = 4, heads = 8, qk_norm = true }"},
        "`qk_norm` is true, and in a llama of transformers it is false"),
    ("X525", "export", {"every": ENDS, "model": "model llama { dim = 64, layers = 4, heads = 5, head_dim = 8 }"},
        "dim 64 is not divisible by heads 5"),
    ("X525", '"m.gguf"', {"every": GGUF.format(", dtype = fp64")}, "in fp32, fp16 or bf16; name a folder"),
    ("X525", '"m.gguf"', {"every": GGUF.format(""), "model": MOE.format("normalise = false")},
        "by their sum, and `norm_topk_prob` is false; name a folder"),
    ("X525", '"m.gguf"', {"every": GGUF.format(""), "model": "model seed_oss { dim = 64, layers = 4, heads = 8 }"},
        "form of SeedOssForCausalLM is unknown"),
    ("X525", '"m.gguf"', {"every": GGUF.format(", adapter = true"), "adapter": "adapter lora { rank = 2 }"},
        "a GGUF file holds a whole model"),
])  # fmt: skip
def test_where_it_cannot_stand(compiled, code: str, shown: str, blocks: dict[str, str], said: str):
    (error,) = compiled(**blocks).diagnostics.errors
    assert error.code == code and said in f"{error.message}; {error.hint}"
    assert error.span is not None and error.span.text == shown


def test_what_changes_nothing_of_an_adapter_is_said(compiled):
    every = 'on finish export { to = "chat", adapter = true, shard_size = 1 GiB, dequantise = true }'
    warned = compiled(every=every, adapter="adapter lora { rank = 2 }").diagnostics.warnings
    assert [each.code for each in warned] == ["W401", "W401"]
    assert "shard_size has no effect" in warned[0].message and "dequantise has no effect" in warned[1].message
    first, second = compiled(every=GGUF.format(", shard_size = 1 GiB, dequantise = true")).diagnostics.warnings
    assert "shard_size has no effect: a GGUF file is not divided" in first.message
    assert "dequantise has no effect: no matrix is quantized" in second.message


def test_averages_that_are_exported_are_published(compiled):
    more = {"ema": "ema { publish = true }", "checkpoint": "checkpoint { enabled = false }"}
    warned = [[each.hint for each in compiled(every=every, **more).diagnostics if each.code == "W401"]
              for every in (ENDS, "")]  # fmt: skip
    assert warned == [[], ["remove it"]]
