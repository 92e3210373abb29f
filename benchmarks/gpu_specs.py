"""The specs that `gpu_day.py` runs beside those of `one_device.py`: a small model and one feature each."""

from typing import Final

SPEC: Final = """
experiment gpu {{ seed = 1, budget = {steps} steps }}
model {model}
tokenizer bytes
dataset stdlib {{ source = python_stdlib(), holdout = 5% }}
batch {{ sequence = {sequence}, micro = 2, rows = 4 }}
optimizer adamw {{ lr = 1e-3 }}
launch {{ device = {device} }}
every 1 step log
{more}
"""
DENSE: Final = "qwen3 { dim = 256, layers = 4, heads = 4, kv_heads = 2, ffn = 768, init_std = 0.05 }"
EXPERTS: Final = (
    "qwen3_moe { dim = 256, layers = 4, heads = 4, kv_heads = 2, experts = 8, experts_per_token = 2, "
    "expert_ffn = 384, init_std = 0.05 }"
)
TOO_LARGE: Final = "llama { dim = 8192, layers = 80, heads = 64, kv_heads = 8, ffn = 28672, vocab = 128256 }"
FP32: Final = "precision { params = fp32, matmul = highest }"
BF16: Final = "precision { params = fp32, compute = bf16 }"

# name: (model, more); those that must work before anything else is worth a look come first.
FEATURES: Final[dict[str, tuple[str, str]]] = {
    "dense, nothing compiled": (DENSE.replace(" }", ", attention = documents }"), BF16),
    "dense, bf16": (DENSE, BF16),
    "compiled": (DENSE, f"{BF16}\ncompile {{ mode = default }}"),
    "recomputed": (DENSE, f"{BF16}\nactivation full"),
    "recomputed in part": (DENSE, f"{BF16}\nactivation selective"),
    "experts, bf16": (EXPERTS, BF16),
    "saved beside training": (DENSE, f"{BF16}\ncheckpoint {{ mode = async_pinned }}\nevery 4 steps checkpoint"),
    "muon": (DENSE.replace("qwen3", "llama"), f"{BF16}\noptimizer muon {{ lr = 0.01 }}"),
    "8-bit states": (DENSE, f"{BF16}\noptimizer adamw8bit {{ lr = 1e-3 }}"),
    "bf16 parameters": (
        DENSE,
        "precision { params = bf16 }\noptimizer adamw { lr = 1e-3, stochastic_rounding = true }",
    ),
    "adapter on NF4": (
        DENSE,
        "precision { params = bf16, base nf4 { block = 64 } }\nadapter lora { rank = 8 }",
    ),
    "averages": (DENSE, f"{BF16}\nema {{ decay = 0.9 }}"),
    "profiled": (DENSE, f"{BF16}\nevery 5 steps profile {{ memory = true }}"),
    "texts": (
        DENSE,
        f'{BF16}\non finish eval stdlib {{ batches = 2 }} then generate {{ prompts = ["def "], tokens = 16 }}',
    ),
    "fp8": (DENSE, "precision { params = fp32, compute = fp8 { recipe = rowwise } }"),
}
COMPILED: Final = f"{BF16}\ncompile {{ mode = default }}"
# What must work before anything else is worth a look.
SMOKE: Final[dict[str, tuple[str, str]]] = {
    "not compiled": FEATURES["dense, bf16"],
    "compiled": FEATURES["compiled"],
    "selective, compiled": (DENSE, f"{COMPILED}\nactivation selective"),
    "experts, compiled": (EXPERTS, COMPILED),
    "fp8, compiled": (DENSE, f"{FEATURES['fp8'][1]}\ncompile {{ mode = default }}"),
}
# What is to go wrong, or to be interrupted.
SAVING: Final = f"{BF16}\nevery 2 steps checkpoint"
NOT_FINITE: Final = f"{BF16}\noptimizer adamw {{ lr = 1e30, clip = none }}"
FULL_DISK: Final = f"{BF16}\ncheckpoint {{ mode = async_pinned, failures = 2 }}\nevery 2 steps checkpoint"


def spec_text(model: str, more: str, *, steps: int, sequence: int, device: str) -> str:
    """The spec of a run. An optimizer in `more` takes the place of the usual one."""
    text = SPEC.format(steps=steps, model=model, sequence=sequence, device=device, more=more)
    if "\noptimizer" in f"\n{more}":
        text = text.replace("optimizer adamw { lr = 1e-3 }\n", "", 1)
    return text


def every_spec() -> dict[str, tuple[str, str]]:
    """All of them, by name."""
    broken = {
        "interrupted": (DENSE, SAVING),
        "too large": (TOO_LARGE, BF16),
        "not finite": (DENSE, NOT_FINITE),
        "full disk": (DENSE, FULL_DISK),
        "beside the CPU": (DENSE, FP32),
        "resumed": (DENSE, f"{BF16}\nevery 3 steps checkpoint"),
    }
    return FEATURES | SMOKE | broken
