; Made by `python tests/support/grammars.py --write` of xtrain. Later patterns count more.
(identifier) @variable
((identifier) @constant
  (#any-of? @constant "1f1b" "a100" "adafactor" "adam_mini" "adamw" "adamw8bit" "adapter_off" "adapters" "ademamix" "all" "all_to_all" "allow" "any" "asha" "assistant" "async" "async_pinned" "attention" "b200" "baby_gloo" "best_fit" "bf16" "blocks" "bradley_terry" "cispo" "clip" "complete_p" "constant" "content" "cosine" "cpo" "cpu" "cross_entropy" "cuda" "cudnn" "dcp" "ddp" "deepseek_v3" "deepseek_v32" "deepspeed" "default" "distill" "documents" "dots1" "dpo" "dr_grpo" "dynamic" "ernie4_5" "error" "estimated" "exact" "exact_answer" "exaone4" "exponential" "falcon_h1" "file" "first" "flash3" "flash4" "flex" "forward_kl" "fp16" "fp32" "fp64" "fp8" "full" "gated" "gaussian" "gemma3" "gemma4" "gemma4_moe" "gemma4_unified" "glm4" "glm4_moe" "glm4_moe_lite" "glm_moe_dsa" "gloo" "gpipe" "gpt_oss" "gradients" "granite" "granitemoehybrid" "greedy" "grid" "group" "grpo" "gspo" "h100" "h200" "here" "high" "highest" "hinge" "importance_sampling" "initial" "int32" "int4" "int64" "int8" "interleaved_1f1b" "inverse_sqrt" "ipo" "job" "jobset" "jsd" "k1" "k2" "k3" "keep" "kto" "kubernetes" "last" "latest" "layer" "learnable" "linear" "lion" "llama" "llama3" "local" "long" "longrope" "lora" "lowest" "mask" "match_rms_adamw" "matmul" "max_autotune" "medium" "microbatch" "minimax_m2" "ministral3" "mistral" "mixtral" "model" "module" "multipack" "muon" "mup" "mxfp4" "mxfp8" "mxfp8_with_gw_hp" "nemotron_h" "newton_schulz" "nf4" "number" "nvfp4" "nvme" "offline" "olmo2" "olmo3" "olmoe" "online" "original" "orpo" "orthogonal" "other" "parallel" "parameter" "parameters" "phi3" "pissa" "plain" "polar_express" "policy_gradient" "polynomial" "ppo" "precomputed" "processed" "proportional" "qwen2" "qwen2_moe" "qwen3" "qwen3_5" "qwen3_5_moe" "qwen3_moe" "qwen3_next" "random" "raw" "reduce_scatter" "regression" "required" "reset" "resharded" "reverse_kl" "ring_only" "robust" "row" "rowwise" "rowwise_with_gw_hp" "rslora" "safe" "same" "sampled" "schedule_free" "seed_oss" "selective" "sequence" "sequential" "server" "sgd" "sglang" "short" "sigmoid" "simpo" "single" "sizes" "skip" "slurm" "smollm3" "softmax" "split" "sqrt" "standard" "step" "sync" "tensorwise" "text" "token" "tokenizer" "torchft" "tpe" "truncate" "uint16" "uint32" "uint8" "ulysses_only" "unsolved" "updates" "vllm" "wait" "warn" "wsd" "yarn" "zbv" "zero_bubble"))
((identifier) @function.builtin
  (#any-of? @function.builtin "arrow" "ceil" "document_prefix" "env" "fill_in_middle" "flatten" "floor" "hub" "huggingface" "jsonl" "log" "max" "mds" "min" "pack" "parquet" "python_stdlib" "round" "shard" "shift_tokens" "sqrt" "synthetic" "text" "to_tensor" "tokens" "uniform" "webdataset" "checkpoint" "digests" "dump" "early_stop" "eval" "export" "generate" "health" "log" "lr_sweep" "memory_snapshot" "merge" "norms" "notify" "profile" "requeue" "rollback" "row_losses" "skip" "stop"))
(on event: (identifier) @constant)
(call function: (identifier) @function)
(assignment name: (identifier) @property)
(block kind: (identifier) @type)
(comment) @comment
(string) @string
(number) @number
(unit) @keyword.modifier
(constant) @constant.builtin
(operator) @operator
["include" "use" "let" "param" "every" "on" "then" "in"] @keyword
["=" ":"] @operator
["{" "}" "(" ")" "[" "]"] @punctuation.bracket
["," "."] @punctuation.delimiter
