"""Ranks of programs on accelerate: FSDP settings, and accelerate's own configuration next to a trainer's."""

from typing import Final

from xtrain.components.importers._deepspeed_json import write_deepspeed
from xtrain.dsl.importing.accounts import is_off
from xtrain.dsl.importing.draft import Draft

_OF_FSDP: Final = (
    "sharding_strategy version auto_wrap_policy transformer_layer_cls_to_wrap state_dict_type final_state_dict_type "
    "cpu_ram_efficient_loading limit_all_gathers sync_module_states use_orig_params backward_prefetch "
    "backward_prefetch_policy forward_prefetch mixed_precision_policy min_num_params xla xla_fsdp_v2 "
    "xla_fsdp_grad_ckpt xla_fsdp_settings ignored_modules save_policy"
)
_SHARDED: Final = "xtrain shards every block; parameters, gradients and states are sharded alike"
# Keys of an accelerate configuration that describe machines.
_MACHINES: Final = (
    "compute_environment debug distributed_type downcast_bf16 enable_cpu_affinity gpu_ids machine_rank "
    "main_process_ip main_process_port main_training_function num_machines num_processes rdzv_backend same_network "
    "tpu_env tpu_use_cluster tpu_use_sudo use_cpu dynamo_config dynamo_config.* ipex_config* mpirun_config*"
)


def write_fsdp(draft: Draft, prefix: str) -> None:
    """Write what keys of FSDP below `prefix` say; each may begin with `fsdp_`."""
    words = {key.removeprefix(prefix).removeprefix("fsdp_"): key for key in draft.values if key.startswith(prefix)}
    draft.block("parallel.fsdp").label = draft.block("parallel.fsdp").label or "auto"
    strategy = draft.text(words.get("sharding_strategy", ""), "FULL_SHARD").upper()
    if strategy in ("SHARD_GRAD_OP", "2"):
        draft.set("parallel.fsdp.reshard", False, words["sharding_strategy"])
    elif strategy not in ("FULL_SHARD", "1"):
        draft.missing(words["sharding_strategy"], "write `fsdp N { replicate = R }`, with the sizes of the machines")
    for word in ("offload_params", "cpu_offload"):
        if word in words:
            draft.set("parallel.fsdp.offload", bool(draft.get(words[word], False)), words[word])
    freed = words.get("reshard_after_forward", "")
    if draft.get(freed) is False:
        draft.set("parallel.fsdp.reshard", False, freed)
    draft.same(freed, "parameters are freed after a forward")
    draft.same(words.get("activation_checkpointing", ""), "off")
    draft.meaningless(" ".join(words[word] for word in _OF_FSDP.split() if word in words), _SHARDED)


def write_launcher(draft: Draft, key: str) -> None:
    """Write what a configuration of accelerate says, a file that `key` names."""
    if draft.attach(key, "accelerate"):
        write_accelerate(draft, f"{key}.")


def write_accelerate(draft: Draft, prefix: str) -> None:
    """Write ranks and formats of the keys of accelerate below `prefix`."""
    count = draft.get(f"{prefix}num_processes")
    if isinstance(count, int) and not isinstance(count, bool):
        draft.note(f"its effective batch counts num_processes = {count} ranks; here it counts those that a run has")
    if draft.has(f"{prefix}fsdp_config"):
        write_fsdp(draft, f"{prefix}fsdp_config.")
    zero = f"{prefix}deepspeed_config"
    if draft.has(zero):
        stage = draft.number(f"{zero}.zero_stage", 2)
        for part in ("optimizer", "param"):
            if not is_off(draft.get(f"{zero}.offload_{part}_device")):
                draft.set("parallel.fsdp.offload", True, f"{zero}.offload_{part}_device", "state in host memory")
        draft.block("parallel.fsdp").label = "auto"
        draft.note(f"ZeRO {stage} becomes `fsdp`: other memory of a rank, the same results")
        draft.same(f"{zero}.offload_optimizer_device {zero}.offload_param_device", "off")
        draft.meaningless(f"{zero}.zero_stage {zero}.zero3_* {zero}.deepspeed_* {zero}.zero_hpz*", "ranks of DeepSpeed")
        draft.known("batch", f"{zero}.gradient_accumulation_steps")
        draft.known("optimizer", f"{zero}.gradient_clipping")
        if draft.has(f"{zero}.deepspeed_config_file"):
            write_deepspeed(draft, f"{zero}.")
    precision = draft.text(f"{prefix}mixed_precision", "no")
    if precision in ("bf16", "fp16") and draft.setting("precision.compute") is None:
        draft.set("precision.compute", None, f"{prefix}mixed_precision", text=precision)
    elif precision == "fp8":
        draft.missing(f"{prefix}mixed_precision", "fp8 is `compute = fp8 { … }`")
    draft.same(f"{prefix}mixed_precision", "the same format")
    draft.meaningless(" ".join(f"{prefix}{key}" for key in _MACHINES.split()), "`launch` and `--world` say the ranks")
