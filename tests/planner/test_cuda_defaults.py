"""Number formats, compilation, memory and garbage on CUDA, as a plan states them."""

import pytest

from xtrain.planner.load import plan_from_text

BIG = """
experiment big {{ budget = 10 steps }}
model llama {{ dim = 4Ki, layers = 32, heads = 32, kv_heads = 8, ffn = 14336, vocab = 128256 }}
tokenizer bytes
dataset made {{ source = synthetic(documents = 50, length = 40) }}
batch {{ sequence = 4Ki, micro = {micro}, rows = 8 }}
optimizer adamw {{ lr = 1e-3 }}
checkpoint {{ enabled = false }}
{more}
"""
H200 = "cluster h200 { nodes = 1, devices = 1 }"
HALF = "precision { compute = bf16 }"
COMPILED = "compile { mode = default }"


def planned(more: str, micro: int = 1):
    found = plan_from_text(BIG.format(more=more, micro=micro), "big.xtrain", world=1)
    assert found.plan is not None, found.diagnostics.render()
    codes = {each.code for each in found.diagnostics} & {"W427", "W428"}
    return found.plan, codes, {check.id: check.evidence for check in found.plan.checks}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (H200, {"W427"}),  # products take all of the time
        ("launch { device = cuda }", {"W427", "W428"}),
        (f"{H200}\nprecision {{ matmul = high }}", {"W428"}),  # fp32 is a choice here
        (f"{H200}\nprecision {{ compute = fp32 }}\ncompile {{ mode = none }}", set()),
        (f"{H200}\n{HALF}", {"W428"}),
        (f"{H200}\n{HALF}\n{COMPILED}", set()),
        (f"{H200}\nprecision {{ params = bf16 }}\n{COMPILED}", set()),
        ("launch { device = cpu }", set()),
        ("", set()),
    ],
)
def test_slow_defaults_on_cuda_are_warned_of(more, expected):
    assert planned(more)[1] == expected


def test_the_warnings_say_what_the_defaults_cost():
    _, _, evidence = planned(H200)
    assert "15 times on h200 slower than in bf16" in evidence["cuda.compute"]
    assert "10 to 30 times, depending on the GPU," in planned("launch { device = cuda }")[2]["cuda.compute"]
    # 0.75 MB a token and layer at 4.0 TB/s, beside about 90 microseconds a token
    assert "about 6% of the time of a step" in planned(f"{H200}\n{HALF}")[2]["cuda.compile"]


@pytest.mark.parametrize(
    ("more", "sync", "reshard"),
    [
        (HALF, "step", False),
        (f"{HALF}\nparallel {{ fsdp auto {{ reshard = true }} }}", "step", True),
        (f"{HALF}\nparallel {{ fsdp auto {{ sync = microbatch }} }}", "microbatch", False),
    ],
)
def test_what_no_rank_shares_is_kept_and_summed_once(more, sync, reshard):
    plan, _, _ = planned(f"{H200}\n{more}")
    assert plan.node("setup.parallel.fsdp").args["reshard"] is reshard
    assert plan.node("step.forward_backward").args["sync"] == sync


def test_a_plan_says_what_a_rank_sets_on_cuda():
    def bootstrap(text: str, world: int = 1):
        found = plan_from_text(BIG.format(more=text, micro=1), "big.xtrain", world=world)
        assert found.plan is not None, found.diagnostics.render()
        return found.plan.node("setup.bootstrap")

    one = {"allocator": "expandable_segments:True", "collect_steps": 50}
    assert bootstrap("launch { device = cuda }").args["cuda"] == bootstrap("").args["cuda"] == one
    assert bootstrap(H200.replace("devices = 1", "devices = 2"), 2).args["cuda"]["nccl"] == {
        "TORCH_NCCL_HIGH_PRIORITY": "1"
    }
    assert "every 50 steps" in bootstrap("").does
    assert "cuda" not in bootstrap("launch { device = cpu }").args
