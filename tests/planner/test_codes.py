"""Every mistake a spec can make has its code, points at the field, and comes with a value that would work."""

import pytest

MOE = "model qwen3_moe { dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = 8, experts_per_token = 2 }"
LEARNING = """model deepseek_v32 {
  dim = 64, layers = 2, heads = 8, q_rank = 40, kv_rank = 64, nope_dim = 32, rope_dim = 16, value_dim = 32, experts = 8,
  index_heads = 16, index_dim = 32, index_topk = 16, index_loss = 0.5, experts_per_token = 2 }"""

# code, what the span shows, blocks that replace those of the small spec, what the hint says
CASES = [
    ("X401", "4", {"parallel": "parallel { fsdp 4 }", "launch": "launch { ranks_per_node = 6 }"}, "use 4 ranks"),
    ("X401", "3", {"launch": "launch { nodes = 3 }", "parallel": "parallel { fsdp 4 }"}, "use 2 nodes"),
    ("X402", "16", {"parallel": "parallel { tp 16 }"}, "use tp 4"),
    ("X403", "8", {"parallel": "parallel { tp 8 }"}, "use tp 4"),
    ("X404", "8", {"parallel": "parallel { pp 8 }", "batch": "batch { sequence = 256, accumulate = 8 }"}, "use pp 4"),
    ("X404", "2", {"parallel": "parallel { pp 2 { stages_per_rank = 2 } }"}, "interleaved_1f1b"),
    ("X405", "250", {"parallel": "parallel { tp 4 }", "batch": "batch { sequence = 250 }"}, "sequence 248 or 252"),
    ("X405", "250", {"parallel": "parallel { cp 2 { ring = 2 } }", "batch": "batch { sequence = 250 }"},
        "sequence 248 or 252"),
    ("X406", "16", {"parallel": "parallel { ep 16, fsdp 16 }", "model": MOE}, "use ep 8"),
    ("X407", "4", {"parallel": "parallel { ep 4, fsdp 6 }", "model": MOE}, "ep 2"),
    ("X408", "8", {"model": "model llama { dim = 100, layers = 4, heads = 8 }"}, "heads 5 or 10"),
    ("X408", "3", {"model": "model llama { dim = 64, layers = 4, heads = 8, kv_heads = 3 }"}, "kv_heads 2"),
    ("X408", "15", {"model": "model llama { dim = 64, layers = 4, heads = 8, head_dim = 15 }"}, "head_dim 16"),
    ("X409", "2", {"parallel": "parallel { ep 2, fsdp 2 }"}, "qwen3_moe"),
    ("X411", "2", {"parallel": "parallel { pp 4 }", "batch": "batch { sequence = 256, accumulate = 2 }"}, "4 or more"),
    ("X412", "9", {"model": MOE.replace("token = 2", "token = 9")}, "8 or fewer"),
    ("X413", "cp", {"parallel": "parallel { cp 4 { ring = 2, ulysses = 4 } }"}, "cp 8"),
    ("X434", "0.5", {"model": LEARNING, "adapter": "adapter lora { rank = 4 }"}, "index_loss 0"),
    ("X434", "0.5", {"model": LEARNING.replace("2 }", '2, frozen = ["layers.*.self_attn"] }')}, "leave indexers out"),
    ("X434", '"layers.4"', {"model": MOE.replace("2 }", '2, frozen = ["layers.4"] }')}, "0 to 3"),
    ("X437", "true", {"optimizer": "optimizer lion { lr = 1e-4, stochastic_rounding = true }"}, "params bf16"),
    ("X501", "nowhere", {"every": "every 10 steps eval nowhere"}, "code"),
    ("X502", "100%", {"dataset": "dataset code { source = python_stdlib(), holdout = 100% }"}, "lower its holdout"),
    ("X502", "", {"dataset": ""}, "dataset web"),
    ("X503", "dataset", {"more": "dataset more { source = python_stdlib() }"}, "100%"),
    ("X504", "code", {"dataset": "dataset code { source = python_stdlib() }", "every": "every 10 steps eval code"},
        "holdout = 1%"),
    ("X505", "no/where", {"tokenizer": 'tokenizer "no/where"'}, "tokenizer bytes"),
    ("X506", "100", {"model": "model llama { dim = 64, layers = 4, heads = 8, vocab = 100 }"}, "vocab 258"),
    ("X508", "flatten", {"collate": "collate = flatten -> to_tensor -> shift_tokens -> pack"}, "to_tensor -> flatten"),
    ("X508", "to_tensor", {"collate": "collate = to_tensor -> flatten -> pack"}, "shift_tokens"),
    ("X508", "to_tensor", {"collate": "collate = to_tensor -> flatten"}, "pack"),
    ("X509", "to_tensor", {"collate": "collate = to_tensor -> flatten -> shift_tokens -> pack(group = 9)"},
        "pack(multipack, group = 9)"),
    ("X601", "6", {"batch": "batch { sequence = 256, rows = 6 }", "parallel": "parallel { fsdp 4 }"}, "rows 4 or 8"),
    ("X601", "6", {"batch": "batch { sequence = 256, rows = 6, micro = 2, accumulate = 2 }"}, "rows 4"),
    ("X602", "200", {"scheduler": "scheduler cosine { warmup = 200 steps }"}, "50 steps or fewer"),
    ("X602", "60", {"scheduler": "scheduler wsd { warmup = 60%, decay = 50% }"}, "steps"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "shown", "blocks", "hint"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_a_mistake_is_named_with_a_value_that_works(compiled, code, shown, blocks, hint):
    result = compiled(**blocks)
    assert result.plan is None
    found = [d for d in result.diagnostics.errors if d.code == code]
    assert found, result.diagnostics.render()
    assert hint in (found[0].hint or "")
    if shown:
        assert found[0].span is not None
        assert shown in found[0].span.text


def test_a_world_that_does_not_fit_names_the_axes(compiled):
    result = compiled(6, parallel="parallel { tp 4, fsdp auto }")
    (error,) = result.diagnostics.errors
    assert error.code == "X401"
    assert "tp 4" in error.message and "--world 6" in error.message
    assert "4 or 8 ranks" in error.hint


def test_several_automatic_axes(load, compiled):
    from attrs import evolve

    from xtrain.dsl.schema.parallel import Tp
    from xtrain.dsl.schema.setting import AUTO
    from xtrain.planner.compile import compile_plan

    spec = load()
    spec = evolve(spec, parallel=evolve(spec.parallel, tp=Tp(size=AUTO)))  # type: ignore[arg-type]
    (error,) = compile_plan(spec).diagnostics.errors
    assert error.code == "X410" and "fsdp and tp" in error.message


def test_all_mistakes_are_reported_together(compiled):
    result = compiled(
        7,
        model="model llama { dim = 60, layers = 2, heads = 8, vocab = 10 }",
        parallel="parallel { tp 16, pp 4, cp 4 { ring = 3 } }",
        scheduler="scheduler cosine { warmup = 200 steps }",
        every="every 10 steps eval nowhere",
        collate="collate = flatten",
        more="dataset more { source = python_stdlib() }",
    )
    codes = {error.code for error in result.diagnostics.errors}
    assert codes >= {"X401", "X402", "X404", "X408", "X413", "X501", "X503", "X506", "X508", "X602"}


def test_warnings_stand_beside_a_plan(compiled):
    result = compiled(
        dataset='dataset web { source = jsonl("no/such/*.jsonl") }',
        tokenizer='tokenizer "no/where"',
        model="model llama { dim = 64, layers = 4, heads = 8, vocab = 500 }",
        every="every 500 steps log",
    )
    assert result.plan is not None
    assert {d.code for d in result.diagnostics.warnings} == {"W501", "W505", "W601"}
    warned = {check.code for check in result.plan.checks if check.status == "warn"}
    assert warned == {"W501", "W505", "W601"}
    assert all(check.place for check in result.plan.checks if check.status == "warn")


@pytest.mark.parametrize(
    ("blocks", "why"),
    [({}, "one data rank takes all rows"),
        ({"parallel": "parallel { fsdp 2 }", "batch": "batch { sequence = 64, rows = 2 }"}, "takes one row a step"),
        ({"parallel": "parallel { fsdp 2 }", "batch": "batch { sequence = 64, rows = 4 }"}, None)],
)  # fmt: skip
def test_rows_that_cannot_be_dealt_by_cost_are_said(compiled, blocks, why):
    result = compiled(collate="collate = to_tensor -> flatten -> shift_tokens -> pack(best_fit)", **blocks)
    assert result.plan is not None
    warned = [d.message for d in result.diagnostics.warnings]
    assert [d.code for d in result.diagnostics.warnings] == ["W502"] * bool(why)
    assert why is None or why in warned[0]


def test_a_valid_spec_passes_every_check(make_plan):
    plan = make_plan(
        every="every 10 steps eval code then log", collate="collate = to_tensor -> flatten -> shift_tokens -> pack"
    )
    assert {check.status for check in plan.checks} == {"pass"}
    assert all(check.evidence for check in plan.checks)
