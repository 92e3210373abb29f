"""GGUF file of an exported folder, as llama.cpp and Ollama read it.

Names and keys come from the `gguf` package. What a file needs beyond them follows llama.cpp's convert_hf_to_gguf.py:
the order of the rows of queries and keys, the factors of llama3's RoPE, and formats of vectors.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import frozen

from xtrain.dsl.schema.model_config import LlamaCpp
from xtrain.plan.hardware import is_installed
from xtrain.plan.llama_cpp import NO_FILE, computed_otherwise, experts_of, rope_of
from xtrain.plan.weight_files import CONFIG, LOADED, StoredTensor, WeightFiles, read_weight_files
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault, ExportFailed

TOKENIZER: Final = "tokenizer.json"
PACKAGE: Final = "gguf>=0.17"
# Splits of the texts before merges (`Split` of tokenizer.json) → their name in llama.cpp.
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# With `ignore_merges`, a word of the vocabulary is a token before any merge; so it is for llama-bpe.
SPLITS: Final = {
    (f"{_WORDS}\\p{{N}}{{1,3}}{_REST}", True): "llama-bpe",
    (f"{_WORDS}\\p{{N}}{{1,3}}{_REST}", False): "smaug-bpe",
    (f"{_WORDS}\\p{{N}}{_REST}", False): "qwen2",
}
# llama.cpp needs a merge: no byte is written as this sign.
NO_MERGE: Final = "\u0200 \u0200"
EXPERT: Final = ".mlp.experts."


def check_form(config: dict[str, Any], tokenizer: dict[str, Any], form: LlamaCpp | None) -> LlamaCpp:
    """Return the form of the models of a config in llama.cpp. tokenizer: content of tokenizer.json. form: of the
    family; None: unknown.

    Raises ExportFailed (X525) if llama.cpp would compute another model or other tokens, and EnvironmentFault (X715)
    without the package.
    """
    check_tokens(tokenizer)
    if (reason := computed_otherwise(config, form)) is not None:
        raise _no_form(reason)
    assert form is not None
    return form


def check_tokens(tokenizer: dict[str, Any]) -> None:
    """Raise ExportFailed (X525) if llama.cpp would read other tokens, and EnvironmentFault (X715) without the package.
    tokenizer: content of tokenizer.json."""
    if not is_installed("gguf"):
        message = "a GGUF file needs the package gguf, which is not installed here; install it with"
        raise EnvironmentFault("X715", f"{message} `pip install '{PACKAGE}'`, or export a folder")
    _split(tokenizer)


def _no_form(reason: str) -> ExportFailed:
    return ExportFailed(f"{NO_FILE}: {reason}; export a folder instead", "X525")


def write_gguf(
    folder: Path, to: Path, form: LlamaCpp | None, report: Callable[[int, int], None]
) -> tuple[dict[str, int], int]:
    """Write the folder as the file `to`, and read it back. Return the bytes of tensors by number format, and the number
    of tensors. form: as for `check_form`. report: called with the bytes written so far and in all. One
    matrix is in memory at a time, or all experts of a layer for one product.

    Raises ExportFailed, also for a tokenizer that llama.cpp has no name for, and OSError.
    """
    import gguf

    config, tokenizer = (json.loads((folder / name).read_text()) for name in (CONFIG, TOKENIZER))
    form = check_form(config, tokenizer, form)
    stored = read_weight_files(str(folder))
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == form.name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    partial = to.with_name(to.name + durable.PARTIAL)
    writer = gguf.GGUFWriter(partial, form.name)
    try:
        _add_settings(writer, config, to.stem, _file_type(stored))
        _add_tokens(writer, folder, tokenizer, config["vocab_size"])
        tensors = list(_tensors(stored, form, config, lambda name: names.get_name(name, (".weight", ".bias"))))
        for tensor in tensors:
            raw = gguf.GGMLQuantizationType[tensor.format]
            size = math.prod(tensor.shape) * ITEM[tensor.format].itemsize
            writer.add_tensor_info(tensor.name, tensor.shape, ITEM[tensor.format], size, raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        sums, formats = {}, dict.fromkeys((tensor.format for tensor in tensors), 0)
        total = sum(math.prod(tensor.shape) * ITEM[tensor.format].itemsize for tensor in tensors)
        for tensor in tensors:
            report(sum(formats.values()), total)
            values = tensor.read()
            sums[tensor.name] = zlib.crc32(values.data)
            formats[tensor.format] += values.nbytes
            writer.write_tensor_data(values)
        writer.close()
        for tensor in gguf.GGUFReader(partial).tensors:
            report(total, total)
            if sums.pop(tensor.name, None) != zlib.crc32(np.ascontiguousarray(tensor.data).data):
                raise ExportFailed(f"{tensor.name} in {to} does not match what was written: the disk has changed it")
        if sums:
            raise ExportFailed(f"{to} lacks {next(iter(sums))}: the disk has changed it")
        durable.sync(partial)
        durable.rename(partial, to)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return {LOADED.get(format, format): size for format, size in formats.items()}, len(tensors)


# Settings ------------------------------------------------------------------------------------------------------------


def _file_type(stored: WeightFiles) -> int:
    import gguf

    types = gguf.LlamaFileType
    return {"F16": types.MOSTLY_F16, "BF16": types.MOSTLY_BF16}.get(stored.formats[0], types.ALL_F32)


def _add_settings(writer: Any, config: dict[str, Any], name: str, file_type: int) -> None:
    import gguf

    rope = rope_of(config)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config:  # a model whose layers all have experts may lack it
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
        writer.add_rope_scaling_orig_ctx_len(original)
    if (experts := experts_of(config)) > 0:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_tokens(writer: Any, folder: Path, content: dict[str, Any], rows: int) -> None:
    """Add the byte-level BPE of tokenizer.json. rows: of the embedding; those without a token are unused."""
    import gguf

    tokens = [(f"[PAD{row}]", gguf.TokenType.UNUSED) for row in range(rows)]
    for token, row in content["model"]["vocab"].items():
        tokens[row] = token, gguf.TokenType.NORMAL
    for added in content["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split(content))
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    special = gguf.SpecialVocab(folder, load_merges=bool(content["model"].get("merges")))
    special.add_special_token.setdefault("bos", False)  # llama.cpp's own choice depends on the split
    special.add_to_gguf(writer, quiet=True)
    if not content["model"].get("merges"):
        writer.add_token_merges([NO_MERGE])


def _split(content: dict[str, Any]) -> str:
    """Return llama.cpp's name of the split of texts before merges. Raises ExportFailed if it has none."""
    before, model = content.get("pre_tokenizer") or {}, content.get("model", {})
    parts = before.get("pretokenizers", [before])
    kinds, whole = [part.get("type") for part in parts], bool(model.get("ignore_merges"))
    if model.get("type") == "BPE" and kinds[-1] == "ByteLevel" and not parts[-1].get("add_prefix_space"):
        own = parts[-1].get("use_regex", True)  # as GPT-2 does
        if not model["merges"] or (kinds == ["ByteLevel"] and own and not whole):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and own and not whole:
            return "smollm"
        pattern = parts[0].get("pattern", {}).get("Regex")
        if kinds == ["Split", "ByteLevel"] and not own and (pattern, whole) in SPLITS:
            return SPLITS[pattern, whole]
    raise _no_form(f"llama.cpp has no name for its tokenizer ({model.get('type')}, {', '.join(map(str, kinds))})")


# Tensors -------------------------------------------------------------------------------------------------------------

# Format in the file → type of numpy, which has no bf16.
ITEM: Final = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@frozen(kw_only=True)
class _Tensor:
    """Tensor of the file, and how it is read."""

    name: str
    format: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def _tensors(
    stored: WeightFiles, form: LlamaCpp, config: dict[str, Any], name_of: Callable[[str], str | None]
) -> Iterator[_Tensor]:
    """Yield the tensors of the file in the order of the folder, experts of a layer together."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    experts: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in stored.tensors.items():
        if EXPERT in name:
            first, _, rest = name.partition(EXPERT)
            number, _, matrix = rest.partition(".")
            if number.isdecimal():
                experts.setdefault(f"{first}{EXPERT}{matrix}", {})[int(number)] = tensor
                continue
        module = name.split(".")[-2]
        turned = heads.get(module) if form.pairs else None
        wide = len(tensor.shape) == 1 or name.endswith(".mlp.gate.weight")  # as llama.cpp computes with them
        yield _one(_named(name_of, name), [tensor], stored.folder, tensor.shape, wide=wide, heads=turned)
    for name, by_number in experts.items():
        parts = [by_number[number] for number in range(experts_of(config))]
        yield _one(_named(name_of, name), parts, stored.folder, (len(parts), *parts[0].shape))
    rope = rope_of(config)
    if rope["rope_type"] == "llama3":
        factors = _llama3(rope, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        yield _Tensor(name="rope_freqs.weight", format="F32", shape=factors.shape, read=lambda: factors)


def _named(name_of: Callable[[str], str | None], name: str) -> str:
    if (found := name_of(name)) is None:
        raise _no_form(f"llama.cpp has no name for {name}")
    return found


def _one(
    name: str,
    parts: list[StoredTensor],
    folder: str,
    shape: tuple[int, ...],
    *,
    wide: bool = False,
    heads: int | None = None,
) -> _Tensor:
    """Return a tensor of parts. wide: in fp32. heads: whose halves of rows become pairs."""
    format = "F32" if wide or parts[0].format == "F64" else parts[0].format

    def read() -> np.ndarray:
        values = np.stack([_read(part, folder, format) for part in parts]).reshape(shape)
        if heads is not None:
            values = values.reshape(heads, 2, -1, *shape[1:]).swapaxes(1, 2)
        return np.ascontiguousarray(values.reshape(shape))

    return _Tensor(name=name, format=format, shape=shape, read=read)


def _read(tensor: StoredTensor, folder: str, format: str) -> np.ndarray:
    kind = ITEM.get(tensor.format, np.dtype("<f8"))
    count = math.prod(tensor.shape)
    values = np.fromfile(Path(folder, tensor.file), kind, count, offset=tensor.start).reshape(tensor.shape)
    if format == tensor.format:
        return values
    if tensor.format == "BF16":  # the upper half of fp32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(ITEM[format])


def _llama3(rope: dict[str, Any], head: int) -> np.ndarray:
    """Return what llama.cpp divides the angles by: 1 for short waves, `factor` for long ones, and between them what
    llama3's RoPE takes (Llama 3.1's `apply_scaling`). [head / 2]"""
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head, 2) / head)
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((original / waves - low) / (high - low)).clip(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
