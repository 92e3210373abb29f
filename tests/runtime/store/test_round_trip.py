"""Models of transformers through a run and back: the same bytes, the same config, the same tokens."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import CONFIGS, UNBOUNDED, coded, make
from safetensors.torch import load_file, save_file
from small_runs import drawn, make_run, plan_of, read, save

from xtrain.cli.main import main
from xtrain.dsl.schema.model import FAMILIES, expert_families
from xtrain.dsl.schema.setting import settings_of
from xtrain.plan.serialise import load_plan
from xtrain.plan.weight_files import WeightsUnreadable, read_weight_files
from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.errors import ExportFailed
from xtrain.runtime.nn.texts import Sampling
from xtrain.runtime.sampling.text_generator import Prompts
from xtrain.runtime.sampling.trained_run import TrainedRun
from xtrain.runtime.store.adapter_export import export_of

IMAGE_IDS = {"image_token_index": 260, "boi_token_index": 261, "eoi_token_index": 262}
LATENT = "q_rank = 14, kv_rank = 12, nope_dim = 6, rope_dim = 4, value_dim = 8, first_dense = 1, expert_scale = 1.5"
CASES = [(family, name) for family, each in CONFIGS.items() for name in each]
# Tied and untied, experts one by one, odd heads, biases beside parameters; the others are compared in the matrix.
ORDINARY = (("llama", "odd heads, tied"), ("mixtral", "plain"), ("gpt_oss", "odd heads"))
# Families whose configs and files differ most.
WRITTEN = ("llama", "qwen2_moe", "gemma3", "gemma4_moe", "phi3", "deepseek_v3", "gpt_oss", "qwen3_next", "nemotron_h")
GROWTH = ", query_growth = 0.5, rope { scaling = yarn, factor = 4, original = 16 }"
WINDOWS = ", layers = 3, window = 5, full_layers = [2, 0]"


def exported(folder: Path, to: Path, *, dtype: str | None = None, model: str = "") -> Path:
    """The run that has taken over the weights of a folder, and is exported before it has changed them."""
    plan = plan_of(f'"{folder}" {{ {model} }}')
    directory = make_run(plan, to.with_name(f"{to.name} run"), to.parent)
    save(plan, directory, read(plan))
    export_of(plan, directory, checkpoint=None, averaged=None, dtype=dtype, most=10**9).write(to, lambda *_: None)
    return directory


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def read_by_transformers(folder: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """A model that transformers reads without a warning, and without a tensor more or less."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as messages

    messages.enable_propagation()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    messages.disable_propagation()
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert [each.getMessage() for each in warnings if each.name.startswith("transformers")] == []
    model, info = loaded
    assert not any(info.values())
    return model


def last_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits after the last of the tokens, by the run's own model."""
    batch = Prompts.of(tokens.tolist(), tokens.shape[1], torch.device("cpu")).first()
    found = TrainedRun.load(directory, "cpu").writer.logits(batch)
    assert found is not None
    return found


def rounded(folder: Path) -> None:
    """Let a folder have its matrices as bf16 and its vectors as fp32, as some published ones are."""
    tensors = {n: value.bfloat16() if value.ndim > 1 else value for n, value in stored(folder).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*case, marks=() if case in ORDINARY else pytest.mark.matrix) for case in CASES]
)
def test_an_import_is_exported_as_it_was(tmp_path: Path, family: str, name: str, caplog: pytest.LogCaptureFixture):
    """Every byte of every tensor, in the formats that they had; then as transformers and xtrain compute it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as messages

    folder = tmp_path / "base"
    reference = make(family, name, folder, max_shard_size="30KB")
    rounded(folder)
    exported(folder, tmp_path / "mixed")
    before, after = stored(folder), stored(tmp_path / "mixed")
    assert before.keys() == after.keys()
    assert {each.dtype for each in after.values()} == {torch.bfloat16, torch.float32}
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype and torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8))
    assert config_of(tmp_path / "mixed") == {**config_of(folder), "dtype": "bfloat16"}

    reference.save_pretrained(folder)
    directory = exported(folder, tmp_path / "out")
    assert config_of(tmp_path / "out") == config_of(folder)
    messages.enable_propagation()
    caplog.clear()  # of what was said of the model that was made
    with caplog.at_level(logging.WARNING):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", output_loading_info=True, attn_implementation="eager"
        )
        model, info = loaded
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        inputs = tokenizer(["line 7 abc"], return_tensors="pt")
        words: Any = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    messages.disable_propagation()
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert [each for each in said if "is falling back to its reference PyTorch" not in each] == []
    assert not any(info.values())
    ours, its = model.state_dict(), reference.state_dict()
    assert ours.keys() == its.keys() and all(torch.equal(ours[key], its[key]) for key in its)
    with torch.no_grad():  # products round by where in memory their operands lie
        gap = (model(**inputs).logits - reference(**inputs).logits).abs().max()
        assert gap < 1e-5 * reference(**inputs).logits.abs().max()
    if (family, name) == UNBOUNDED:
        return
    told = tokenizer.decode(words[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert TrainedRun.load(directory, "cpu").continue_texts(["line 7 abc"], 32, Sampling(temperature=0)) == [told]


def config_of(folder: Path) -> dict[str, Any]:
    """Without the ids that are those of the tokenizer, which the folder of the test has none of."""
    found = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in found.items() if name not in ("bos_token_id", "eos_token_id")}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        *(pytest.param(each, "", marks=() if each in WRITTEN else pytest.mark.matrix) for each in CONFIGS),
        ("mistral", ", window = 5"),
        ("qwen3", WINDOWS),
        ("ministral3", GROWTH),
    ],
)
def test_a_model_of_xtrain_is_one_of_transformers(
    tmp_path: Path, family: str, more: str, caplog: pytest.LogCaptureFixture
):
    """One whose config was never a file."""

    experts = ", experts = 3, experts_per_token = 2, expert_ffn = 24" if family in expert_families() else ""
    known = settings_of(FAMILIES[family])
    layers = "" if "layers =" in more else f", layers = {4 if 'pattern' in known else 2}"
    width = 16 if "rotary_share" in known else 12 if family == "olmoe" else 10
    heads = f"kv_heads = 1, head_dim = {width}" if "kv_rank" not in known else LATENT
    heads += ", index_heads = 12, index_dim = 6, index_topk = 5" if "index_topk" in known else ""
    heads += ", attention_layers = [1]" if "attention_layers" in known else ""
    sizes = f"dim = 36{layers}, heads = 3, {heads}, ffn = 40, norm_eps = 1e-3{experts}"
    config = FAMILIES[family].config
    tied = "" if config is not None and "tie_embeddings" in config.constant else ", tie_embeddings = true"
    plan = plan_of(f"{family} {{ {sizes}, rope_theta = 700{tied}{more} }}")
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, {name: 0.2 * value for name, value in drawn(plan).items()})
    assert main(["export", str(directory), "--to", str(tmp_path / "out"), "--shard-size", "50KB"]) == 0
    model = read_by_transformers(tmp_path / "out", caplog)
    assert model.dtype == torch.float32
    tokens = torch.tensor([[256, *b"line 7 abc def"]])
    with torch.no_grad():
        ours = last_logits(directory, tokens)
        theirs = model(tokens).logits[:, -1]
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_capped_scores_of_a_gemma3_are_those_that_transformers_can_compute(tmp_path: Path):
    """No config.json says so: its classes have the cap of another family as an argument of attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = "dim = 32, layers = 3, heads = 4, kv_heads = 2, head_dim = 10, ffn = 40, vocab = 264, rope_theta = 1e6"
    more = "window = 3, full_layers = [1], score_width = 3, score_cap = 0.5, logit_cap = 2, tie_embeddings = true"
    plan = plan_of(f"gemma3 {{ {sizes}, {more} }}")
    directory = make_run(plan, tmp_path / "run", tmp_path)
    weights = {name: 0.2 * value for name, value in drawn(plan).items()}
    save(plan, directory, weights)
    assert main(["export", str(directory), "--to", str(tmp_path / "out")]) == 3
    config = AutoConfig.for_model(
        "gemma3_text", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
        intermediate_size=40, vocab_size=264, sliding_window=3, query_pre_attn_scalar=3, final_logit_softcapping=2.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    model.load_state_dict({f"model.{name}": value for name, value in weights.items()}, strict=False)
    tokens = torch.tensor([[256, *b"line 7 abc def"]])
    with torch.no_grad():
        ours = last_logits(directory, tokens)
        theirs, uncapped = (model(tokens, **more).logits[:, -1] for more in ({"softcap": 0.5}, {}))
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert (ours - uncapped).abs().max() > 1e-3 * theirs.abs().max()


@pytest.mark.parametrize("saving", [{}, {"save_original_format": False, "max_shard_size": "30KB"}])
def test_the_text_of_a_model_with_images_is_a_model(
    tmp_path: Path, saving: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    """Its tensors under the names of either form; what is exported is the text model alone."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = make("gemma3", "plain", tmp_path / "text")
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    config = Gemma3Config(text_config=text.config, vision_config=vision, mm_tokens_per_image=4, **IMAGE_IDS)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    folder = tmp_path / "whole"
    whole.save_pretrained(folder, **saving)
    assert any("vision_tower" in name for name in stored(folder))
    directory = exported(folder, tmp_path / "out")
    assert config_of(tmp_path / "out")["model_type"] == "gemma3_text"
    before, after = stored(tmp_path / "text"), stored(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    model = read_by_transformers(tmp_path / "out", caplog)
    assert type(model) is type(text)
    tokens = torch.tensor([[256, *b"line 7 abc def"]])
    with torch.no_grad():
        ours = last_logits(directory, tokens)
        theirs = model(tokens).logits[:, -1]
        of_whole = whole(tokens).logits[:, -1]
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert (ours - of_whole).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize(("family", "name"), [
    ("gemma4_moe", "plain"),
    pytest.param("gemma4", "plain", marks=pytest.mark.matrix),
    pytest.param("gemma4", "per-layer inputs, shared keys", marks=pytest.mark.matrix),
])  # fmt: skip
def test_the_text_of_a_gemma4_with_images_is_a_model(tmp_path: Path, family: str, name: str):
    """Published files of E2B and E4B also have keys and values of blocks that use shared ones."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = make(family, name, tmp_path / "text")
    vision: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 4}  # fmt: skip
    whole = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text.config, vision_config=vision))
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    assert {name.split(".")[1] for name in stored(tmp_path / "whole")} == {
        "embed_vision", "language_model", "vision_tower"
    }  # fmt: skip
    start = "model.language_model.layers.3.self_attn"
    idle = {f"{start}.{each}.weight": torch.ones(3) for each in ("k_proj", "v_proj", "k_norm")}
    save_file({**stored(tmp_path / "whole"), **(idle if name != "plain" else {})}, tmp_path / "whole/model.safetensors")
    exported(tmp_path / "whole", tmp_path / "out")
    assert config_of(tmp_path / "out") == config_of(tmp_path / "text")
    before, after = stored(tmp_path / "text"), stored(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


# Family of a part → type, class, and starts of the names of its tensors, and a tensor of another part.
WHOLES = [
    ("mistral", None, "mistral3", "Mistral3ForConditionalGeneration", "language_model.", "multi_modal_projector.a"),
    ("mistral", "mistral", "mistral3", "Mistral3ForConditionalGeneration", "model.language_model.", "vision_tower.a"),
    ("ministral3", "ministral3", "mistral3", "Mistral3ForConditionalGeneration", "language_model.", "vision_tower.a"),
    ("deepseek_v3", "kimi_k2", "kimi_k25", "KimiK25ForConditionalGeneration", "language_model.", "vision_tower.a"),
    ("deepseek_v3", None, "kimi_k25", "Kimi_K25ForConditionalGeneration", "model.language_model.", "mm_projector.a"),
    ("deepseek_v3", "kimi_k2", "", "DeepseekV3ForCausalLM", "", ""),
]


@pytest.mark.parametrize(("family", "kind", "whole", "architecture", "start", "other"), WHOLES)
def test_the_text_of_another_type_is_exported_as_its_family(
    tmp_path: Path, family: str, kind: str | None, whole: str, architecture: str, start: str, other: str
):
    """As published folders name types, classes and tensors, some with modeling files."""
    make(family, "plain", tmp_path / "text")
    before, own = stored(tmp_path / "text"), config_of(tmp_path / "text")
    folder = tmp_path / "folder"
    folder.mkdir()
    files = {"auto_map": {"AutoConfig": "own.Config"}} if family == "deepseek_v3" else {}
    text = {**own, "model_type": kind, **files}
    config = text if not whole else {"model_type": whole, "text_config": text, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    joined = "" if start != "model.language_model." else "model."  # the head is beside the model
    named = {f"{start}{name.removeprefix(joined)}" if name != "lm_head.weight" or not joined else name: value
             for name, value in before.items()}  # fmt: skip
    save_file({**named, **({other: torch.ones(2)} if other else {})}, folder / "model.safetensors")
    exported(folder, tmp_path / "out")
    after = stored(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert config_of(tmp_path / "out") == {**own, **({"tie_word_embeddings": False} if whole else {})}


SPEC = """experiment coded {{ seed = 1, budget = 1 steps }}
model "{folder}" {{ }}
tokenizer bytes
dataset code {{ source = python_stdlib() }}
batch {{ sequence = 64 }}
optimizer adamw {{ lr = 1e-3 }}
"""


@pytest.mark.parametrize(("family", "coding"), [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8")])
def test_a_folder_of_codes_is_dequantised_and_written_in_bf16(tmp_path: Path, family: str, coding: str):
    folder = tmp_path / "base"
    make(family, "in blocks" if coding == "mxfp4" else "plain", folder)
    expected, own = coded(folder, coding), config_of(folder)
    exported(folder, tmp_path / "out")
    after = stored(tmp_path / "out")
    assert after.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(after[name], value) and after[name].dtype == torch.bfloat16, name
    assert own.pop("quantization_config") and config_of(tmp_path / "out") == {**own, "dtype": "bfloat16"}
    plan = plan_of(f'"{folder}" {{ }}')
    (does,) = (node.does for node in plan.nodes if node.op == "setup.read_weights")
    assert f"of bf16, dequantized from {coding}" in does
    (shown,) = (each for each in plan.provenance if each.path == "model.coding")
    assert (shown.value, shown.origin) == (coding, "config")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    compiled = plan_from_text(SPEC.format(folder=tmp_path / "out"), "spec.xtrain")
    assert [(each.code, f"stored as {coding}" in each.message) for each in compiled.diagnostics.errors] == [
        ("X524", True)
    ]


def test_a_snapshot_of_the_hub_is_exported_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models--org--name" / "snapshots" / commit
    make("llama", "plain", folder)
    plan = plan_of(f'hub("org/name", revision = "{commit}")')
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, read(plan))
    assert main(["export", str(directory), "--to", str(tmp_path / "out")]) == 0
    before, after = stored(folder), stored(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert config_of(tmp_path / "out") == config_of(folder)
    shutil.rmtree(folder)
    assert main(["export", str(directory), "--to", str(tmp_path / "unknown")]) == 3
    assert main(["export", str(directory), "--to", str(tmp_path / "fp32"), "--dtype", "fp32"]) == 0


def test_keys_that_say_nothing_of_the_model_stay_and_a_longer_context_is_said(tmp_path: Path):
    folder = tmp_path / "base"
    make("llama", "plain", folder)
    keys = json.loads((folder / "config.json").read_text())
    keys |= {"max_position_embeddings": 32, "pad_token_id": 3, "eos_token_id": [9, 257], "torch_dtype": "float32"}
    del keys["dtype"], keys["rope_parameters"]
    (folder / "config.json").write_text(json.dumps({**keys, "rope_theta": 10000.0, "pretraining_tp": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 5, "eos_token_id": [9]}))
    exported(folder, tmp_path / "out", dtype="fp16", model="init_std = 0.125, weights = auto")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found == {
        **keys, "rope_theta": 10000.0, "pretraining_tp": 1, "max_position_embeddings": 64, "torch_dtype": "float16",
        "initializer_range": 0.125, "bos_token_id": 256,
    }  # fmt: skip
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"top_k": 5, "eos_token_id": 257, "bos_token_id": 256}


@pytest.mark.parametrize(
    ("scaling", "context"), [("yarn, factor = 4, original = 32", 131072), ("dynamic, factor = 2, original = 64", 64)]
)
def test_positions_that_a_run_has_scaled_otherwise_are_written(tmp_path: Path, scaling: str, context: int):
    """Of a mixtral, whose heads transformers only knows the width of where it is written."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "base"
    make("mixtral", "plain", folder)
    directory = exported(folder, tmp_path / "out", model=f"rope {{ scaling = {scaling} }}")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (found["head_dim"], found["max_position_embeddings"]) == (8, context)
    tokens = torch.tensor([[256, *b"line 7 abc def ghi jkl"]])
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    batch = Prompts.of(tokens.tolist(), tokens.shape[1], torch.device("cpu")).first()
    with torch.no_grad():
        ours, theirs = TrainedRun.load(directory, "cpu").writer.logits(batch), model(tokens).logits[:, -1]
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_a_folder_that_is_gone_leaves_the_number_format_to_be_said(tmp_path: Path):
    folder = tmp_path / "base"
    make("qwen3", "plain", folder)
    directory = exported(folder, tmp_path / "there")
    shutil.rmtree(folder)
    plan = load_plan(directory / "plan.json")
    common: dict[str, Any] = {"checkpoint": None, "averaged": None, "most": 10**9}
    with pytest.raises(ExportFailed, match="choose one, such as --dtype bf16"):
        export_of(plan, directory, dtype=None, **common).write(tmp_path / "out", lambda *_: None)
    done = export_of(plan, directory, dtype="fp32", **common).write(tmp_path / "out", lambda *_: None)
    assert "base, which the run read its model from, is gone" in done.remarks[0]
    one, other = stored(tmp_path / "there"), stored(tmp_path / "out")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(WeightsUnreadable):
        read_weight_files(str(folder))


def test_a_config_as_earlier_versions_wrote_it(tmp_path: Path):
    """With keys that published configs of Granite 4 have and transformers does not read, and an infinite number."""
    make("granitemoehybrid", next(iter(CONFIGS["granitemoehybrid"])), tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    written = json.loads(config.read_text()) | {"init_method": "mup", "normalization_function": "rmsnorm"}
    config.write_text(json.dumps({**written, "time_step_limit": [0.0, float("inf")]}))
    assert "Infinity]" in config.read_text()
    exported(tmp_path / "base", tmp_path / "out")
    assert (
        read_weight_files(str(tmp_path / "out")).tensors.keys()
        == read_weight_files(str(tmp_path / "base")).tensors.keys()
    )
    config.write_text(json.dumps({**written, "time_step_limit": [0.0, float("nan")]}))
    with pytest.raises(AssertionError, match="NaN is not a JSON number"):
        plan_of(f'"{tmp_path / "base"}" {{ }}')
