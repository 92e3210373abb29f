"""Configurations of LLaMA-Factory (YAML), as its release 0.9.5 computes them."""

import json
from pathlib import Path
from typing import Any, ClassVar, Final

from xtrain.components.importers import _training_arguments as arguments
from xtrain.components.importers._transformers_trainer import module_names, names, write_adapter_folder, write_lora
from xtrain.dsl.importing.draft import Draft, identifier
from xtrain.dsl.importing.importer import IMPORTERS, Importer
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.data_components import SOURCES, source_of
from xtrain.dsl.spec_text import value_text
from xtrain.lazy_attrs import frozen

INFO: Final = "dataset_info.json"
_TEMPLATE: Final = "it has its own template `{}`; here the tokenizer's own is used: compare with `xtrain data show`"
_STAGES: Final = {"sft": "", "pt": "", "dpo": "dpo", "kto": "kto", "rm": "bradley_terry"}
# Templates whose text no tokenizer has.
_OWN: Final = ("alpaca", "default", "vicuna", "empty", "fewshot")
_COLUMNS: Final = {"alpaca": ("prompt", "query", "response", "system", "chosen", "rejected", "kto_tag"),
                   "sharegpt": ("messages", "system", "tools", "chosen", "rejected", "kto_tag")}  # fmt: skip


@IMPORTERS.register()
@frozen
class LlamaFactoryImporter(Importer):
    """Configurations of LLaMA-Factory."""

    title = "LLaMA-Factory"
    marks = ("stage|finetuning_type", "finetuning_type|template", "model_name_or_path", "dataset|template|cutoff_len")
    settings: ClassVar = arguments.SETTINGS
    without_meaning: ClassVar = {
        **arguments.WITHOUT_MEANING,
        "tokens are stored below `workspace`": (
            "tokenized_path preprocessing_batch_size buffer_size data_shared_file_system max_files media_dir cache_dir"
        ),
        arguments.UPLOADS: f"{arguments.WITHOUT_MEANING[arguments.UPLOADS]} export_hub_model_id",
        "the padding has no loss": "ignore_pad_token_for_loss",
        "the size of images and videos, which are not read": "image_max_pixels image_min_pixels video_* audio_*",
        "the reference is the model without its adapter": "ref_model_quantization_bit",
        "placement and kernels of the program": (
            "device_map low_cpu_mem_usage offload_folder use_fast_tokenizer split_special_tokens moe_aux_loss_* "
            "disable_shuffling upcast_layernorm upcast_lmhead_output infer_* vllm_* sglang_* export_size export_device "
            "export_legacy_format export_quantization_* use_v1_kernels "
            "print_param_status compute_accuracy pissa_convert fsdp_transformer_layer_cls_to_wrap"
        ),
        "the text model has no such parts": "freeze_vision_tower freeze_multi_modal_projector freeze_language_model",
    }
    lacking: ClassVar = {
        **arguments.LACKING,
        "this optimizer is not there": "use_galore galore_* use_apollo apollo_* use_badam badam_*",
        "xtrain has no LoRA+": "loraplus_*",
        "this loss is not there": "use_asft_loss asft_alpha use_eaft_loss eaft_*",
        "this method is not there": (
            "use_llama_pro mixture_of_depths use_kt kt_* shift_attn use_mca oft_* reward_model* ppo_*"
        ),
        "frozen parts are written `frozen` of `model`": "freeze_trainable_* freeze_extra_modules",
        "the file merges an adapter and trains nothing: `xtrain merge RUN`": "export_dir",
        "several adapters, or one under a new one, are merged first": "adapter_name_or_path create_new_adapter",
        "new tokens are written into the tokenizer's files first": "resize_vocab add_tokens add_special_tokens "
        "new_special_tokens_config init_special_tokens",
        "scaled positions are written `rope { … }` of `model`": "rope_scaling",
        "products in fp8 are scaled as torchao's are": "fp8 fp8_*",
        "evaluations by generated texts are not there": "predict_with_generate eval_num_beams compute_accuracy",
        "the system message is in the records": "default_system tool_format",
        "datasets are mixed by `mixture`": "mix_strategy interleave_probs",
        "a cross-entropy next to the preference is not there": "pref_ftx pref_bco_weight",
        "another reference is `reference = \"folder\"`": "ref_model ref_model_adapters",
    }  # fmt: skip

    kind: str = named("llama_factory")

    def write(self, draft: Draft) -> None:
        stage = draft.text("stage", "sft")
        draft.name_experiment()
        names(draft, "model_name_or_path", "model_revision")
        names(draft, "model_name_or_path", "model_revision", model=False)
        adapter = draft.text("finetuning_type", "lora") == "lora"
        _write_adapter(draft, adapter)
        held = _write_data(draft, stage)
        pure = bool(draft.get("pure_bf16"))
        usual = arguments.Usual(recomputes=not draft.get("disable_gradient_checkpointing"), bf16=pure)
        draft.translated("disable_gradient_checkpointing")
        arguments.write_arguments(draft, usual, datasets=held, full=not adapter, params="bf16" if pure else "fp32")
        draft.translated("pure_bf16") if pure else draft.same("pure_bf16", "off")
        if draft.get("use_adam_mini"):
            draft.label("optimizer", "adam_mini", "use_adam_mini")
        if draft.get("use_muon"):
            draft.label("optimizer", "muon", "use_muon", "norms and biases decay too there; here they do not")
            draft.note("AdamW's eps is added before the correction of the second moment there, here after it")
        draft.same("use_adam_mini use_muon", "off")
        _write_fp8(draft)
        if draft.get("use_swanlab"):
            draft.translated("use_swanlab")
            draft.set("log.swanlab.project", draft.text("swanlab_project", "llamafactory"), "swanlab_project")
            for name, key in (("name", "swanlab_run_name"), ("workspace", "swanlab_workspace")):
                if draft.has(key):
                    draft.set(f"log.swanlab.{name}", draft.text(key), key)
            mode = draft.text("swanlab_mode", "cloud")
            draft.set("log.swanlab.mode", "online" if mode == "cloud" else mode, "swanlab_mode")
            draft.unless_off("swanlab_*", "another key of SwanLab")
        draft.same("use_swanlab", "off")
        draft.meaningless("swanlab_*", "SwanLab is off")
        _write_loss(draft, stage, adapter)
        draft.meaningless("use_dft_loss", "it goes with `stage: sft`")


def _write_fp8(draft: Draft) -> None:
    """Write products in fp8, which torchao computes with a scale of each row for all matrices but the head."""
    if draft.get("fp8") and draft.text("fp8_backend", "auto") in ("auto", "torchao"):
        draft.set("precision.compute", None, "fp8 fp8_backend", text="fp8 { recipe = rowwise }")
        draft.meaningless("fp8_enable_fsdp_float8_all_gather", "messages have the format of `rest`; products are equal")


def _write_adapter(draft: Draft, adapter: bool) -> None:
    if not adapter:
        if draft.text("finetuning_type") == "full":
            draft.translated("finetuning_type")
        draft.missing("finetuning_type", "all parameters are trained, or an adapter of LoRA")
        draft.meaningless("lora_* use_rslora use_dora additional_target pissa_*", "no adapter is trained")
        draft.unless_off("quantization_bit", "the base is quantized only below an adapter")
    elif _goes_on(draft):
        draft.label("adapter", "lora", "finetuning_type")
        settings = "lora_* use_rslora use_dora additional_target pissa_* create_new_adapter"
        write_adapter_folder(draft, "adapter_name_or_path", settings)
    else:
        if draft.has("adapter_name_or_path") and not draft.get("do_train"):
            draft.missing("adapter_name_or_path", "the file has no `do_train`: it trains nothing")
        rank = draft.number("lora_rank", 8)
        write_lora(draft, {"label": "finetuning_type", "rank": "lora_rank", "alpha": "lora_alpha",
                           "dropout": "lora_dropout", "scaling": "use_rslora", "dora": "use_dora"},
                   8, 2 * rank, 0)  # fmt: skip
        targets = module_names([name.strip() for name in draft.text("lora_target", "all").split(",")])
        if targets:
            draft.set("adapter.targets", targets, "lora_target")
        draft.missing("lora_target", "`targets` are parts of names")
        if draft.has("additional_target"):
            parts = [name.strip() for name in draft.text("additional_target").split(",")]
            draft.set("adapter.train", parts, "additional_target")
        if draft.get("pissa_init"):
            draft.set("adapter.init", None, "pissa_init", text="pissa")
            if draft.number("pissa_iter", 16) >= 0:
                draft.note("PiSSA's parts are approximated by iterations there; here they are exact")
        draft.translated("pissa_iter")
        draft.same("pissa_init", "off")
    bits = draft.number("quantization_bit", 0)
    if adapter and bits in (4, 8) and draft.text("quantization_method", "bnb").lower() in ("bnb", "bitsandbytes"):
        kind, note = ("nf4", "") if bits == 4 else ("int8", "weights alone; bitsandbytes also rounds inputs")
        if bits == 4 and draft.text("quantization_type", "nf4") != "nf4":
            draft.missing("quantization_type", "4-bit codes are NormalFloat")
        draft.label("precision.base", kind, "quantization_bit quantization_method quantization_type", note)
        if bits == 4:
            draft.set("precision.base.double", bool(draft.get("double_quantization", True)), "double_quantization")
    draft.unless_off("quantization_bit", "this quantization is not there")
    draft.meaningless("quantization_method quantization_type double_quantization", "the base is not quantized")


def _goes_on(draft: Draft) -> bool:
    """Return True for a file that trains on from one adapter; several are merged before training."""
    one = draft.has("adapter_name_or_path") and "," not in draft.text("adapter_name_or_path")
    return bool(one and draft.get("do_train") and not draft.get("create_new_adapter"))


# Data -----------------------------------------------------------------------------------------------------------------


def _write_data(draft: Draft, stage: str) -> list[str]:
    """Write the datasets of `dataset_info.json`; return those with a held-out part."""
    info = _info(draft)
    given = draft.get("dataset", "")
    wanted = given if isinstance(given, list) else [name.strip() for name in str(given).split(",") if name.strip()]
    taken: list[str] = []
    for name in wanted:
        entry = None if info is None else info[1].get(str(name))
        if not isinstance(entry, dict):
            draft.missing("dataset", f"{INFO} does not say what `{name}` is; put it into dataset_dir")
            continue
        label = identifier(str(name), "data")
        taken.append(label if label not in taken else f"{label}_{len(taken) + 1}")
        _write_dataset(draft, f"dataset.{taken[-1]}", info[0] if info else Path(), entry, stage)
    draft.translated("dataset dataset_dir")
    draft.missing("max_samples", "write that many records into a file")
    for name in taken if len(taken) > 1 else ():
        draft.set(f"mixture.{name}", None, "", "every document once an epoch", text="1 epoch")
    share = draft.number("val_size", 0)
    if share >= 1:
        draft.missing("val_size", "a number of documents; `holdout` is a share, such as 2%")
        share = 0
    for name in taken if share else ():
        draft.set(f"dataset.{name}.holdout", None, "val_size", text=f"{100 * share:.10g}%")
    draft.same("val_size", "nothing is held out")
    draft.unless_off("eval_dataset eval_on_each_dataset", "write the dataset with `holdout = 100%`")
    draft.meaningless("template enable_thinking", "no conversation is formatted")
    draft.same("train_on_prompt mask_history", "answers alone are trained on")
    _write_rows(draft, stage)
    return taken if share else []


def _write_rows(draft: Draft, stage: str) -> None:
    draft.set("batch.sequence", draft.number("cutoff_len", 2048), "cutoff_len")
    packs = draft.get("packing", stage == "pt") or draft.get("neat_packing")
    rows = "pack(sequential)" if packs and stage == "pt" else "pack(multipack)" if packs else "pack(single)"
    rows = "pack(multipack)" if stage == "kto" else rows
    if packs and not draft.get("neat_packing"):
        draft.note("documents that are packed into one row see each other there; here they do not")
    draft.translated("packing neat_packing")
    draft.collate = (f"to_tensor -> flatten -> shift_tokens -> {rows}", "packing" if draft.has("packing") else
                     "its default")  # fmt: skip


def _info(draft: Draft) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder and content of `dataset_info.json`; None if it cannot be read."""
    folder = draft.config.path.resolve().parent
    name = draft.text("dataset_dir", "data")
    for place in (Path(name), *(parent / name for parent in (folder, *folder.parents))):
        try:
            content = json.loads((place / INFO).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            return place, content
    return None


def _write_dataset(draft: Draft, address: str, folder: Path, entry: dict[str, Any], stage: str) -> None:
    file, repository = entry.get("file_name"), entry.get("hf_hub_url")
    most = draft.number("max_samples", 0)
    unread = _unread(entry)
    if unread is not None:  # before the key counts as translated with the source
        draft.missing("dataset", unread)
    if isinstance(file, str):
        path = folder / file
        source = source_of(path.name)
        if SOURCES[source].records != "fields" and path.suffix != ".txt":
            draft.missing("dataset", f"{file}: files of this type are not read; use JSON lines")
            return
        draft.set(f"{address}.source", None, "dataset dataset_dir", text=f"{source}({value_text(str(path))})")
        if most and not _has_at_most(path, most):
            draft.missing("max_samples", f"write the first {most} records of {file} into a file")
        draft.same("max_samples", "the files have no more")
    elif isinstance(repository, str):
        arguments_ = [value_text(repository)]
        arguments_ += [f"config = {value_text(entry['subset'])}"] if isinstance(entry.get("subset"), str) else []
        split = f"{entry.get('split', 'train')}[:{most}]" if most else entry.get("split", "train")
        arguments_ += [f"split = {value_text(split)}"] if split != "train" else []
        draft.set(f"{address}.source", None, "dataset max_samples", text=f"huggingface({', '.join(arguments_)})")
    else:
        draft.missing("dataset", f"{INFO} names neither a file nor a repository of the Hugging Face hub")
        return
    if unread is None:
        _write_columns(draft, address, entry, stage)
    longer = "skip" if stage in ("dpo", "kto", "rm") else "split" if stage == "pt" else "truncate"
    draft.set(f"{address}.oversized", None, "cutoff_len", "turns lose their ends in proportion there", text=longer)


def _unread(entry: dict[str, Any]) -> str | None:
    """Return what xtrain does not read of an entry of `dataset_info.json`; None if it reads all."""
    form, columns, tags = str(entry.get("formatting", "alpaca")), _part(entry, "columns"), _part(entry, "tags")
    known = _COLUMNS.get(form)
    extra = {"ranking", "formatting", "columns", "tags", "file_name", "hf_hub_url", "subset", "split", "ms_hub_url",
             "om_hub_url"}  # fmt: skip
    odd = (set(columns) - set(known or ())) | (set(entry) - extra)
    if known is None or odd:
        return f"its {INFO} has {', '.join(sorted(odd)) or form}, which xtrain does not read"
    if form != "sharegpt":
        return None
    if (tags.get("role_tag", "from"), tags.get("content_tag", "value")) not in (("from", "value"), ("role", "content")):
        return "messages have `role` and `content`, or `from` and `value`"
    if "kto_tag" in columns:
        return "labels belong to pairs of a prompt and a response, not to conversations"
    return None


def _part(entry: dict[str, Any], name: str) -> dict[str, Any]:
    found = entry.get(name)
    return found if isinstance(found, dict) else {}


def _write_columns(draft: Draft, address: str, entry: dict[str, Any], stage: str) -> None:
    columns = _part(entry, "columns")
    if stage == "pt":
        draft.set(f"{address}.text", columns.get("prompt", "text"), "stage")
        return
    if entry.get("formatting") == "sharegpt":
        messages = columns.get("messages", "conversations")
        draft.set(f"{address}.{'prompt' if entry.get('ranking') else 'messages'}", messages)
    else:
        draft.set(f"{address}.prompt", columns.get("prompt", "instruction"))
        if not entry.get("ranking"):
            draft.set(f"{address}.response", columns.get("response", "output"))
            draft.set(
                f"{address}.input", columns.get("query", "input"), "", "after an empty line; there after one break"
            )
    if entry.get("ranking"):
        for side in ("chosen", "rejected"):
            draft.set(f"{address}.{side}", columns.get(side, side))
    for name, column in (("system", "system"), ("tools", "tools"), ("label", "kto_tag")):
        if column in columns:
            draft.set(f"{address}.{name}", columns[column])
    if draft.get("train_on_prompt"):
        draft.set(f"{address}.train_on", None, "train_on_prompt", text="all")
    elif draft.get("mask_history"):
        draft.set(f"{address}.train_on", None, "mask_history", text="last")
    name = draft.text("template", "default")
    if name in _OWN:
        draft.missing("template", 'write a Jinja template with its text: `template = "…"`')
    elif name in ("llama3", "chatml"):
        draft.set(f"{address}.template", name, "template")
    else:
        draft.set(f"{address}.template", None, "template", f"its {name}", text="auto")
        draft.note(_TEMPLATE.format(name))


def _has_at_most(path: Path, most: float) -> bool:
    """Return True if a file of JSON has no more records than `most`."""
    try:
        text = path.read_text(encoding="utf-8")
        records = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
    except (OSError, ValueError, RecursionError):
        return False
    return len(records) <= most


def _write_loss(draft: Draft, stage: str, adapter: bool) -> None:
    loss = _STAGES.get(stage)
    if loss is None:
        draft.missing("stage", "this method is not there")
        return
    if not loss:
        draft.translated("stage")
        draft.meaningless("pref_* dpo_label_smoothing simpo_gamma kto_*", "no preferences are learned")
        if draft.get("use_dft_loss") and stage == "sft":
            draft.label("loss", "cross_entropy", "use_dft_loss")
            draft.set("loss.dynamic", True, "use_dft_loss")
        draft.same("use_dft_loss", "off")
        return
    kind = draft.text("pref_loss", "sigmoid") if stage == "dpo" else ""
    loss = kind if kind in ("orpo", "simpo") else loss
    draft.label("loss", loss, "stage pref_loss" if kind in ("orpo", "simpo", "sigmoid") else "stage")
    if loss != "bradley_terry":
        draft.set("loss.beta", draft.number("pref_beta", 0.1), "pref_beta")
    if kind in ("hinge", "ipo"):
        draft.set("loss.form", None, "pref_loss", text=kind)
    if loss == "dpo":
        draft.set("loss.label_smoothing", draft.number("dpo_label_smoothing", 0), "dpo_label_smoothing")
    if loss in ("dpo", "kto") and adapter:
        draft.set("loss.reference", None, "", "the model with its adapter off", text="adapter_off")
    if loss == "simpo":
        draft.set("loss.gamma", draft.number("simpo_gamma", 0.5), "simpo_gamma")
    if loss == "kto":
        draft.set("loss.desirable", draft.number("kto_chosen_weight", 1), "kto_chosen_weight")
        draft.set("loss.undesirable", draft.number("kto_rejected_weight", 1), "kto_rejected_weight")
        draft.set("loss.reference_point", None, "", "TRL estimates it from the batch", text="estimated")
    draft.missing("pref_loss", "this form of the loss is not there")
    draft.meaningless("dpo_label_smoothing simpo_gamma kto_*", "the loss does not read it")
