"""`TrainingArguments` of transformers 5.24, which TRL and LLaMA-Factory extend."""

from typing import Any, Final

from xtrain.components.importers._accelerate import write_fsdp
from xtrain.components.importers._deepspeed_json import write_zero
from xtrain.components.importers._transformers_trainer import (
    LAST_STEP,
    PER_RANK,
    share_or_steps,
    write_evaluations,
    write_optimizer,
    write_schedule,
)
from xtrain.dsl.importing.accounts import is_off
from xtrain.dsl.importing.draft import Draft
from xtrain.lazy_attrs import frozen

SETTINGS: Final = {
    "batch": ("per_device_train_batch_size gradient_accumulation_steps dataloader_num_workers neftune_noise_alpha"),
    "loss": "label_smoothing_factor",
}
UPLOADS: Final = "a run uploads nothing; afterwards, `xtrain export` and `xtrain push FOLDER REPO`"
_READING: Final = "how the program reads its data; the data is the same"
WITHOUT_MEANING: Final = {
    "the run's folder is `workspace`": "output_dir overwrite_output_dir",
    _READING: (
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context dataset_num_proc remove_unused_columns label_names length_column_name "
        "preprocessing_num_workers overwrite_cache dataset_streaming streaming dataloader_drop_last data_seed "
        "per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
        "include_for_metrics batch_eval_metrics prediction_loss_only pad_to_multiple_of pad_token"
    ),
    "modeling files of a folder are executed only with `model { code = remote }`": "trust_remote_code",
    "ranks and devices are xtrain's": (
        "ddp_* local_rank use_cpu accelerator_config torch_empty_cache_steps auto_find_batch_size log_on_each_node "
        "save_on_each_node enable_jit_checkpoint no_cuda parallelism_config ray_*"
    ),
    "kernels of the program; xtrain chooses its own, with the same results up to rounding": (
        "use_liger_kernel liger_kernel_config attn_implementation flash_attn torch_compile_backend use_cache "
        "enable_liger_kernel use_unsloth* fp16_full_eval bf16_full_eval"
    ),
    "recomputation without `use_reentrant` is the only kind here": (
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant_gc"
    ),
    "records of a run are xtrain's own": (
        "logging_strategy logging_first_step logging_dir logging_nan_inf_filter log_level log_level_replica "
        "disable_tqdm include_num_input_tokens_seen include_tokens_per_second project run_name plot_loss "
        "skip_memory_metrics debug trackio_*"
    ),
    "`xtrain run` trains, and evaluates as the ticks say": "do_train do_eval do_predict",
    UPLOADS: "push_to_hub hub_* push_to_hub_*",
    "checkpoints hold the full state": (
        "save_only_model save_safetensors ignore_data_skip restore_callback_states_from_checkpoint"
    ),
}
LACKING: Final = {
    "activations stay on the device": "activation_offloading",
    "only some modules of GaLore and the like": "optim_target_modules",
    "it is a checkpoint of transformers": "resume_from_checkpoint",
    "evaluations begin with the first tick": "eval_delay",
    "an evaluation before the first step is not there": "eval_on_start",
}


@frozen
class Usual:
    """Defaults that a program on transformers' trainer changes."""

    rate: float = 5e-5
    batch: int = 8
    logging: float = 500
    recomputes: bool = False
    bf16: bool = False


def write_arguments(draft: Draft, usual: Usual, *, datasets: list[str], full: bool, params: str = "fp32") -> None:
    """Write length, batch, optimizer, schedule, precision, ranks and ticks. datasets: with a held-out part.

    full: all parameters are trained. params: format in which they are kept.
    """
    _write_length(draft)
    draft.set("batch.micro", draft.number("per_device_train_batch_size", usual.batch), "per_device_train_batch_size")
    write_optimizer(draft, "optim", "adamw_torch_fused", usual_lr=usual.rate, full=full)
    _write_schedule(draft)
    _write_precision(draft, usual, params)
    _write_ranks(draft)
    _write_ticks(draft, usual, datasets)
    draft.set("experiment.seed", draft.number("seed", 42), "seed")
    if draft.number("label_smoothing_factor", 0):
        draft.label("loss", "cross_entropy", "", "label_smoothing_factor")
    if draft.get("full_determinism"):
        draft.set("precision.deterministic", True, "full_determinism")
    draft.same("full_determinism", "off")
    if draft.get("average_tokens_across_devices", True):
        draft.same("average_tokens_across_devices", "the loss is divided by the tokens of all ranks")
    else:
        draft.note(PER_RANK)
        draft.translated("average_tokens_across_devices")
    if draft.text("train_sampling_strategy", "random") == "random" and not draft.get("group_by_length"):
        draft.same("train_sampling_strategy group_by_length", "rows are drawn in random order")
    else:
        draft.missing("train_sampling_strategy group_by_length", "rows are drawn in random order")
    trackers = draft.get("report_to", "none")
    chosen = {
        str(name).lower().removesuffix("_ml") for name in (trackers if isinstance(trackers, list) else [trackers])
    }
    if "tensorboard" in chosen:
        draft.set("log.tensorboard", True, "report_to")
    for tracker in sorted(chosen & {"wandb", "mlflow", "comet", "trackio", "swanlab"}):
        draft.set(f"log.{tracker}.project", draft.text("project", "huggingface"), "report_to project")
        if draft.has("run_name"):
            draft.set(f"log.{tracker}.name", draft.text("run_name"), "run_name")
    if unknown := chosen - {"tensorboard", "wandb", "mlflow", "comet", "trackio", "swanlab", "none", "all", "[]"}:
        draft.missing("report_to", f"there is no tracker {', '.join(sorted(unknown))}; a class of your own can be one")
    draft.same("report_to", "files of the run")


def _write_length(draft: Draft) -> None:
    epochs, steps = draft.number("num_train_epochs", 3), draft.number("max_steps", -1)
    if steps > 0:
        draft.set("experiment.budget", None, "max_steps", text=share_or_steps(steps))
        draft.meaningless("num_train_epochs", "max_steps is the length")
        return
    draft.same("max_steps", "no limit")
    draft.set("experiment.budget", None, "num_train_epochs", text=f"{epochs} {'epoch' if epochs == 1 else 'epochs'}")
    draft.note(LAST_STEP)


def _write_schedule(draft: Draft) -> None:
    ratio, steps = draft.number("warmup_ratio", 0), draft.number("warmup_steps", 0)
    warmup, keys = ("0 steps", "warmup_steps warmup_ratio")
    if steps:
        warmup, keys = share_or_steps(steps), "warmup_steps"
        draft.meaningless("warmup_ratio", "warmup_steps is the length")
    elif ratio:
        warmup, keys = f"{100 * ratio:.10g}%", "warmup_ratio"
        draft.meaningless("warmup_steps", "warmup_ratio is the length")
    write_schedule(draft, "lr_scheduler_type", "linear", warmup, keys, "lr_scheduler_kwargs")


def _write_precision(draft: Draft, usual: Usual, params: str) -> None:
    if draft.get("bf16", usual.bf16 and not draft.get("fp16")):
        draft.set("precision.params", None, "", text=params)
        draft.set("precision.compute", None, "bf16", text="bf16")
    elif draft.get("fp16"):
        draft.set("precision.compute", None, "fp16", text="fp16")
    draft.same("bf16 fp16", "off")
    if isinstance(draft.get("tf32"), bool):
        draft.set("precision.matmul", None, "tf32", text="high" if draft.get("tf32") else "highest")
    keys = "gradient_checkpointing activation_checkpointing"
    recomputes: Any = next((draft.get(key) for key in keys.split() if draft.has(key)), usual.recomputes)
    if not is_off(recomputes):
        draft.label("activation", "full", keys)
    draft.same(keys, "off")
    if not is_off(draft.get("torch_compile")):
        draft.label("compile", "", "torch_compile")
        mode = "max_autotune" if draft.text("torch_compile_mode").startswith("max-autotune") else "default"
        draft.set("compile.mode", None, "torch_compile_mode", text=mode)
    draft.same("torch_compile torch_compile_mode", "off")


def _write_ranks(draft: Draft) -> None:
    fsdp = draft.get("fsdp", "")
    words = fsdp if isinstance(fsdp, list) else str(fsdp).split()
    draft.block("parallel.fsdp").label = "auto"
    if "offload" in words:
        draft.set("parallel.fsdp.offload", True, "fsdp")
    if "shard_grad_op" in words:
        draft.set("parallel.fsdp.reshard", False, "fsdp")
    draft.meaningless("fsdp", "blocks are sharded as `parallel` says")
    write_fsdp(draft, "fsdp_config.")
    if not is_off(draft.get("deepspeed")):
        write_zero(draft, "deepspeed")


def _write_ticks(draft: Draft, usual: Usual, datasets: list[str]) -> None:
    every = draft.number("logging_steps", usual.logging)
    if every and draft.text("logging_strategy", "steps") == "steps":
        draft.statements.append((f"every {share_or_steps(every)} log", _origin(draft, "logging_steps")))
    draft.translated("logging_steps")
    strategy, keep = draft.text("save_strategy", "steps").lower(), draft.number("save_total_limit", 0)
    period = {"steps": share_or_steps(draft.number("save_steps", 500)), "epoch": "1 epoch"}.get(strategy, "")
    if period:
        origin = _origin(draft, "save_steps" if strategy == "steps" else "save_strategy")
        draft.statements.append((f"every {period} checkpoint", origin))
        draft.translated("save_strategy save_steps" if strategy == "steps" else "save_strategy")
    if strategy != "best":
        draft.translated("save_strategy")
    draft.meaningless("save_steps", "save_strategy says how often")
    draft.set("checkpoint.keep", None, "save_total_limit", text=str(keep or "none"))
    strategy = draft.text("eval_strategy", draft.text("evaluation_strategy", "no")).lower()
    steps = draft.number("eval_steps", every or 500)
    period = {"steps": share_or_steps(steps), "epoch": "1 epoch"}.get(strategy, "")
    write_evaluations(draft, datasets, period, _origin(draft, "eval_strategy"), "early_stopping_steps")
    if period and datasets:
        draft.translated("eval_strategy evaluation_strategy eval_steps")
    why = "nothing is held out for evaluation" if period else "off"
    draft.meaningless("eval_strategy evaluation_strategy eval_steps", why)
    draft.meaningless("load_best_model_at_end greater_is_better", "checkpoints hold the full state")


def _origin(draft: Draft, key: str) -> str:
    return key if draft.has(key) else f"{draft.trainer}'s default"
