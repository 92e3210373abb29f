"""Configurations of ArcticTraining (YAML), types `sft` and `causal`, as its release 0.8 computes them."""

import re
from typing import Any, ClassVar, Final

from xtrain.components.importers._deepspeed_json import write_deepspeed
from xtrain.components.importers._transformers_trainer import (
    LAST_STEP,
    names,
    share_or_steps,
    write_schedule,
)
from xtrain.dsl.importing.draft import Draft, identifier
from xtrain.dsl.importing.importer import IMPORTERS, Importer
from xtrain.dsl.schema.component import named
from xtrain.dsl.spec_text import value_text
from xtrain.lazy_attrs import frozen

_MEANS: Final = "it averages the mean losses of microbatches and ranks; xtrain divides by all tokens of the step"
_ROLES: Final = re.compile(r"(\w+)\.role\.(user|assistant|system)")


@IMPORTERS.register()
@frozen
class ArcticTrainingImporter(Importer):
    """Configurations of ArcticTraining."""

    title = "ArcticTraining"
    marks = ("model.name_or_path", "data.sources", "deepspeed|optimizer|scheduler|micro_batch_size")
    without_meaning: ClassVar = {
        "kernels of the program; xtrain chooses its own": "model.type model.attn_implementation data.type",
        "how the data is read and stored": (
            "data.cache_dir data.num_proc data.use_data_cache data.cache_processed_data data.cache_fs_type "
            "data.fail_on_missing_cache data.div_length data.pad_to data.always_max_length data.drop_last data.seed"
        ),
        "records of a run are xtrain's own": (
            "logger logger.* train_log_* mem_profiler_* kill_switch_path model.save_name"
        ),
        "the check of its own file": "skip_validation",
    }
    lacking: ClassVar = {
        "a program of one's own": "code",
        "sizes of a model's folder cannot be changed": "model.hf_config_kwargs model.peft_config.*",
        "training on one batch is not there": "overfit_first_batch",
        "write `every 1000 steps memory_snapshot`": "mem_profiler",
        "positions that run on over documents are not there": "data.fuse_positions_prob data.repeat_to_pack_max_length",
        "reasoning is trained as the records have it": "data.ignore_empty_think",
        "its own layout of experts": "arctic_moe enable_arctic_moe_custom_optimization enable_routing_replay",
    }

    kind: str = named("arctic_training")

    def write(self, draft: Draft) -> None:
        kind = draft.text("type", "sft")
        draft.name_experiment()
        if kind in ("sft", "causal"):
            draft.translated("type")
        draft.missing("type", "trained are conversations (`sft`) and plain text (`causal`)")
        draft.set("experiment.seed", draft.number("seed", 42), "seed")
        _write_length(draft)
        names(draft, "model.name_or_path")
        names(
            draft,
            "tokenizer.name_or_path" if draft.has("tokenizer.name_or_path") else "model.name_or_path",
            model=False,
        )
        _write_data(draft, kind)
        draft.set("batch.micro", draft.number("micro_batch_size", 1), "micro_batch_size")
        draft.set("batch.accumulate", draft.number("gradient_accumulation_steps", 1), "gradient_accumulation_steps")
        draft.set("batch.workers", draft.number("data.dl_num_workers", 2), "data.dl_num_workers")
        _write_optimizer(draft)
        _write_precision(draft)
        _write_ticks(draft)
        draft.note(_MEANS)


def _write_length(draft: Draft) -> None:
    steps, epochs = draft.number("train_iters", 0), draft.number("epochs", 1)
    if steps:
        draft.set("experiment.budget", None, "train_iters", text=share_or_steps(steps))
        draft.meaningless("epochs", "train_iters is the length")
    else:
        draft.set("experiment.budget", None, "epochs", text=f"{epochs} {'epoch' if epochs == 1 else 'epochs'}")
        draft.note(LAST_STEP)
    for key, setting in (("exit_iteration", "stop_at"), ("exit_iteration_this_run", "stop_after")):
        if ends := draft.number(key, 0):
            draft.set(f"launch.{setting}", None, key, text=share_or_steps(ends))
        draft.same(key, "off")
    if least := draft.number("min_iterations", 0):
        draft.note(f"it repeats the data until {least} steps are full, and its schedule is as long; here epochs count")
    draft.translated("min_iterations train_iters")


def _write_data(draft: Draft, kind: str) -> None:
    sources: Any = draft.get("data.sources", [])
    taken: list[str] = []
    for number, source in enumerate(sources if isinstance(sources, list) else []):
        key = f"data.sources.{number}"
        named_source = source.get("name_or_path", "") if isinstance(source, dict) else source
        text = named_source if isinstance(named_source, str) else ""
        repository, _, split = text.partition(":")
        if not repository:
            draft.missing(key, "a source without a name")
            continue
        name = identifier(repository, "data")
        name = name if name not in taken else f"{name}_{len(taken) + 1}"
        taken.append(name)
        split = split or draft.text(f"{key}.split", "train")
        config = draft.text(f"{key}.kwargs.name")
        arguments = [value_text(repository), *([f"config = {value_text(config)}"] if config else [])]
        arguments += [f"split = {value_text(split)}"] if split != "train" else []
        keys = f"{key} " if isinstance(source, str) else f"{key}.name_or_path {key}.split {key}.kwargs.name"
        draft.set(f"dataset.{name}.source", None, keys, text=f"huggingface({', '.join(arguments)})")
        _write_fields(draft, f"dataset.{name}", key, kind)
    for name in taken if len(taken) > 1 else ():
        draft.set(f"mixture.{name}", None, "", "every document once an epoch", text="1 epoch")
    parts: Any = draft.get("data.train_eval_split", [1.0, 0.0])
    if isinstance(parts, list) and len(parts) == 2 and isinstance(parts[1], float) and parts[1]:
        for name in taken:
            draft.set(f"dataset.{name}.holdout", None, "data.train_eval_split", text=f"{100 * parts[1]:.10g}%")
    draft.same("data.train_eval_split", "nothing is held out")
    draft.unless_off("data.eval_sources", "write the dataset with `holdout = 100%`")
    length = draft.number("data.max_length", 8192)
    draft.set("batch.sequence", length, "data.max_length")
    rows = "pack(multipack)" if draft.get("data.pack_samples") else "pack(single)"
    rows = "pack(sequential)" if kind == "causal" else rows
    origin = "data.pack_samples" if draft.has("data.pack_samples") else "its default"
    draft.collate = (f"to_tensor -> flatten -> shift_tokens -> {rows}", origin)
    draft.translated("data.pack_samples data.mask_inputs data.filter_samples")


def _write_fields(draft: Draft, address: str, key: str, kind: str) -> None:
    if kind == "causal":
        draft.set(f"{address}.oversized", None, "", "pieces of its length", text="split")
    else:
        fields = {match[1] for role in ("user", "assistant", "system")
                  if (match := _ROLES.fullmatch(draft.text(f"{key}.role_mapping.{role}")))}  # fmt: skip
        odd = [name for name, value in draft.values.items()
               if name.startswith(f"{key}.role_mapping.") and not _ROLES.fullmatch(str(value))]  # fmt: skip
        draft.missing(" ".join(odd), "roles and contents are in one list of messages")
        draft.set(f"{address}.messages", fields.pop() if len(fields) == 1 else "messages", f"{key}.role_mapping.*")
        longer = "skip" if draft.get("data.filter_samples", True) else "truncate"
        draft.set(f"{address}.oversized", None, "data.filter_samples", text=longer)
        if draft.get("data.mask_inputs", True) is False:
            draft.set(f"{address}.train_on", None, "data.mask_inputs", text="all")
        draft.note("of repositories that it knows it reads their own fields; compare with `xtrain data show`")
    draft.unless_off(f"{key}.sample_count {key}.sample_ratio", "write the part of the data into files")
    draft.meaningless(f"{key}.sample_seed {key}.process {key}.type {key}.kwargs.*", "how it reads the data")


def _write_optimizer(draft: Draft) -> None:
    kind = draft.text("optimizer.type", "fused_adam")
    draft.label("optimizer", "adamw", "optimizer.type" if kind in ("fused_adam", "cpu_adam", "adamw") else "")
    draft.missing("optimizer.type", "xtrain has no such optimizer; the spec has AdamW")
    key = next((key for key in ("optimizer.learning_rate", "optimizer.lr", "scheduler.learning_rate", "scheduler.lr")
                if draft.has(key)), "optimizer.lr")  # fmt: skip
    draft.set("optimizer.lr", draft.number(key, 5e-4), key)
    draft.set("optimizer.weight_decay", draft.number("optimizer.weight_decay", 0.1), "optimizer.weight_decay")
    draft.set("optimizer.betas", draft.get("optimizer.betas", [0.9, 0.999]), "optimizer.betas")
    ratio = draft.number("scheduler.warmup_ratio", 0.1)
    draft.meaningless("scheduler.type", "the name says the schedule")
    write_schedule(
        draft, "scheduler.name", "linear", f"{100 * ratio:.10g}%", "scheduler.warmup_ratio", "scheduler.kwargs"
    )


def _write_precision(draft: Draft) -> None:
    dtype = draft.text("model.dtype", "bf16").lower().removeprefix("dtype.")
    if dtype in ("bf16", "fp32", "bfloat16", "float32"):
        draft.set("precision.params", None, "", "DeepSpeed updates weights in fp32", text="fp32")
        draft.set("precision.compute", None, "model.dtype", text="bf16" if dtype.startswith("b") else "fp32")
    draft.missing("model.dtype", "parameters are not trained in fp16; use bf16")
    if not draft.get("model.disable_activation_checkpoint"):
        offloads = draft.get("activation_checkpoint_cpu_offload")
        draft.label("activation", "full", "activation_checkpoint_cpu_offload" if offloads else "")
        if offloads:
            draft.note("it moves saved activations to host memory; here they stay on the device")
    if draft.get("tiled_mlp_compute"):
        draft.set("activation.tile_mlp", None, "tiled_mlp_compute", text="auto")
    draft.translated("model.disable_activation_checkpoint")
    draft.same("activation_checkpoint_cpu_offload tiled_mlp_compute", "off")
    write_deepspeed(draft, "deepspeed.")
    for axis, key in (("cp", "sequence_parallel_size"), ("ep", "expert_parallel_size")):
        if (size := draft.number(key, 1)) > 1:
            draft.label(f"parallel.{axis}", str(size), key)
        draft.same(key, "one rank")
    draft.ranks = max(draft.number("expert_parallel_size", 1), 1)


def _write_ticks(draft: Draft) -> None:
    every = draft.number("loss_log_interval", 1)
    if every:
        draft.statements.append((f"every {share_or_steps(every)} log", "loss_log_interval"))
    draft.translated("loss_log_interval")
    entries = draft.get("checkpoint", [])
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        key = f"checkpoint.{number}"
        if not isinstance(entry, dict) or entry.get("type", "huggingface") not in ("huggingface", "deepspeed"):
            draft.missing(key, "checkpoints are xtrain's own; exports have the format of transformers")
            continue
        for word, unit in (("save_every_n_steps", "steps"), ("save_every_n_epochs", "epochs")):
            if count := draft.number(f"{key}.{word}", 0):
                one = {"steps": "step", "epochs": "epoch"}[unit] if count == 1 else unit
                draft.statements.append((f"every {count} {one} checkpoint", f"{key}.{word}"))
        if entry.get("type") == "huggingface" and entry.get("save_end_of_training"):
            folder = value_text(draft.text(f"{key}.output_dir"))
            draft.statements.append((f"on finish export {{ to = {folder} }}", f"{key}.output_dir"))
        draft.translated(key)
    draft.same("eval_interval eval_log_iter_interval", "off")
    if draft.get("wandb.enable"):
        for name in ("project", "entity", "name"):
            if draft.has(f"wandb.{name}") or name == "project":
                draft.set(f"log.wandb.{name}", draft.text(f"wandb.{name}", "arctic-training"), f"wandb.{name}")
        draft.translated("wandb.enable")
    draft.meaningless("wandb.*", "W&B is off")
