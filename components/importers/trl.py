"""Configurations of TRL's command line (`trl sft --config`), as its release 1.16 computes them."""

import json
from pathlib import Path
from typing import Any, ClassVar, Final

from xtrain.components.importers import _training_arguments as arguments
from xtrain.components.importers._accelerate import write_launcher
from xtrain.components.importers._transformers_trainer import (
    module_names,
    names,
    write_lora,
    write_padding,
    write_source,
)
from xtrain.dsl.importing.draft import Draft, identifier
from xtrain.dsl.importing.importer import IMPORTERS, Importer
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen

# Method → keys that only its configurations have.
_METHODS: Final = {
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "num_iterations", "scale_rewards"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "dpo": ("beta", "label_smoothing", "precompute_ref_log_probs", "f_divergence_type", "ld_alpha", "sync_ref_model"),
    "reward": ("center_rewards_coefficient",),
}
_RATES: Final = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "grpo": 1e-6, "reward": 1e-4}
_TAIL: Final = (
    "what the template writes after an answer's last token, such as a line break, counts there; here it does not"
)
_FIRST: Final = (
    "with a tokenizer without bos the first token of a text is not predicted there; here eos comes before it"
)
_FORMS: Final = {"sigmoid": "sigmoid", "ipo": "ipo", "hinge": "hinge", "robust": "robust"}


@IMPORTERS.register()
@frozen
class TrlImporter(Importer):
    """Configurations of TRL."""

    title = "TRL"
    marks = (
        "!stage",
        "!finetuning_type",
        "model_name_or_path",
        "dataset_name|datasets.0.path|dataset_text_field|use_peft|max_length|packing",
        "learning_rate|per_device_train_batch_size|output_dir|num_train_epochs|max_steps|use_peft",
    )
    settings: ClassVar = arguments.SETTINGS
    without_meaning: ClassVar = {
        **arguments.WITHOUT_MEANING,
        "documents of a row do not see each other": "padding_free eval_packing",
        "the reference is computed before the first step": "precompute_ref_log_probs precompute_ref_batch_size",
        "models have no dropout here": "disable_dropout",
        "a spec trains one way": "lora_task_type",
        "the format in which codes are stored": "bnb_4bit_quant_storage",
        "variables of the environment": "env env.*",
    }
    lacking: ClassVar = {
        **arguments.LACKING,
        "new tokens are written into the tokenizer's files first": "eos_token",
        "the reference does not change during a run": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        "this form of the loss is not there": (
            "use_weighting f_divergence_type f_alpha_divergence_coef ld_alpha discopop_tau loss_weights"
        ),
        "records are not changed by functions": "dataset_kwargs formatting_func",
        "`targets` are matrices of linear layers": "lora_target_parameters",
    }

    kind: str = named("trl")

    def write(self, draft: Draft) -> None:
        method = next((name for name, keys in _METHODS.items() if any(draft.has(key) for key in keys)), "sft")
        draft.name_experiment(f", read as one of `trl {method}`")
        names(draft, "model_name_or_path", "model_revision")
        names(draft, "model_name_or_path", "model_revision", model=False)
        adapter = bool(draft.get("use_peft"))
        _write_adapter(draft, adapter)
        held = _write_data(draft, method)
        _write_rows(draft, method)
        dtype = draft.text("dtype", draft.text("torch_dtype", "float32")).removeprefix("torch.")
        usual = arguments.Usual(_RATES[method], 8, 10, recomputes=True, bf16=True)
        params = "bf16" if dtype == "bfloat16" and not adapter else "fp32"
        arguments.write_arguments(draft, usual, datasets=held, full=not adapter, params=params)
        if dtype in ("float32", "bfloat16", "auto"):
            draft.translated("dtype torch_dtype")
        draft.missing("dtype torch_dtype", "parameters are in fp32 or bf16")
        draft.missing("model_init_kwargs", "sizes of a model's folder cannot be changed")
        _write_loss(draft, method, adapter)
        write_padding(draft)
        if draft.has("accelerate_config"):
            write_launcher(draft, "accelerate_config")


def _write_adapter(draft: Draft, adapter: bool) -> None:
    if not adapter:
        draft.meaningless("lora_* use_rslora use_dora", "use_peft is off")
        draft.same("use_peft", "off")
    else:
        write_lora(draft, {"label": "use_peft", "rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout",
                           "scaling": "use_rslora", "dora": "use_dora", "train": "lora_modules_to_save"},
                   16, 32, 0.05)  # fmt: skip
        targets = module_names(draft.get("lora_target_modules", []))
        if targets:
            draft.set("adapter.targets", targets, "lora_target_modules")
        elif draft.has("lora_target_modules"):
            draft.missing("lora_target_modules", "`targets` are parts of names, not regular expressions")
        else:
            draft.set("adapter.targets", ["q_proj", "v_proj"], "", "PEFT's default for most models")
    if draft.get("load_in_4bit"):
        draft.label("precision.base", "nf4", "load_in_4bit bnb_4bit_quant_type")
        draft.set("precision.base.double", bool(draft.get("use_bnb_nested_quant", False)), "use_bnb_nested_quant")
    elif draft.get("load_in_8bit"):
        draft.label("precision.base", "int8", "load_in_8bit", "weights alone; bitsandbytes also rounds inputs")
    draft.same("load_in_4bit load_in_8bit", "off")
    draft.meaningless("bnb_4bit_quant_type use_bnb_nested_quant", "the base is not quantized")


def _write_data(draft: Draft, method: str) -> list[str]:
    """Write the datasets; return those with a held-out part."""
    entries = draft.get("datasets", [])
    keys = [f"datasets.{number}" for number in range(len(entries))] if isinstance(entries, list) else []
    given = [(f"{key}.path", f"{key}.data_files", f"{key}.name", f"{key}.split") for key in keys]
    given = given or [("dataset_name", "", "dataset_config", "dataset_train_split")]
    taken: list[str] = []
    for path, files, config, split in given:
        if not draft.has(path):
            draft.missing(path.rpartition(".")[0] or path, "a dataset without a path")
            continue
        name = identifier(draft.text(path), "data")
        name = name if name not in taken else f"{name}_{len(taken) + 1}"
        taken.append(name)
        write_source(draft, f"dataset.{name}", path, files=files, config=config, split=split)
        _write_fields(draft, f"dataset.{name}", method)
        longer = "truncate" if draft.get("max_length", 1024) else "error"
        draft.set(f"dataset.{name}.oversized", None, "truncation_mode", text="skip" if method != "sft" else longer)
    for name in taken if len(taken) > 1 else ():
        draft.set(f"mixture.{name}", None, "", "every document once an epoch", text="1 epoch")
    if draft.text("truncation_mode", "keep_start") != "keep_start":
        draft.missing("truncation_mode", "a long document loses its end")
    share = draft.get("test_split_size")
    if isinstance(share, float) and 0 < share < 1:
        for name in taken:
            draft.set(f"dataset.{name}.holdout", None, "test_split_size", text=f"{100 * share:.10g}%")
        return taken
    draft.meaningless("dataset_test_split", "evaluations are of held-out rows: write a dataset { holdout = 100% }")
    draft.same("shuffle_dataset", "rows are drawn in random order")
    return []


def _write_fields(draft: Draft, address: str, method: str) -> None:
    first = _first_record(draft.setting(f"{address}.source") or "")
    if method in ("dpo", "kto"):
        draft.note(_TAIL)
    if method in ("dpo", "reward"):
        for side in ("chosen", "rejected"):
            draft.set(f"{address}.{side}", side)
        if first is None or "prompt" in first:
            draft.set(f"{address}.prompt", "prompt")
    elif method == "kto":
        for setting, field in (("prompt", "prompt"), ("response", "completion"), ("label", "label")):
            draft.set(f"{address}.{setting}", field)
    elif draft.get("assistant_only_loss") or (first and ("messages" in first or "conversations" in first)):
        field = "conversations" if first and "conversations" in first else "messages"
        draft.set(f"{address}.messages", field)
        everything = not draft.get("assistant_only_loss")
        draft.set(f"{address}.train_on", None, "assistant_only_loss", text="all" if everything else "assistant")
    elif draft.get("completion_only_loss") or (first and "prompt" in first):
        draft.set(f"{address}.prompt", "prompt")
        draft.set(f"{address}.response", "completion")
        if draft.get("completion_only_loss") is False:
            draft.set(f"{address}.train_on", None, "completion_only_loss", text="all")
        draft.translated("completion_only_loss")
        if first and isinstance(first.get("prompt"), str):
            draft.set(f"{address}.template", "{% for message in messages %}{{ message.content }}{% endfor %}",
                      "", "prompt and completion as they are")  # fmt: skip
    else:
        draft.set(f"{address}.text", draft.text("dataset_text_field", "text"), "dataset_text_field")
        draft.note(_FIRST)
        if first is None:
            draft.note("it looks at the first record: of `messages` or `prompt` and `completion`, name these fields")
    draft.same("assistant_only_loss completion_only_loss", "as the records say")
    draft.meaningless("dataset_text_field", "the records have other fields")
    template = draft.text("chat_template_path")
    if template and draft.setting(f"{address}.text") is None:
        draft.set(f"{address}.template", template, "chat_template_path")


def _first_record(source: str) -> dict[str, Any] | None:
    """Return the first record of a local file of JSON lines; None if it cannot be read."""
    if not source.startswith("jsonl("):
        return None
    path = Path(source.partition('"')[2].partition('"')[0])
    try:
        with path.open(encoding="utf-8") as file:
            record = json.loads(file.readline(1 << 20))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _write_rows(draft: Draft, method: str) -> None:
    draft.set("batch.sequence", draft.number("max_length", draft.number("max_seq_length", 1024)),
              "max_length max_seq_length")  # fmt: skip
    strategy = draft.text("packing_strategy", "bfd")
    packs = bool(draft.get("packing")) and method == "sft"
    method_of_rows = "pack(multipack)" if packs else "pack(single)"
    if packs and strategy == "wrapped":
        draft.missing("packing_strategy", "rows that cut documents without regard to them")
    draft.translated("packing packing_strategy")
    draft.collate = (f"to_tensor -> flatten -> shift_tokens -> {method_of_rows}", "packing" if draft.has("packing") else
                     "TRL's default: one document in a row")  # fmt: skip


def _write_loss(draft: Draft, method: str, adapter: bool) -> None:
    kinds = draft.get("loss_type")
    kind = kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds
    if method == "sft":
        if kind in (None, "nll", "chunked_nll"):
            draft.same("loss_type", "cross-entropy")
        if kind == "dft":
            draft.label("loss", "cross_entropy", "loss_type")
            draft.set("loss.dynamic", True, "loss_type")
        draft.missing("loss_type", "this loss is not there")
    elif method == "dpo":
        draft.label("loss", "dpo")
        draft.set("loss.beta", draft.number("beta", 0.1), "beta")
        if kind == "robust":
            draft.set("loss.label_smoothing", draft.number("label_smoothing", 0), "label_smoothing")
        draft.meaningless("label_smoothing", "TRL reads it for `robust` and `exo_pair` alone")
        if isinstance(kind, str) and kind in _FORMS:
            draft.set("loss.form", None, "loss_type", text=_FORMS[kind])
        if adapter:
            draft.set("loss.reference", None, "", "the model with its adapter off", text="adapter_off")
        draft.missing("loss_type", "this form of the loss is not there")
    elif method == "kto":
        draft.label("loss", "kto")
        for name, key in (("desirable", "desirable_weight"), ("undesirable", "undesirable_weight")):
            draft.set(f"loss.{name}", draft.number(key, 1), key)
        draft.set("loss.beta", draft.number("beta", 0.1), "beta")
        if kind == "apo_zero_unpaired":
            draft.translated("loss_type")
        else:
            draft.set("loss.reference_point", None, "loss_type", text="estimated")
            draft.collate = (
                "to_tensor -> flatten -> shift_tokens -> pack(multipack)",
                "its reference point needs several",
            )
    elif method == "reward":
        draft.label("loss", "bradley_terry")
        draft.set("loss.centre", draft.number("center_rewards_coefficient", 0), "center_rewards_coefficient")
    else:
        why = "rewards are functions with another signature; write `reward` and `rollout`"
        draft.missing(" ".join(_METHODS["grpo"]), why)
        draft.missing("beta epsilon epsilon_high temperature top_p top_k loss_type use_vllm vllm_*", why)
