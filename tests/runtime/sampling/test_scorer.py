"""A reward model that scores completions: the numbers of transformers, and what is no reward model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from xtrain.plan.plan import Plan
from xtrain.plan.weight_files import read_weight_files
from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import op_of
from xtrain.runtime.nn.batch import Completion, Prompt, SampledGroup
from xtrain.runtime.sampling.scoring import Scorer
from xtrain.runtime.sampling.trained_run import alone
from xtrain.runtime.store.beginning import check_folder

SPEC = """experiment scored {{ seed = 1, budget = 4 steps }}
model llama {{ dim = 32, layers = 1, heads = 4, ffn = 48 }}
tokenizer bytes
dataset sums {{ source = jsonl("sums.jsonl"), prompt = "q", response = "a", template = "plain", oversized = skip }}
batch {{ sequence = 256, rows = 4, micro = 2 }}
collate = to_tensor -> flatten -> shift_tokens -> pack(single)
loss grpo {{ }}
rollout {{ group = 4, max_tokens = 20 }}
reward model {{ folder = "{folder}" }}
optimizer adamw {{ lr = 1e-3 }}
"""
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "num_labels": 1, "vocab_size": 258}  # fmt: skip
KINDS = {
    "llama": ("LlamaConfig", {}),
    "qwen3_moe": ("Qwen3MoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}),
}  # fmt: skip


def saved(folder: Path, kind: str = "llama", *, head: str = "SequenceClassification", **more: Any) -> Any:
    """A model of transformers with random weights, and its folder."""
    import transformers

    config_class, own = KINDS[kind]
    config = getattr(transformers, config_class)(**{**SIZES, **own, **more})
    torch.manual_seed(3)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model.eval()


def compiled(folder: Path) -> Any:
    return plan_from_text(SPEC.format(folder=folder), "scored", world=1)


def scorer_of(plan: Plan) -> Scorer:
    """As a run reads it, by its node."""
    node, rank = plan.node("setup.scorer"), alone(torch.device("cpu"))
    return op_of(node).bind(node, {"rank": rank, "meshes": SimpleNamespace(has=lambda axis: False)})()


def group() -> SampledGroup:
    """Completions of unequal lengths, one of them cut."""
    prompt = Prompt(
        ids=np.array([256, 5, 9]), text="", answer="", rest=np.array([10, 11]), values={}, dataset=0, place=0
    )
    tokens = [[1, 2, 3, 257], [7, 257], [30, 31, 32, 33, 34, 35]]
    return SampledGroup(
        prompt, [Completion(tokens=each, logprobs=[0.0] * len(each), text="", cut=len(each) == 6) for each in tokens]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_are_those_of_transformers(tmp_path: Path, kind: str):
    model = saved(tmp_path, kind)
    plan = compiled(tmp_path).plan
    assert plan is not None
    found = scorer_of(plan).rewards(group())
    # What documents have behind their answers follows completions that have an end.
    texts = [[256, 5, 9, 1, 2, 3, 257, 10, 11], [256, 5, 9, 7, 257, 10, 11], [256, 5, 9, 30, 31, 32, 33, 34, 35]]
    model.config.pad_token_id = 0
    expected = [model(torch.tensor([each])).logits.item() for each in texts]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5) and len({round(each, 3) for each in found}) == 3


def test_the_plan_has_the_model_its_memory_and_its_forward(tmp_path: Path):
    saved(tmp_path)
    plan, plain = (
        compiled(tmp_path).plan,
        plan_from_text(
            SPEC.format(folder="").replace('model { folder = "" }', "exact_answer { }"), "scored", world=1
        ).plan,
    )
    assert plan is not None and plain is not None
    files = read_weight_files(str(tmp_path))
    size = sum(tensor.bytes for tensor in files.tensors.values())
    node = plan.node("setup.scorer")
    assert node.args["digest"] == files.digest and node.args["architecture"]["head"] == "reward"
    memories = [each.estimates.classes[0].memory.total_bytes for each in (plan, plain)]
    assert memories[0] == memories[1] + size
    assert "forward of at most" in plan.node("rollout.score").does
    assert ("setup.scorer", "rollout.score") in {(edge.before, edge.after) for edge in plan.edges}


def test_what_is_no_reward_model_is_said(tmp_path: Path):
    wrong: dict[str, tuple[str, str]] = {}
    saved(tmp_path / "writes", head="CausalLM")
    wrong["writes"] = ("X524", "no reward head")
    saved(tmp_path / "other", vocab_size=300)
    wrong["other"] = ("X441", "vocabulary of 300")
    for name, (code, message) in wrong.items():
        found = compiled(tmp_path / name)
        errors = [each for each in found.diagnostics.errors if message in each.message]
        assert found.plan is None and [each.code for each in errors] == [code], (name, found.diagnostics.errors)


def test_a_folder_that_may_come_is_a_warning_and_the_plan_is_made_anew_then(tmp_path: Path):
    found = compiled(tmp_path / "later")
    assert found.plan is not None
    assert [each.code for each in found.diagnostics.warnings if "later" in each.message] == ["W501"]
    with pytest.raises(EnvironmentFault, match="plan again when it is there"):
        check_folder(found.plan)
