"""Models that transformers' own code computes: against transformers, and what a spec may ask of them."""

import importlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from code_models import ROLLOUT, SINGLE, built, content_of, differences, make, plan_for, round_trip, rows, theirs
from reference_models import make as make_native
from small_runs import SPEC, make_run, plan_of, read, save
from torch.utils.flop_counter import FlopCounterMode

from xtrain.blocks.block import BlockPiece, block_of
from xtrain.blocks.code_layer import CodeLayer
from xtrain.dsl.checking import model_code
from xtrain.planner.load import plan_from_text
from xtrain.runtime.feed.microbatch import IGNORE_INDEX
from xtrain.runtime.inspect import small_model
from xtrain.runtime.inspect.code_layouts import attends_by_kernels
from xtrain.runtime.inspect.code_ranks import _on_two_ranks
from xtrain.runtime.inspect.small_model import idle_parameters, of_layers, reward_class, small
from xtrain.runtime.inspect.trace import trace_plan
from xtrain.runtime.nn.code_attention import _attention, attending
from xtrain.runtime.nn.code_transformer import CodeTransformer
from xtrain.runtime.nn.model_code import CodeModel, UnknownCode, build, config_of
from xtrain.runtime.sampling.text_generator import Prompts
from xtrain.runtime.store.adapter_export import export_of

# Norms after, learned positions, experts. With `-m slow` also fused matrices, a factor of logits, a head with a bias, a
# cap of logits, state over layers, positions counted from padding, a tied bias, other parts.
ORDINARY = ("olmo3", "gpt2", "glm4_moe")
OTHERS = (
    "phi3", "cohere", "codegen", "gemma2", "mamba", "falcon_h1", "roberta", "gemma3",
    "arcee", "apertus", "aria_text", "afmoe", "bamba", "beam", "biogpt", "bloom", "cohere2", "deepseek_v3", "diffllama",
    "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "glm", "glm4", "gpt_bigcode", "gptj", "granite", "granitemoe",
    "helium", "falcon", "gpt_neo", "mpt", "phi", "qwen3_next", "rwkv", "sarvam_moe", "seed_oss", "stablelm",
    "starcoder2",
)  # fmt: skip
KEYS: dict[str, dict[str, Any]] = {"cohere": {"use_qk_norm": True}}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


pytestmark = pytest.mark.usefixtures("inspected_here")


@pytest.mark.parametrize("kind", [*ORDINARY, *map(slow, OTHERS)])
def test_loss_and_gradients_are_those_of_transformers(kind: str, tmp_path: Path):
    """Of documents in a row, each alone in the reference; and an export without training is the folder again."""
    folder = tmp_path / "model"
    reference = make(kind, folder, **KEYS.get(kind, {}))
    found = differences(folder, reference)
    assert found["loss"] < 1e-5 and found["gradients"] < 1e-4
    assert not round_trip(folder, tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_moe", slow("gpt_oss")])
def test_losses_of_routers_have_the_weight_of_the_config(kind: str, tmp_path: Path):
    """Of a row: the mean over layers of the loss that transformers' function gives for each."""
    reference = make(kind, tmp_path).double()
    plan = plan_of(f'"{tmp_path}" {{ code = transformers }}', params="fp64")
    arch, batch = plan.architecture, rows(plan.architecture.vocab, (64,))
    model = built(plan)
    model.train()
    model.whole(None, batch).sum().backward()
    found = reference(input_ids=batch.input_ids_BS, output_router_logits=True, use_cache=False)
    loss_of = importlib.import_module(type(reference).__module__).load_balancing_loss_func
    each = [loss_of((logits,), arch.experts, arch.experts_per_token) for logits in found.router_logits]
    coefficient = reference.config.router_aux_loss_coef
    assert arch.router_aux_loss == coefficient * arch.experts_per_token > 0 and len(each) == len(arch.expert_layers)
    assert batch.labels_BS is not None
    entropy = F.cross_entropy(found.logits[0], batch.labels_BS[0], ignore_index=IGNORE_INDEX, reduction="sum")
    (entropy + coefficient * sum(each) / len(each)).backward()
    wanted = dict(reference.named_parameters())
    own = dict(model.named_parameters())
    assert isinstance(model.whole, CodeTransformer)
    for name, ours in model.whole.code.names.items():
        mine, other = own[ours].grad, wanted[name].grad  # transformers sums its loss in fp32
        assert mine is not None and other is not None and (mine - other).abs().max() < 1e-8 * other.abs().max()


def test_native_code_and_transformers_agree(tmp_path: Path):
    make_native("llama", "odd heads, tied", tmp_path)
    native, code = built(plan_of(f'"{tmp_path}" {{ }}')).whole, built(plan_for(tmp_path)).whole
    assert isinstance(code, CodeTransformer) and not isinstance(native, CodeTransformer)
    losses = [model(None, rows(263)).sum() for model in (native, code)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    assert dict(native.named_parameters()).keys() == dict(code.named_parameters()).keys()


@pytest.mark.parametrize("kind", ["olmo3", "mamba", slow("gemma2"), slow("falcon")])
def test_texts_are_those_of_whole_forwards(kind: str, tmp_path: Path):
    """Also of prompts of several lengths, which begin with padding."""
    reference = make(kind, tmp_path)
    plan = plan_for(tmp_path)
    model, prompts = built(plan).whole, [[5, 9, 30], [7, 8, 11, 60, 2]]
    running = Prompts.of(prompts, 9, torch.device("cpu"))
    batch, texts = running.first(), [list(prompt) for prompt in prompts]
    with torch.no_grad():
        for _ in range(4):
            logits_BV = model(None, batch)
            running.cache.filled += batch.shape[1]
            for text, logits_V in zip(texts, logits_BV, strict=True):
                wanted_V = reference(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(logits_V, wanted_V, rtol=1e-4, atol=1e-4)
                text.append(int(wanted_V.argmax()))
            batch = running.next([text[-1] for text in texts])
    planned = sum(
        len(each.layers) * each.block.cached(plan.architecture, 1, 9, set()) for each in plan.architecture.kinds
    )
    assert running.cache.bytes == 4 * len(prompts) * planned


@pytest.mark.parametrize("kind", ["olmo3", "gpt2", "glm4_moe"])
def test_drawn_weights_depend_on_seed_and_name(kind: str, tmp_path: Path):
    make(kind, tmp_path)
    model = built(plan_for(tmp_path)).whole
    assert isinstance(model, CodeTransformer)
    names = [name for name, _ in model.named_parameters()]
    first, again = ({name: model.drawn(name, 3) for name in order} for order in (names, names[::-1]))
    other = model.drawn("embed_tokens.weight", 4)
    assert all(torch.equal(first[name], again[name]) and first[name].isfinite().all() for name in names)
    assert not torch.equal(first["embed_tokens.weight"], other)
    assert 0.01 < float(first["embed_tokens.weight"].std()) < 0.03


def errors(model: str, more: str = "", world: int | None = None) -> list[tuple[str, str]]:
    text = SPEC.format(model=model, tokenizer="bytes", params="fp32", more=more)
    found = plan_from_text(text, "small.xtrain", world=world).diagnostics
    return [(each.code, f"{each.message}; {each.hint}") for each in found.errors]


@pytest.mark.parametrize(("more", "code", "word"), [
    ("parallel { tp 2 { } }", "X530", "sequence = false"),
    ("compile { }", "X530", "compilation"),
    ("activation none { tile_mlp = 2 }", "X418", "no layer of a block can be cut"),
    ("batch { neftune = 5.0 }", "X530", "noise on embeddings"),
    ("parallel { fsdp = 2, ep 2 { } }", "X409", "no experts"),
])  # fmt: skip
def test_settings_that_its_code_does_not_support(more: str, code: str, word: str, tmp_path: Path):
    make("olmo3", tmp_path)
    found = errors(f'"{tmp_path}" {{ code = transformers }}', more, world=2)
    assert [text for own, text in found if own == code and word in text], found


def test_a_router_loss_needs_a_router(tmp_path: Path):
    make("olmo3", tmp_path)
    ((code, text),) = errors(f'"{tmp_path}" {{ code = transformers, router_aux_loss = 0.1 }}')
    assert code == "X433" and "router has logits" in text
    assert not errors(f'"{tmp_path}" {{ code = transformers, router_aux_loss = 0 }}')


SERVER = 'experiment s {{ }}\nmodel "{}" {{ code = transformers }}\ntokenizer bytes\nadapter lora {{ }}\nserve {{ }}\n'


@pytest.mark.parametrize(("kind", "text", "reason"), [
    ("olmo3", SERVER, ""),
    ("olmo3", ROLLOUT, ""),
    ("mamba", SERVER, "more than keys and values of earlier positions"),
    ("mamba", ROLLOUT, "mix the completions of a prompt"),
    slow("aria_text", SERVER, ""),
])  # fmt: skip
def test_what_is_generated_for_a_server_and_for_rollouts(kind: str, text: str, reason: str, tmp_path: Path):
    make(kind, tmp_path)
    found = plan_from_text(text.format(tmp_path, ""), "small.xtrain").diagnostics.errors
    assert {each.code for each in found} == ({"X530"} if reason else set()), found
    assert all(reason in each.message for each in found)


def test_a_model_of_many_tensors_is_measured_on_two_ranks():
    many = [torch.zeros(1) for _ in range(300)]
    assert _on_two_ranks(partial(dict.get, {0: ["same"], 1: ["same"], "more": many})) == ["same"]  # type: ignore[arg-type]


@pytest.mark.parametrize("compare", [partial(dict.__getitem__, {0: ["same"]}), lambda rank: ["same"]])
def test_ranks_that_raise_an_error_confirm_nothing(compare: Any):
    assert _on_two_ranks(compare) is None


def test_ranks_that_are_killed_have_not_measured():
    with pytest.raises(UnknownCode, match="exit codes 0 and 1"):
        _on_two_ranks(os._exit)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "text"), [
    ("olmo3", "key-value cache: "),
    slow("falcon", "in a cache of transformers, whose memory is not counted"),
    ("mamba", "without a cache: each token computes all positions before it again"),
])  # fmt: skip
def test_a_plan_says_how_texts_are_continued(kind: str, text: str, tmp_path: Path):
    make(kind, tmp_path)
    plan = plan_for(tmp_path, more=f'on finish generate {{ prompts = ["abc"], tokens = 60 }}\n{SINGLE}')
    (node,) = (node for node in plan.nodes if node.op == "tick.generate")
    assert text in node.does


@pytest.mark.parametrize(("kind", "parts"), [slow("gemma2", 2), slow("phi3", 1), ("olmo3", 1)])
def test_ranks_keep_all_heads_of_gathered_keys(kind: str, parts: int, tmp_path: Path):
    make(kind, tmp_path)
    arch = plan_for(tmp_path).architecture
    assert arch.own["code"]["tensor"]
    for layer in block_of(arch.kind_of(0)).layers():
        alone, of_two = (layer.cached(arch, tp, 10, set()) for tp in (1, 2))
        assert alone == parts * of_two > 0


PAIRS = """experiment small {{ budget = 4 steps }}
model "{}" {{ code = transformers }}
tokenizer bytes
dataset pairs {{ source = jsonl("*.jsonl"), chosen = "chosen", rejected = "rejected" }}
loss bradley_terry {{ }}
batch {{ sequence = 64 }}
optimizer adamw {{ lr = 1e-3 }}
{}
"""


@pytest.mark.parametrize("kind", ["olmo3", slow("gpt2")])
def test_a_reward_model_is_read_by_transformers(kind: str, tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    make(kind, tmp_path / "model")
    plan = plan_from_text(PAIRS.format(tmp_path / "model", ""), "small.xtrain").plan
    assert plan is not None
    values = read(plan)
    save(plan, make_run(plan, tmp_path / "run", tmp_path), values)
    found = export_of(plan, tmp_path / "run", checkpoint=None, averaged=None, dtype=None, most=10**9)
    found.write(tmp_path / "out", lambda *_: None)
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    batch = rows(plan.architecture.vocab, (30,))
    hidden_SD = theirs.base_model(batch.input_ids_BS, use_cache=False)[0][0]
    rewards = theirs.eval()(input_ids=batch.input_ids_BS).logits
    torch.testing.assert_close(rewards[0], values["score.weight"] @ hidden_SD[-1])
    again = plan_from_text(PAIRS.format(tmp_path / "out", ""), "small.xtrain").plan
    assert again is not None and "setup.head" not in {node.op for node in again.nodes}


def test_a_reward_model_that_transformers_lacks_is_not_exported(tmp_path: Path):
    make("granite", tmp_path)
    assert plan_from_text(PAIRS.format(tmp_path, ""), "small.xtrain").plan is not None
    text = PAIRS.format(tmp_path, 'on finish export { to = "out" }')
    found = plan_from_text(text, "small.xtrain").diagnostics.errors
    assert [each.code for each in found] == ["X525"] and "GraniteForCausalLM" in found[0].message


def test_rows_longer_than_a_table_of_positions(tmp_path: Path):
    make("gpt2", tmp_path)
    ((code, text),) = errors(f'"{tmp_path}" {{ }}', "batch { sequence = 512 }")
    assert code == "X530" and "512 positions" in text and "table of 256" in text
    assert not errors(f'"{tmp_path}" {{ }}', "batch { sequence = 256 }")


def test_documents_that_would_mix_need_rows_of_their_own(tmp_path: Path):
    make("mamba", tmp_path)
    ((code, text),) = errors(f'"{tmp_path}" {{ }}')
    assert code == "X530" and "mixes the documents of a row" in text and "pack(single)" in text
    assert not errors(f'"{tmp_path}" {{ }}', SINGLE)


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "intermediate_size": 48,
}


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "nonsense"}, "no model type 'nonsense'"),
    ({"model_type": "nonsense", "auto_map": {"AutoModelForCausalLM": "code.Model"}}, "no model type 'nonsense'"),
    ({"model_type": "nonsense", "transformers_version": "9.1.0"}, "of transformers 9.1.0"),
    ({"model_type": "bart"}, "encoder with a decoder"),
    ({"model_type": "t5"}, "encoder with a decoder"),
    ({"model_type": "musicgen"}, "encoder with a decoder"),
    ({"model_type": "vit"}, "no causal language model"),
    ({"model_type": "exaone4", "hidden_size": "wide"}, "expected int, got str"),
    ({"model_type": "exaone4", "layer_types": []}, "`num_hidden_layers` (32)"),
    ({"model_type": "exaone4", "hidden_act": "gold"}, "KeyError('gold')"),
    ({"model_type": "exaone4", "quantization_config": {"quant_method": "fp8"}}, "its weights are quantized"),
    ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "(`auto_map`) is not run"),
    ({"model_type": "clip"}, "no causal language model"),
    ({"model_type": "t5gemma2_text"}, "no causal language model"),
    ({"model_type": "exaone4", "hidden_size": "wide"}, "rejects the config"),
    ({"model_type": "exaone4", "rope_parameters": 7}, "rejects the config"),
    ({"model_type": "llama4", "text_config": 5}, "rejects the config"),
    ({"model_type": "dbrx"}, "cannot be built"),
    ({"model_type": "exaone4", **SMALL, "hidden_act": "none such"}, "cannot be built"),
    ({"model_type": "bert", **SMALL}, "sees later tokens"),
    ({"model_type": "moshi", **SMALL}, "321 rows"),
    ({"model_type": "rembert", **SMALL, "is_decoder": True}, "narrower than its layers"),
    ({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}, "table of 16 positions"),
    ({"model_type": "cpmant", **SMALL, "dim_head": 8, "dim_ff": 48}, "1,344 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "word"), UNUSABLE)
def test_code_that_cannot_be_used(config: dict[str, Any], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("xtrain.runtime.inspect.model_code.traces")  # it is refused before its layers are traced
    (tmp_path / "config.json").write_text(json.dumps(config))
    ((code, text),) = errors(f'"{tmp_path}" {{ weights = none, code = transformers }}')
    assert code == "X529" and word in text


def test_an_old_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_code, "version", lambda name: "4.57.1")
    (tmp_path / "config.json").write_text('{"model_type": "exaone4"}')
    ((code, text),) = errors(f'"{tmp_path}" {{ weights = none, code = transformers }}')
    assert code == "X529" and "4.57.1 is too old" in text and "pip install" in text


PLANS = """
import sys
from xtrain.cli.main import main
from xtrain.dsl.checking import model_code

if {fake}:  # instead of a process of its own
    def refuse(*given):
        raise model_code.CodeUnusable("no model type 'nonsense'", "")
    model_code._inspected = refuse
codes = [main(["plan", path]) for path in sys.argv[1:]]
assert "torch" not in sys.modules and "transformers" not in sys.modules and all(codes)
"""


@pytest.mark.parametrize(
    "rows",
    [UNUSABLE[:1], pytest.param(UNUSABLE, marks=[pytest.mark.slow, pytest.mark.timeout(2400)])],
    ids=("one", "in child processes"),
)
def test_plans_of_bad_input_have_no_torch(rows: list[tuple[dict[str, Any], str]], tmp_path: Path):
    specs = []
    for number, (config, _) in enumerate(rows):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        model = f'"{folder}" {{ weights = none, code = transformers }}'
        specs.append(folder / "bad.xtrain")
        specs[-1].write_text(SPEC.format(model=model, tokenizer="bytes", params="fp32", more=""))
    script, environment = PLANS.format(fake=len(rows) == 1), {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", script, *map(str, specs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    said = re.split(r"(?=error\[X\d+\])", done.stdout + done.stderr)[1:]
    assert len(said) == len(rows)
    for text, (_, word) in zip(said, rows, strict=True):
        assert text.startswith("error[X529]") and word in " ".join(text.split()), text


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise model_code.PackageNotFoundError(name)

    monkeypatch.setattr(model_code, "version", missing)
    (tmp_path / "config.json").write_text('{"model_type": "exaone4"}')
    ((code, text),) = errors(f'"{tmp_path}" {{ weights = none, code = transformers }}')
    assert code == "X529" and "pip install 'xtrain[transformers]'" in text


ADAPTED = (
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma2", "glm", "glm4", "glm4_moe", "gpt_neox",
    "granite", "granitemoe", "helium", "mistral", "phi", "qwen2", "seed_oss", "stablelm", "starcoder2",
)  # fmt: skip


@pytest.mark.parametrize(("kind", "settings"), [
    ("olmo3", ", dora = true"),
    slow("olmo3", ""),
    slow("phi3", ", dora = true"),
    *(slow(kind, "") for kind in ADAPTED),
])  # fmt: skip
def test_adapters_are_those_of_peft(kind: str, settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Losses and gradients of a document with random factors, in fp64."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import transformers_weight_conversion as conversion

    # It takes `gate_proj` of any module for that of experts.
    monkeypatch.setattr(conversion, "convert_peft_config_for_transformers", lambda *given, **named: None)
    reference = make(kind, tmp_path).double()
    adapter = f"adapter lora {{ rank = 3, alpha = 12{settings} }}"
    plan = plan_of(f'"{tmp_path}" {{ code = transformers }}', params="fp64", more=adapter)
    model = built(plan).whole
    assert isinstance(model, CodeTransformer)
    factors = {each.name for each in plan.parameters.tensors if each.adapter}
    own = {name: parameter for name, parameter in model.named_parameters() if name in factors}
    matrices = {each.adapter.removesuffix(".weight") for each in plan.parameters.tensors if each.adapter}
    files = {ours: name for name, ours in model.code.names.items() if "lora" not in name}
    targets = [files[f"{matrix}.weight"].removesuffix(".weight") for matrix in sorted(matrices)]
    config = LoraConfig(r=3, lora_alpha=12, target_modules=targets, use_dora=bool(settings))
    peft: Any = get_peft_model(reference, config)
    wanted = {name: each for name, each in peft.named_parameters() if each.requires_grad}
    assert len(wanted) == len(own) > 0

    def its(name: str) -> str:
        matrix, _, factor = name.removesuffix(".weight").rpartition(".")
        path = files[f"{matrix}.weight"].removesuffix(".weight")
        return f"base_model.model.{path}.{factor}.default.weight"

    with torch.no_grad():
        for name, parameter in own.items():
            parameter.mul_(0.1)
            wanted[its(name)].copy_(parameter)
    batch = rows(plan.architecture.vocab, (30,))
    ours, other = model(None, batch).sum(), theirs(peft, batch)
    ours.backward()
    other.backward()
    torch.testing.assert_close(ours, other, rtol=1e-9, atol=0)
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.grad, wanted[its(name)].grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("kind", "mode", "limit"), [
    ("olmo3", "full", 0.06), ("qwen3_moe", "none", 0.03),
    *(slow(*each) for each in (("olmo3", "none", 0.02), ("mamba", "none", 0.06), ("gpt2", "none", 0.03),
        ("gpt2", "full", 0.06), ("qwen3_moe", "full", 0.06))),
])  # fmt: skip
def test_planned_memory_is_near_the_traced(kind: str, mode: str, limit: float, tmp_path: Path):
    make(kind, tmp_path)
    more = f"activation {mode} {{ }}\nlaunch {{ device = cpu }}" + (f"\n{SINGLE}" if kind == "mamba" else "")
    plan = plan_of(f'"{tmp_path}" {{ code = transformers }}', more=more)
    (planned,) = plan.estimates.classes
    (traced,) = trace_plan(plan)
    assert planned.memory.total_bytes == pytest.approx(traced.memory.total_bytes, rel=limit)


@pytest.mark.parametrize(("layer", "more"), [
    (CodeLayer("code", 1), {}),
    (CodeLayer("code", 1, 8, True), {"window": 8, "experts": True}),
])  # fmt: skip
def test_plans_omit_settings_of_a_layer_that_older_plans_lack(layer: CodeLayer, more: dict[str, Any]):
    assert layer.to_json() == {"piece": "CodeLayer", "name": "code", "kind": 1, **more}
    assert BlockPiece.from_json(layer.to_json()) == layer


@pytest.mark.parametrize(("kind", "mixes"), [
    ("olmo3", False), slow("falcon_h1", True), slow("rwkv", True),
])  # fmt: skip
def test_planned_flops_are_those_of_its_code(kind: str, mixes: bool, tmp_path: Path):
    """But for attention, which torch does not count on the CPU, and for what it computes of padding."""
    reference = make(kind, tmp_path)
    plan, positions = plan_for(tmp_path), 64
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        reference(input_ids=torch.arange(positions)[None] + 4, use_cache=False)
    assert plan.estimates.work.position * positions == pytest.approx(3 * counter.get_total_flops(), rel=4e-4)
    layers = [layer for each in plan.architecture.kinds for layer in each.block.layers()]
    assert any(layer.position_flops(plan.architecture) for layer in layers) == mixes


@pytest.mark.parametrize(("kind", "keys", "vectors"), [
    slow("gpt_oss", {}, {"gate_up_proj_bias", "down_proj_bias"}),
    slow("cohere", KEYS["cohere"], {"q_norm.weight", "k_norm.weight"}),
])  # fmt: skip
def test_biases_of_experts_and_norms_of_heads_do_not_decay(
    kind: str, keys: dict[str, Any], vectors: set[str], tmp_path: Path
):
    make(kind, tmp_path, **keys)
    arch = plan_for(tmp_path).architecture
    for own in arch.kinds:
        of_layer = [each for each in own.block.parameters(arch) if len(each.shape) > 1]
        found = [each for each in of_layer if not each.decays]
        assert len(found) == len(vectors) and all(each.name.endswith(tuple(vectors)) for each in found)
        assert len(of_layer) > len(found) and not any(each.is_matrix for each in found)


def test_rounding_of_a_small_model_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where fp32 does not show that kernels give the same, fp64 does."""
    code = CodeModel(make("olmo3", tmp_path))
    monkeypatch.setattr(small_model, "TOLERANCE", 1e-9)
    assert not attends_by_kernels(code) and small_model.shows(attends_by_kernels, code)
    assert not small_model.shows(lambda code: False, code)
    assert next(code.model.parameters()).dtype == torch.float32


@pytest.mark.parametrize(("kind", "part"), [("blenderbot-small", "encoder_attn"), slow("deepseek_v32", "indexer")])
def test_parameters_that_no_hidden_state_depends_on_are_idle(kind: str, part: str):
    config = config_of(content_of(kind))
    with torch.device("meta"):
        whole = build(config)
    tiny = small(config_of(content_of(kind)).to_dict(), whole)
    assert tiny is not None
    idle, found = idle_parameters(tiny), of_layers(idle_parameters(tiny), tiny)
    own = {name.partition(".")[2].partition(".")[2] for name in idle if name.startswith("layers.")}
    assert idle and all(part in name for name in idle) and own == frozenset().union(*found.values())


@pytest.mark.slow
def test_idle_parameters_are_frozen(tmp_path: Path):
    """The plan names them, adapters leave them out, and all other parameters have gradients."""
    make("blenderbot-small", tmp_path / "model")
    plan, adapted = (plan_for(tmp_path / "model", more=f"{SINGLE}\n{each}") for each in ("", "adapter lora { }"))
    frozen = {each.name for each in plan.parameters.tensors if not each.trained}
    assert frozen and all("encoder_attn" in name for name in frozen)
    assert "encoder_attn" in plan.node("setup.freeze").does
    assert not any("encoder_attn" in each.adapter for each in adapted.parameters.tensors)
    model = built(plan)
    model.whole(None, rows(plan.architecture.vocab, (20,))).sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == frozen


def test_layers_may_take_views_of_attention():
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    for width in (4, 2):
        with attending(lambda q, *_: q):
            out, _ = _attention(torch.nn.Module(), q, k, v[..., :width])
        assert out.is_contiguous() and torch.equal(out, q[..., :width].transpose(1, 2))


@pytest.mark.slow
def test_a_config_without_a_choice_of_padding_has_no_reward_model():
    config = config_of(content_of("modernbert-decoder"))
    with torch.device("meta"):
        whole = build(config)
    tiny = small(config.to_dict(), whole)
    assert tiny is not None and not reward_class(tiny)
