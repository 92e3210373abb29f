"""Exports as GGUF files, compared with the folder that transformers reads and with llama.cpp itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapted_models import run_of as adapted
from safetensors.torch import load_file
from small_runs import MIXTRAL, drawn, make_run, plan_of, save

from xtrain.cli.main import main
from xtrain.dsl.schema.model_config import LlamaCpp
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import ExportFailed
from xtrain.runtime.store import gguf_file
from xtrain.runtime.store.gguf_file import SPLITS, check_form

gguf = pytest.importorskip("gguf")

ARCHITECTURE = "general.architecture"
SIZES = "dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48, init_std = 0.1"
LLAMA3 = "rope { scaling = llama3, factor = 8, low = 1, high = 4, original = 32 }"
EXPERTS = "experts = 4, experts_per_token = 2, expert_ffn = 32, head_dim = 16"
MODELS = {
    "llama": f"llama {{ {SIZES}, {LLAMA3} }}",
    "tied": f"llama {{ {SIZES}, tie_embeddings = true }}",
    "biases": f"llama {{ {SIZES}, attention_bias = true, mlp_bias = true }}",
    "mistral": f"mistral {{ {SIZES}, head_dim = 16 }}",
    "qwen2": f"qwen2 {{ {SIZES}, rope {{ scaling = yarn, factor = 4, original = 32 }} }}",
    "qwen3": f"qwen3 {{ {SIZES}, head_dim = 16 }}",
    "qwen3_moe": f"qwen3_moe {{ {SIZES}, {EXPERTS} }}",
    "olmo2": f"olmo2 {{ {SIZES} }}",
}
PAIRED = ("llama", "tied", "biases", "mistral")


def run_of(model: str, folder: Path, **settings: str) -> Path:
    plan = plan_of(model, **settings)
    directory = make_run(plan, folder / "run", folder)
    weights = drawn(plan)
    for name, value in weights.items():
        weights[name] = 1 + value / 4 if "norm" in name else value / 4
    # Texts of ASCII only: a server does not say which bytes of a broken character it sampled.
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    head[128:256], head[256:] = head[:128] / 2, head[:2] / 2
    save(plan, directory, weights)
    return directory


def written(directory: Path, folder: Path, *flags: str) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """The reader of the file, and tensors and config of the folder of the same checkpoint."""
    for name in ("m.gguf", "m"):
        assert main(["export", str(directory), "--to", str(folder / name), *flags]) == 0
    tensors = load_file(folder / "m" / "model.safetensors")
    return gguf.GGUFReader(folder / "m.gguf"), tensors, json.loads((folder / "m" / "config.json").read_text())


def wide(tensor: Any) -> np.ndarray:
    """The values of a tensor of the file, in fp32."""
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        return (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return tensor.data.astype(np.float32)


def of_transformers(rows: np.ndarray, heads: int) -> np.ndarray:
    """`permute` of transformers' convert_llama_weights_to_hf.py, which reads weights with neighbouring pairs."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize(("model", "dtype"), [
    ("llama", "bf16"), ("qwen3_moe", "fp16"),
    *(pytest.param(name, dtype, marks=pytest.mark.slow) for name in MODELS for dtype in ("fp16", "fp32")),
])  # fmt: skip
def test_the_file_has_the_weights_of_the_folder(model: str, dtype: str, tmp_path: Path):
    directory = run_of(MODELS[model], tmp_path)
    reader, folder, _ = written(directory, tmp_path, "--dtype", dtype)
    found = {tensor.name: tensor for tensor in reader.tensors}
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == reader.fields[ARCHITECTURE].contents())
    names = gguf.get_tensor_name_map(arch, 2)
    experts: dict[str, list[np.ndarray]] = {}
    for name, value in folder.items():
        values = value.float().numpy()
        if ".experts." in name:
            kind = name.split(".")[-2].removesuffix("_proj")
            experts.setdefault(f"blk.{name.split('.')[2]}.ffn_{kind}_exps.weight", []).append(values)
            continue
        ours = found.pop(names.get_name(name, (".weight", ".bias")))
        assert (ours.tensor_type.name == "F32") == (dtype == "fp32" or value.ndim == 1 or "ffn_gate_inp" in ours.name)
        if model in PAIRED and ".q_proj." in name:
            assert not np.array_equal(wide(ours), values)
            assert np.array_equal(of_transformers(wide(ours), 4), values)
        elif model in PAIRED and ".k_proj." in name:
            assert np.array_equal(of_transformers(wide(ours), 2), values)
        else:
            assert np.array_equal(wide(ours), values)
    for name, parts in experts.items():
        assert np.array_equal(wide(found.pop(name)), np.stack(parts))
    assert found.keys() == ({"rope_freqs.weight"} if model == "llama" else set())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_settings_and_tokens(tmp_path: Path):
    reader, _, config = written(run_of(MODELS["llama"], tmp_path), tmp_path, "--dtype", "bf16")
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert {name.removeprefix("llama."): values[name] for name in values if name.startswith("llama.")} == {
        "block_count": 2, "context_length": config["max_position_embeddings"], "embedding_length": 32,
        "feed_forward_length": 48, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 8, "attention.value_length": 8, "vocab_size": 258, "rope.dimension_count": 8,
        "attention.layer_norm_rms_epsilon": pytest.approx(config["rms_norm_eps"]), "rope.freq_base": 10000.0,
    }  # fmt: skip
    assert values["general.name"] == "m" and values["general.architecture"] == "llama"
    assert values["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    assert len(tokens) == 258 and tokens[97] == "a" and tokens[32] == "Ġ" and kinds[97] == gguf.TokenType.NORMAL
    assert kinds[256:] == [gguf.TokenType.CONTROL] * 2
    assert (values["tokenizer.ggml.bos_token_id"], values["tokenizer.ggml.eos_token_id"]) == (256, 257)
    assert values["tokenizer.ggml.add_bos_token"]
    factors = next(tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    # Waves of 6.28, 62.8, 628 and 6,283 positions; 32 / 8 and 32 are the borders of short and long ones.
    short = 1 / ((1 - (32 / (2 * np.pi) - 1) / 3) / 8 + (32 / (2 * np.pi) - 1) / 3)
    assert factors == pytest.approx([min(max(short, 1), 8), 8, 8, 8])


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
BPE = {"type": "BPE", "merges": ["a b"]}
LLAMA3_SPLIT, QWEN2_SPLIT = dict.fromkeys(pattern for pattern, _ in SPLITS)
CONFIG = {"architectures": ["SomeForCausalLM"], "hidden_size": 64}
FORM = LlamaCpp("some")


def tokenizer_of(*parts: dict[str, Any], model: dict[str, Any] = BPE) -> dict[str, Any]:
    return {"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(parts)}}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}}


@pytest.mark.parametrize(("content", "name"), [
    (tokenizer_of(split(LLAMA3_SPLIT), BYTE_LEVEL, model=BPE | {"ignore_merges": True}), "llama-bpe"),
    (tokenizer_of(split(LLAMA3_SPLIT), BYTE_LEVEL), "smaug-bpe"),
    (tokenizer_of(split(QWEN2_SPLIT), BYTE_LEVEL), "qwen2"),
    (tokenizer_of(BYTE_LEVEL | {"use_regex": True}), "gpt-2"),
    (tokenizer_of({"type": "Digits", "individual_digits": True}, BYTE_LEVEL | {"use_regex": True}), "smollm"),
    (tokenizer_of(BYTE_LEVEL, model={"type": "BPE", "merges": []}), "gpt-2"),
    (tokenizer_of(BYTE_LEVEL), None),
    (tokenizer_of(split(QWEN2_SPLIT), BYTE_LEVEL, model=BPE | {"ignore_merges": True}), None),
    (tokenizer_of(split(r"\p{N}+"), BYTE_LEVEL), None),
    (tokenizer_of(split(QWEN2_SPLIT), BYTE_LEVEL | {"add_prefix_space": True}), None),
    (tokenizer_of(BYTE_LEVEL, model={"type": "Unigram"}), None),
    ({"model": BPE, "pre_tokenizer": None}, None),
])  # fmt: skip
def test_names_of_splits(content: dict[str, Any], name: str | None):
    if name is not None:
        assert gguf_file._split(content) == name
        return
    with pytest.raises(ExportFailed, match="no name for its tokenizer"):
        check_form(CONFIG, content, FORM)


@pytest.mark.parametrize(("changed", "said"), [
    ({"sliding_window": 4096, "use_sliding_window": None}, "computes some without the sliding window of 4,096"),
    ({"sliding_window": 64, "use_sliding_window": True}, "sliding window of 64"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE of kind longrope"),
    ({"rope_scaling": {"type": "dynamic"}}, "RoPE of kind dynamic"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 16}}, "RoPE with beta_fast 16"),
    ({"num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [1]}, "with experts and without are mixed"),
    ({"num_local_experts": 4, "norm_topk_prob": False}, "`norm_topk_prob` is false"),
    ({"attention_bias": True}, "attention of some without biases"),
])  # fmt: skip
def test_models_that_llama_cpp_computes_otherwise_are_refused(changed: dict[str, Any], said: str):
    content = tokenizer_of(BYTE_LEVEL, model={"type": "BPE", "merges": []})
    assert check_form(CONFIG | {"sliding_window": 64, "use_sliding_window": False}, content, FORM) == FORM
    config = {name: value for name, value in (CONFIG | changed).items() if value is not None}
    with pytest.raises(ExportFailed, match=said) as refused:
        check_form(config, content, FORM)
    assert refused.value.code == "X525" and "export a folder instead" in str(refused.value)


def test_a_merged_adapter_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = run_of(MODELS["tied"], tmp_path)
    assert main(["export", str(base), "--to", str(tmp_path / "base"), "--dtype", "fp32"]) == 0
    base.rename(tmp_path / "earlier")
    plan = plan_of(f'"{tmp_path / "base"}"', more="adapter lora { rank = 2 }")
    values = torch.Generator().manual_seed(0)
    trained = {each.name: torch.randn(each.shape, generator=values) for each in plan.parameters.tensors if each.trained}
    directory = adapted(plan, tmp_path, trained)
    for name in ("m.gguf", "m"):
        assert main(["merge", str(directory), "--to", str(tmp_path / name), "--dtype", "fp32"]) == 0
        assert ("merge.json" in capsys.readouterr().out) == (name == "m")
    merged, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "base"))
    name = "model.layers.1.self_attn.v_proj.weight"
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert np.array_equal(found["blk.1.attn_v.weight"], merged[name].numpy())
    assert not torch.equal(merged[name], plain[name])


@pytest.mark.parametrize(("verb", "flags", "model", "said"), [
    ("export", (), MIXTRAL, "error[X525]: no GGUF file is written of this model: llama.cpp's form of Mixtral"),
    ("export", ("--dtype", "fp8"), MODELS["tied"], "of a whole model in fp32, fp16 or bf16"),
    ("export", ("--dtype", "fp64"), MODELS["tied"], "of a whole model in fp32, fp16 or bf16"),
    ("merge", ("--dtype", "fp64"), MODELS["tied"], "xtrain merge: a .gguf file is written of a whole model in fp32"),
    ("export", ("--adapter",), MODELS["tied"], "of a whole model in fp32, fp16 or bf16"),
    ("export", ("--quantise",), MODELS["tied"], "of a whole model in fp32, fp16 or bf16"),
])  # fmt: skip
def test_what_no_file_is_written_of(
    verb: str, flags: tuple[str, ...], model: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    directory = run_of(model, tmp_path)
    assert main([verb, str(directory), "--to", str(tmp_path / "m.gguf"), *flags]) in (2, 3)
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_export_that_was_killed_or_fails_leaves_nothing(tmp_path: Path, monkeypatch, capsys):
    directory, to = run_of(MODELS["tied"], tmp_path), tmp_path / "m.gguf"
    (tmp_path / ".m.gguf.folder").mkdir()
    (tmp_path / ".m.gguf.folder" / "config.json").write_text("{}")
    (tmp_path / f"m.gguf{durable.PARTIAL}").write_text("half a file")
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file.zlib, "crc32", lambda values, seen=[]: seen.append(0) or len(seen))
        assert main(["export", str(directory), "--to", str(to)]) == 3
    assert "does not match what was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert main(["export", str(directory), "--to", str(to)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "run"]
    assert main(["export", str(directory), "--to", str(to)]) == 3
    assert "m.gguf already exists" in capsys.readouterr().err


def server_of(llama_cpp: Any, file: Path) -> Any:
    settings = llama_cpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = str(file), 256, 1, 1
    settings.cache_type_k = settings.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to fp16
    return llama_cpp.Server(settings)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype", "error"), [
    *((model, "fp32", 1e-5) for model in MODELS), ("qwen3_moe", "bf16", 0.05), ("llama", "fp16", 0.01),
])  # fmt: skip
def test_llama_cpp_computes_what_transformers_computes(model: str, dtype: str, error: float, tmp_path: Path):
    """Log-probabilities of 24 tokens; with rounded weights it rounds what it multiplies them by, too."""
    llama_cpp: Any = pytest.importorskip("xllamacpp")
    from transformers import AutoModelForCausalLM

    written(run_of(MODELS[model], tmp_path), tmp_path, "--dtype", dtype)
    prompt = "The sum of 3 and 5: "
    request = {"prompt": prompt, "n_predict": 24, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    answered = server_of(llama_cpp, tmp_path / "m.gguf").handle_completions(request)
    answer = answered["choices"][0]["logprobs"]["content"]
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    ids = torch.tensor([[256, *prompt.encode(), *(token["id"] for token in answer)]])
    with torch.no_grad():
        logits = theirs(ids).logits[0, -len(answer) - 1 : -1].log_softmax(-1)
    best = logits.max(-1)
    assert len(answer) == 24
    chosen = logits.gather(1, torch.tensor([[token["id"]] for token in answer]))
    assert chosen.flatten().tolist() == pytest.approx([token["logprob"] for token in answer], abs=error)
    assert (best.values - chosen.flatten()).max() <= error * 2 * (dtype != "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SPLITS.values(), "gpt-2", "smollm"])
def test_llama_cpp_splits_texts_as_the_tokenizer_does(name: str, tmp_path: Path):
    """The token after a text has the log-probability that transformers computes, so that all tokens are the same."""
    llama_cpp: Any = pytest.importorskip("xllamacpp")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    own = name in ("gpt-2", "smollm")
    parts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)]
    pattern, whole = next((key for key, value in SPLITS.items() if value == name), (None, False))
    if pattern is not None:
        parts.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    elif name == "smollm":
        parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer: Any = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<|end|>", "<|im|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([Path(gguf_file.__file__).read_text()], trainer)
    size = tokenizer.get_vocab_size()
    assert size > 600
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
    }
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=size + 3, bos_token_id=None, eos_token_id=0, **sizes, **heads))
    model.eval().save_pretrained(tmp_path / "m")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(tmp_path / "m")
    gguf_file.write_gguf(tmp_path / "m", tmp_path / "m.gguf", LlamaCpp("qwen2"))
    server = server_of(llama_cpp, tmp_path / "m.gguf")
    for text in (
        "Hello, it's 12345 tokens — don't 3.14159\n\n  indented\tcode(x)=1;  ",
        "naïve café ŽŽ 日本語 12 👍🏽\r\n\r\nend",
        "<|im|>user\nWhat's 7+8?<|end|>  \n ok",
        "    four spaces\n\n\n\nand 1,000,000 rows!!! 'LL we've",
    ):
        ids = tokenizer.encode(text).ids
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).max(-1)
        answered = server.handle_completions({"prompt": text, "n_predict": 1, "temperature": 0, "logprobs": 1})
        assert answered["usage"]["prompt_tokens"] == len(ids), text
        for token in (answered["choices"][0]["logprobs"] or {"content": []})["content"]:  # unless it is no character
            assert token["id"] == best.indices.item()
            assert token["logprob"] == pytest.approx(best.values.item(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in MODELS if model != "qwen3_moe"])
def test_mlx_reads_the_folder(model: str, tmp_path: Path):
    mx, mlx_lm = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.utils")
    from transformers import AutoModelForCausalLM

    run = run_of(MODELS[model], tmp_path)
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    ids = list(range(65, 90))
    model_of_mlx, _ = mlx_lm.load_model(tmp_path / "out")
    with mx.stream(mx.cpu):
        logits = np.array(model_of_mlx(mx.array([ids])).astype(mx.float32))[0]
    reader = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = reader(torch.tensor([ids])).logits[0].detach().numpy()
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
