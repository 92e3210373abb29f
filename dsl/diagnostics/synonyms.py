"""What other trainers call our settings, so that a name from elsewhere is answered with ours."""

from collections.abc import Iterable
from typing import Final

_OURS: Final = {
    "hidden_size": "dim", "hidden_dim": "dim", "d_model": "dim", "n_embd": "dim", "embed_dim": "dim",
    "num_hidden_layers": "layers", "num_layers": "layers", "n_layers": "layers", "n_layer": "layers", "depth": "layers",
    "num_attention_heads": "heads", "num_heads": "heads", "n_heads": "heads", "n_head": "heads",
    "num_key_value_heads": "kv_heads", "num_kv_heads": "kv_heads", "n_kv_heads": "kv_heads",
    "intermediate_size": "ffn", "ffn_dim": "ffn", "hidden": "ffn", "vocab_size": "vocab", "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token", "top_k": "experts_per_token", "moe_intermediate_size": "expert_ffn",
    "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embeddings", "initializer_range": "init_std",
    "learning_rate": "lr", "wd": "weight_decay", "grad_clip": "clip", "max_grad_norm": "clip", "max_norm": "clip",
    "warmup_steps": "warmup", "warmup_ratio": "warmup", "min_lr": "floor", "batch_size": "micro",
    "micro_batch_size": "micro", "global_batch_size": "rows", "gradient_accumulation_steps": "accumulate",
    "grad_accum": "accumulate", "seq_len": "sequence", "sequence_length": "sequence", "max_seq_len": "sequence",
    "context_length": "sequence", "max_steps": "budget", "steps": "budget", "num_train_epochs": "budget",
    "epochs": "budget", "dtype": "compute", "dp": "fsdp", "data_parallel": "fsdp", "zero": "fsdp",
    "tensor_parallel": "tp", "expert_parallel": "ep", "pipeline_parallel": "pp", "context_parallel": "cp",
    "hsdp": "replicate", "max_tokens": "tokens", "output_dir": "root", "path": "source", "files": "source",
    "evaluate": "eval", "validate": "eval", "save": "checkpoint", "sample": "generate", "optim": "optimizer",
    "cpu_offload": "offload", "reshard_after_forward": "reshard", "virtual_stages": "stages_per_rank",
    "num_virtual_stages": "stages_per_rank", "sequence_parallel": "sequence", "norm_topk_prob": "normalise",
    "n_shared_experts": "shared_experts", "num_shared_experts": "shared_experts", "scoring_func": "score",
    "router_aux_loss_coef": "aux_loss", "data_parallel_mode": "stack",
    "num_workers": "workers", "dataloader_num_workers": "workers", "prefetch_factor": "prefetch",
    "text_column": "text", "text_field": "text", "dataset_text_field": "text", "conversations": "messages",
    "chat_template": "template", "assistant_only_loss": "train_on", "completion": "response", "start": "from",
    "data_mix": "mixture", "blend": "mixture", "curriculum": "phase", "stage": "phase", "sampling": "mixture",
    "lr_scheduler": "scheduler", "schedule": "scheduler", "data": "dataset", "training": "experiment", "end": "finish",
    "record_shapes": "shapes", "with_stack": "stacks", "profile_memory": "memory", "profiler": "profile",
    "memory_profile": "memory_snapshot", "train": "experiment", "trainer": "experiment", "lora": "adapter",
    "peft": "adapter", "peft_config": "adapter", "param_groups": "group", "parameter_groups": "group",
    "lora_r": "rank", "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets",
    "modules_to_save": "train", "use_dora": "dora", "use_rslora": "scaling", "init_lora_weights": "init",
    "rank_pattern": "ranks", "alpha_pattern": "alphas", "layers_to_transform": "layers",
    "neftune_noise_alpha": "neftune", "ref_model": "reference", "num_generations": "group",
    "max_completion_length": "max_tokens", "max_new_tokens": "tokens",
}  # fmt: skip


def ours(word: str, candidates: Iterable[str]) -> str | None:
    """Our name for what another trainer calls `word`, if it is one of the candidates."""
    name = _OURS.get(word.lower(), "")
    return name if name in candidates else None
