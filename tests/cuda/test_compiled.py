"""What torch.compile makes of blocks on CUDA, without a device: no graph breaks, and no variants but the known ones."""

from itertools import product
from pathlib import Path

import attrs
import pytest
import torch
from cuda_code import compiled

from xtrain.blocks.stage_costs import StageCosts
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.setting import settings_of
from xtrain.plan.plan import Plan
from xtrain.planner.costs import estimates
from xtrain.planner.costs.memory import stage_costs
from xtrain.planner.load import plan_from_text
from xtrain.runtime.nn.layers import Linear

SIZES = "dim = 64, layers = 2, heads = 4, kv_heads = 2"
DENSE = f"llama {{ {SIZES}, ffn = 128 }}"
BF16 = "precision { params = bf16 }"
MODELS = {
    "dense": (DENSE, BF16),
    "MoE": (f"qwen3_moe {{ {SIZES}, experts = 4, experts_per_token = 2, expert_ffn = 64 }}", BF16),
    "gemma3": (f"gemma3 {{ {SIZES}, ffn = 128, window = 64, full_layers = [1] }}", BF16),
    "gpt_oss": (f"gpt_oss {{ {SIZES}, experts = 4, experts_per_token = 2, expert_ffn = 64, window = 64 }}", BF16),
    "LoRA": (DENSE, f"{BF16}\nadapter lora {{ rank = 8 }}"),
    "NF4": (DENSE, "precision { params = bf16, base nf4 { block = 32 } }\nadapter lora { rank = 8 }"),
    "fp8": (DENSE, "precision { params = fp32, compute = fp8 { recipe = rowwise } }"),
}
FURTHER = {
    "mxfp8": (DENSE, "precision { params = fp32, compute = fp8 { recipe = mxfp8 } }"),
    "flash3": (DENSE.replace("kv_heads = 2", "kv_heads = 2, attention = flash3"), BF16),
    "qat": (DENSE, "precision { params = bf16, qat { weights = int4, group = 32, activations = int8 } }"),
}
SAVED = {"all kept": "", "selective": "activation selective", "full": "activation full"}
LAYOUTS = {
    "one rank": "",
    "fsdp": "parallel { fsdp 2 }",
    "tp": "parallel { tp 2 }",
    "ulysses": "parallel { cp 2 { ulysses = 2 } }",
    "ep": "parallel { ep 2 }",
}
OF_EXPERTS = ("MoE", "gpt_oss")
# Graphs: of a block with rows of one document and with rows of several, of its mask; more for kinds of layers, for a
# frozen embedding before the first block, and for what is compiled apart beside experts.
GRAPHS = {"dense": 3, "MoE": 4, "gemma3": 6, "gpt_oss": 6, "LoRA": 5, "NF4": 5, "fp8": 3}
# With rows of one document: the mask of several takes time. By default two, in which most differs.
QUICK = (
    ("dense", "selective", "tp"), ("MoE", "full", "ep"), ("gemma3", "all kept", "one rank"),
    ("NF4", "full", "fsdp"), ("fp8", "selective", "ulysses"),
)  # fmt: skip
ROWS = [
    *(pytest.param(*row, False, id=", ".join(row)) for row in QUICK[:2]),
    *(pytest.param(*row, False, marks=pytest.mark.slow, id=", ".join(row)) for row in QUICK[2:]),
    *(
        pytest.param(*row, True, marks=pytest.mark.slow, id=", ".join((*row, "several documents")))
        for row in product(MODELS, SAVED, LAYOUTS)
        if row[2] != "ep" or row[0] in OF_EXPERTS
    ),
    *(pytest.param(model, "selective", "tp", True, marks=pytest.mark.slow, id=model) for model in FURTHER),
]
SMALL = {
    "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128, "experts": 4, "experts_per_token": 2,
    "expert_ffn": 64, "window": 64,
}  # fmt: skip
SCALED = "rope { scaling = yarn, factor = 4, original = 64 }"


def plan_of(folder: Path, model: str, more: str, world: int = 1, *, sequence: int = 128, micro: int = 2) -> Plan:
    """The plan of a small run that compiles its blocks for CUDA."""
    text = f"""
experiment compiled {{ seed = 1, budget = 4 steps }}
model {model}
tokenizer bytes
dataset short {{ source = synthetic(documents = 200, length = 40) }}
batch {{ sequence = {sequence}, micro = {micro}, accumulate = 2 }}
optimizer adamw {{ lr = 1e-3 }}
launch {{ device = cuda }}
compile {{ mode = default }}
checkpoint {{ enabled = false }}
{more}
"""
    loaded = plan_from_text(text, str(folder / "spec.xtrain"), [], world=world)
    assert loaded.plan is not None, loaded.diagnostics.render(color=False)
    return loaded.plan


@pytest.mark.parametrize(("model", "saved", "layout", "packed"), ROWS)
def test_a_block_is_one_graph_a_variant(model, saved, layout, packed, tmp_path):
    made, more = (MODELS | FURTHER)[model]
    plan = plan_of(tmp_path, made, "\n".join((more, SAVED[saved], LAYOUTS[layout])), 1 if layout == "one rank" else 2)
    found = compiled(plan, packed=packed)
    assert found.breaks == [] and found.unknown == []
    assert len(found.graphs) <= GRAPHS.get(model, GRAPHS["dense"]), found.recompiles


WIDE = "dim = 1024, layers = 2, heads = 8, kv_heads = 2"
EXACT = 0.005
# Without recomputation under tp, torch keeps two summands of the residual stream instead of their sum: in the first
# block of a frozen model, and with fp8.
SUMMANDS = {"LoRA": 0.055, "NF4": 0.055, "fp8": 0.07}


@pytest.mark.parametrize(("model", "saved", "layout"), [
    pytest.param("dense", "selective", "one rank", id="dense, selective"),
    *(pytest.param(*row, marks=pytest.mark.slow, id=", ".join(row)) for row in product(MODELS, SAVED, LAYOUTS)
      if row[0] not in OF_EXPERTS and row[2] in ("one rank", "tp", "ulysses")),
    *(pytest.param(model, "all kept", "one rank", marks=pytest.mark.slow, id=model) for model in OF_EXPERTS),
    *(pytest.param(model, "selective", "one rank", marks=pytest.mark.slow, id=model) for model in FURTHER),
])  # fmt: skip
def test_blocks_keep_what_the_plan_says(model, saved, layout, tmp_path, monkeypatch):
    stages: list[list[list[StageCosts]]] = []
    monkeypatch.setattr(estimates, "stage_costs", lambda *of: stages.append(stage_costs(*of)) or stages[-1])
    made, more = (MODELS | FURTHER)[model]
    made = made.replace(SIZES, WIDE).replace("ffn = 128", "ffn = 3584").replace("window = 64", "window = 512")
    made = made.replace("expert_ffn = 64", "expert_ffn = 384")
    more = "\n".join((more, SAVED[saved], LAYOUTS[layout]))
    plan = plan_of(tmp_path, made, more, 1 if layout == "one rank" else 2, sequence=1024)
    found = compiled(plan, partition=True, packed=True, single=False)
    stage = stages[-1][0][0]
    for measured, (block, again) in zip(found.kept, stage.blocks, strict=False):
        planned = block.saved_bytes(again) + stage.rotation
        apart = EXACT
        if (saved, layout) == ("all kept", "tp") and (model == "fp8" or block.layer == 0):
            apart = SUMMANDS.get(model, apart)
        assert planned == pytest.approx(measured, rel=apart)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_any_kind_is_compiled_whole_but_its_recurrences(family, tmp_path):
    known = settings_of(FAMILIES[family])
    given = {name: meta.example for name, (a, meta) in known.items() if a.default is attrs.NOTHING}
    given |= {name: value for name, value in SMALL.items() if name in known}
    model = f"{family} {{ {', '.join(f'{name} = {value}' for name, value in given.items())}, {SCALED} }}"
    plan = plan_of(tmp_path, model, BF16)
    found = compiled(plan, packed=True)
    recurrent = any(layer.keeps_state for kind in plan.architecture.kinds for layer in kind.block.layers())
    assert bool(found.breaks) == recurrent and found.unknown == []
    assert all("torch.compiler.disable" in each for each in found.breaks)


@pytest.mark.slow
def test_more_variants_than_torch_expects_stay_compiled(tmp_path):
    """Windows, rows of several documents, evaluations and a smaller last batch: more than torch's own limit of 8."""
    made, more = MODELS["gemma3"]
    found = compiled(plan_of(tmp_path, made, more), packed=True, evaluated=(2, 1))
    assert found.breaks == [] and found.unknown == []
    assert sum(size > 20 for size in found.graphs) > 8


@pytest.mark.parametrize("ring", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_would_run_uncompiled_is_an_error_except_in_rings(ring, tmp_path, monkeypatch):
    def broken(self, input):
        torch._dynamo.graph_break()
        return torch.nn.functional.linear(input, self.weight)

    monkeypatch.setattr(Linear, "forward", broken)
    plan = plan_of(tmp_path, DENSE, BF16 + "\nparallel { cp 2 { ring = 2 } }" * ring, 2 if ring else 1)
    if ring:
        assert compiled(plan).breaks != []
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(plan)
