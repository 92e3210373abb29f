"""Settings of other trainers: the same, converted with a formula, or ambiguous; a fix writes only what is certain."""

import re
from pathlib import Path

import pytest

from xtrain.dsl.autofix import apply_fixes
from xtrain.dsl.diagnostics.synonyms import synonyms
from xtrain.dsl.load import load_spec

PAGE = Path(__file__).parents[2] / "docs" / "importing.md"
REFERENCE = PAGE.with_name("reference.md")
BASE = """experiment first {{ {experiment} }}
model qwen3 {{ dim = 32, layers = 1, heads = 2, ffn = 64, {model} }}
tokenizer bytes
dataset d {{ source = python_stdlib(), {dataset} }}
batch {{ sequence = 64, {batch} }}
optimizer adamw {{ {optimizer} }}
"""
EMPTY = {"experiment": "budget = 9 steps", "model": "", "dataset": "", "batch": "", "optimizer": "lr = 2e-4"}
HEADS = {"scheduler": "scheduler cosine", "wsd": "scheduler wsd", "adapter": "adapter lora", "dpo": "loss dpo",
         "loss": "loss cross_entropy", "grpo": "loss grpo", "kto": "loss kto", "simpo": "loss simpo"}  # fmt: skip


def spec(block, body):
    """A spec whose `block` has `body`: a block of the base, one more block, or blocks inside blocks (`parallel.pp`)."""
    if block in EMPTY:
        rate = "lr = 2e-4, " if block == "optimizer" and "learning_rate" not in body else ""
        text = BASE.format_map({**EMPTY, block: rate + body})
        return text.replace("sequence = 64, encoder_", "encoder_").replace("ffn = 64, ffn_", "ffn_")
    outer, _, inner = block.partition(".")
    head, tail = (f"{outer} {{ {inner} {{ ", " } }") if inner else (f"{HEADS.get(outer, outer)} {{ ", " }")
    return BASE.format_map(EMPTY) + f"{head}{body}{tail}\n"


def found_in(text, texts=()):
    return load_spec("s", (), {"s": text, **dict(texts)}).diagnostics


def fixed(block, body):
    text = spec(block, body)
    after = apply_fixes(lambda texts: found_in(text, texts)).texts.get("s", text)
    before, end = text.split(body)
    return after.removeprefix(before).removesuffix(end)


CERTAIN = [
    # transformers' TrainingArguments
    ("optimizer", "learning_rate = 2e-4", "lr = 2e-4"),
    ("optimizer", "adam_epsilon = 1e-6", "eps = 1e-6"),
    ("optimizer", "max_grad_norm = 0.5", "clip = 0.5"),
    ("optimizer", "max_grad_norm = 0", "clip = none"),
    ("scheduler", "warmup_ratio = 0.03", "warmup = 3%"),
    ("scheduler", "warmup_steps = 100", "warmup = 100 steps"),
    ("scheduler", "warmup_steps = 0.05", "warmup = 5%"),
    ("scheduler", "warmup_steps = 0", "warmup = 0 steps"),
    ("scheduler", "min_lr = 2e-5", "floor = 10%"),
    ("scheduler", "min_lr_rate = 0.1", "floor = 10%"),
    ("experiment", "max_steps = 1000", "budget = 1000 steps"),
    ("experiment", "num_train_epochs = 3", "budget = 3 epochs"),
    ("batch", "per_device_train_batch_size = 4", "micro = 4"),
    ("batch", "gradient_accumulation_steps = 8", "accumulate = 8"),
    ("batch", "dataloader_num_workers = 2", "workers = 2"),
    ("batch", "neftune_noise_alpha = 5", "neftune = 5"),
    ("loss", "label_smoothing_factor = 0.1", "label_smoothing = 0.1"),
    ("checkpoint", "save_total_limit = 2", "keep = 2"),
    ("precision", "bf16 = true", "compute = bf16"),
    # config.json
    ("model", "num_key_value_heads = 1", "kv_heads = 1"),
    ("model", "vocab_size = 512", "vocab = 512"),
    ("model", "rms_norm_eps = 1e-5", "norm_eps = 1e-5"),
    ("model", "tie_word_embeddings = true", "tie_embeddings = true"),
    ("model", "initializer_range = 0.01", "init_std = 0.01"),
    ("model", "sliding_window = 32", "window = 32"),
    # TRL
    ("dataset", 'dataset_text_field = "body"', 'text = "body"'),
    ("dataset", "assistant_only_loss = true", "train_on = assistant"),
    ("simpo", "simpo_gamma = 1.5", "gamma = 1.5"),
    ("kto", "desirable_weight = 1.5", "desirable = 1.5"),
    ("kto", "undesirable_weight = 0.5", "undesirable = 0.5"),
    ("grpo", "epsilon_high = 0.28", "clip_high = 0.28"),
    ("rollout", "num_generations = 8", "group = 8"),
    ("rollout", "max_completion_length = 64", "max_tokens = 64"),
    ("rollout", "num_iterations = 2", "updates = 2"),
    ("rollout", "mask_truncated_completions = true", "mask_truncated = true"),
    # PEFT
    ("adapter", "r = 8", "rank = 8"),
    ("adapter", "lora_alpha = 32", "alpha = 32"),
    ("adapter", "lora_dropout = 0.05", "dropout = 0.05"),
    ("adapter", "use_rslora = true", "scaling = rslora"),
    ("adapter", "use_rslora = false", "scaling = standard"),
    ("adapter", "use_dora = true", "dora = true"),
    ("adapter", 'target_modules = ["q_proj", "v_proj"]', 'targets = ["q_proj", "v_proj"]'),
    ("adapter", 'target_modules = "all-linear"', 'targets = ["all_linear"]'),
    ("adapter", 'modules_to_save = ["lm_head"]', 'train = ["lm_head"]'),
    ("adapter", "init_lora_weights = true", "init = default"),
    ("adapter", 'init_lora_weights = "pissa"', "init = pissa"),
    ("adapter", "layers_to_transform = [0, 1]", 'layers = ["0", "1"]'),
    # axolotl
    ("batch", "micro_batch_size = 2", "micro = 2"),
    ("experiment", "num_epochs = 2", "budget = 2 epochs"),
    ("dataset", "val_set_size = 0.05", "holdout = 5%"),
    ("dataset", "train_on_inputs = false", "train_on = assistant"),
    ("adapter", "lora_r = 16", "rank = 16"),
    ("adapter", "lora_target_linear = true", 'targets = ["all_linear"]'),
    ("adapter", "peft_use_dora = true", "dora = true"),
    ("scheduler", "cosine_min_lr_ratio = 0.1", "floor = 10%"),
    # LLaMA-Factory
    ("adapter", "lora_rank = 8", "rank = 8"),
    ("adapter", 'lora_target = "q_proj,v_proj"', 'targets = ["q_proj", "v_proj"]'),
    ("adapter", "lora_target = all", 'targets = ["all_linear"]'),
    ("dataset", "val_size = 0.1", "holdout = 10%"),
    ("dataset", "train_on_prompt = true", "train_on = all"),
    ("dataset", "mask_history = true", "train_on = last"),
    # torchtitan
    ("batch", "local_batch_size = 8", "micro = 8"),
    ("batch", "global_batch_size = 64", "rows = 64"),
    ("batch", "global_batch_size = -1", "rows = auto"),
    ("optimizer", "max_norm = 1.0", "clip = 1.0"),
    ("experiment", "steps = 1000", "budget = 1000 steps"),
    ("wsd", "decay_ratio = 0.8", "decay = 80%"),
    ("wsd", "decay_type = sqrt", "shape = sqrt"),
    ("wsd", "min_lr_factor = 0.1", "floor = 10%"),
    ("parallel", "data_parallel_shard_degree = -1", "fsdp auto"),
    ("parallel", "tensor_parallel_degree = 2", "tp 2"),
    ("parallel", "pipeline_parallel_degree = 2", "pp 2"),
    ("parallel", "context_parallel_degree = 2", "cp 2"),
    ("parallel", "expert_parallel_degree = 2", "ep 2"),
    ("parallel.pp 2", 'pipeline_parallel_schedule = "1F1B"', "schedule = 1f1b"),
    ("parallel.pp 2", 'pipeline_parallel_schedule = "Interleaved1F1B"', "schedule = interleaved_1f1b"),
    ("parallel.fsdp 2", 'fsdp_reshard_after_forward = "always"', "reshard = true"),
    ("parallel.fsdp 2", "enable_cpu_offload = true", "offload = true"),
    ("parallel.fsdp 2", 'mixed_precision_reduce = "float32"', "reduce = fp32"),
    ("checkpoint", "keep_latest_k = 0", "keep = none"),
    ("checkpoint", "async_mode = async_with_pinned_mem", "mode = async_pinned"),
    ("precision", 'mixed_precision_param = "bfloat16"', "compute = bf16"),
    # DeepSpeed
    ("batch", "train_micro_batch_size_per_gpu = 4", "micro = 4"),
    ("optimizer", "gradient_clipping = 1.0", "clip = 1.0"),
    ("scheduler", "warmup_num_steps = 500", "warmup = 500 steps"),
    # verl
    ("batch", "micro_batch_size_per_gpu = 4", "micro = 4"),
    ("experiment", "total_epochs = 15", "budget = 15 epochs"),
    ("experiment", "total_training_steps = 300", "budget = 300 steps"),
    ("optimizer", "clip_grad = 1.0", "clip = 1.0"),
    ("scheduler", "lr_warmup_steps_ratio = 0.1", "warmup = 10%"),
    ("scheduler", "min_lr_ratio = 0.1", "floor = 10%"),
    ("rollout", "max_response_length = 512", "max_tokens = 512"),
    ("grpo", "clip_ratio_low = 0.2", "clip_low = 0.2"),
    ("grpo", "clip_ratio_high = 0.28", "clip_high = 0.28"),
    ("grpo", "kl_loss_coef = 0.001", "kl_weight = 0.001"),
    ("parallel.cp 2", "ulysses_sequence_parallel_size = 2", "ulysses = 2"),
    # NeMo
    ("batch", "encoder_seq_length = 64", "sequence = 64"),
    ("model", "ffn_hidden_size = 96", "ffn = 96"),
    ("model", "num_query_groups = 1", "kv_heads = 1"),
    ("model", "kv_channels = 16", "head_dim = 16"),
    ("model", "layernorm_epsilon = 1e-5", "norm_eps = 1e-5"),
    ("model", "init_method_std = 0.01", "init_std = 0.01"),
    ("model", "share_embeddings_and_output_weights = true", "tie_embeddings = true"),
    ("parallel", "tensor_model_parallel_size = 2", "tp 2"),
    ("parallel.pp 2", "virtual_pipeline_model_parallel_size = 2", "stages_per_rank = 2"),
    ("optimizer", "gradient_clip_val = 1.0", "clip = 1.0"),
    # Megatron, Lightning, nanoGPT
    ("scheduler", "lr_warmup_fraction = 0.02", "warmup = 2%"),
    ("scheduler", "lr_warmup_iters = 300", "warmup = 300 steps"),
    ("optimizer", "clip_grad_norm = 0", "clip = none"),
    ("optimizer", "adam_eps = 1e-6", "eps = 1e-6"),
    ("experiment", "max_epochs = 2", "budget = 2 epochs"),
    ("adapter", 'target_modules = ["all-linear"]', 'targets = ["all_linear"]'),
]


@pytest.mark.parametrize(("block", "body", "after"), CERTAIN, ids=[f"{row[0]}: {row[1]}" for row in CERTAIN])
def test_a_certain_setting_is_converted(block, body, after):
    assert fixed(block, body) == after


UNCERTAIN = [
    ("batch", "batch_size = 32", "`rows` is the batch of a step on all ranks, `micro`"),
    ("batch", "train_batch_size = 32", "`rows` is the batch of a step on all ranks, `micro`"),
    ("batch", "max_length = 64", "`oversized`"),
    ("optimizer", "adam_beta1 = 0.8", "`betas = [0.8, 0.95]`"),
    ("optimizer", "beta1 = 0.8, beta2 = 0.98", "`betas = [0.8, 0.98]`"),
    ("scheduler", "min_lr = 2e-3", "100% · min_lr / `lr`"),  # above the peak
    ("scheduler", "warmup_ratio = 3", "a share of 0.03 is `3%`"),
    ("scheduler", "warmup_iters = 0.5", "a number of `steps`"),
    ("experiment", "max_steps = -1", "a number of `steps`"),
    ("dataset", "val_set_size = 2000", "a share of 0.03 is `3%`"),
    ("dataset", 'conversations = "conversations"', "`role` and `content`"),
    ("adapter", "rank_pattern = { q_proj: 4 }", "no regular expressions"),
    ("adapter", 'init_lora_weights = "pissa_niter_4"', "`pissa`"),
    ("adapter", 'target_modules = ".*q_proj$"', "parts of names"),
    ("checkpoint", "save_total_limit = 2, best = eval.d.loss", "`best` is kept in addition"),
    ("checkpoint", "save_steps = 50", "`every 50 steps checkpoint`"),
    ("checkpoint", "save_steps = 0.1", "`every 500 steps checkpoint`"),  # a share of all steps
    ("checkpoint", "save_steps = -1", "`every 500 steps checkpoint`"),
    ("batch", "eval_interval = 25", "`every 25 steps eval DATASET`"),
    ("experiment", "logging_steps = 1", "`every 1 step log`"),
    ("precision", "dtype = bf16", "`params` of parameters"),
    ("parallel", "data_parallel_size = 8", "`fsdp 8` shards"),
    ("parallel", "data_parallel_replicate_degree = 2", "`fsdp N { replicate = 2 }`"),
    ("grpo", "epsilon = 0.2", "`clip_low` and `clip_high`"),
    ("grpo", "clip_ratio = 0.2", "both `clip_low` and `clip_high`"),
    ("batch", "ppo_mini_batch_size = 256", "prompts of an update"),
    ("batch", "ppo_micro_batch_size_per_gpu = 8", "all completions of a prompt"),
    ("scheduler", "lr_warmup_steps = -1", "a number of `steps`"),  # verl: by the ratio
    ("checkpoint", "save_freq = 20", "`every 20 steps checkpoint`"),
    ("batch", "val_check_interval = 0.25", "steps eval DATASET`"),  # a share of an epoch
    ("batch", "learning_rate = 2e-4", "xtrain calls this `lr`, in `optimizer`"),
    ("batch", "warmup_ratio = 0.03", "xtrain calls this `warmup = 3%`, in `scheduler`"),
    ("optimizer", "gradient_checkpointing = true", "`activation full`"),
    ("batch", "sequence_parallel = true", "`tp N { sequence = true }`"),
    ("parallel", "fsdp = true", "write `fsdp auto`"),
    ("parallel", 'tp = "all"', "write `tp 2`"),
    ("optimizer", 'optim = "sgd"', "`optimizer adamw { "),
]


@pytest.mark.parametrize(("block", "body", "words"), UNCERTAIN, ids=[f"{row[0]}: {row[1]}" for row in UNCERTAIN])
def test_an_uncertain_setting_has_a_hint_and_no_fix(block, body, words):
    assert fixed(block, body) == body
    assert any(words in (each.hint or "") for each in found_in(spec(block, body)))


@pytest.mark.parametrize("block", [
    pytest.param(block, marks=pytest.mark.slow if number % 4 else ())
    for number, block in enumerate((*EMPTY, *HEADS, "parallel", "precision", "checkpoint", "rollout"))
])  # fmt: skip
def test_an_ambiguous_name_is_never_renamed(block):
    """In no block, and not to a name that is spelled nearly the same."""
    words = [word for word, synonym in synonyms().items() if not synonym.convert and synonym.hint]
    found = [each for each in found_in(spec(block, "\n".join(f"{word} = 1" for word in words))) if each.code == "X203"]
    assert len(found) >= len(words) - 2  # a block has some of these settings
    assert all(not each.fix or not each.fix.span.text.startswith(tuple(words)) for each in found)


def test_every_synonym_is_of_a_name_of_the_reference():
    known = set(re.findall(r"`([a-z]\w*)", REFERENCE.read_text(encoding="utf-8")))
    assert {name for synonym in synonyms().values() for name in synonym.names if name} <= known


def test_a_converted_value_follows_the_learning_rate_of_the_spec():
    text = spec("scheduler", "min_lr = 3e-5").replace("lr = 2e-4", "learning_rate = 3e-4")
    assert "floor = 10% " in apply_fixes(lambda texts: found_in(text, texts)).texts["s"]


def test_a_value_through_a_name_is_not_converted():
    text = "let share = 0.03\n" + spec("scheduler", "warmup_ratio = share")
    assert not apply_fixes(lambda texts: found_in(text, texts)).texts


SAMPLES = ("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu", "local_batch_size",
           "device_batch_size", "micro_batch_size_per_gpu")  # fmt: skip


@pytest.mark.parametrize("word", SAMPLES)
@pytest.mark.parametrize(("rollout", "after"), [
    ("group = 8", "micro = 2"),
    ("num_generations = 8", "micro = 2"),
    ("group = 3", None),  # 16 completions are no whole rows
    ("", None),
])  # fmt: skip
def test_completions_of_a_rollout_become_rows(word, rollout, after):
    body = f"{word} = 16"
    text = spec("batch", body) + f"rollout {{ {rollout} }}\n"
    fix = apply_fixes(lambda texts: found_in(text, texts)).texts.get("s", text)
    assert (after or body) in fix
    if after is None:
        assert any(f"{word} / `group` of `rollout`" in (each.hint or "") for each in found_in(text))


@pytest.mark.parametrize(("size", "after"), [("-1", "rows = auto"), ("64", None)])
def test_a_batch_of_prompts_or_completions_is_no_number_of_rows(size, after):
    body = f"global_batch_size = {size}"
    text = spec("batch", body) + "rollout { group = 8 }\n"
    assert (after or body) in apply_fixes(lambda texts: found_in(text, texts)).texts.get("s", text)


@pytest.mark.parametrize(("block", "body", "hint", "after"), [
    ("scheduler", "floor = 0.1", "write `10%`", "floor = 10%"),
    ("scheduler", "floor = 2e-5", "write `0.002%` if this is a share", None),
    ("scheduler", "floor = 1", "write `1%` or `100%`", None),
    ("scheduler", "warmup = 0.03", "write `0.03 epochs` or `3%`", None),
    ("launch", "stop_deadline = 30", "write `30 s` or `30 min`", None),
])  # fmt: skip
def test_a_unit_is_written_only_if_no_other_is_as_likely(block, body, hint, after):
    assert fixed(block, body) == (after or body)
    assert [each.hint for each in found_in(spec(block, body)) if each.code == "X302"] == [hint]


def test_the_page_shows_all_rows():
    names = {"wsd": "scheduler", "dpo": "loss", "grpo": "loss", "kto": "loss", "simpo": "loss"}
    lines = ["| in | of another trainer | becomes |", "| --- | --- | --- |"]
    for block, body, after in CERTAIN:
        place = names.get(block, block).removesuffix(" 2")
        lines.append(f"| `{place}` | `{body}` | `{after}` |")
    lines += ["", "| in | of another trainer | the hint says |", "| --- | --- | --- |"]
    for block, body, words in UNCERTAIN:
        hints = [each.hint for each in found_in(spec(block, body)) if words in (each.hint or "")]
        lines.append(f"| `{names.get(block, block)}` | `{body}` | {hints[0]} |")
    table = "\n".join(lines) + "\n"
    assert table in PAGE.read_text(encoding="utf-8"), f"write into docs/importing.md:\n{table}"
