"""DeepSpeed's configuration, in a file of its own or named by another trainer's configuration.

Numbers that are `auto` are filled in by the trainer that starts DeepSpeed.
"""

from typing import Final

from xtrain.dsl.importing.accounts import is_off
from xtrain.dsl.importing.draft import Draft

_BUFFERS: Final = (
    "zero_optimization.allgather_* zero_optimization.reduce_* zero_optimization.overlap_comm "
    "zero_optimization.contiguous_gradients zero_optimization.round_robin_gradients zero_optimization.sub_group_size "
    "zero_optimization.stage3_* zero_optimization.prefetch_bucket_size zero_optimization.param_persistence_threshold "
    "zero_optimization.max_* zero_optimization.ignore_unused_parameters zero_optimization.gather_* "
    "zero_optimization.offload_*.* zero_optimization.elastic_checkpoint zero_optimization.memory_efficient_linear "
    "zero_optimization.leaf_module zero_optimization.use_multi_rank_bucket_allreduce aio aio.* "
    "zero_force_ds_cpu_optimizer zero_allow_untested_optimizer communication_data_type prescale_gradients "
    "gradient_predivide_factor sparse_gradients seq_parallel_communication_data_type"
)
_RECORDS: Final = (
    "steps_per_print wall_clock_breakdown dump_state memory_breakdown flops_profiler flops_profiler.* comms_logger "
    "comms_logger.* comms_config.* monitor_config.* _comment"
)


def write_zero(draft: Draft, key: str) -> None:
    """Write what a key says that names a file of DeepSpeed, or holds its content."""
    if not isinstance(draft.get(key), str) or draft.attach(key, "DeepSpeed"):
        write_deepspeed(draft, f"{key}.")


def write_deepspeed(draft: Draft, prefix: str = "") -> None:
    """Write ranks, batch and precision of DeepSpeed's keys, which begin with `prefix`.

    ZeRO divides state and not arithmetic, so every stage becomes `fsdp`; what only the engine can do, offloading to
    disks, is its stack.
    """
    _write_stage(draft, f"{prefix}zero_optimization")
    for key in list(draft.values):
        if key.startswith(prefix) and draft.values[key] == "auto":
            draft.meaningless(key, "the trainer fills it in")
    for name, path in (("train_micro_batch_size_per_gpu", "batch"), ("gradient_accumulation_steps", "batch"),
                       ("gradient_clipping", "optimizer")):  # fmt: skip
        if draft.get(f"{prefix}{name}") != "auto":
            draft.known(path, f"{prefix}{name}")
    _write_batch(draft, prefix)
    if draft.get(f"{prefix}bf16.enabled") is True:
        draft.set("precision.compute", None, f"{prefix}bf16.enabled", text="bf16")
        draft.set("precision.params", None, "", "DeepSpeed updates weights in fp32", text="fp32")
    draft.same(f"{prefix}bf16.enabled", "off")
    _write_fp16(draft, f"{prefix}fp16.")
    draft.unless_off(f"{prefix}amp.enabled", "use `compute = fp16`")
    draft.meaningless(f"{prefix}fp16.* {prefix}bf16.* {prefix}amp.*", "settings of loss scaling")
    _write_engine_optimizer(draft, prefix)
    draft.meaningless(
        " ".join(f"{prefix}{key}" for key in _BUFFERS.split()), "buffers and communication of DeepSpeed's engine"
    )
    draft.meaningless(" ".join(f"{prefix}{key}" for key in _RECORDS.split()), "records of a run are xtrain's own")
    checkpointing = f"{prefix}activation_checkpointing"
    draft.meaningless(f"{checkpointing} {checkpointing}.*", "`activation` says what is recomputed")
    draft.meaningless(f"{prefix}tensorboard.* {prefix}wandb.* {prefix}csv_monitor.*", "`log` says where records go")


def _write_fp16(draft: Draft, fp16: str) -> None:
    """Write fp16 with DeepSpeed's dynamic scale of the loss; its `hysteresis` overflows in a row are one here."""
    if draft.get(f"{fp16}enabled") is True and not draft.get(f"{fp16}loss_scale"):
        scale, interval = (
            2 ** draft.number(f"{fp16}initial_scale_power", 16),
            draft.number(f"{fp16}loss_scale_window", 1000),
        )
        note = "the scale is halved at the first overflow; there after `hysteresis` of them"
        keys = f"{fp16}enabled {fp16}loss_scale {fp16}initial_scale_power {fp16}loss_scale_window"
        text = f"fp16 {{ scale = {scale}, interval = {interval} }}"
        draft.set("precision.compute", None, keys, note, text=text)
    draft.unless_off(f"{fp16}enabled", "a constant scale of the loss is not there; leave `loss_scale` out")


def _write_stage(draft: Draft, zero: str) -> None:
    stage = draft.number(f"{zero}.stage", 0)
    draft.block("parallel.fsdp").label = "auto"
    devices = {part: draft.get(f"{zero}.offload_{part}.device", "none") for part in ("optimizer", "param")}
    used = {part: device for part, device in devices.items() if not is_off(device)}
    if "nvme" in used.values():
        draft.set("parallel.stack", None, f"{zero}.stage", text="deepspeed")
        draft.set("parallel.deepspeed.stage", stage)
        for part, device in used.items():
            draft.set(f"parallel.deepspeed.offload_{part}", None, f"{zero}.offload_{part}.device", text=str(device))
            path = f"{zero}.offload_{part}.nvme_path"
            if draft.has(path):
                draft.set("parallel.deepspeed.nvme_path", draft.text(path), path)
    elif used:
        keys = " ".join(f"{zero}.offload_{part}.device" for part in used)
        draft.set("parallel.fsdp.offload", True, keys, "parameters, gradients and optimizer state in host memory")
    draft.meaningless(
        f"{zero}.stage", "`fsdp` divides parameters, gradients and optimizer state; results do not change"
    )
    draft.same(f"{zero}.offload_optimizer.device {zero}.offload_param.device", "off")
    draft.unless_off(f"{zero}.zero_hpz_partition_size {zero}.mics_shard_size", "write `fsdp N {{ replicate = R }}`")
    draft.unless_off(f"{zero}.zero_quantized_*", "gradients and weights travel unquantized")
    if draft.has(zero):
        draft.note("each stage of ZeRO becomes `fsdp`: other memory of a rank, the same results")


def _write_batch(draft: Draft, prefix: str) -> None:
    total = draft.get(f"{prefix}train_batch_size")
    if isinstance(total, int) and not isinstance(total, bool):
        draft.set("batch.rows", total, f"{prefix}train_batch_size")


def _write_engine_optimizer(draft: Draft, prefix: str) -> None:
    """Write DeepSpeed's own optimizer and schedule, if it has them."""
    name, given = draft.text(f"{prefix}optimizer.type").lower(), f"{prefix}optimizer.params"
    if name:
        kind = {"adam": "adamw", "adamw": "adamw", "onebitadam": "", "lion": "lion", "fusedadam": "adamw"}.get(name, "")
        if not kind or (name == "adam" and draft.get(f"{given}.adam_w_mode") is False):
            draft.missing(f"{prefix}optimizer.type {given}", "xtrain has no such optimizer")
        else:
            draft.label("optimizer", kind, f"{prefix}optimizer.type")
            for word in ("lr", "weight_decay", "betas", "eps"):
                if draft.has(f"{given}.{word}") and draft.get(f"{given}.{word}") != "auto":
                    draft.known("optimizer", f"{given}.{word}")
            draft.meaningless(f"{given}.torch_adam {given}.adam_w_mode {given}.fused", "one AdamW")
    name, given = draft.text(f"{prefix}scheduler.type"), f"{prefix}scheduler.params"
    if name:
        kind = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}.get(name, "")
        warmup = draft.get(f"{given}.warmup_num_steps")
        if (
            not kind
            or draft.get(f"{given}.warmup_type", "linear") not in ("linear", "auto")
            or not _plain(draft, given)
        ):
            draft.missing(f"{prefix}scheduler.type {given}", "xtrain has no such schedule")
            return
        draft.label("scheduler", kind, f"{prefix}scheduler.type")
        if isinstance(warmup, int):
            draft.known("scheduler", f"{given}.warmup_num_steps")
        if isinstance(draft.get(f"{given}.cos_min_ratio"), float | int):
            draft.set(
                "scheduler.floor",
                None,
                f"{given}.cos_min_ratio",
                text=f"{100 * draft.get(f'{given}.cos_min_ratio'):.10g}%",
            )
        draft.translated(f"{given}.warmup_type")
        draft.same(f"{given}.warmup_min_lr {given}.warmup_min_ratio", "a warm-up from 0")
        if isinstance(draft.get(f"{given}.total_num_steps"), int):
            draft.set(
                "experiment.budget",
                None,
                f"{given}.total_num_steps",
                text=f"{draft.get(f'{given}.total_num_steps')} steps",
            )
        if isinstance(draft.get(f"{given}.warmup_max_lr"), float) and draft.setting("optimizer.lr") is None:
            draft.set("optimizer.lr", draft.get(f"{given}.warmup_max_lr"), f"{given}.warmup_max_lr")
        draft.meaningless(f"{given}.warmup_max_lr", "the optimizer's learning rate")


def _plain(draft: Draft, given: str) -> bool:
    return draft.get(f"{given}.warmup_min_lr", 0) in (0, "auto") and draft.get(f"{given}.warmup_min_ratio", 0) == 0
