"""`model "folder"`: what config.json and the headers of weights say becomes a plan, or a diagnostic with its place."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_folders import CONFIG, QUERY, Folder, safetensors, shapes

from xtrain.blocks.latent_attention import LatentAttentionLayer
from xtrain.components.families.deepseek_v3 import DeepseekV3
from xtrain.dsl.checking.config_json import family_of
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText, Span
from xtrain.dsl.schema.model import FAMILIES, ModelFolder
from xtrain.plan.architecture import buffers, parameters
from xtrain.plan.canonical import fingerprint
from xtrain.plan.checkpoints import checkpoint_contents, weight_mismatches
from xtrain.plan.serialise import dumps, from_json
from xtrain.plan.weight_files import read_weight_files, stored_names
from xtrain.planner.compile import Compiled
from xtrain.planner.load import plan_from_spec, plan_from_text
from xtrain.planner.review.page import render
from xtrain.runtime.store.beginning import planned_files

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder.whole(tmp_path)


def errors(compiled: Compiled) -> list[tuple[str, str]]:
    assert compiled.plan is None
    return [(error.code, f"{error.message}; {error.hint}") for error in compiled.diagnostics.errors]


def test_a_folder_says_what_a_model_is(folder: Folder):
    plan = folder.plan().plan
    assert plan is not None
    arch = plan.architecture
    assert (arch.family, arch.dim, arch.layers, arch.heads, arch.kv_heads, arch.head_dim) == ("llama", 32, 2, 4, 2, 8)
    assert (arch.ffn, arch.vocab, arch.rope_theta, arch.norm_eps, arch.tie_embeddings) == (48, 264, 5e5, 1e-5, False)
    origins = {entry.path: (entry.origin, entry.place) for entry in plan.provenance}
    assert origins["model.dim"] == ("config", "model/config.json:6:3")
    assert origins["model.family"] == origins["model.folder"] == ("text", f"{folder.path}/spec.xtrain:2:7")
    # Of a key that is absent the place of the model type stands for the default of that.
    assert origins["model.head_dim"] == origins["model.tie_embeddings"] == ("config", "model/config.json:5:3")
    args = plan.node("setup.read_weights").args
    assert args["folder"] == "model" and plan.node("setup.weights").args == {"offload": False}
    weights = {name: ["BF16", shape] for name, shape in shapes().items()}
    assert plan.config["weights"] == fingerprint(weights) and args["digest"] == read_weight_files("model").digest
    # Weights identify an experiment by names, formats and shapes; the files of a plan are those, with this config.json.
    folder.config(transformers_version="5.0.0")
    other = folder.plan().plan
    assert other is not None and other.config == plan.config and other.config_id == plan.config_id
    assert other.node("setup.read_weights").args["digest"] != args["digest"]
    folder.config()
    # What a plan says of itself makes the same plan, and experiment.
    again = plan_from_text(plan.spec_text, plan.spec).plan
    assert again is not None and again.config_id == plan.config_id and again.spec_text == plan.spec_text


def test_a_folder_with_the_name_of_a_family_stays_a_folder(folder: Folder):
    (folder.path / "model").rename(folder.path / "llama")
    ((code, text),) = errors(folder.plan('"llama"'))  # it could mean both
    assert code == "X520" and "`llama` is both a family and a folder" in text
    plan = folder.plan('"./llama"').plan
    assert plan is not None and 'model "./llama"' in plan.spec_text
    again = plan_from_text(plan.spec_text, plan.spec).plan
    assert again is not None and again.id == plan.id and again.node("setup.read_weights").args["folder"] == "./llama"


def test_a_shape_alone_needs_no_weights(folder: Folder):
    (folder.path / "model" / "model.safetensors").unlink()
    plan = folder.plan('"model" { weights = none, init_std = 0.3 }').plan
    assert plan is not None and plan.node("setup.weights").args["init_std"] == 0.3
    assert not [node for node in plan.nodes if node.op == "setup.read_weights"] and "weights" not in plan.config
    pretrained = folder.plan('"model"', more='checkpoint { pretrained = "runs/a" }').plan
    assert pretrained is not None and not [node for node in pretrained.nodes if node.op == "setup.read_weights"]


def test_settings_beside_it_agree_or_are_reported_with_both_places(folder: Folder):
    same = folder.plan('"model" { dim = 32, attention = mask, rope_theta = 5e5, head_dim = auto }')
    assert same.plan is not None and not same.diagnostics.warnings
    assert same.plan.node("setup.build_model").args["attention"]["cpu"] == "mask"
    for setting, theirs in {
        "dim = 64": "hidden_size", "kv_heads = 4": "num_key_value_heads", "tie_embeddings = true": "model_type",
        "rope_theta = 1e4": "rope_theta", "qk_norm = true": "model_type", "head_dim = 16": "model_type",
    }.items():  # fmt: skip
        (error,) = folder.plan(f'"model" {{ {setting} }}').diagnostics.errors
        assert error.code == "X523" and error.span is not None and error.span.text == setting.split(" = ")[1]
        ((note, place), *_) = error.notes
        assert place is not None and place.source.path == "model/config.json", note
        assert theirs in error.message or theirs in place.text
    (error,) = folder.plan('"model"', "model.layers=3").diagnostics.errors
    assert error.code == "X523" and error.span is not None and error.span.source.path == "--set"
    idle = folder.plan('"model" { init_std = 0.3 }')
    assert [warning.code for warning in idle.diagnostics.warnings] == ["W401"]


def test_the_deviation_of_a_head_of_rewards_is_used_where_the_folder_has_none(folder: Folder):
    def warned() -> list[str]:
        spec = folder.spec('"model" { init_std = 0.3 }', more="loss regression")
        data = 'dataset code { source = jsonl("a.jsonl"), text = "text", values = { reward: "r" }, oversized = skip }'
        text = spec.read_text().replace("dataset code { source = python_stdlib() }", data)
        compiled = plan_from_text(text, "spec.xtrain")
        assert compiled.plan is not None, compiled.diagnostics.render()
        drawn = [node.args["init_std"] for node in compiled.plan.nodes if node.op == "setup.head"]
        found = [warning.code for warning in compiled.diagnostics.warnings if warning.code == "W401"]
        assert drawn == ([] if found else [0.3])
        return found

    assert warned() == []
    with_head = {name: shape for name, shape in shapes().items() if not name.startswith("lm_head")}
    folder.weights(safetensors(with_head | {"score.weight": [1, 32]}))
    folder.config(architectures=["LlamaForSequenceClassification"])
    assert warned() == ["W401"]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def test_scaled_positions_are_those_of_the_file_or_of_the_spec(folder: Folder):
    """Both spellings; the plan has what a scaling reads, with its place, and what transformers fills in."""
    wanted = {"scaling": "llama3", "factor": 8.0, "original": 8192, "low": 1.0, "high": 4.0}
    for changes in (
        {"rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ):
        folder.config(max_position_embeddings=131072, **changes)
        plan = folder.plan().plan
        assert (
            plan is not None and plan.architecture.to_json()["rope"] == wanted and plan.architecture.rope_theta == 5e5
        )
        values = {entry.path: (entry.value, entry.origin) for entry in plan.provenance}
        assert values["model.rope.factor"] == ("8", "config") and values["model.rope.scaling"] == ("llama3", "config")
        again = plan_from_text(plan.spec_text, plan.spec).plan
        assert again is not None and again.config_id == plan.config_id and from_json(json.loads(dumps(plan))) == plan
    other = folder.plan('"model" { rope { scaling = yarn, factor = 4, original = 131_072 } }')
    assert other.plan is not None and not other.diagnostics.warnings
    assert other.plan.architecture.rope.magnitude == 0.1 * math.log(4) + 1
    shown = {entry.path: (entry.value, entry.how) for entry in other.plan.provenance}
    assert shown["model.rope.attention_factor"] == ("1.138629436111989", "0.1 · ln(factor 4) + 1")
    assert other.plan.config_id != plan.config_id
    (mismatch,) = weight_mismatches(checkpoint_contents(plan), checkpoint_contents(other.plan))
    assert mismatch.path == "model.rope" and "scaling llama3 → yarn" in mismatch.text
    folder.config(
        max_position_embeddings=128, rope_scaling={"type": "yarn", "factor": 2, "mscale": 2, "mscale_all_dim": 1}
    )
    plan = folder.plan().plan
    assert plan is not None and plan.architecture.rope.original == 128
    assert plan.architecture.rope.magnitude == (0.2 * math.log(2) + 1) / (0.1 * math.log(2) + 1)
    folder.config(max_position_embeddings=64, rope_scaling={"type": "dynamic", "factor": 2.0})
    plan = folder.plan().plan
    assert plan is not None and plan.architecture.rope.original == 64
    idle = folder.plan('"model" { rope { scaling = linear, factor = 2, low = 2 } }').diagnostics.warnings
    assert [(each.code, "low" in each.message) for each in idle] == [("W401", True)]
    (error,) = folder.plan('"model" { rope { scaling = yarn, factor = 2 } }').diagnostics.errors
    assert error.code == "X432" and "original" in (error.hint or "")


@pytest.mark.parametrize(("length", "divisors"), [(64, "long"), (8, "short")])
def test_the_divisors_of_longrope_follow_from_the_length_of_rows(folder: Folder, length: int, divisors: str):
    pairs, lists = 4, {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = {"rope_type": "longrope", **lists, "original_max_position_embeddings": 16}
    folder.config(max_position_embeddings=64, head_dim=2 * pairs, rope_scaling=scaling)
    plan = folder.plan(more=f"batch {{ sequence = {length} }}").plan
    assert plan is not None
    rope = plan.architecture.rope
    assert (rope.divisors, rope.factor, rope.short) == (divisors, 4.0, (1.0,) * pairs)
    assert rope.magnitude == math.sqrt(1 + math.log(4) / math.log(16))
    assert rope.frequencies(2 * pairs, 1.0) == [{"long": 0.5, "short": 1.0}[divisors]] * pairs
    shown = {entry.path: (entry.value, entry.how) for entry in plan.provenance}
    assert shown["model.rope.divisors"] == (divisors, f"rows of {length}, original 16")
    assert from_json(json.loads(dumps(plan))) == plan


def test_positions_are_scaled_as_a_class_of_transformers_does_where_no_key_says_how(folder: Folder):
    """As `GptOssConfig` of transformers 5.23."""
    yarn = "yarn × 32 from 4,096"
    for keys, found in (
        ({}, yarn),
        ({"rope_scaling": "null", "rope_parameters": "null"}, yarn),
        ({"rope_scaling": {}}, yarn),
        ({"rope_parameters": {}}, "none × 1"),
        ({"rope_scaling": {"rope_type": "default"}}, "none × 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, "linear × 3"),
    ):
        folder.config(**OSS, **keys)
        plan = folder.plan('"model" { weights = none }').plan
        assert plan is not None and str(plan.architecture.rope) == found, keys
        assert plan.architecture.rope.truncate is (found != yarn)
    folder.config(**OSS, max_position_embeddings=2048)
    ((code, text),) = errors(folder.plan('"model" { weights = none }'))
    assert code == "X522" and "only 2048" in text
    own = "rope { scaling = linear, factor = 2 }"
    folder.config(**OSS)
    plan = folder.plan(f'"model" {{ weights = none, {own} }}').plan
    assert plan is not None and str(plan.architecture.rope) == "linear × 2"
    places = [(entry.value, entry.origin) for entry in plan.provenance if entry.path == "model.rope.factor"]
    assert places == [("2", "text")]


def test_blocks_without_experts_are_those_of_the_file(folder: Folder):
    folder.config(**{**EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    plan = folder.plan('"model" { weights = none }').plan
    assert plan is not None
    dense, experts = plan.architecture.kinds
    assert (dense.layers, experts.layers, plan.architecture.expert_layers) == ((0, 2, 3), (1,), (1,))
    shapes = {tensor.name: tensor.shape for tensor in plan.parameters.tensors}
    assert shapes["layers.3.mlp.gate_proj.weight"] == (48, 32) and shapes["layers.1.mlp.experts.up_proj"] == (4, 32, 16)
    assert "layers.1.mlp.gate_proj.weight" not in shapes and "layers.0.mlp.gate.weight" not in shapes
    page = render(plan)
    assert "layers 0, 2 to 3  ffn 48" in page and "layer 1           4 experts of 16, 2 a token" in page
    (error,) = folder.plan('"model" { weights = none, dense_layers = [0] }').diagnostics.errors
    assert error.code == "X523" and "mlp_only_layers" in error.message
    assert folder.plan('"model" { weights = none, dense_layers = [3] }').plan is not None
    folder.config(**EXPERTS)
    plan = folder.plan('"model" { weights = none }').plan
    assert plan is not None and "expert_every" not in plan.architecture.to_json()


def test_the_scale_of_scores_follows_positions_scaled_by_yarn(folder: Folder):
    """As `yarn_apply_mscale` of transformers 5.23 has it, in either spelling."""
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 32, "mscale": 1.0}
    scales = {}
    for weight in (0.0, 0.7, 1.0):
        scaling = {**yarn, "mscale_all_dim": weight}
        folder.config(**LATENT, max_position_embeddings=1280, rope_scaling=scaling)
        plan = folder.plan('"model" { weights = none }').plan
        assert plan is not None and plan.architecture.own["score_weight"] == weight
        shown = {entry.path: (entry.value, entry.place) for entry in plan.provenance}
        assert shown["model.score_weight"][1].startswith("model/config.json")
        (scales[weight],) = {
            layer.scale
            for kind in plan.architecture.kinds
            for layer in kind.block.layers()
            if isinstance(layer, LatentAttentionLayer)
        }
        folder.config(
            **LATENT, max_position_embeddings=1280, rope_theta=None, rope_scaling=None,
            rope_parameters={**scaling, "rope_theta": 5e5},
        )  # fmt: skip
        again = folder.plan('"model" { weights = none }').plan
        assert again is not None and again.config_id == plan.config_id and from_json(json.loads(dumps(again))) == again
    assert scales == {weight: 12**-0.5 * (0.1 * weight * math.log(40.0) + 1) ** 2 for weight in scales}
    ((code, text),) = errors(folder.plan('"model" { weights = none, score_weight = 0.5 }'))
    assert code == "X523" and "rope_parameters" in text
    folder.config(**LATENT)
    plan = folder.plan('"model" { weights = none }').plan
    assert plan is not None and plan.architecture.own["score_weight"] == 0


def test_a_layer_that_predicts_further_tokens_is_not_read(folder: Folder):
    """It lies behind the last one, and has a matrix that no other has; other layers there are refused."""
    folder.config(**LATENT)
    plan = folder.plan('"model" { weights = none }').plan
    assert plan is not None
    model: dict[str, list[int]] = {}
    for each in (*parameters(plan.architecture), *buffers(plan.architecture)):
        for part in DeepseekV3.stored.of(each)[0]:
            model[part.name] = list(part.shape)
    further = {f"model.layers.2.{name}.weight": [32] for name in ("enorm", "hnorm", "shared_head.norm")}
    further |= {"model.layers.2.eh_proj.weight": [32, 64], "model.layers.2.mlp.gate.e_score_correction_bias": [4]}
    biases = [name for name in model if name.endswith("e_score_correction_bias")]
    assert biases == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    folder.weights(safetensors({**model, **further}, dict.fromkeys(biases, "F32")))
    assert folder.plan().plan is not None
    further.pop("model.layers.2.eh_proj.weight")
    folder.weights(safetensors({**model, **further}))
    ((code, text),) = errors(folder.plan())
    assert code == "X524" and "`model.layers.2.enorm.weight`" in text and "not of this model" in text
    folder.weights(safetensors({name: shape for name, shape in model.items() if name not in biases}))
    ((code, text),) = errors(folder.plan())
    assert code == "X524" and f"`{biases[0]}` is missing" in text


KEYS: dict[str, Any] = {"architectures": "null", "attention_bias": None}  # of a family without biases on all
OSS = {**KEYS, "model_type": "gpt_oss", "num_local_experts": 4}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a type that is no text": ("X521", "model type 7", {"model_type": 7}),
    "no family": ("X521", "model_type", {"model_type": None}),
    "another head": ("X521", "ForTokenClassification", {"architectures": ["LlamaForTokenClassification"]}),
    "quantised": ("X522", "quantization_config", {"quantization_config": {"quant_method": "fp8"}}),
    "positions scaled otherwise": ("X522", "longrope", {"rope_scaling": {"type": "ntk", "factor": 8.0}}),
    "scaled in two ways": ("X522", "positions differently",
        {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "two types": ("X522", "rope_type", {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 8.0}}),
    "a type that is none": ("X522", "rope_type", {"rope_scaling": {"type": ["linear"], "factor": 8.0}}),
    "half a scaling": ("X522", "low_freq_factor", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    "no factor": ("X522", "`factor`", {"rope_scaling": {"type": "linear"}}),
    "no context": ("X522", "max_position_embeddings", {"rope_scaling": {"type": "yarn", "factor": 2.0}}),
    "a key of another scaling": ("X522", "beta_fast",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}),
    "longer before scaling": ("X522", "only 4096", {"max_position_embeddings": 4096,
            "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}}),
    "a factor that is none": ("X301", "factor", {"rope_scaling": {"type": "linear", "factor": "2"}}),
    "a factor below 1": ("X304", "factor", {"rope_scaling": {"type": "linear", "factor": 0.5}}),
    "dynamic, and longer rows": ("X432", "rows have 64",
        {"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "bounds the wrong way": ("X432", "below", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                "low_freq_factor": 4.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 16}}),
    "divisors of other pairs": ("X432", "pairs of a head", {"rope_scaling": {"rope_type": "longrope", "factor": 8.0,
                "short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 16}}),
    "no divisors": ("X522", "short_factor", {"rope_scaling": {"rope_type": "longrope", "factor": 8.0,
                "long_factor": [2.0], "original_max_position_embeddings": 16}}),
    "divisors that are none": ("X304", "short", {"rope_scaling": {"rope_type": "longrope", "factor": 8.0,
                "short_factor": [0.0], "long_factor": [2.0], "original_max_position_embeddings": 16}}),
    "partial positions": ("X522", "partial_rotary_factor", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    "two bases": ("X522", "rope_theta", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
    "two bases, old": ("X522", "keep the intended", {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4},
            "rope_scaling": {"type": "default", "rope_theta": 1e6}}),
    "a base that transformers does not read": ("X522", "computes with 10000",
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"rope_type": "default"}}),
    "positions that are none": ("X522", "rope_scaling", {"rope_scaling": "linear"}),
    "biases that are none": ("X301", "attention_bias", {"attention_bias": 1}),
    "biases of a family without": ("X522", "attention_bias",
        {"model_type": "mixtral", "architectures": "null", "attention_bias": True}),
    "another function": ("X522", "gelu", {"hidden_act": "gelu"}),
    "dropout": ("X522", "attention_dropout", {"attention_dropout": 0.1}),
    "a window": ("X522", "sliding_window", {"sliding_window": 4096}),
    "an unknown key": ("X522", "logit_scale", {"logit_scale": 0.0625}),
    "code of its own": ("X522", "auto_map", {"auto_map": {"AutoModel": "modeling.Mine"}}),
    "no width": ("X522", "hidden_size", {"hidden_size": None}),
    "a width that is none": ("X301", "dim", {"hidden_size": "32"}),
    "a negative width": ("X304", "ffn", {"intermediate_size": -1}),
    "a tie that is none": ("X301", "tie_embeddings", {"tie_word_embeddings": 1}),
    "heads": ("X408", "kv_heads", {"num_key_value_heads": 3}),
    "dense blocks that there are not": ("X433", "no block 2", {**EXPERTS, "mlp_only_layers": [2]}),
    "dense blocks that are none": ("X301", "dense_layers", {**EXPERTS, "mlp_only_layers": ["a"]}),
    "no block with experts": ("X433", "no block has experts", {**EXPERTS, "decoder_sparse_step": 3}),
    "no step": ("X304", "expert_every", {**EXPERTS, "decoder_sparse_step": 0}),
    "two numbers of experts": ("X522", "num_local_experts", {**EXPERTS, "num_local_experts": 8}),
    "a function of experts": ("X522", "scoring_func", {**EXPERTS, "scoring_func": "sigmoid"}),
    "jitter": ("X522", "router_jitter_noise", {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
            "router_jitter_noise": 0.1, "attention_bias": None}),
    "windows that are neither on nor off": ("X522", "use_sliding_window",
        {**KEYS, "model_type": "qwen2", "use_sliding_window": "false"}),
    "windows up to a layer that is no number": ("X522", "max_window_layers", {**KEYS, **EXPERTS,
            "architectures": "null", "model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 1.5}),
    "positions of three parts": ("X522", "use_mrope", {**KEYS, "model_type": "qwen2", "use_mrope": True}),
    "clipped activations": ("X522", "clip_qkv", {**KEYS, "model_type": "olmo2", "clip_qkv": 8.0}),
    "flags of layers that are none": ("X522", "0 or 1", {**KEYS, "model_type": "smollm3", "no_rope_layers": [1, 2]}),
    "keys of fewer heads": ("X522", "num_key_value_heads", {**KEYS, "model_type": "deepseek_v3"}),
    "positions of another width": ("X522", "head_dim", {**KEYS, **LATENT, "head_dim": 8}),
    "experts in some layers": ("X522", "moe_layer_freq", {**KEYS, **LATENT, "moe_layer_freq": 2}),
    "choice without biases": ("X522", "topk_method", {**KEYS, **LATENT, "topk_method": "group_limited_greedy"}),
    "softmax of groups": ("X522", "scoring_func", {**KEYS, **LATENT, "scoring_func": "softmax"}),
    "groups of one": ("X433", "groups of two or more", {**KEYS, **LATENT, "n_group": 4}),
    "more groups than there are": ("X433", "exceeds expert_groups 2", {**KEYS, **LATENT, "topk_group": 3}),
    "too few experts in the groups": ("X433", "2 experts",
        {**KEYS, **LATENT, "topk_group": 1, "num_experts_per_tok": 3}),
    "an odd width of positions": ("X433", "is odd", {**KEYS, **LATENT, "qk_rope_head_dim": 3}),
    "a SwiGLU in all blocks": ("X433", "none has experts", {**KEYS, **LATENT, "first_k_dense_replace": 2}),
    "no shared expert": ("X304", "shared_experts", {**KEYS, **LATENT, "n_shared_experts": 0}),
    "no interval": ("X522", "no_rope_layer_interval", {**KEYS, "model_type": "smollm3", "no_rope_layer_interval": 0}),
    "a gate of another kind": ("X522", "moe_gate",
        {**KEYS, **EXPERTS, "architectures": "null", "model_type": "qwen2_moe", "moe_gate": "sigmoid"}),
    "no width of the shared expert": ("X304", "shared_ffn",
        {**KEYS, **EXPERTS, "architectures": "null", "model_type": "qwen2_moe", "shared_expert_intermediate_size": 0}),
    "windows of layers that are no number": ("X522", "max_window_layers",
        {"model_type": "qwen3", "architectures": "null", "use_sliding_window": True, "max_window_layers": "1"}),
    "types of more layers": ("X522", "layer_types",
        {"model_type": "qwen3", "architectures": "null", "layer_types": ["full_attention"] * 3}),
    "windows that are none": ("X522", "layer_types",
        {"model_type": "qwen3", "architectures": "null", "layer_types": ["sliding_attention"] * 2}),
    "a window of no position": ("X304", "window",
        {"model_type": "mistral", "architectures": "null", "attention_bias": None, "sliding_window": 0}),
    "more layers than any model": ("X304", "layers", {**KEYS, "model_type": "smollm3", "num_hidden_layers": 10**12}),
    "more experts than any model": ("X304", "experts", {**OSS, "num_local_experts": 10**12}),
    "windows of more layers than any model": ("X304", "layers",
        {"model_type": "qwen3", "architectures": "null", "use_sliding_window": True, "num_hidden_layers": 10**12}),
    "codes of another method": ("X522", "mxfp4, or fp8", {**OSS, "quantization_config": {"quant_method": "gptq"}}),
    "fp8 with one scale": ("X522", "quantization_config",
        {**OSS, "quantization_config": {"quant_method": "fp8", "weight_block_size": None}}),
    "a window of no length": ("X522", "sliding_window", {**OSS, "sliding_window": "null"}),
    "no bound": ("X304", "swiglu_limit", {**OSS, "swiglu_limit": 0}),
    "windows that are turned off": ("X522", "layer_types",
        {"model_type": "qwen3", "architectures": "null", "layer_types": ["full_attention", "sliding_attention"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_no_key_that_changes_the_model_is_passed_over(folder: Folder, name: str):
    code, word, changes = CONFIGS[name]
    folder.config(**changes)
    found = errors(folder.plan('"model" { weights = none }'))
    assert [(each, word in text) for each, text in found] == [(code, True)], found


def test_keys_that_change_nothing_are_passed_over(folder: Folder):
    """All that transformers has for any model and for generation, and what other programs leave in published files."""
    transformers = pytest.importorskip("transformers")
    kept = {"pruned_heads", "add_cross_attention", "rope_interleaved", "use_mrope", "tie_encoder_decoder"}
    every = {**transformers.PreTrainedConfig().to_dict(), **transformers.GenerationConfig().to_dict()}
    changes = {name: "anything" for name in every if name not in CONFIG and name != "is_encoder_decoder"}
    changes |= dict.fromkeys(kept | {"is_encoder_decoder"}, False) | {"pruned_heads": {}}
    others = (
        "unsloth_fixed", "unsloth_version", "_attn_implementation_autoset", "max_sequence_length", "tokenizer_class",
        "transformers.js_config", "is_llama_config", "_flash_attn_2_enabled", "finetuning_task", "torchscript",
        "tf_legacy_loss", "task_specific_params", "unk_token_id", "forced_decoder_ids", "model_max_length",
    )  # fmt: skip
    changes |= dict.fromkeys(others, 0.7)
    plain = folder.plan('"model" { weights = none }').plan
    folder.config(**changes)
    found = folder.plan('"model" { weights = none }')
    assert found.plan is not None and plain is not None, errors(found)
    assert found.plan.architecture == plain.architecture
    for name, value in {
        "is_encoder_decoder": True,
        "rope_interleaved": True,
        "pruned_heads": {"0": [1]},
        "mup": 1,
    }.items():
        folder.config(**{name: value})
        assert [(code, name in text) for code, text in errors(folder.plan('"model" { weights = none }'))] == [
            ("X522", True)
        ]
        folder.config(**{name: None})


def test_a_folder_with_fewer_rows_than_the_tokenizer_has_ids_gets_more(folder: Folder):
    folder.config(vocab_size=200)
    folder.weights(safetensors(shapes({**CONFIG, "vocab_size": 200})))
    ((code, text),) = errors(folder.plan())
    assert code == "X506" and "write `vocab = tokenizer` in `model`, which adds 58 rows" in text
    ((code, text), _) = errors(folder.plan('"model" { vocab = 258 }'))
    assert code == "X523" and "`vocab = tokenizer` adds rows" in text
    plan = folder.plan('"model" { vocab = tokenizer }').plan
    assert plan is not None and plan.architecture.vocab == 258
    node = plan.node("setup.read_weights")
    assert node.args["grows"] and "58 rows of embedding and head missing there" in node.does
    (why,) = (entry.how for entry in plan.provenance if entry.path == "model.vocab")
    assert why == "200 rows of model, and 58 for further ids of the tokenizer"
    ((code, text),) = errors(folder.plan('"model" { vocab = tokenizer }', more="adapter lora { rank = 2 }"))
    assert code == "X506" and "adds 58 rows, which an adapter leaves untrained" in text
    ((code, text),) = errors(folder.plan('"model" { vocab = tokenizer, frozen = ["lm_head"] }'))
    assert code == "X506" and "adds 58 rows, which `frozen` leaves untrained" in text
    assert folder.plan('"model" { vocab = tokenizer, frozen = ["layers.0"] }').plan is not None


@pytest.mark.parametrize("vocab", [258, 264])
def test_a_folder_with_enough_rows_keeps_them(folder: Folder, vocab: int):
    folder.config(vocab_size=vocab)
    folder.weights(safetensors(shapes({**CONFIG, "vocab_size": vocab})))
    plain, grown = (folder.plan(f'"model" {more}').plan for more in ("", "{ vocab = tokenizer }"))
    assert plain is not None and grown is not None
    assert plain.architecture == grown.architecture and "grows" not in grown.node("setup.read_weights").args


GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_act": None, "rope_theta": None,
    "rope_scaling": None, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9,
}  # fmt: skip


@pytest.mark.parametrize(("code", "word", "changes"), [
    ("X522", "gelu_pytorch_tanh", {"hidden_activation": "silu"}),
    ("X522", "transformers ignores it", {"attn_logit_softcapping": 50.0}),
    ("X522", "use_bidirectional_attention", {"use_bidirectional_attention": True}),
    ("X522", "sliding_window_pattern", {"sliding_window_pattern": 0}),
    ("X522", "layer_types", {"layer_types": ["sliding_attention", "chunked_attention"]}),
    ("X522", "as some layers have the window", {"sliding_window": "null"}),
    ("X522", "one object for full_attention", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("X522", "of type default", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}),
    ("X522", "keep the intended", {"rope_local_base_freq": 1e4, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e5}}}),
    ("X522", "elsewhere", {"rope_theta": 1e5, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}),
    ("X522", "nothing is scaled", {"rope_scaling": {"type": "linear", "factor": 8.0}}),
    ("X522", "longrope", {"rope_parameters": {"full_attention": {"rope_type": "ntk", "factor": 2.0}}}),
    ("X304", "logit_cap", {"final_logit_softcapping": 0}),
    ("X304", "local_theta", {"rope_local_base_freq": 0}),
    ("X304", "layers", {"num_hidden_layers": 10**12}),
])  # fmt: skip
def test_no_key_that_changes_a_gemma3_is_passed_over(folder: Folder, code: str, word: str, changes: dict[str, Any]):
    folder.config(**{**GEMMA3, **changes})
    found = errors(folder.plan('"model" { weights = none }'))
    assert [(each, word in text) for each, text in found] == [(code, True)], found


GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "hidden_act": None, "rope_theta": None,
    "rope_scaling": None, "head_dim": 8, "sliding_window": 9, "hidden_size_per_layer_input": 0, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
LAYER: dict[str, Any] = {"head_dim": 12, "num_key_value_heads": 1}
PROPORTIONAL: dict[str, Any] = {"rope_type": "proportional", "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(("code", "word", "changes"), [
    ("X522", "use_bidirectional_attention", {"use_bidirectional_attention": "all"}),
    ("X522", "per_layer_config", {"per_layer_config": {"1": LAYER}}),
    ("X522", "per_layer_config", {"per_layer_config": {"0": LAYER, "1": LAYER, "2": LAYER}}),
    ("X522", "per_layer_config", {"per_layer_config": {"1": {"rope_theta": 1}, "2": {"rope_theta": 1}}}),
    ("X522", "per_layer_config", {"per_layer_config": {"1": 5, "2": 5}}),
    ("X522", "per_layer_config", {"per_layer_config": [1]}),
    ("X522", "layer_types", {"layer_types": 5, "per_layer_config": {}}),
    ("X522", "rope_parameters", {"rope_parameters": {"full_attention": {**PROPORTIONAL, "beta_fast": 2}}}),
    ("X304", "share", {"rope_parameters": {"full_attention": {**PROPORTIONAL, "partial_rotary_factor": 1.5}}}),
    ("X433", "do not divide heads", {"attention_k_eq_v": True, "num_global_key_value_heads": 3}),
    ("X433", "is odd", {"global_head_dim": 7}),
    ("X522", "num_experts", {"enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 8}),
    ("X433", "and every token has vectors", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 20}),
    ("X433", "of the first 1 blocks none without a window has keys", {"num_kv_shared_layers": 2}),
    ("X433", "of the first 0 blocks none", {"num_kv_shared_layers": 3}),
    ("X304", "layer_input", {"hidden_size_per_layer_input": -1}),
])  # fmt: skip
def test_no_key_that_changes_a_gemma4_is_passed_over(folder: Folder, code: str, word: str, changes: dict[str, Any]):
    folder.config(**{**GEMMA4, **changes})
    found = errors(folder.plan('"model" { weights = none }'))
    assert [(each, word in text) for each, text in found] == [(code, True)], found


@pytest.mark.parametrize(("changes", "own"), [
    ({}, (512, 2, False)),
    ({"global_head_dim": 12, "num_global_key_value_heads": 1}, (12, 2, False)),  # counts only with the next key
    ({"global_head_dim": 12, "num_global_key_value_heads": 1, "attention_k_eq_v": True}, (12, 1, True)),
    ({"per_layer_config": {"1": LAYER, "2": LAYER}, "global_head_dim": 16}, (12, 1, False)),
    ({"per_layer_config": {}}, (8, 2, False)),
    ({"per_layer_config": {"0": LAYER}, "num_hidden_layers": 1, "layer_types": None}, (12, 1, False)),
    ({"layer_types": None, "global_head_dim": 12}, (12, 2, False)),
    ({"layer_types": ["full_attention"] * 3, "per_layer_config": dict.fromkeys("012", LAYER)}, (12, 1, False)),
    ({"layer_types": ["full_attention", "full_attention", "sliding_attention"], "global_head_dim": 12}, (12, 2, False)),
    ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}, (512, 2, False)),
])  # fmt: skip
def test_heads_of_a_gemma4_are_those_of_transformers(folder: Folder, changes: dict[str, Any], own: tuple[Any, ...]):
    from transformers import AutoConfig

    folder.config(**{**GEMMA4, **changes})
    plan = folder.plan('"model" { weights = none }').plan
    assert plan is not None
    arch = plan.architecture
    assert tuple(arch.own[name] for name in ("full_head_dim", "full_kv_heads", "full_key_values")) == own
    assert arch.family == ("gemma4_moe" if "enable_moe_block" in changes else "gemma4")
    assert arch.rope.resolved() == {"scaling": "proportional", "factor": 1.0, "share": 0.25}
    theirs: Any = AutoConfig.from_pretrained(folder.path / "model")
    for layer, kind in enumerate(theirs.layer_types):
        (ours,) = [each for each in arch.kind_of(layer).block.layers() if each.attends]
        its, heads = theirs.per_layer_config[layer], ours.own(arch)
        assert (heads.head_dim, heads.kv_heads) == (its.head_dim, its.num_key_value_heads)
        assert (ours.window is None) == (kind == "full_attention")


NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hidden_act": None, "rms_norm_eps": None,
    "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2,
}  # fmt: skip


@pytest.mark.parametrize(("said", "changes"), [
    ("config.json has no `hybrid_override_pattern`", {}),
    ('`hybrid_override_pattern` is "MX"', {"hybrid_override_pattern": "MX"}),
    ("`layers_block_type` is 5", {"layers_block_type": 5}),
    ("`layers_block_type` is", {"layers_block_type": ["mamba", "swa"]}),
])  # fmt: skip
def test_the_blocks_of_a_nemotron_h_are_given(folder: Folder, said: str, changes: dict[str, Any]):
    folder.config(**{**NEMOTRON, **changes})
    ((code, text),) = errors(folder.plan('"model" { weights = none }'))
    assert code == "X522" and said in text


MIXERS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 24},
    "granitemoehybrid": {"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_local_experts": 0, "mamba_d_head": 6, "shared_intermediate_size": 20},
}  # fmt: skip


@pytest.mark.parametrize(("family", "code", "said", "changes"), [
    *((family, "X522", "`time_step_limit` is [0.001, 0.1]", {"time_step_limit": [0.001, 0.1]}) for family in MIXERS),
    ("falcon_h1", "X522", "`mamba_d_ssm` is 22", {"mamba_d_ssm": 22, "mamba_d_head": 6}),
    ("falcon_h1", "X522", "`mamba_d_ssm` is 24", {"mamba_d_head": "6"}),
    ("falcon_h1", "X522", '`mamba_d_ssm` is "a"', {"mamba_d_ssm": "a"}),
    ("falcon_h1", "X522", '`mamba_rms_norm` is "no"', {"mamba_rms_norm": "no"}),
    ("falcon_h1", "X433", "ffn_scales has 1 numbers", {"mlp_multipliers": [1.0]}),
    ("falcon_h1", "X433", "mamba_scales has 4 numbers", {"ssm_multipliers": [1.0] * 4}),
])  # fmt: skip
def test_mixers_that_nothing_native_computes(
    folder: Folder, family: str, code: str, said: str, changes: dict[str, Any]
):
    folder.config(**{"mamba_n_heads": 4, "rms_norm_eps": 1e-5, **MIXERS[family], **changes})
    ((found, text),) = errors(folder.plan('"model" { weights = none }'))
    assert found == code and said in text


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("changes", [
    {"hidden_size_per_layer_input": 16}, {"num_kv_shared_layers": 1}, {"hidden_size_per_layer_input": None},
])  # fmt: skip
def test_a_gemma4_that_is_not_native_is_computed_by_the_code_of_transformers(
    folder: Folder, changes: dict[str, Any], whole: bool
):
    """Experts with per-layer inputs, which its class has unless a key says otherwise, or with shared keys."""

    def family(**given: Any) -> str:
        text = {name: value for name, value in {**CONFIG, **GEMMA4, **given}.items() if value is not None}
        config = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
        (folder.path / "model" / "config.json").write_text(json.dumps(config if whole else text))
        diagnostics = Diagnostics()
        found = family_of(ModelFolder("model"), Span(SourceText("spec", "model"), 0, 5), diagnostics)
        assert found is not None and not diagnostics.has_errors
        return found[0]

    assert family() == family(**changes) == "gemma4" and family(enable_moe_block=True) == "gemma4_moe"
    assert family(**changes, enable_moe_block=True) == "transformers_code"


E2B: dict[str, Any] = {
    **GEMMA4, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 300, "num_hidden_layers": 6,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip


def test_blocks_of_a_gemma4_share_the_keys_of_the_last_ones_with_their_window(folder: Folder):
    folder.config(**E2B)
    plan = folder.plan('"model" { weights = none }').plan
    assert plan is not None
    names = {each.name: each.shape for each in plan.parameters.tensors}
    assert names["layers.0.per_layer_inputs.table.weight"] == (300, 36)
    ffn = names["layers.0.mlp.up_proj.weight"][0]
    for layer in range(6):
        attention = {name.split(".")[3] for name in names if name.startswith(f"layers.{layer}.self_attn.")}
        assert ("k_proj" in attention) == ("k_norm" in attention) == (layer < 4)
        assert names[f"layers.{layer}.mlp.up_proj.weight"][0] == (ffn if layer < 4 else 2 * ffn)
    kinds = [plan.architecture.kind_of(layer).block for layer in range(6)]
    gives = [[each.gives for each in kind.layers() if each.attends] for kind in kinds]
    takes = [[each.takes for each in kind.layers() if each.attends] for kind in kinds]
    assert gives == [[""], [""], ["sliding_attention"], ["full_attention"], [""], [""]]
    assert takes == [[""], [""], [""], [""], ["sliding_attention"], ["full_attention"]]
    stored = stored_names(plan.architecture)  # published files have keys that nothing uses
    for tensor in ("k_proj.weight", "v_proj.weight", "k_norm.weight", "q_proj.weight"):
        ignored = [stored.is_ignored(f"model.layers.{n}.self_attn.{tensor}", plan.architecture, ()) for n in range(6)]
        assert ignored == [n > 3 and tensor != "q_proj.weight" for n in range(6)]


@pytest.mark.parametrize(("changes", "layers", "said", "hint"), [
    ({}, "", "a stage begins with layer 3, but layer 3 takes what layer 0 makes", "use pp 1"),
    ({"hidden_size_per_layer_input": 0}, "[4, 2]", "layer 4, but layer 4 takes what layer 2 makes", "layers 1 to 2"),
    ({"hidden_size_per_layer_input": 0}, "[2, 4]", "", ""),
])  # fmt: skip
def test_stages_begin_where_no_block_takes_values_of_an_earlier_stage(
    folder: Folder, changes: dict[str, Any], layers: str, said: str, hint: str
):
    folder.config(**{**E2B, **changes})
    sets = (
        "parallel.pp=2",
        "batch.micro=1",
        "batch.accumulate=2",
        *([f"parallel.pp.layers={layers}"] if layers else []),
    )
    compiled = folder.plan('"model" { weights = none }', *sets)
    found = [each for each in compiled.diagnostics.errors if each.code == "X404"]
    assert (compiled.plan is None) == bool(said)
    assert not said or (said in found[0].message and hint in (found[0].hint or ""))


def test_layouts_divide_the_heads_of_every_layer(folder: Folder):
    folder.config(**GEMMA4, global_head_dim=12, num_global_key_value_heads=1, attention_k_eq_v=True)
    ((code, text),) = errors(folder.plan('"model" { weights = none }', "parallel.tp=2"))
    assert code == "X403" and "kv_heads 1 cannot be split over tp 2" in text
    plan = folder.plan('"model" { weights = none }', "parallel.cp=2").plan
    assert plan is not None and plan.mesh.size("ulysses") == 2  # which copy one head, and divide two


WHOLE: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {"hidden_size": 16},
    "eos_token_id": [1, 106], "image_token_index": 7, "mm_tokens_per_image": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "model_type": "gemma3_text",
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 9, "vocab_size": 264,
}  # fmt: skip


@pytest.mark.parametrize(("code", "word", "changes"), [
    ("X521", "Gemma3ForConditionalGeneration", {"architectures": ["Gemma3ForSequenceClassification"]}),
    ("X521", "llama", {"text_config": {**TEXT, "model_type": "llama"}}),
    ("X522", "has no `text_config`", {"text_config": None}),
    ("X522", "as `text_config`", {"text_config": [1]}),
    ("X522", "quantized", {"quantization_config": {"quant_method": "fp8"}}),
    ("X522", "logit_scale", {"logit_scale": 0.5}),
    ("X522", "clip_qkv", {"text_config": {**TEXT, "clip_qkv": 8.0}}),
    ("X522", "alone but not the model with images", {"text_config": {**TEXT, "final_logit_softcapping": 30.0}}),
])  # fmt: skip
def test_of_a_model_with_images_the_text_is_read(folder: Folder, code: str, word: str, changes: dict[str, Any]):
    path = folder.path / "model" / "config.json"
    config = {**WHOLE, "text_config": TEXT}
    path.write_text(json.dumps(config, indent=2))
    plan = folder.plan('"model" { weights = none }').plan
    assert plan is not None and plan.architecture.own["window"] == 9
    arch = plan.architecture  # heads and ties are those that its class has
    assert (arch.family, arch.dim, arch.heads, arch.rope_theta, arch.tie_embeddings) == ("gemma3", 32, 8, 1e6, True)
    line = path.read_text().splitlines().index('    "hidden_size": 32,') + 1
    origins = {entry.path: (entry.origin, entry.place) for entry in plan.provenance}
    assert origins["model.dim"] == ("config", f"model/config.json:{line}:5")
    changed = {name: value for name, value in {**config, **changes}.items() if value is not None}
    path.write_text(json.dumps(changed, indent=2))
    found = errors(folder.plan('"model" { weights = none }'))
    assert [(each, word in text) for each, text in found] == [(code, True)], found
    path.write_text(json.dumps({**config, "tie_word_embeddings": False}))
    untied = folder.plan('"model" { weights = none }').plan
    assert untied is not None and not untied.architecture.tie_embeddings


def test_a_gemma3_of_either_version_is_the_same(folder: Folder):
    """Keys of version 4 and of version 5 of transformers, and what its class has where there are none."""

    def settings(**changes: Any) -> tuple[Any, ...]:
        folder.config(**{**GEMMA3, **changes})
        plan = folder.plan('"model" { weights = none }').plan
        assert plan is not None
        arch = plan.architecture
        angles = [kind.block.angles(arch) for kind in arch.kinds]
        return (
            arch.rope_theta,
            arch.rope.resolved(),
            dict(arch.own),
            [(each.theta, each.rope) for each in angles if each],
        )

    types = {"layer_types": ["sliding_attention", "full_attention"]}
    scaled = {"rope_type": "linear", "factor": 8.0}
    fours = settings(rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=scaled, sliding_window_pattern=2)
    fives = settings(**types, rope_parameters={
        "full_attention": {**scaled, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    })  # fmt: skip
    assert fours == fives
    theta, rope, own, angles = fives
    assert (theta, rope) == (5e5, {"scaling": "linear", "factor": 8.0})
    assert own == {
        "window": 9, "full_layers": [1], "local_theta": 2e4, "score_width": 8, "score_cap": None, "logit_cap": None
    }  # fmt: skip
    assert [each[0] for each in angles] == [2e4, 5e5] and angles[0][1].scaling == "none"
    theta, rope, own, _ = settings(**types, rope_parameters={"full_attention": None})
    assert (theta, rope, own["local_theta"]) == (1e6, {}, 1e4)
    _, _, own, _ = settings(num_hidden_layers=14)
    assert own["full_layers"] == [5, 11]
    own = settings(num_hidden_layers=14, sliding_window="null", layer_types=["full_attention"] * 14)[2]
    assert "window" not in own and "full_layers" not in own


WINDOWS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "mistral as its class has it": (4096, {"model_type": "mistral"}),
    "mistral without": (None, {"model_type": "mistral", "sliding_window": "null"}),
    "mistral": (77, {"model_type": "mistral", "sliding_window": 77}),
    "mixtral as its class has it": (None, {"model_type": "mixtral"}),
    "mixtral": (9, {"model_type": "mixtral", "sliding_window": 9}),
    "qwen3, turned off": (None, {"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": False}),
    "qwen3, in all layers": (9, {"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True,
                                 "max_window_layers": 0}),
    "qwen3, in later layers than it has": (None, {"model_type": "qwen3", "sliding_window": 9,
                                                  "use_sliding_window": True}),
    "qwen3, layer by layer": (9, {"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True,
                                  "layer_types": ["sliding_attention"] * 2}),
    "qwen2, turned off": (None, {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 0}),
    "qwen2, in all layers": (4096, {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}),
    "qwen2_moe, in no layer": (None, {**EXPERTS, "model_type": "qwen2_moe", "architectures": "null",
                                      "use_sliding_window": True, "max_window_layers": 0}),
    "smollm3, of no length": (None, {"model_type": "smollm3", "use_sliding_window": True}),
    "smollm3, in all layers": (9, {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9,
                                   "no_rope_layers": [0, 0]}),
    "gpt_oss, in no layer": (None, {**OSS, "layer_types": ["full_attention"] * 2}),
    "gpt_oss as its class has it, in all layers": (128, {**OSS, "layer_types": ["sliding_attention"] * 2}),
    "qwen3_moe, turned off": (None, {**EXPERTS, "sliding_window": 9}),
    "qwen3_moe": (9, {**EXPERTS, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 40}),
}  # fmt: skip


def test_a_folder_may_have_windows_in_some_layers(folder: Folder):
    qwen3: dict[str, Any] = {"model_type": "qwen3", "architectures": "null", "use_sliding_window": True}
    for types in (
        {"max_window_layers": 1},
        {"max_window_layers": 7, "layer_types": ["full_attention", "sliding_attention"]},
    ):
        folder.config(**qwen3, sliding_window=9, **types)
        plan = folder.plan('"model" { weights = none }').plan
        assert plan is not None and plan.architecture.own == {"window": 9, "full_layers": [0]}
        first, second = plan.architecture.kinds
        assert [kind.layers for kind in (first, second)] == [(0,), (1,)]
        assert [layer.window for kind in (first, second) for layer in kind.block.layers() if layer.attends] == [None, 9]
        assert plan.estimates.work.windows == ((None, 0.5), (9, 0.5))
        again = plan_from_text(plan.spec_text, plan.spec).plan
        assert again is not None and again.id == plan.id
    own = {"num_hidden_layers": 4, "sliding_window": 9, "use_sliding_window": True}
    for changes, full in (
        ({**KEYS, "model_type": "qwen2", "max_window_layers": 2}, [0, 1]),
        ({**KEYS, **EXPERTS, "architectures": "null", "model_type": "qwen2_moe", "max_window_layers": 3}, [1, 3]),
        ({**KEYS, **EXPERTS, "architectures": "null", "model_type": "qwen2_moe"}, [1, 3]),
        ({**KEYS, "model_type": "smollm3", "no_rope_layer_interval": 2}, [0, 2]),
        ({**KEYS, "model_type": "smollm3", "no_rope_layers": [0, 1, 1, 0]}, [1, 2]),
        ({**OSS, "use_sliding_window": None}, [1, 3]),
    ):
        folder.config(**(own | changes))
        plan = folder.plan('"model" { weights = none }').plan
        assert plan is not None and (plan.architecture.own["window"], plan.architecture.own["full_layers"]) == (9, full)
    for settings, word in {"full_layers = [0, 2]": "block 2", "full_layers = [1, 0]": "no block"}.items():
        ((_, text),) = errors(folder.plan(f"qwen3 {{ dim = 32, layers = 2, heads = 4, window = 9, {settings} }}"))
        assert word in text
    idle = folder.plan("qwen3 { dim = 32, layers = 2, heads = 4, full_layers = [1] }").diagnostics.warnings
    assert [warning.code for warning in idle] == ["W401"]


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_that_of_the_folder(folder: Folder, name: str):
    """As the configurations of transformers 5.23 have it."""
    window, changes = WINDOWS[name]
    folder.config(**{"architectures": "null", "attention_bias": None, **changes})
    plan = folder.plan('"model" { weights = none }').plan
    assert plan is not None
    (found,) = {layer.window for kind in plan.architecture.kinds for layer in kind.block.layers() if layer.attends}
    assert found == window
    places = [(entry.value, entry.place.split(":")[0]) for entry in plan.provenance if entry.path == "model.window"]
    assert places == ([] if window is None else [(str(window), "model/config.json")])
    ((code, _),) = errors(folder.plan('"model" { weights = none, window = 33 }'))
    assert code == "X523"


def test_a_tied_model_may_have_its_head_twice(folder: Folder):
    folder.config(tie_word_embeddings=True)
    assert folder.plan().plan is not None  # the run compares them
    folder.weights(safetensors({name: shape for name, shape in shapes().items() if name != "lm_head.weight"}))
    assert folder.plan().plan is not None
    folder.weights(safetensors({**shapes(), "lm_head.weight": [264, 16]}))
    ((_, text),) = errors(folder.plan())
    assert "lm_head.weight" in text


def test_a_header_may_be_so_long_that_its_length_looks_like_a_pickle(folder: Folder):
    content = safetensors(shapes())
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    for beginning in (b"\x80\2", b"\x80\4"):
        length = 2**16 + int.from_bytes(beginning, "little")
        folder.weights(length.to_bytes(8, "little") + header.ljust(length) + content[8 + len(header) :])
        assert (folder.path / "model" / "model.safetensors").read_bytes().startswith(beginning)
        assert folder.plan().plan is not None


def test_other_files_are_another_experiment(folder: Folder):
    before, other = folder.plan().plan, folder.plan('"./model/"').plan
    assert before is not None and other is not None and before.id == other.id
    folder.weights(safetensors(shapes(), {QUERY: "F32"}))
    after = folder.plan().plan
    assert after is not None and after.config_id != before.config_id
    assert {name for name in before.config if after.config[name] != before.config[name]} == {"weights"}


def test_a_snapshot_of_the_hub(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    copy = f"models--org--name/snapshots/{commit}"
    repo = folder.path / "cache" / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "blobs").mkdir()
    (repo / "snapshots" / commit).mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):  # snapshots have links to what was downloaded
        (folder.path / "model" / name).rename(repo / "blobs" / name)
        (repo / "snapshots" / commit / name).symlink_to(Path("../../blobs", name))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder.path / "cache"))
    for model in (
        'hub("org/name")',
        f'hub("org/name", revision = "{commit}")',
        'hub("org/name", revision = "main") { dim = 32 }',
    ):
        plan = folder.plan(model).plan
        assert plan is not None and f'model hub("org/name", revision = "{commit}")' in plan.spec_text
        args = plan.node("setup.read_weights").args
        assert args == {"repo": "org/name", "revision": commit, "digest": args["digest"]}
    before, digest = folder.plan('hub("org/name")').plan, args["digest"]
    shutil.copytree(folder.path / "cache", folder.path / "other", symlinks=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(folder.path / "other"))
    (repo / "snapshots" / commit / "model.safetensors").unlink()
    after = folder.plan('hub("org/name")').plan
    assert before is not None and after is not None and (before.id, before.config) == (after.id, after.config)
    assert planned_files(digest, repo="org/name", revision=commit).folder == f"{folder.path}/other/{copy}"
    for model, word in (
        ('"org/name"', 'write hub("org/name")'),
        ('hub("org/other")', "xtrain fetch org/other"),
        ('hub("org/name", revision = "v2")', "--revision v2"),
        ('hub("../../etc")', "not a repository"),
        ('hub("org/name", revision = "../main")', "not a repository"),
        ('hub("org/name", revision = "")', "not a repository"),
        ('hub("org/name", revision = "a\\u{0}b")', "not a repository"),
    ):
        ((code, text),) = errors(folder.plan(model))
        assert code == "X520" and word in text, text
    for model in ("hub()", 'hub("org/name", version = "1")', 'hub("org/name", revision = 3)'):
        ((code, _),) = errors(folder.plan(model))
        assert code == "X220"
    monkeypatch.setenv("HF_HUB_CACHE", "~nobody-of-this-name/cache")
    ((code, text),) = errors(folder.plan('hub("org/name")'))
    assert code == "X520" and "~nobody-of-this-name" in text


@pytest.mark.parametrize(("written", "sets", "code", "word"), [
    ("tokenizer bytes", ('tokenizer=hub("org/name")',), "X505", "xtrain fetch org/name"),
    ("tokenizer bytes", ('tokenizer=hub ("org/name", revision = "v2")',), "X505", "--revision v2"),
    ("tokenizer bytes", ("tokenizer=hub(org)",), "X220", "does not name a tokenizer"),
    ("tokenizer bytes", ("tokenizer=hub(",), "X103", "never closed"),
    ('tokenizer "hub(x)"', (), "X505", "hub(x): No such file"),
    (r'tokenizer "hub(\"org/name\", revision = \"main\")"', (), "X505", "No such file"),
    ("", (), "X505", "the model's folder model has no tokenizer.json"),
])  # fmt: skip
def test_tokenizers_that_are_not_there(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, written: str, sets: tuple[str, ...], code: str, word: str
):
    monkeypatch.setenv("HF_HUB_CACHE", str(folder.path / "cache"))
    spec = folder.spec('"model" { vocab = tokenizer, weights = none }')
    spec.write_text(spec.read_text().replace("tokenizer bytes", written))
    (error,) = plan_from_spec(spec, sets).diagnostics.errors
    assert error.code == code and error.span is not None and word in f"{error.message}; {error.hint}", error


NEXT = "model.layers.2."


@pytest.mark.parametrize(("family", "name", "further", "ignored"), [
    ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", (), True),
    ("llama", "model.layers.0.self_attn.q_proj.bias", (), False),
    ("llama", f"{NEXT}mlp.up_proj.weight", (), False),
    ("llama", "vision_tower.patch.weight", (), False),
    ("gemma3", "vision_tower.patch.weight", (), True),
    ("gemma3", "model.multi_modal_projector.weight", (), True),
    ("gemma3", "model.vision_tower", (), False),
    # Modules behind the two layers that predict further tokens; where the model has them, copies alone are left.
    ("deepseek_v3", f"{NEXT}mlp.up_proj.weight", (), True),
    ("deepseek_v3", "model.layers.1.mlp.up_proj.weight", (), False),
    ("deepseek_v3", "model.layers.3.mlp.up_proj.weight", (), False),
    ("deepseek_v3", f"{NEXT}mlp.up_proj.weight", (2,), False),
    ("deepseek_v3", f"{NEXT}embed_tokens.weight", (2,), True),
    ("deepseek_v3", f"{NEXT}shared_head.head.weight", (2,), True),
])  # fmt: skip
def test_what_files_have_beside_a_model(family: str, name: str, further: tuple[int, ...], ignored: bool):
    arch: Any = SimpleNamespace(layers=2, further_layers=further)
    stored = FAMILIES[family].stored
    assert stored is not None and stored.is_ignored(name, arch, {name, f"{NEXT}eh_proj.weight"}) == ignored
