"""Adapters of PEFT through a run and back: the same bytes; merged into the model as PEFT merges them."""

import json
import shutil
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import plan_on, run_of, with_single_experts
from reference_models import make
from safetensors.torch import load_file, save_file
from small_runs import make_run, plan_of, save
from torch import Tensor

from xtrain.cli.main import main
from xtrain.dsl.diagnostics.diagnostic import Diagnostic
from xtrain.plan.architecture import buffers
from xtrain.plan.arithmetic import Counts
from xtrain.plan.peft import PEFT_CONFIG, PEFT_WEIGHTS
from xtrain.planner.load import plan_from_text
from xtrain.planner.rules.validate import check_counted
from xtrain.runtime.store.base_weights import BaseWeights

# Name → (family, its model, what PEFT is asked for).
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "odd heads, tied", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "rslora": ("qwen3", "plain", {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}),
    "dora": ("llama", "biased, scaled by yarn",
        {"r": 3, "lora_alpha": 5, "use_dora": True, "target_modules": ["q_proj", "o_proj", "down_proj"]}),
    "some layers": ("llama", "odd heads, tied",
        {"r": 2, "lora_dropout": 0.05, "target_modules": ["up_proj", "o_proj"], "layers_to_transform": [1]}),
    "patterns": ("llama", "odd heads, tied", {"r": 2, "lora_alpha": 5,
            "target_modules": ["q_proj", "v_proj", "up_proj"], "rank_pattern": {"v_proj": 3},
            "alpha_pattern": {"v_proj": 9, "layers.1.mlp.up_proj": 1}}),
    "ranks": ("llama", "odd heads, tied", {"r": 2, "target_modules": ["v_proj", "o_proj", "up_proj"],
            "rank_pattern": {"v_proj": 3, "layers.0.mlp.up_proj": 5},
            "alpha_pattern": {"layers.1.self_attn.o_proj": 7}}),
    "beside an embedding that is the head": ("llama", "odd heads, tied",
        {"r": 2, "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "of the head": ("qwen3", "plain", {"r": 3, "lora_alpha": 5, "target_modules": ["k_proj", "lm_head"]}),
    "per-layer inputs": ("gemma4", "per-layer inputs, shared keys",
        {"r": 2, "lora_alpha": 8, "target_modules": "all-linear"}),
    "beside a head": ("qwen3", "plain", {"r": 2, "target_modules": ["k_proj"], "modules_to_save": ["lm_head"]}),
}  # fmt: skip


def made(family: str, name: str, asked: dict[str, Any], folder: Path, *, with_head: bool = False) -> Any:
    """A model of PEFT with random A and B, saved with its base; folder: gets `base` and `adapter`. with_head: the
    latter has the matrices of embedding and head as well, where they have adapters."""
    from peft import LoraConfig, get_peft_model

    base = make(family, name, folder / "base")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **asked))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.1, generator=generator)
    model.save_pretrained(str(folder / "adapter"), save_embedding_layers=with_head)
    return model


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name == "per-layer inputs" else ()) for name in CASES]
)
def test_an_adapter_of_peft_is_exported_as_it_was_and_merged_as_there(tmp_path: Path, name: str, capsys):
    family, model, asked = CASES[name]
    reference = made(family, model, asked, tmp_path)
    plan = plan_on(tmp_path)
    adapter = plan.architecture.adapter
    assert (adapter.rank, adapter.alpha) == (asked["r"], asked.get("lora_alpha", 8))
    assert adapter.dropout == asked.get("lora_dropout", 0)
    assert adapter.dora == asked.get("use_dora", False)
    assert adapter.scaling == ("rslora" if asked.get("use_rslora") else "standard")
    directory = run_of(plan, tmp_path)
    assert main(["export", str(directory), "--adapter", "--to", str(tmp_path / "out")]) == 0
    for file in (PEFT_WEIGHTS, PEFT_CONFIG):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()

    assert main(["merge", str(directory), "--to", str(tmp_path / "merged")]) == 0
    assert "read back and compared" in capsys.readouterr().out
    merged, theirs = load_file(tmp_path / "merged" / "model.safetensors"), reference.merge_and_unload().state_dict()
    assert merged.keys() <= theirs.keys() and merged
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=1e-6)
    for folder, library, words in (("out", "peft", "RA of rank "), ("merged", "transformers", "into which ")):
        card = (tmp_path / folder / "README.md").read_text()
        assert f'library_name: "{library}"' in card and f'"xtrain", "{family}", "lora"]' in card
        assert words in card and f"alpha {adapter.alpha:g}" in card
    report = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert len(report) == sum("lora_A" in key for key in load_file(tmp_path / "adapter" / PEFT_WEIGHTS))
    assert all(each["rms"] > 0 and each["error"] == 0 for each in report.values())


def test_peft_reads_what_is_written_without_a_warning(tmp_path: Path):
    """Of an adapter that began here, so that its config is written anew."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    bases = {"tied": ("llama", "odd heads, tied"), "untied": ("qwen3", "plain")}
    reference = {name: make(*made_of, tmp_path / name) for name, made_of in bases.items()}
    for number, text in enumerate(
        (
            'rank = 2, alpha = 3, targets = ["v_proj", "lm_head"], ranks = { lm_head: 3 }',
            "rank = 3, alpha = 7, ranks = { mlp: 2 }, alphas = { v_proj: 9.5 }",
            'rank = 2, targets = ["layers.0.self_attn.q_proj", "mlp.up_proj"], scaling = rslora',
            "rank = 2, alpha = 3, dora = true",
            'rank = 2, targets = ["v_proj"], train = ["embed_tokens", "norm"]',
            'rank = 3, layers = ["1"], ranks = { o_proj: 5 }, alphas = { "layers.1.mlp": 2.5, v_proj: 1 }',
        )
    ):
        name = "untied" if "lm_head" in text else "tied"
        base = reference[name]
        plan = plan_of(f'"{tmp_path / name}"', more=f"adapter lora {{ {text} }}")
        folder = tmp_path / str(number)
        trained = {each.name: torch.randn(each.shape) / 10 for each in plan.parameters.tensors if each.trained}
        directory = make_run(plan, folder / "run", folder)
        with BaseWeights.of(plan, folder, torch.device("cpu")) as weights:
            digest = weights.digest
        save(plan, directory, trained, base_content=digest)
        assert main(["export", str(directory), "--adapter", "--to", str(folder / "out")]) == 0
        assert main(["merge", str(directory), "--to", str(folder / "merged")]) == 0
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT's own
            model = PeftModel.from_pretrained(fresh, str(folder / "out"))
        ids_BS = torch.arange(12).view(2, 6)
        ours = AutoModelForCausalLM.from_pretrained(folder / "merged")
        torch.testing.assert_close(model(ids_BS).logits, ours(ids_BS).logits, rtol=0, atol=1e-5)
        assert not torch.allclose(base(ids_BS).logits, ours(ids_BS).logits, atol=1e-3)


# Family, settings of the adapter, and (rank, alpha) of experts and of q_proj in the file.
EXPERTS: list[Any] = [
    pytest.param("qwen3_moe", "", (2, 6, 3, 1.5), marks=pytest.mark.matrix),
    pytest.param("mixtral", ", scaling = rslora", (2, 6 * 2**0.5, 3, 1.5 * 3**0.5), marks=pytest.mark.matrix),
    (
        "qwen3_moe",
        ', ranks = { "experts.up_proj": 5, "1.*.experts": 4, q_proj: 3 }, '
        'alphas = { "experts.down_proj": 9, q_proj: 1.5 }',
        (5, 5 * 6 / 2, 3, 1.5),
    ),
]


@pytest.mark.parametrize(("family", "more", "values"), EXPERTS)
def test_adapters_of_experts_are_written_one_by_one(tmp_path: Path, family: str, more: str, values: tuple[float, ...]):
    """PEFT computes with them what the merged model computes; and they are read and written again byte for byte. It has
    gate and up in one matrix, without patterns: all experts get one rank and one scale."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    make(family, "plain", tmp_path / "base")
    text = f'rank = 2, alpha = 6, targets = ["experts", "q_proj"]{more}'
    text += "" if "ranks" in more else ", ranks = { q_proj: 3 }, alphas = { q_proj: 1.5 }"
    plan = plan_of(f'"{tmp_path / "base"}"', more=f"adapter lora {{ {text} }}")
    trained = {each.name: torch.randn(each.shape) / 5 for each in plan.parameters.tensors if each.trained}
    directory = make_run(plan, tmp_path / "first", tmp_path)
    with BaseWeights.of(plan, tmp_path, torch.device("cpu")) as weights:
        save(plan, directory, trained, base_content=weights.digest)
    assert main(["export", str(directory), "--adapter", "--to", str(tmp_path / "adapter")]) == 0
    assert main(["merge", str(directory), "--to", str(tmp_path / "merged")]) == 0
    names = load_file(tmp_path / "adapter" / PEFT_WEIGHTS).keys()
    assert any(".experts.1." in name for name in names) and not any("base_layer" in name for name in names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT's own
        # PEFT's own too: it turns pairs of experts into those of stacks, and takes its pattern of these for idle.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match .*gate_up_proj")
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model = PeftModel.from_pretrained(fresh, str(tmp_path / "adapter"))
    ids_BS = torch.arange(12).view(2, 6)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(model(ids_BS).logits, ours(ids_BS).logits, rtol=0, atol=1e-5)
    merged, theirs = ours.state_dict(), model.merge_and_unload().state_dict()
    assert any("experts.gate_up_proj" in name for name in merged) and merged.keys() == theirs.keys()
    torch.testing.assert_close(merged, theirs, rtol=0, atol=1e-6)
    again = plan_on(tmp_path)
    adapter, before = again.architecture.adapter, plan.architecture.adapter
    assert (adapter.rank, adapter.ranks, adapter.scaling) == (values[0], {"self_attn.q_proj": values[2]}, "standard")
    assert (adapter.alpha, adapter.alphas["self_attn.q_proj"]) == pytest.approx((values[1], values[3]), rel=1e-12)
    assert {*before.targets} == {"experts", "q_proj"} and "self_attn.q_proj" in adapter.targets
    assert main(["export", str(run_of(again, tmp_path)), "--adapter", "--to", str(tmp_path / "out")]) == 0
    for file in (PEFT_WEIGHTS, PEFT_CONFIG):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()


def test_magnitudes_of_experts_are_written_one_by_one(tmp_path: Path, capsys):
    """PEFT reads them where experts are modules of their own, and computes what the merged model computes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    reference = with_single_experts(make("qwen3_moe", "plain", tmp_path / "base"))
    text = 'rank = 2, alpha = 6, dora = true, targets = ["experts", "q_proj"]'
    plan = plan_of(f'"{tmp_path / "base"}"', more=f"adapter lora {{ {text} }}")
    trained = {each.name: torch.randn(each.shape) / 5 for each in plan.parameters.tensors if each.trained}
    directory = make_run(plan, tmp_path / "first", tmp_path)
    with BaseWeights.of(plan, tmp_path, torch.device("cpu")) as weights:
        save(plan, directory, trained, base_content=weights.digest)
    assert main(["export", str(directory), "--adapter", "--to", str(tmp_path / "adapter")]) == 0
    assert "PEFT with transformers 5 has no magnitudes of" in " ".join("".join(capsys.readouterr()).split())
    assert main(["merge", str(directory), "--to", str(tmp_path / "merged")]) == 0
    model = PeftModel.from_pretrained(reference, str(tmp_path / "adapter"))
    ids_BS = torch.arange(12).view(2, 6)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(model(ids_BS).logits, ours(ids_BS).logits, rtol=0, atol=1e-5)
    again = plan_on(tmp_path)
    assert again.architecture.adapter.dora
    assert main(["export", str(run_of(again, tmp_path)), "--adapter", "--to", str(tmp_path / "out")]) == 0
    for file in (PEFT_WEIGHTS, PEFT_CONFIG):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()
    config(alpha_pattern={r"experts\.0\.gate_proj": 3})(tmp_path / "adapter")
    code, text = diagnosed(tmp_path, f'from = "{tmp_path / "adapter"}"')
    assert code == "X522" and "have different alphas" in text and text.endswith("adapter_config.json:1")


# Family, targets, and what PEFT does not do with the adapter; empty: it computes what the merged model does.
UNREAD: list[Any] = [
    ("deepseek_v3", "mlp", "takes model.layers.0.mlp.gate_proj, and others named like expert matrices, for experts"),
    ("qwen2_moe", "experts", "leaves out layers.0.mlp.experts.gate_proj and all other routed experts"),
    ("qwen3_moe", "experts.up_proj", "fails for layers.0.mlp.experts.up_proj, because it needs both gate and up"),
    ("mixtral", "experts.down_proj", ""),
]
UNREAD += (pytest.param(*each, marks=pytest.mark.matrix) for each in (
    ("deepseek_v3", "self_attn", ""),
    ("glm4_moe", "down_proj", "takes model.layers.0.mlp.down_proj, and others"),
    ("glm4_moe", "experts", ""),
    ("qwen3_next", "shared_expert", "takes model.layers.0.mlp.shared_expert.gate_proj, and others"),
    ("qwen2_moe", "shared_expert", ""),
    ("qwen3_5_moe", "experts", "leaves out layers.0.mlp.experts.gate_proj and all other routed experts"),
    ("qwen3_next", "q_proj", "leaves out model.layers.0.linear_attn.q_proj and others that it has in one matrix"),
    ("phi3", "mlp", "leaves out model.layers.0.mlp.gate_proj and others"),
    ("gemma4_moe", "mlp", ""),
    ("olmoe", "experts", ""),
    ("dots1", "experts", ""),
))  # fmt: skip


@pytest.mark.parametrize(("family", "targets", "said"), UNREAD)
def test_what_peft_leaves_out_is_said(tmp_path: Path, capsys, family: str, targets: str, said: str):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    reference = make(family, "plain", tmp_path / "base")
    plan = plan_of(f'"{tmp_path / "base"}"', more=f'adapter lora {{ rank = 2, targets = ["{targets}"] }}')
    trained = {each.name: torch.randn(each.shape) / 5 for each in plan.parameters.tensors if each.trained}
    state = {name.replace(".mlp.e_score", ".mlp.gate.e_score"): each for name, each in reference.state_dict().items()}
    state = {name.replace(".layer_scalar", ".layer_scalar.factor"): each for name, each in state.items()}
    trained |= {each.name: state[f"model.{each.name}"] for each in buffers(plan.architecture)}
    directory = make_run(plan, tmp_path / "first", tmp_path)
    with BaseWeights.of(plan, tmp_path, torch.device("cpu")) as weights:
        save(plan, directory, trained, base_content=weights.digest)
    assert main(["export", str(directory), "--adapter", "--to", str(tmp_path / "adapter")]) == 0
    printed = " ".join("".join(capsys.readouterr()).split())
    assert f"PEFT with transformers 5 {said}" in printed if said else "PEFT with" not in printed
    again = plan_on(tmp_path).parameters.tensors
    assert {each.name for each in again if each.adapter} == {
        each.name for each in plan.parameters.tensors if each.adapter
    }
    assert main(["merge", str(directory), "--to", str(tmp_path / "merged")]) == 0
    ids_BS, ours = torch.arange(12).view(2, 6), AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    try:
        theirs = PeftModel.from_pretrained(reference, str(tmp_path / "adapter"))(ids_BS).logits
    except (ValueError, RuntimeError) as problem:
        assert said, problem
        return
    assert torch.allclose(theirs, ours(ids_BS).logits, rtol=0, atol=1e-4) == (not said)


def test_another_base_is_refused_and_little_is_kept_by_bf16(tmp_path: Path, capsys):
    made("llama", "odd heads, tied", {"r": 2, "target_modules": ["v_proj"]}, tmp_path)
    directory = run_of(plan_on(tmp_path), tmp_path)
    assert main(["merge", str(directory), "--to", str(tmp_path / "coarse"), "--dtype", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "rounding to the format affects layers." in said and "merge.json has all" in said
    report = json.loads((tmp_path / "coarse" / "merge.json").read_text())
    assert all(0 < each["error"] < 1 and each["unchanged"] < 1 for each in report.values())

    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    assert main(["merge", str(directory), "--to", str(tmp_path / "other")]) == 3
    assert "error[X705]" in (said := capsys.readouterr().err) and "was trained on the base" in said
    assert main(["generate", str(directory), "--prompt", "a", "--tokens", "1"]) == 3
    assert "was trained on the base" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "base")
    assert main(["merge", str(directory), "--to", str(tmp_path / "other")]) == 3
    assert "error[X524]: the model under the adapter cannot be read" in capsys.readouterr().err


def test_an_export_says_which_of_both_is_meant(tmp_path: Path, capsys):
    made("llama", "odd heads, tied", {"r": 2, "target_modules": ["v_proj"]}, tmp_path)
    directory = run_of(plan_on(tmp_path), tmp_path)
    assert main(["export", str(directory), "--to", str(tmp_path / "out")]) == 3
    said = capsys.readouterr().err
    assert "error[X525]: the run trains an adapter" in said and "xtrain merge" in said
    whole = plan_of(f'"{tmp_path / "base"}"')
    other = make_run(whole, tmp_path / "whole", tmp_path)
    assert main(["export", str(other), "--adapter", "--to", str(tmp_path / "out")]) == 3
    assert "error[X525]: the run trains no adapter" in capsys.readouterr().err
    assert main(["merge", str(other), "--to", str(tmp_path / "out")]) == 3
    assert "error[X525]: the run trains no adapter" in capsys.readouterr().err


# What is wrong with a folder ------------------------------------------------------------------------------------------

Change = Callable[[Path], object]


def config(**keys: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / PEFT_CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return change


def weights(change: Callable[[dict[str, Tensor]], object]) -> Change:
    def run(folder: Path) -> None:
        tensors = load_file(folder / PEFT_WEIGHTS)
        change(tensors)
        save_file(tensors, folder / PEFT_WEIGHTS, {"format": "pt"})

    return run


A = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
WRONG: dict[str, tuple[Change, str, str]] = {
    "no config": (lambda folder: (folder / PEFT_CONFIG).unlink(), "X520", "adapter_config.json cannot be read"),
    "no JSON": (lambda folder: (folder / PEFT_CONFIG).write_text("{"), "X520", "is not a JSON object"),
    "a list": (lambda folder: (folder / PEFT_CONFIG).write_text("[]"), "X520", "is not a JSON object"),
    "no type": (lambda folder: (folder / PEFT_CONFIG).write_text("{}"), "X520", "has no `peft_type`"),
    "another method": (config(peft_type="IA3"), "X522", '`peft_type` is "IA3"'),
    "biases": (config(bias="all"), "X522", '`bias` is "all"'),
    "conv1d": (config(fan_in_fan_out=True), "X522", "`fan_in_fan_out` is true"),
    "pissa": (config(init_lora_weights="pissa"), "X522", '`init_lora_weights` is "pissa"'),
    "an unknown key": (config(new_thing=2), "X522", "`new_thing` of"),
    "a word for a yes": (config(use_rslora="yes"), "X522", '`use_rslora` is "yes"'),
    "words for numbers": (config(lora_alpha="eight"), "X522", "`lora_alpha` is"),
    "a share of words": (config(lora_dropout=1), "X522", "`lora_dropout` is 1"),
    "no pattern": (config(alpha_pattern={"v_proj": None}), "X522", "`alpha_pattern` is null"),
    "patterns in a list": (config(rank_pattern=["v_proj"]), "X522", "`rank_pattern` is ["),
    "a broken pattern": (config(alpha_pattern={"v_proj(": 3}), "X522", "`v_proj(` is no pattern"),
    "another rank": (config(r=3), "X522", "lora_A of model.layers.0.self_attn.v_proj has 2 rows, and `r` in"),
    "another rank of some": (config(rank_pattern={"v_proj": 4}), "X522", "has 2 rows, and `rank_pattern` in"),
    "no rank": (weights(lambda found: found.update({name: each.flatten()[:0, None] for name, each in found.items()})),
        "X522", "has 0 rows"),
    "no weights": (lambda folder: (folder / PEFT_WEIGHTS).unlink(), "X524", "cannot be read"),
    "a pickle": (lambda folder: (folder / PEFT_WEIGHTS).rename(folder / "adapter_model.bin"), "X524",
        "has its adapter as a pickle"),
    "cut off": (lambda folder: (folder / PEFT_WEIGHTS).write_bytes((folder / PEFT_WEIGHTS).read_bytes()[:-8]), "X524",
        "is cut off"),
    "no B": (weights(lambda found: found.pop(A.replace("lora_A", "lora_B"))), "X524", "is missing"),
    "no A": (weights(lambda found: found.pop(A)), "X524", "is not of this model"),
    "no magnitudes": (config(use_dora=True), "X524", "lora_magnitude_vector` are missing"),
    "another shape": (weights(lambda found: found.update({A: torch.zeros(2, 7)})), "X524", "is 2 × 7 in"),
    "whole numbers": (weights(lambda found: found.update({A: found[A].int()})), "X524", "is stored as I32"),
    "another model": (
        weights(lambda found: [found.update({name.replace("v_proj", "c_attn"): found.pop(name)}) for name in [*found]]),
        "X524", "has A and B for no matrix of this model"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    made("llama", "odd heads, tied", {"r": 2, "target_modules": ["v_proj"]}, folder)
    return folder


SMALL = """experiment small {{ seed = 1, budget = 40 steps }}
model "{folder}/base"
tokenizer bytes
adapter lora {{ {adapter} }}
dataset lines {{ source = text("*.txt") }}
batch {{ sequence = 64 }}
optimizer adamw {{ lr = 1e-3 }}
"""


def mistake(folder: Path, adapter: str) -> Diagnostic:
    """The one mistake of a spec with this adapter."""
    (found,) = plan_from_text(SMALL.format(folder=folder, adapter=adapter), "small.xtrain").diagnostics.errors
    return found


def diagnosed(folder: Path, adapter: str) -> tuple[str, str]:
    found = mistake(folder, adapter)
    return found.code, found.message


@pytest.mark.parametrize("what", WRONG)
def test_a_damaged_adapter_is_a_diagnostic(good: Path, tmp_path: Path, what: str):
    change, code, said = WRONG[what]
    shutil.copytree(good / "adapter", tmp_path / "adapter")
    change(tmp_path / "adapter")
    found = diagnosed(good, f'from = "{tmp_path / "adapter"}"')
    assert found[0] == code and said in found[1], found


def test_a_run_that_counts_its_data_reads_the_folder_again(good: Path):
    """A budget in epochs; the spec of a plan has no places for the settings that the folder gives."""
    text = SMALL.format(folder=good, adapter=f'from = "{good / "adapter"}"').replace("40 steps", "2 epochs")
    plan = plan_from_text(text, "small.xtrain").plan
    assert plan is not None
    assert not list(check_counted(plan, Counts(epoch_rows=Fraction(4000))))


def test_values_of_a_folder_are_no_part_of_a_decomposition(good: Path):
    found = mistake(good, f'from = "{good / "adapter"}", init = pissa')
    assert found.code == "X435" and "pissa takes a part out of it" in found.message
    assert found.span is not None and found.span.text == "pissa"


def test_an_embedding_that_is_the_head_is_both(tmp_path: Path):
    family, model, asked = CASES["beside an embedding that is the head"]
    made(family, model, asked, tmp_path)
    named, head = f'from = "{tmp_path / "adapter"}"', "base_model.model.lm_head.weight"
    weights(lambda found: found.update({head: found[head] + 1}))(tmp_path / "adapter")
    code, text = diagnosed(tmp_path, named)
    assert code == "X524" and "the model has one tensor for both" in text
    config(ensure_weight_tying=False)(tmp_path / "adapter")
    code, text = diagnosed(tmp_path, named)
    assert code == "X522" and "its head is the old embedding" in text


def test_a_head_beside_its_adapter_is_refused(tmp_path: Path):
    family, model, asked = CASES["of the head"]
    made(family, model, asked, tmp_path, with_head=True)
    code, text = diagnosed(tmp_path, f'from = "{tmp_path / "adapter"}"')
    assert code == "X522" and "lm_head next to its adapter" in text


def test_an_adapter_of_a_head_that_is_the_embedding_is_exported_and_not_merged(tmp_path: Path, capsys):
    asked = {"r": 3, "lora_alpha": 5, "target_modules": ["k_proj", "lm_head"]}
    made("llama", "odd heads, tied", asked, tmp_path)
    directory = run_of(plan_on(tmp_path), tmp_path)
    assert main(["export", str(directory), "--adapter", "--to", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / PEFT_WEIGHTS).read_bytes() == (tmp_path / "adapter" / PEFT_WEIGHTS).read_bytes()
    capsys.readouterr()
    assert main(["merge", str(directory), "--to", str(tmp_path / "merged")]) != 0
    assert "on its head, which is tied to the embedding" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_a_setting_beside_a_folder_agrees_with_it(good: Path):
    named = f'from = "{good / "adapter"}"'
    code, text = diagnosed(good, f"{named}, rank = 4")
    assert code == "X523" and "`rank` is 4, and `r` of" in text and text.endswith("says 2")
