"""Keys of axolotl that say nothing to xtrain, and keys of features that xtrain does not have; each with the reason."""

from typing import Final

from xtrain.components.importers._training_arguments import UPLOADS

KERNELS: Final = "kernels and memory of axolotl; xtrain chooses its own, with the same results up to rounding"
# Reason → keys; `*` is any text.
WITHOUT_MEANING: Final = {
    KERNELS: (
        "attn_implementation flash_attention xformers_attention sdp_attention flex_attention eager_attention "
        "sage_attention flash_optimum flash_attn_cross_entropy flash_attn_fuse_mlp flash_attn_rms_norm "
        "flash_attn_fuse_qkv flex_attn_compile_kwargs liger_* lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "lora_embedding_kernel use_kernels use_scattermoe use_sonicmoe experts_implementation cut_cross_entropy "
        "chunked_cross_entropy chunked_cross_entropy_num_chunks unsloth_* s2_attention sdpa_varlen "
        "fused_attn_kernel gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 expert_parallel_num_* "
        "expert_parallel_token_capacity use_dsv4_kernels use_glm_dsa_kernels batch_flattening "
        "torch_compile_backend tiled_mlp_use_original_mlp layer_offloading heads_k_stride ring_attn_func"
    ),
    "recomputation without `use_reentrant` is the only kind here": "gradient_checkpointing_kwargs",
    "the run's folder is `workspace`": "output_dir",
    UPLOADS: "hub_model_id hub_*",
    "tokens are stored below `workspace`": (
        "dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory skip_prepare_dataset "
        "dataset_shard_num dataset_shard_idx num_dataset_shards_to_save remove_unused_columns "
        "sample_packing_mp_start_method is_preprocess preprocess_iterable"
    ),
    "how the dataloader of axolotl works; the data is the same": (
        "dataloader_pin_memory dataloader_prefetch_factor streaming streaming_multipack_buffer_size "
        "pretrain_multipack_buffer_size pretrain_multipack_attn sample_packing_eff_est total_num_tokens "
        "total_supervised_tokens sample_packing_group_size sample_packing_bin_size "
        "sample_packing_seq_len_multiplier shuffle_before_merging_datasets eval_sample_packing eval_batch_size "
        "pad_to_sequence_len pad_to_multiple_of multipack_real_batches dataloader_drop_last"
    ),
    "a run resumes by itself": "auto_resume_from_checkpoints",
    "config.json of the model says its class and size": (
        "base_model_config is_falcon_derived_model is_llama_derived_model is_mistral_derived_model "
        "is_qwen_derived_model tokenizer_type tokenizer_use_fast tokenizer_legacy model_revision "
        "base_model_ignore_patterns"
    ),
    "modeling files of a folder are executed only with `model { code = remote }`": "trust_remote_code",
    "placement on devices and ranks is xtrain's": (
        "device_map device local_rank world_size ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers "
        "ddp_find_unused_parameters low_cpu_mem_usage experimental_skip_move_to_device max_memory "
        "gpu_memory_limit use_ray ray_* lora_on_cpu accelerator_config.gradient_accumulation_kwargs "
        "qlora_sharded_model_loading torch_empty_cache_steps gc_steps gc_collect_steps torchdistx_path"
    ),
    "rows are padded inside a mask here; no padding token is read": "special_tokens.pad_token tokens.pad_token",
    "rows that no token of the tokenizer has": "resize_token_embeddings_to_32x",
    "the layout of matrices follows from the model": "lora_fan_in_fan_out",
    "text has no unknown tokens": "special_tokens.unk_token tokens.unk_token",
    "where a turn ends follows from the template": "eot_tokens",
    "the cloud that axolotl starts": (
        "provider project_name secrets* gpu gpu_count volumes* node_count branch dockerfile_commands memory "
        "timeout memory_preprocess timeout_preprocess"
    ),
    "how axolotl reads its own file": "strict debug axolotl_config_path hf_use_auth_token",
    "checkpoints are in xtrain's own format": "save_safetensors merge_lora merge_method",
    "with an adapter only the adapter is trained": "peft_autocast_adapter_dtype",
    "loss values are in the run's records": "include_tokens_per_second include_tkps",
    "no trainer logs the texts that its table of completions is made of": (
        "swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer"
    ),
    "axolotl reads no such key, and says nothing": "adam_eps eta_min full_finetune test_value context_parapllel_size",
}
# Reason → keys that are not expressible unless they are off.
LACKING: Final = {
    "write `every N steps merge`; learning rates do not begin again, and moments are kept or dropped whole": (
        "relora* jagged_restart_*"
    ),
    "xtrain has no LISA": "lisa_*",
    "xtrain has no LongLoRA or POSE": "use_pose pose_*",
    "GPTQ models are not read": "gptq*",
    "LoftQ is not computed": "peft",
    "xtrain has no LoRA+": "loraplus_lr_ratio",
    "these parts of LoRA are not there": (
        "peft_layers_pattern peft_layer_replication peft_trainable_token_indices peft_ensure_weight_tying "
        "lora_rank_pattern lora_alpha_pattern"
    ),
    "`export --quantise` writes integers, and xtrain prunes no weights": "quantization llmcompressor",
    "tokens are stored below `workspace`, and not uploaded": "push_dataset_to_hub",
    "trackers get the records of the run, its spec and its plan": (
        "hf_mlflow_log_artifacts mlflow_* comet_* swanlab_* trackio_* use_otel_metrics otel_metrics_* wandb_watch "
        "wandb_log_model wandb_run_id"
    ),
    "rows are drawn in random order": "group_by_length curriculum_sampling sample_packing_sequentially",
    "images, audio and processors are not read": "processor_type image_size image_resize_algorithm",
    "diffusion models are not trained": "diffusion",
    "this loss is not there": "use_eaft eaft_* chunked_grpo* scaling_softmax*",
    "this method is not there": "ebft process_reward_model",
    "evaluations by generated texts are not there": (
        "do_causal_lm_eval do_bench_eval bench_* eval_causal_lm_metrics generate_samples"
    ),
    "axolotl prints texts of evaluations": "eval_table_size",
    "new tokens and other special tokens are written into the tokenizer's files first": (
        "tokens added_tokens_overrides shrink_embeddings fix_untrained_tokens default_system_message"
    ),
    "the weights are stored in another format here": (
        "model_quantization_config model_quantization_config_kwargs nvfp4_merge_aware use_onebitllms "
        "dsv4_fp4_grouped_mode"
    ),
    "a trainer, patch or plugin of one's own": "trainer_cls",
    "experts in this layout are not read": "llama4_linearized_experts",
    "learning rates by module are written `group NAME { lr_scale = … }`": ("embedding_lr embedding_lr_scale lr_groups"),
    "warm-up is linear": "lr_quadratic_warmup",
    "copies of the first step are not kept": "save_first_step",
    "`cosine` has no constant part": "cosine_constant_lr_ratio",
    "activations stay on the device": "activation_offloading",
}
