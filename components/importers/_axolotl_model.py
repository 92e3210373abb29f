"""Model, adapter, number formats and ranks of axolotl's configurations."""

import re
from typing import Final

from xtrain.components.importers._accelerate import write_fsdp
from xtrain.components.importers._deepspeed_json import write_zero
from xtrain.components.importers._transformers_trainer import (
    NAMES_EXPERTS,
    module_names,
    names,
    write_adapter_folder,
    write_lora,
)
from xtrain.dsl.importing.accounts import is_off
from xtrain.dsl.importing.draft import Draft
from xtrain.dsl.schema.precision import FLOATS

_FIRST: Final = '"layers.0.self_attn.q_proj"'
_WHOLE_TEXT: Final = re.compile(r"\^?(model\.language_model\.\*|language_model\.\*|lm_head(\.\*)?|embed_tokens)")


def write_model(draft: Draft) -> None:
    names(draft, "base_model", "revision_of_model")
    if draft.has("tokenizer_config") and draft.get("tokenizer_config") != draft.get("base_model"):
        names(draft, "tokenizer_config", model=False)
    else:
        names(draft, "base_model", "revision_of_model", model=False)
        draft.translated("tokenizer_config")
    kind = draft.text("model_type")
    if not kind or kind.endswith("ForCausalLM") or (draft.get("reward_model") and kind.endswith("Classification")):
        draft.meaningless("model_type type_of_model", "config.json of the model says its class")
    draft.missing("model_type type_of_model", "xtrain trains causal language models")
    draft.meaningless("cls_model_config", "config.json of the model says its class")
    _write_balance(draft)
    draft.unless_off("overrides_of_model_config* model_config.*", "sizes of a model's folder cannot be changed")
    for key in (f"{place}.{name}" for place in ("special_tokens", "tokens") for name in ("bos_token", "eos_token")):
        if draft.has(key):
            name = key.partition(".")[2]
            draft.note(f"{name} is {draft.get(key)} there; here the tokenizer's own counts, in tokenizer_config.json")
            draft.translated(key)
    if draft.get("reinit_weights"):
        draft.set("model.weights", None, "reinit_weights", text="none")
    draft.same("reinit_weights", "off")
    if draft.get("tokenizer_use_mistral_common"):
        draft.note("mistral_common tokenizes there, here tokenizer.json with its template")
    draft.translated("tokenizer_use_mistral_common")
    quantized = "model_quantization_config"
    if draft.get(quantized) == "Mxfp4Config" and draft.get(f"{quantized}_kwargs.dequantize"):
        why = "weights are trained dequantized; a folder in mxfp4 is refused, name one in bf16"
        draft.meaningless(f"{quantized} {quantized}_kwargs", why)
    unfrozen = draft.get("unfrozen_parameters", [])
    if isinstance(unfrozen, list) and unfrozen and all(_WHOLE_TEXT.fullmatch(str(name)) for name in unfrozen):
        draft.same("unfrozen_parameters", "the whole text model, which is all that is read")
    draft.unless_off("unfrozen_parameters", "`frozen` of `model` lists what is frozen, without regular expressions")
    draft.unless_off("freeze_mm_modules", "images are not read")


def _write_balance(draft: Draft) -> None:
    """Write the weight of the routers' balance loss, which transformers adds with `output_router_logits` alone."""
    key = "model_config.output_router_logits"
    if draft.get(key):
        note = "the weight is router_aux_loss_coef · num_experts_per_tok of config.json there; write it as `router`'s"
        draft.note(f"{note} `aux_loss`")
        draft.translated(key)
    elif NAMES_EXPERTS.search(draft.text("base_model").lower()):
        draft.note("experts have a balance loss only with output_router_logits: else write `router { aux_loss = 0 }`")
    draft.same(key, "the config's own value")


def _write_rounding(draft: Draft) -> None:
    """Write products in fp8 and simulated quantization, as torchao computes them for axolotl."""
    if draft.get("fp8"):
        first = "accelerate leaves out the first matrix and the last"
        draft.set("precision.compute", None, "fp8", first, text=f"fp8 {{ recipe = tensorwise, skip = [{_FIRST}] }}")
        draft.meaningless("fp8_enable_fsdp_float8_all_gather", "messages have the format of `rest`; products are equal")
    draft.unless_off("fp8 fp8_enable_fsdp_float8_all_gather", "it goes with `fp8`")
    form = (draft.get("qat.weight_dtype"), draft.get("qat.activation_dtype"))
    if form in (("int4", "int8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")):
        draft.set("precision.qat.weights", None, "qat.weight_dtype", text=form[0])
        draft.set("precision.qat.activations", None, "qat.activation_dtype", text=form[1])
        if form[0] == "int4":
            draft.set("precision.qat.group", draft.number("qat.group_size", 32), "qat.group_size")
        elif draft.number("qat.group_size", FLOATS[form[0]]) == FLOATS[form[0]]:
            draft.same("qat.group_size", "the only group of this format")
        draft.note("it rounds the matrix of the head too; here it is not rounded")
        draft.unless_off("qat.quantize_embedding", "embeddings are not rounded")
        draft.unless_off("qat.fake_quant_after_n_steps", "train without `qat`, then resume with it")
    others = "`qat` rounds weights to int4 with inputs in int8 as axolotl does, or both to mxfp4 or nvfp4"
    draft.unless_off("qat", others)


def write_adapter(draft: Draft, adapter: str) -> None:
    if adapter not in ("lora", "qlora"):
        if adapter:
            draft.missing("adapter", "xtrain has adapters of LoRA only")
        draft.meaningless("lora_* peft_*", "no adapter is trained")
        draft.unless_off("load_in_4bit load_in_8bit", "the base is quantized only below an adapter")
        return
    if draft.has("lora_model_dir") and not draft.has("rl"):
        draft.label("adapter", "lora", "adapter")
        write_adapter_folder(draft, "lora_model_dir", "lora_* peft_*")
    else:
        _write_new_adapter(draft)
    _write_base(draft)


def _write_new_adapter(draft: Draft) -> None:
    write_lora(draft, {"label": "adapter", "rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout",
                       "scaling": "peft_use_rslora", "dora": "peft_use_dora", "train": "lora_modules_to_save",
                       "layers": "peft_layers_to_transform", "init": "peft_init_lora_weights"}, 8, 16, 0.0)  # fmt: skip
    named_modules = module_names(draft.get("lora_target_modules", []))
    if draft.get("lora_target_linear"):
        others = [name for name in named_modules or () if name in ("lm_head", "embed_tokens")]
        draft.set("adapter.targets", ["all_linear", *others], "lora_target_linear lora_target_modules")
    elif named_modules:
        draft.set("adapter.targets", named_modules, "lora_target_modules")
    elif draft.has("lora_target_modules"):
        draft.missing("lora_target_modules", "`targets` are parts of names, not regular expressions")
    else:
        draft.set("adapter.targets", ["q_proj", "v_proj"], "", "PEFT's default for most models")
    draft.same("lora_target_linear", "off")
    parameters = draft.get("lora_target_parameters", [])
    if parameters and all(re.fullmatch(r"(mlp\.)?experts\.(gate_up_proj|down_proj)", str(name)) for name in parameters):
        chosen = [*(named_modules or []), "experts"]
        draft.set("adapter.targets", chosen, "lora_target_modules lora_target_parameters",
                  "every expert has matrices of its own")  # fmt: skip
    else:
        draft.unless_off("lora_target_parameters", "`targets` are matrices of linear layers and `experts`")
    draft.unless_off(
        "lora_model_dir", "preferences are learned from a new adapter; `adapter { from = … }` names a folder"
    )


def _write_base(draft: Draft) -> None:
    four, eight = draft.get("load_in_4bit"), draft.get("load_in_8bit")
    if four:
        options = draft.get("bnb_config_kwargs", {})
        draft.label("precision.base", "nf4", "load_in_4bit")
        if isinstance(options, dict):
            draft.set("precision.base.double", bool(options.get("bnb_4bit_use_double_quant", True)),
                      "bnb_config_kwargs.bnb_4bit_use_double_quant")  # fmt: skip
            if options.get("bnb_4bit_quant_type", "nf4") == "nf4":
                draft.same("bnb_config_kwargs.bnb_4bit_quant_type", "nf4")
    elif eight:
        draft.label(
            "precision.base", "int8", "load_in_8bit", "weights alone; bitsandbytes also rounds inputs to 8 bits"
        )
    if four or eight:
        draft.translated("quantize_moe_experts")
    if (
        (four or eight)
        and not draft.get("quantize_moe_experts")
        and NAMES_EXPERTS.search(draft.text("base_model").lower())
    ):
        draft.note(
            "with `quantize_moe_experts` off, experts stay in bf16 there; here the base of experts is quantized too"
        )
    draft.unless_off("quantize_moe_experts", "`precision { base … }` quantizes all frozen matrices")
    draft.same("load_in_4bit load_in_8bit", "off")


def write_precision(draft: Draft, adapter: str) -> None:
    half = draft.get("bf16", "auto")
    sharded = any(not is_off(draft.get(key)) for key in ("fsdp", "fsdp_config", "deepspeed"))
    if is_off(half) and not draft.get("bfloat16"):
        half = bool(draft.get("fp16")) and bool(adapter)
        draft.set("precision.compute", None, f"bf16 bfloat16{' fp16 float16' * half}", text="fp16" if half else "fp32")
        draft.unless_off("fp16 float16", "parameters are not trained in fp16; use fp16 with an adapter, or bf16")
    elif adapter or sharded:
        draft.set("precision.params", None, "", "the trained parameters are in fp32 there", text="fp32")
        draft.set("precision.compute", None, "bf16 bfloat16", text="bf16")
    else:
        draft.set("precision.params", None, "bf16 bfloat16", "weights are loaded in bf16, and so trained", text="bf16")
    draft.same("fp16 float16 float32", "off")
    _write_rounding(draft)
    draft.meaningless("torch_dtype", "bf16 says the format")
    if isinstance(draft.get("tf32"), bool):
        draft.set("precision.matmul", None, "tf32", text="high" if draft.get("tf32") else "highest")
    draft.same("tf32", "auto")
    draft.meaningless("embeddings_skip_upcast fp32_norms* experts_fp32", "norms and statistics are computed in fp32")
    activation = draft.get("gradient_checkpointing", False)
    fsdp_too = draft.get("fsdp_config.activation_checkpointing") or draft.get(
        "fsdp_config.fsdp_activation_checkpointing"
    )
    keys = "gradient_checkpointing fsdp_config.activation_checkpointing fsdp_config.fsdp_activation_checkpointing"
    offloads = not is_off(draft.get("activation_offloading"))
    if not is_off(activation) or fsdp_too or offloads:
        note = "activations stay on the device" if offloads or isinstance(activation, str) else ""
        draft.label("activation", "full", f"{keys} activation_offloading", note)
        if note:
            draft.note("it moves saved activations to host memory; here blocks are recomputed, with the same numbers")
    draft.same(keys, "off")
    if draft.get("tiled_mlp"):
        shards = draft.number("tiled_mlp_num_shards", 0)
        draft.set("activation.tile_mlp", None, "tiled_mlp tiled_mlp_num_shards", text=str(shards or "auto"))
    draft.same("tiled_mlp tiled_mlp_num_shards", "off")
    if not is_off(draft.get("torch_compile")):
        mode = "max_autotune" if draft.text("torch_compile_mode").startswith("max-autotune") else "default"
        draft.label("compile", "", "torch_compile")
        draft.set("compile.mode", None, "torch_compile_mode", text=mode)
    draft.same("torch_compile torch_compile_mode", "off")


def write_ranks(draft: Draft) -> None:
    axes = {
        "tp": "tensor_parallel_size",
        "cp": "context_parallel_size|sequence_parallel_degree",
        "ep": "expert_parallel_size",
    }
    for axis, keys in axes.items():
        for key in keys.split("|"):
            size = draft.number(key, 1)
            if draft.has(key) and size > 1:
                draft.label(f"parallel.{axis}", str(size), key)
            draft.same(key, "one rank")
    draft.ranks = max(draft.ranks, draft.number("expert_parallel_size", 1))
    replicas = draft.number("dp_replicate_size", 1)
    if replicas > 1:
        draft.set("parallel.fsdp.replicate", replicas, "dp_replicate_size")
    draft.same("dp_replicate_size", "one replica")
    shards = draft.number("dp_shard_size", 0)
    if shards >= 1:
        draft.label("parallel.fsdp", str(shards), "dp_shard_size")
    write_fsdp(draft, "fsdp_config.")
    draft.meaningless("fsdp fsdp_version fsdp_final_state_dict_type", "blocks are sharded as `parallel` says")
    if not is_off(draft.get("deepspeed")):
        write_zero(draft, "deepspeed")
    draft.unless_off("deepcompile", "compiled collectives are not there")
