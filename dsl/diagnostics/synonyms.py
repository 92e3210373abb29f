"""Settings of TRL, transformers, PEFT, axolotl, torchtitan, LLaMA-Factory, DeepSpeed, verl and NeMo in xtrain's terms.

A synonym is *same* (another name for the same number), *converted* (another unit or other words, with a formula), or
*ambiguous* (a hint says what it may mean). Only the first two are written by `xtrain check --fix`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Final

from xtrain.lazy_attrs import frozen


@frozen
class Given:
    """Value of a setting of another trainer.

    data: the value; names are strings here, and lists tuples. text: the source text. setting: returns the value that
    the spec gives a setting of xtrain, such as `optimizer.lr`, or True for a block that it has; None without one.
    """

    data: Any
    text: str
    setting: Callable[[str], Any]


Conversion = Callable[[Given], str | None]
_EXAMPLE = re.compile(r"\{([\w ]+)\|([^}]+)\}( steps)?")


@frozen
class Synonym:
    """Meaning of a setting of another trainer.

    names: xtrain's settings, the likeliest first. hint: the formula, or what an ambiguous name may mean;
    `{words|500}` in it is the value of the first of these settings that the spec has, or else 500.
    convert: returns xtrain's text for a value; None where the value does not determine it.
    """

    names: tuple[str, ...]
    hint: str = ""
    convert: Conversion | None = None

    def hint_with(self, text_of: Callable[[str], str | None] = lambda name: None) -> str:
        """Return the hint with values of the spec. text_of: name of a setting → its plain positive number as written.

        A fraction replaces an example that is a fraction alone: of steps it is a share.
        """

        def value(match: re.Match[str]) -> str:
            names, example, steps = match.groups(default="")
            text = next((text for name in names.split() if (text := text_of(name))), example)
            text = example if {".", "e"} & {*text} and "." not in example else text
            return text + (" step" if steps and text == "1" else steps)

        return _EXAMPLE.sub(value, self.hint)

    @property
    def is_same(self) -> bool:
        """True if only the name differs."""
        return not self.hint and self.convert is None


def ours(word: str, candidates: Iterable[str]) -> str | None:
    """Return xtrain's name for another trainer's `word`, if it is one of the candidates."""
    synonym = synonym_of(word)
    there = set(candidates) if synonym else ()
    return next((name for name in synonym.names if name in there), None) if synonym else None


def synonym_of(word: str) -> Synonym | None:
    """Return the meaning of another trainer's `word`; None if it is not in the table."""
    return synonyms().get(word.lower())


# Conversions ----------------------------------------------------------------------------------------------------------


def _is_number(data: Any) -> bool:
    return isinstance(data, int | float) and not isinstance(data, bool)


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.10g}%"


def _share(given: Given) -> str | None:
    return _percent(given.data) if _is_number(given.data) and 0 <= given.data <= 1 else None


def _count(unit: str) -> Conversion:
    def convert(given: Given) -> str | None:
        whole = _is_number(given.data) and given.data >= 1 and int(given.data) == given.data
        return f"{int(given.data)} {unit}" if whole else None

    return convert


def _epochs(given: Given) -> str | None:
    return f"{given.text} epochs" if _is_number(given.data) and given.data > 0 else None


def _warmup(given: Given) -> str | None:
    """Convert `warmup_steps` of transformers 5: from 1 on it is a number of steps, below 1 a share of all steps."""
    if _is_number(given.data) and given.data == 0:
        return "0 steps"
    return _count("steps")(given) or (_share(given) if isinstance(given.data, float) else None)


def _of_peak(given: Given) -> str | None:
    peak = given.setting("optimizer.lr")
    known = _is_number(given.data) and _is_number(peak) and 0 <= given.data <= peak and peak > 0
    return _percent(given.data / peak) if known else None


def _zero_is_none(given: Given) -> str | None:
    if not _is_number(given.data) or given.data < 0:
        return None
    return given.text if given.data else "none"


def _kept(given: Given) -> str | None:
    # transformers keeps the best checkpoint within the limit, xtrain in addition to it.
    return _zero_is_none(given) if given.setting("checkpoint.best") is None else None


def _negative_is_auto(given: Given) -> str | None:
    if given.data in (-1, "auto"):
        return "auto"
    return given.text if _is_number(given.data) and given.data >= 1 else None


def _rows_of_step(given: Given) -> str | None:
    text = _negative_is_auto(given)
    return text if text == "auto" or given.setting("rollout") is None else None  # prompts, or completions


def _rows(given: Given) -> str | None:
    """Convert a number of samples: with a rollout these are completions, and a row here holds all of a prompt."""
    if given.setting("rollout") is None:
        return given.text or None
    group = given.setting("rollout.group")
    whole = type(given.data) is int and type(group) is int and group > 0 and given.data % group == 0
    return str(given.data // group) if whole else None


def _words(words: Mapping[Any, str]) -> Conversion:
    def convert(given: Given) -> str | None:
        data = given.data.lower() if isinstance(given.data, str) else given.data
        return words.get(data) if isinstance(data, str | bool) else None

    return convert


def _targets(given: Given) -> str | None:
    text = given.data
    if isinstance(text, tuple):
        return given.text.replace('"all-linear"', '"all_linear"')
    if text in ("all-linear", "all"):
        return '["all_linear"]'
    names = text.split(",") if isinstance(text, str) else []
    plain = names and all(name.strip().replace("_", "").isalnum() for name in names)
    return "[" + ", ".join(f'"{name.strip()}"' for name in names) + "]" if plain else None


def _numbered(given: Given) -> str | None:
    numbers = given.data if isinstance(given.data, tuple) else (given.data,)
    whole = bool(numbers) and all(type(number) is int for number in numbers)
    return "[" + ", ".join(f'"{number}"' for number in numbers) + "]" if whole else None


# The table ------------------------------------------------------------------------------------------------------------

_SAME: Final = {
    # model: config.json, nanoGPT, torchtitan
    "dim": "hidden_size d_model n_embd embed_dim", "layers": "num_hidden_layers num_layers n_layers n_layer depth",
    "heads": "num_attention_heads num_heads n_heads n_head",
    "kv_heads": "num_key_value_heads num_kv_heads n_kv_heads num_query_groups",
    "ffn": "intermediate_size ffn_dim ffn_hidden_size", "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps layernorm_epsilon",
    "experts": "num_experts num_local_experts n_routed_experts", "experts_per_token": "num_experts_per_tok top_k",
    "expert_ffn": "moe_intermediate_size", "init_std": "initializer_range init_method_std",
    "tie_embeddings": "tie_word_embeddings share_embeddings_and_output_weights",
    "normalise": "norm_topk_prob", "score": "scoring_func", "shared_experts": "n_shared_experts num_shared_experts",
    "window": "sliding_window", "head_dim": "kv_channels",
    # training
    "lr": "learning_rate max_lr peak_lr", "weight_decay": "wd", "eps": "adam_epsilon adam_eps", "seed": "random_seed",
    "accumulate": "gradient_accumulation_steps grad_accum grad_accum_steps accumulate_grad_batches",
    "sequence": "seq_len seq_length sequence_length sequence_len max_seq_len max_seq_length context_length "
                "block_size encoder_seq_length",
    "label_smoothing": "label_smoothing_factor", "workers": "num_workers dataloader_num_workers",
    "neftune": "neftune_noise_alpha", "shape": "decay_type",
    # ranks
    "tp": "tensor_parallel tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size tp_size",
    "pp": "pipeline_parallel pipeline_parallel_degree pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "cp": "context_parallel context_parallel_degree context_parallel_size cp_size",
    "ep": "expert_parallel expert_parallel_degree expert_parallel_size expert_model_parallel_size ep_size",
    "ulysses": "ulysses_sequence_parallel_size", "stages_per_rank": "virtual_pipeline_model_parallel_size",
    "offload": "cpu_offload enable_cpu_offload", "reshard": "reshard_after_forward",
    # data
    "text": "text_column text_field dataset_text_field", "response": "completion", "source": "path files",
    # adapters: PEFT, LLaMA-Factory
    "rank": "r lora_r lora_rank", "alpha": "lora_alpha cpo_alpha", "dropout": "lora_dropout",
    "train": "modules_to_save lora_modules_to_save", "dora": "use_dora peft_use_dora",
    "double": "bnb_4bit_use_double_quant",
    # preferences, rollouts
    "desirable": "desirable_weight", "undesirable": "undesirable_weight", "clip_high": "epsilon_high clip_ratio_high",
    "clip_low": "clip_ratio_low", "kl_weight": "kl_loss_coef",
    "group": "num_generations param_groups parameter_groups", "mask_truncated": "mask_truncated_completions",
    "updates": "num_iterations", "gamma": "simpo_gamma", "tokens max_tokens": "max_tokens max_new_tokens",
    "max_tokens": "max_completion_length max_response_length",
    # blocks, actions, events, options
    "scheduler": "lr_scheduler schedule", "dataset": "data", "optimizer": "optim", "mixture": "data_mix blend",
    "eval": "evaluate validate", "checkpoint": "save", "generate": "sample", "finish": "end", "from": "start",
    "shapes": "record_shapes", "stacks": "with_stack", "memory": "profile_memory", "profile": "profiler",
    "memory_snapshot": "memory_profile", "project": "wandb_project", "entity": "wandb_entity",
}  # fmt: skip

_STEPS, _SHARE, _CLIP = "a number of `steps`", "a share of 0.03 is `3%`", "0 is `none`"
_SEVERAL_BATCHES = "`rows` is the batch of a step on all ranks, `micro` the rows of one forward on a rank"
_PEAK_SHARE = "`floor` is the final rate as a share of the peak: 100% · {key} / `lr` of `optimizer`"
_CONVERTED: Final[dict[str, tuple[str, Conversion, str]]] = {
    "max_steps train_steps total_steps num_steps steps max_iters train_iters total_training_steps": (
        "budget", _count("steps"), _STEPS,
    ),
    "num_train_epochs num_epochs max_epochs epochs total_epochs": ("budget", _epochs, "a number of `epochs`"),
    "warmup_steps": ("warmup", _warmup, _STEPS),
    "warmup_iters warmup_num_steps num_warmup_steps lr_warmup_steps lr_warmup_iters": (
        "warmup", _count("steps"), _STEPS,
    ),
    "num_decay_steps decay_steps": ("decay", _count("steps"), _STEPS),
    "warmup_ratio lr_warmup_ratio warmup_fraction lr_warmup_fraction lr_warmup_steps_ratio": ("warmup", _share, _SHARE),
    "decay_ratio": ("decay", _share, _SHARE),
    "min_lr_rate min_lr_ratio min_lr_factor cosine_min_lr_ratio": ("floor", _share, _SHARE),
    "min_lr eta_min lr_end": ("floor", _of_peak, _PEAK_SHARE),
    "val_set_size val_size test_size": ("holdout", _share, _SHARE),
    "max_grad_norm grad_clip clip_grad clip_grad_norm gradient_clipping gradient_clip_val max_norm": (
        "clip", _zero_is_none, _CLIP,
    ),
    "save_total_limit keep_latest_k": (
        "keep", _kept, "0 is `none`; `keep` counts the newest checkpoints, and `best` is kept in addition",
    ),
    "micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu local_batch_size device_batch_size "
    "micro_batch_size_per_gpu": (
        "micro", _rows, "with `rollout` a row holds all completions of a prompt: {key} / `group` of `rollout`",
    ),
    "global_batch_size": (
        "rows", _rows_of_step, "-1 is `auto`; with `rollout` a row holds all completions of a prompt",
    ),
    "data_parallel_shard_degree": ("fsdp", _negative_is_auto, "-1 is `auto`"),
    "fsdp_reshard_after_forward": (
        "reshard", _words({"default": "auto", "always": "true", "never": "false", True: "true", False: "false"}),
        "`auto`, `true` or `false`",
    ),
    "pipeline_parallel_schedule": (
        "schedule",
        _words({"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved_1f1b", "zbvzerobubble": "zbv"}),
        "`gpipe`, `1f1b`, `interleaved_1f1b`, `zero_bubble` or `zbv`",
    ),
    "async_mode": (
        "mode", _words({"disabled": "sync", "async": "async", "async_with_pinned_mem": "async_pinned"}),
        "`sync`, `async` or `async_pinned`",
    ),
    "mixed_precision_param": ("compute", _words({"bfloat16": "bf16", "float32": "fp32"}), "`bf16` or `fp32`"),
    "mixed_precision_reduce": ("reduce", _words({"bfloat16": "bf16", "float32": "fp32"}), "`bf16` or `fp32`"),
    "bf16": ("compute", _words({True: "bf16"}), "`true` is `compute = bf16`"),
    "fp16": ("compute", _words({True: "fp16"}), "`true` is `compute = fp16`"),
    "assistant_only_loss": ("train_on", _words({True: "assistant", False: "all"}), "`assistant` or `all`"),
    "train_on_inputs train_on_prompt": ("train_on", _words({False: "assistant", True: "all"}), "`assistant` or `all`"),
    "mask_history": ("train_on", _words({True: "last", False: "assistant"}), "`last` or `assistant`"),
    "use_rslora peft_use_rslora": ("scaling", _words({True: "rslora", False: "standard"}), "`rslora` or `standard`"),
    "init_lora_weights peft_init_lora_weights": (
        "init", _words({True: "default", "gaussian": "gaussian", "orthogonal": "orthogonal", "pissa": "pissa"}),
        "`default`, `gaussian`, `orthogonal` or `pissa`",
    ),
    "target_modules lora_target lora_target_modules": (
        "targets", _targets, 'a list of parts of names; `["all_linear"]` means all linear layers',
    ),
    "lora_target_linear": ("targets", _words({True: '["all_linear"]'}), "`true` is `targets = [\"all_linear\"]`"),
    "layers_to_transform peft_layers_to_transform": ("layers", _numbered, "numbers in quotes, or a range: `[\"0-3\"]`"),
}  # fmt: skip

_AMBIGUOUS: Final = {
    "batch_size train_batch_size total_batch_size": ("rows micro", _SEVERAL_BATCHES),
    "ppo_mini_batch_size": (
        "rows", "verl counts prompts of an update; `rows` counts rows of a step, each with all completions of a prompt",
    ),
    "ppo_micro_batch_size_per_gpu": (
        "micro", "verl counts completions of a forward; `micro` counts rows, each with all completions of a prompt",
    ),
    "clip_ratio": ("clip_low clip_high", "it is both `clip_low` and `clip_high`"),
    "max_length cutoff_len model_max_length": (
        "sequence", "`sequence` is the length of a row; `oversized` of `dataset` says what happens to longer documents",
    ),
    "hidden_dim hidden": ("dim ffn", "`dim` is the width of the model, `ffn` the width of a feed-forward layer"),
    "adam_beta1 adam_beta2 beta1 beta2": (
        "betas", "both belong in one list: `betas = [{adam_beta1 beta1|0.9}, {adam_beta2 beta2|0.95}]`",
    ),
    "router_aux_loss_coef": (
        "aux_loss", (
            "`aux_loss` counts shares of a row's choices; transformers counts each choice of a token in the whole "
            "batch: the nearest value is its coefficient · `experts_per_token`"
        ),
    ),
    "prefetch_factor dataloader_prefetch_factor": (
        "prefetch", "`prefetch` counts steps of a rank, not batches of a worker",
    ),
    "dtype torch_dtype": ("compute params", "`compute` is the format of forward and backward, `params` of parameters"),
    "tf32": ("matmul", "`matmul = high` allows TF32, `highest` does not"),
    "dp data_parallel data_parallel_size": (
        "fsdp", "`fsdp {words|N}` shards the model over data ranks; `fsdp N { replicate = R }` has replicas of it",
    ),
    "zero zero_stage": ("fsdp stack", "`fsdp` shards everything, like ZeRO 3; stages: `xtrain docs parallel.stack`"),
    "hsdp data_parallel_replicate_degree": ("replicate", "replicas are written `fsdp N { replicate = {words|R} }`"),
    "data_parallel_mode": ("stack", "see `xtrain docs parallel.stack`"),
    "virtual_stages num_virtual_stages": ("stages_per_rank", "`stages_per_rank` counts the stages of one rank"),
    "sequence_parallel": ("", "write `tp N { sequence = true }` in `parallel`, which is the default"),
    "output_dir": ("root", "`root` is the folder of all runs; each run has its own folder inside"),
    "run_name": ("run", "the label of `experiment` names a run; `run` of `workspace` is the name of its folder"),
    "conversations": ("messages", "`messages` names a field with a list of messages with `role` and `content`"),
    "chat_template chat_template_path": ("template", "`template` is a built-in template or the path of a Jinja file"),
    "rank_pattern": ("ranks", "`ranks` maps parts of names to ranks; it has no regular expressions"),
    "alpha_pattern": ("alphas", "`alphas` maps parts of names to values of alpha; it has no regular expressions"),
    "epsilon": ("eps clip_low", "of a policy's ratio it is `clip_low` and `clip_high`, of an optimizer `eps`"),
    "loss_type": ("form", "the label of `loss` names the loss; `form` is a variant of it"),
    "ref_model": ("reference", "see `xtrain docs loss.reference`"),
    "steps_per_generation": ("steps", "`steps` counts optimizer steps, not microbatches"),
    "lr_scheduler_type": ("", "the label of `scheduler` names the schedule: `scheduler cosine { … }`"),
    "save_steps save_interval save_freq": ("", "write `every {words|500} steps checkpoint` at the top level"),
    "eval_steps eval_interval test_freq val_check_interval": (
        "", "write `every {words|500} steps eval DATASET` at the top level",
    ),
    "logging_steps log_interval log_freq log_every_n_steps": (
        "", "write `every {words|10} steps log` at the top level",
    ),
    "gradient_checkpointing": ("", "write `activation full` at the top level"),
    "torch_compile": ("", "write `compile { }` at the top level"),
    "packing sample_packing": ("", "rows are packed by the last link of `collate`; see `xtrain docs collate`"),
    "load_in_4bit": ("", "write `precision { base nf4 { } }`"),
    "load_in_8bit": ("", "write `precision { base int8 { } }`, whose scales differ from bitsandbytes"),
    "report_to": ("", "write `log { tensorboard = true }`, `log { wandb { … } }` or another of its trackers"),
    "resume_from_checkpoint": ("from resume", "a run resumes by itself; `from` starts from another run's checkpoint"),
    "metric_for_best_model": ("best", "`best` is written `eval.DATASET.loss`"),
    "training train trainer": (
        "experiment", "the length is set in `experiment`, the rest in `batch`, `optimizer` and `parallel`",
    ),
    "lora peft peft_config": ("adapter", "write `adapter lora { … }`"),
    "curriculum stage": ("phase", "write `phase NAME { … }`"),
    "sampling": ("mixture", "`mixture { … }` has the weights of datasets, `generate` and `rollout` sample text"),
}  # fmt: skip


@cache
def synonyms() -> Mapping[str, Synonym]:
    """Return the settings of other trainers by name, in lower case."""
    found = {word: Synonym(tuple(names.split())) for names, words in _SAME.items() for word in words.split()}
    for words, (names, convert, hint) in _CONVERTED.items():
        found |= {word: Synonym(tuple(names.split()), hint.format(key=word), convert) for word in words.split()}
    for words, (names, hint) in _AMBIGUOUS.items():
        hint = hint.replace("{words|", f"{{{words}|")
        found |= {word: Synonym(tuple(names.split()), hint) for word in words.split()}
    return found
