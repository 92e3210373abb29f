"""Configurations of other trainers: what becomes of each key, files that cannot be read, and exit codes."""

import json
from pathlib import Path

import examples
import pytest

from tests.support.commands import xtrain
from xtrain.components.importers._prompt_formats import ALPACA, prompt_template
from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.dsl.diagnostics.diagnostic import SourceText
from xtrain.dsl.importing.accounts import Fate
from xtrain.dsl.importing.config_file import read_config
from xtrain.dsl.importing.importer import IMPORTERS, candidates
from xtrain.dsl.syntax.format import format_source
from xtrain.planner.load import plan_from_text
from xtrain.runtime.feed.documents import DocumentEncoder
from xtrain.runtime.feed.records import SourceRecord

AXOLOTL = """\
base_model: models/own
sequence_len: 256
learning_rate: 1e-3
datasets:
  - path: data/a.jsonl
    type: chat_template
"""
DOCS = Path(__file__).parents[2] / "docs"
ABSENT = {"X520", "X505", "W505", "W501"}  # the folder of the model is not there


def imported(folder, text, name="c.yml", kind=None):
    """Return the draft and the formatted spec of a configuration."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    config = read_config(path)
    found = candidates(config)
    assert kind is None or found == [kind]
    draft = IMPORTERS[kind or found[0]]().imported(config)
    return draft, format_source(SourceText("c.xtrain", draft.spec()))


def fates(draft):
    return {account.key: account.fate for account in draft.accounts()}


def lines_of(spec):
    """The lines of a spec without their comments, those of its list of keys left out."""
    return [line.partition("  #")[0].strip() for line in spec.splitlines() if not line.startswith("#")]


def has_no_mistake(spec, kind):
    """Model and data may be absent; a file that does not name them leaves them to the user."""
    left_out = set() if IMPORTERS[kind].whole else {"X204", "X205", "X502"}
    return {error.code for error in plan_from_text(spec, "c.xtrain").diagnostics.errors} <= ABSENT | left_out


def without(text, keys):
    """A configuration without the lines of some keys, so that a row can give them."""
    kept, drops = "", False
    for line in text.splitlines():
        drops = drops if line.startswith((" ", "-")) else line.partition(":")[0] in keys
        kept += "" if drops else f"{line}\n"
    return kept


def check_row(folder, base, kind, text, lines, name="c.yml"):
    """Every key of the row has a place, the spec has the lines (those with `!` it lacks) and no mistake."""
    keys = {line.partition(":")[0] for line in text.splitlines() if not line.startswith((" ", "-"))}
    draft, spec = imported(folder, without(base, keys) + text + "\n", name, kind)
    assert Fate.MISSING not in fates(draft).values()
    written = lines_of(spec)
    for line in lines:
        assert (line.removeprefix("!") in written) is not line.startswith("!"), (line, spec)
    assert has_no_mistake(spec, kind)


CHAT = "datasets:\n  - path: a.jsonl\n    type: chat_template"
AXOLOTL_ROWS = [
    ("loss_watchdog_threshold: 5.0\nloss_watchdog_patience: 2",
     ("loss_above = 5", "loss_patience = 2", "on loss_above checkpoint then stop")),
    ("loss_watchdog_threshold: 5.0", ("loss_above = 5", "on loss_above checkpoint then stop")),
    ("datasets:\n  - path: https://example.com/a.jsonl\n    type: alpaca", ['source = jsonl("https://example.com/a.jsonl")']),
    ("val_set_size: 0.1\nevals_per_epoch: 4\nearly_stopping_patience: 3\nload_best_model_at_end: true",
     ("best = eval.a.loss",
      "every 25% eval a { batches = none } then early_stop { metric = eval.a.loss, patience = 3 }")),
    ("use_mlflow: true\nmlflow_experiment_name: p\nmlflow_tracking_uri: http://t", ("mlflow {", 'uri = "http://t"')),
    ("use_swanlab: true\nswanlab_project: p\nswanlab_mode: cloud", ("swanlab {", 'project = "p"')),
    # length
    ("num_epochs: 2", ["budget = 2 epochs"]),
    ("num_epochs: 0.5", ["budget = 0.5 epochs"]),
    ("max_steps: 100\nnum_epochs: 2", ["budget = 100 steps"]),
    ("seed: 7", ["seed = 7"]),
    ("output_dir: out", ["seed = 42"]),
    # batch
    ("micro_batch_size: 2\ngradient_accumulation_steps: 4", ["micro = 2", "accumulate = 4"]),
    ("micro_batch_size: 2\nbatch_size: 16", ["micro = 2", "accumulate = 8"]),
    ("micro_batch_size: 2\nbatch_size: 16\ngradient_accumulation_steps: 3", ["accumulate = 3"]),
    ("sample_packing: true", ["collate = to_tensor -> flatten -> shift_tokens -> pack(multipack)"]),
    ("pad_to_multiple_of: 64", ["pad_to = 64"]),
    ("sample_packing: false", ["collate = to_tensor -> flatten -> shift_tokens -> pack(single)"]),
    ("excess_length_strategy: truncate", ["oversized = truncate"]),
    ("excess_length_strategy: raise", ["oversized = error"]),
    ("neftune_noise_alpha: 5", ["neftune = 5"]),
    # optimizer: defaults that differ are written
    ("optimizer: adamw_torch", ["optimizer adamw {", "weight_decay = 0", "betas = [0.9, 0.999]", "!eps = 1e-08"]),
    ("optimizer: adamw_bnb_8bit", ["optimizer adamw8bit {", "betas = [0.9, 0.999]", "weight_decay = 0"]),
    ("optimizer: lion_32bit\nweight_decay: 0.1", ["optimizer lion {", "weight_decay = 0.1"]),
    ("optimizer: ademamix\nadam_beta2: 0.99", ["optimizer ademamix {", "betas = [0.9, 0.99]", "weight_decay = 0"]),
    ("optimizer: sgd", ["optimizer sgd {", "momentum = 0"]),
    ("optimizer: muon\nweight_decay: 0.05",
     ["optimizer muon {", "betas = [0.9, 0.999]", "weight_decay = 0.05", "group embed_tokens {"]),
    ("weight_decay: 0.01", ["weight_decay = 0.01", "group embed_tokens {"]),
    ("adam_beta2: 0.95\nadam_epsilon: 1e-6", ["!betas = [0.9, 0.95]", "eps = 1e-06"]),
    ("max_grad_norm: 0.5", ["clip = 0.5"]),
    ("max_grad_norm: 0", ["clip = none"]),
    # schedule
    ("warmup_ratio: 0.03", ["warmup = 3%"]),
    ("warmup_steps: 20", ["warmup = 20 steps"]),
    ("warmup_steps: 1", ["warmup = 2 steps"]),  # as it computes
    ("max_steps: 200\nwarmup_ratio: 0.05", ["warmup = 10 steps"]),
    ("max_steps: 10000", ["warmup = 100 steps"]),  # 3 %, at most 100
    ("lr_scheduler: constant\nwarmup_steps: 9", ["scheduler constant"]),
    ("lr_scheduler: constant_with_warmup\nwarmup_steps: 9", ["scheduler constant {", "warmup = 9 steps"]),
    ("lr_scheduler: linear\nwarmup_steps: 0", ["scheduler linear"]),
    ("cosine_min_lr_ratio: 0.1", ["floor = 10%"]),
    # precision
    ("bf16: true", ["params = bf16"]),
    ("bf16: true\nadapter: lora", ["compute = bf16", "!params = bf16"]),
    ("bf16: auto\nfsdp_config:\n  offload_params: true", ["compute = bf16", "!params = bf16"]),
    ("bf16: false", ["compute = fp32"]),
    ("min_sample_len: 64", ["min_tokens = 64"]),
    ("bf16: false\nfp16: true\nadapter: lora", ["compute = fp16"]),
    ("fp8: true\nfp8_enable_fsdp_float8_all_gather: true",
     ['compute = fp8 { recipe = tensorwise, skip = ["layers.0.self_attn.q_proj"] }']),
    ("qat:\n  weight_dtype: int4\n  activation_dtype: int8",
     ["qat {", "weights = int4", "activations = int8", "group = 32"]),
    ("qat:\n  weight_dtype: nvfp4\n  activation_dtype: nvfp4\n  group_size: 16",
     ["qat {", "weights = nvfp4", "activations = nvfp4"]),
    ("tf32: true", ["matmul = high"]),
    ("gradient_checkpointing: true", ["activation full"]),
    ("tiled_mlp: true", ["tile_mlp = auto"]),
    ("torch_compile: true", ["compile {}"]),
    # adapter
    ("adapter: lora\nlora_r: 8\nlora_alpha: 32\nlora_dropout: 0.05", ["rank = 8", "alpha = 32", "dropout = 0.05"]),
    ("adapter: lora\nlora_target_modules: [q_proj, v_proj]", ['targets = ["q_proj", "v_proj"]']),
    ("adapter: lora\nlora_target_modules: model.layers.[\\d]+.(mlp|self_attn).(up|q)_proj",
     ['targets = ["up_proj", "q_proj"]']),
    ("adapter: lora\nlora_target_modules: [q_proj]\nlora_target_parameters: [mlp.experts.down_proj]",
     ['targets = ["q_proj", "experts"]']),
    ("adapter: lora\npeft_use_rslora: true", ["scaling = rslora"]),
    ("adapter: lora\npeft_use_dora: true", ["dora = true"]),
    ("adapter: qlora\nload_in_4bit: true", ["base nf4"]),
    ("adapter: qlora\nload_in_4bit: true\nlora_model_dir: old\nlora_r: 4\nlora_dropout: 0.1\nlora_target_linear: true",
     ['from = "old"', "base nf4", "!rank = 4", "!dropout = 0.1"]),
    ("adapter: lora\nload_in_8bit: true", ["base int8"]),
    # data
    ("datasets:\n  - path: org/name\n    type: chat_template\n    split: train[:10%]",
     ['source = huggingface("org/name", split = "train[:10%]")', 'messages = "messages"']),
    ("datasets:\n  - path: d\n    ds_type: json\n    data_files: [a.jsonl, b.jsonl]\n"
     "    type: completion\n    field: body",
     ['source = jsonl("a.jsonl", "b.jsonl")', 'text = "body"', "oversized = split"]),
    ("datasets:\n  - path: a.jsonl\n    type: alpaca",
     ['prompt = "instruction"', 'response = "output"', 'system = "input"']),
    ("datasets:\n  - path: a.jsonl\n    type: alpaca\ntrain_on_inputs: true", ["train_on = all"]),
    ("datasets:\n  - path: a.jsonl\n    type: {field_instruction: q, field_output: a, format: '[{instruction}]'}",
     ['prompt = "q"', 'response = "a"', '!system = "input"']),
    ("datasets:\n  - path: a.jsonl\n    type: {field_input: more, format: '{instruction}: {input}', system_prompt: Hi}",
     ['prompt = "instruction"', 'response = "output"', 'system = "more"']),
    ("dataset_exact_deduplication: true", ["deduplicate = exact"]),
    ("adapter: lora\nlora_fan_in_fan_out: true", ["adapter lora {"]),
    ("model_config:\n  output_router_logits: true", ["!aux_loss = 0"]),
    ("tokens:\n  eos_token: </s>", ["tokenizer hub(\"models/own\")"]),
    (f"{CHAT}\n    roles_to_train: []", ["train_on = last"]),
    (f"{CHAT}\n    field_messages: conversations\n"
     "    message_property_mappings:\n      role: from\n      content: value", ['messages = "conversations"']),
    (f"{CHAT}\n    message_field_training: train", ['message_train = "train"']),
    (f"{CHAT}\n    drop_system_message: true", ["drop_system = true"]),
    (f"{CHAT}\n  - path: b.jsonl\n    type: chat_template",
     ["a = 1 epoch", "b = 1 epoch"]),
    ("chat_template: chatml", ['template = "chatml"']),
    ("val_set_size: 0.05\nevals_per_epoch: 2\nnum_epochs: 2", ["holdout = 5%", "every 25% eval a { batches = none }"]),
    ("val_set_size: 0.05\neval_steps: 50", ["every 50 steps eval a { batches = none }"]),
    ("pretraining_dataset:\n  - path: t.txt\n    ds_type: text\nmax_steps: 9", ['source = text("t.txt")']),
    # losses
    ("rl: dpo\nrl_beta: 0.2\ndatasets:\n  - path: a.jsonl\n    type: chat_template.default",
     ["loss dpo {", "beta = 0.2", 'prompt = "messages"', 'chosen = "chosen"']),
    ("rl: orpo\norpo_alpha: 0.3\ndatasets:\n  - path: a.jsonl\n    type: chat_template.argilla", ["beta = 0.3"]),
    ("rl: ipo\ndatasets:\n  - path: a.jsonl\n    type: llama3.argilla", ["form = ipo", 'template = "llama3"']),
    ("rl: kto\ndatasets:\n  - path: a.jsonl\n    type: llama3.ultra",
     ['prompt = "prompt"', 'response = "completion"', 'label = "label"', 'template = "llama3"']),
    (f"rl: dpo\nadapter: lora\n{CHAT}.default", ["reference = adapter_off"]),
    # ranks, files, trackers
    ("tensor_parallel_size: 2", ["tp 2"]),
    ("dp_shard_size: 4\nexpert_parallel_size: 1", ["fsdp 4"]),
    ("fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_offload_params: false", ["reshard = false"]),
    ("saves_per_epoch: 2", ["every 50% checkpoint", "keep = 4"]),
    ("save_steps: 500\nsave_total_limit: 2", ["every 500 steps checkpoint", "keep = 2"]),
    ("save_strategy: no", ["!every 1 epoch checkpoint"]),
    ("logging_steps: 1", ["every 1 step log"]),
    ("wandb_project: p\nwandb_name: n", ['project = "p"', 'name = "n"']),
    ("use_tensorboard: true", ["tensorboard = true"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "lines"), AXOLOTL_ROWS, ids=[row[0].replace("\n", "; ")[:70] for row in AXOLOTL_ROWS])
def test_axolotl(tmp_path, text, lines):
    check_row(tmp_path, AXOLOTL, "axolotl", text, lines)


@pytest.mark.parametrize(("text", "key", "fate"), [
    ("flash_attention: true", "flash_attention", Fate.MEANINGLESS),
    ("special_tokens:\n  pad_token: x", "special_tokens.pad_token", Fate.MEANINGLESS),
    ("wandb_project:", "wandb_project", Fate.MEANINGLESS),  # no value
    ("plugins:\n  - axolotl.integrations.liger.LigerPlugin", "plugins.0", Fate.MEANINGLESS),
    ("adapter: lora\nlora_r: 16", "lora_r", Fate.DEFAULT),
    ("use_swanlab: true\nswanlab_log_completions: true", "swanlab_log_completions", Fate.MEANINGLESS),
    ("use_swanlab: true\nswanlab_lark_secret: a", "swanlab_lark_secret", Fate.MISSING),
    ("micro_batch_size: {b: 2}", "micro_batch_size", Fate.MISSING),  # the default of both is 1
    *[(f"pad_to_multiple_of: 64\n{text}", "pad_to_multiple_of", Fate.MEANINGLESS)
      for text in ("sample_packing: true", "torch_compile: true", "pad_to_sequence_len: true", "sequence_len: 64")],
    ("pad_to_multiple_of: 64\nsequence_len: 65", "pad_to_multiple_of", Fate.TRANSLATED),
    ("relora: false", "relora", Fate.DEFAULT),
    ("train_on_inputs: false", "train_on_inputs", Fate.DEFAULT),
    ("fp16: false", "fp16", Fate.DEFAULT),
    ("relora: true", "relora", Fate.MISSING),
    ("bf16: false\nfp16: true", "fp16", Fate.MISSING),
    ("bf16: false\nfp16: true\nadapter: lora", "fp16", Fate.TRANSLATED),
    ("bf16: false\nfloat16: true", "float16", Fate.MISSING),
    ("optimizer: galore_adamw", "optimizer", Fate.MISSING),
    ("lr_scheduler: one_cycle", "lr_scheduler", Fate.MISSING),
    ("val_set_size: 2000", "val_set_size", Fate.MISSING),
    ("learning_rate: fast", "learning_rate", Fate.MISSING),
    ("micro_batch_size: {a: 1}", "micro_batch_size", Fate.MISSING),
    ("plugins:\n  - mine.Plugin", "plugins.0", Fate.MISSING),
    ("deepspeed: nowhere.json", "deepspeed", Fate.MISSING),
    ("datasets:\n  - path: a.csv\n    type: alpaca", "datasets.0.path", Fate.MISSING),
    ("datasets:\n  - path: a.jsonl\n    type: user.function", "datasets.0.type", Fate.MISSING),
    (f"{CHAT}\n    train_on_eos: all", "datasets.0.train_on_eos", Fate.MISSING),
    (f"{CHAT}\n    speling: 1", "datasets.0.speling", Fate.MISSING),
    ("rl: grpo", "rl", Fate.MISSING),
    ("rl: dpo\nadapter: lora\nlora_model_dir: old", "lora_model_dir", Fate.MISSING),
    ("adapter: lora\nlora_model_dir: old\nlora_r: 4", "lora_r", Fate.MEANINGLESS),
    ("lora_model_dir: old", "lora_model_dir", Fate.MEANINGLESS),  # all parameters are trained
    ("no_such_key: 1", "no_such_key", Fate.MISSING),
])  # fmt: skip
def test_classes_of_axolotls_keys(tmp_path, text, key, fate):
    keys = {line.partition(":")[0] for line in text.splitlines() if not line.startswith((" ", "-"))}
    draft, spec = imported(tmp_path, without(AXOLOTL, keys) + text + "\n", kind="axolotl")
    accounts = [account for account in draft.accounts() if account.key == key]
    assert [account.fate for account in accounts] == [fate]
    assert fate is Fate.TRANSLATED or accounts[0].why
    assert (f"{key} = " in spec.partition("\n\n")[0]) is (fate is Fate.MISSING)


def test_every_key_has_exactly_one_class(tmp_path):
    text = AXOLOTL + "relora: true\nwandb_project: p\nspecial_tokens: {pad_token: a, eos_token: b}\n"
    text += "unknown: {a: [1, {b: 2}]}\nplugins: [axolotl.integrations.liger.LigerPlugin, mine]\ngptq: {bits: 4}\n"
    draft, _ = imported(tmp_path, text)
    keys = [account.key for account in draft.accounts()]
    leaves = [key for key, value in draft.values.items() if not isinstance(value, dict | list)]
    assert len(keys) == len(set(keys))
    for leaf in leaves:
        assert sum(leaf == key or leaf.startswith(f"{key}.") for key in keys) == 1, leaf


def test_a_file_of_deepspeed_is_read_next_to_the_configuration(tmp_path):
    zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True}
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}, "odd": 1}))
    draft, spec = imported(tmp_path, AXOLOTL + "deepspeed: zero.json\n")
    found = fates(draft)
    assert "offload = true" in lines_of(spec)
    assert found["deepspeed.zero_optimization.overlap_comm"] is Fate.MEANINGLESS
    assert [key for key, fate in found.items() if fate is Fate.MISSING] == ["deepspeed.odd"]


TRL = """\
model_name_or_path: models/own
dataset_name: org/name
learning_rate: 1e-3
bf16: false
"""
FACTORY = """\
model_name_or_path: models/own
stage: sft
finetuning_type: full
dataset: own
template: llama3
learning_rate: 1e-3
"""
ARGUMENTS = """\
output_dir: out
per_device_train_batch_size: 2
learning_rate: 1e-3
"""
OTHER_ROWS = [
    ("trl", "loss_type: dft", ["dynamic = true"]),
    ("llama_factory", "use_dft_loss: true", ["dynamic = true"]),
    ("trl", "num_train_epochs: 1", ["budget = 1 epoch", "micro = 8", "keep = none", "every 500 steps checkpoint"]),
    ("trl", "max_steps: 9", ["budget = 9 steps"]),
    ("trl", "model_name_or_path: org/name\nmodel_revision: v1",
     ['model hub("org/name", revision = "v1")', 'tokenizer hub("org/name", revision = "v1")']),
    ("trl", "output_dir: out", ["budget = 3 epochs", "scheduler linear", "sequence = 1024", "activation full"]),
    ("trl", "bf16: true", ["compute = bf16", "!params = bf16"]),
    ("trl", "bf16: true\ndtype: bfloat16", ["params = bf16"]),
    ("trl", "pad_to_multiple_of: 64\nmax_length: 512", ["pad_to = 64"]),
    ("trl", "packing: true\nmax_length: 512", ["collate = to_tensor -> flatten -> shift_tokens -> pack(multipack)"]),
    ("trl", "assistant_only_loss: true", ['messages = "messages"']),
    ("trl", "completion_only_loss: true", ['prompt = "prompt"', 'response = "completion"']),
    ("trl", "dataset_text_field: body", ['text = "body"']),
    ("trl", "use_peft: true", ["alpha = 32", "dropout = 0.05", 'targets = ["q_proj", "v_proj"]']),
    ("trl", "use_peft: true\nload_in_4bit: true\nlora_target_modules: all-linear", ["double = false"]),
    ("trl", "use_peft: true\nuse_rslora: true", ["scaling = rslora"]),
    ("trl", "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}", ["floor = 10%"]),
    ("trl", "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-4}", ["floor = 10%"]),
    ("trl", "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 7}",
     ["decay = 7 steps", "shape = cosine"]),
    ("trl", "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 7, decay_type: 1-sqrt}",
     ["shape = sqrt"]),
    ("trl", "warmup_steps: 0.05", ["warmup = 5%"]),
    ("trl", "beta: 0.3\nloss_type: [ipo]", ["loss dpo {", "beta = 0.3", "form = ipo", 'chosen = "chosen"']),
    ("trl", "desirable_weight: 1.5", ["loss kto {", "desirable = 1.5", 'label = "label"']),
    ("trl", "center_rewards_coefficient: 0.01", ["loss bradley_terry {", "centre = 0.01"]),
    ("trl", "report_to: [wandb, tensorboard]", ["tensorboard = true", 'project = "huggingface"']),
    ("llama_factory", "cutoff_len: 256", ["sequence = 256", 'template = "llama3"', 'prompt = "instruction"']),
    ("llama_factory", "finetuning_type: lora\nlora_rank: 4", ["rank = 4", "alpha = 8"]),
    ("llama_factory", "finetuning_type: lora\nlora_target: q_proj,v_proj", ['targets = ["q_proj", "v_proj"]']),
    ("llama_factory", "finetuning_type: lora\nquantization_bit: 4", ["base nf4"]),
    ("llama_factory", "do_train: true\nfinetuning_type: lora\nadapter_name_or_path: old\nlora_rank: 4",
     ['from = "old"', "!rank = 4"]),
    ("llama_factory", "fp8: true\nfp8_backend: torchao\nbf16: true", ["compute = fp8 { recipe = rowwise }"]),
    ("llama_factory", "use_muon: true\nweight_decay: 0.1",
     ["optimizer muon {", "weight_decay = 0.1", "betas = [0.9, 0.999]"]),
    ("llama_factory", "pure_bf16: true", ["params = bf16"]),
    ("llama_factory", "bf16: true", ["compute = bf16", "!params = bf16"]),
    ("llama_factory", "val_size: 0.1\neval_strategy: steps\neval_steps: 20",
     ["every 20 steps eval own { batches = none }"]),
    ("llama_factory", "max_samples: 2", ["budget = 3 epochs"]),  # the file has no more
    ("llama_factory", "train_on_prompt: true", ["train_on = all"]),
    ("llama_factory", "mask_history: true", ["train_on = last"]),
    ("llama_factory", "use_adam_mini: true", ["optimizer adam_mini {"]),
    ("llama_factory", "packing: true", ["collate = to_tensor -> flatten -> shift_tokens -> pack(multipack)"]),
    ("llama_factory", "dataset: pairs\nstage: dpo\npref_beta: 0.2", ["beta = 0.2", 'chosen = "chosen"']),
    ("transformers", "warmup_ratio: 0.1\nlabel_smoothing_factor: 0.1", ["warmup = 10%", "label_smoothing = 0.1"]),
    ("trl", "beta: 0.2\nlabel_smoothing: 0.1", ["beta = 0.2", "!label_smoothing = 0.1"]),  # TRL does not read it
    ("trl", "beta: 0.2\nloss_type: robust\nlabel_smoothing: 0.1", ["form = robust", "label_smoothing = 0.1"]),
    ("transformers", "weight_decay: 0.01\noptim: sgd", ["optimizer sgd {", "!group embed_tokens {"]),
    ("transformers", "fsdp: full_shard auto_wrap offload", ["offload = true"]),
    ("transformers", "save_strategy: epoch\nsave_total_limit: 2", ["every 1 epoch checkpoint", "keep = 2"]),
]  # fmt: skip
BASES = {"trl": TRL, "llama_factory": FACTORY, "transformers": ARGUMENTS}


@pytest.mark.parametrize(("kind", "text", "lines"), OTHER_ROWS, ids=[f"{k}: {t[:60]!r}" for k, t, _ in OTHER_ROWS])
def test_programs_on_transformers(tmp_path, kind, text, lines):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.json").write_text(json.dumps([{"instruction": "a", "input": "", "output": "b"}] * 2))
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({
        "own": {"file_name": "own.json"}, "pairs": {"file_name": "own.json", "ranking": True},
    }))  # fmt: skip
    check_row(tmp_path, BASES[kind], kind, text, lines)


@pytest.mark.parametrize(("kind", "text", "key"), [
    ("trl", "packing: true\npacking_strategy: wrapped", "packing_strategy"),
    ("trl", "num_generations: 8", "num_generations"),
    ("trl", "loss_type: focal", "loss_type"),
    ("trl", "optim: adafactor", "optim"),
    ("trl", "train_sampling_strategy: group_by_length", "train_sampling_strategy"),
    ("trl", "report_to: clearml", "report_to"),
    ("llama_factory", "template: vicuna", "template"),
    ("llama_factory", "dataset: nowhere", "dataset"),
    ("llama_factory", "finetuning_type: freeze", "finetuning_type"),
    ("llama_factory", "stage: ppo", "stage"),
    ("llama_factory", "max_samples: 1", "max_samples"),
    ("llama_factory", "fp8: true\nfp8_backend: te", "fp8"),
    *[("llama_factory", f"finetuning_type: lora\nadapter_name_or_path: {text}", "adapter_name_or_path")
      for text in ("a", "a, b\ndo_train: true", "a\ndo_train: true\ncreate_new_adapter: true")],
    ("llama_factory", "finetuning_type: lora\nadapter_name_or_path: a\nexport_dir: b", "export_dir"),
])  # fmt: skip
def test_what_programs_on_transformers_have_alone(tmp_path, kind, text, key):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.json").write_text(json.dumps([{"instruction": "a", "input": "", "output": "b"}] * 2))
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"own": {"file_name": "own.json"}}))
    keys = {line.partition(":")[0] for line in text.splitlines()}
    draft, _ = imported(tmp_path, without(BASES[kind], keys) + text + "\n", kind=kind)
    assert fates(draft)[key] is Fate.MISSING


@pytest.mark.parametrize(("entry", "lines"), [
    ({"file_name": "own.json", "formatting": "sharegpt"}, ['messages = "conversations"']),
    ({"file_name": "own.json", "formatting": "sharegpt", "columns": {"messages": "m"},
      "tags": {"role_tag": "role", "content_tag": "content"}}, ['messages = "m"']),
    ({"file_name": "own.json", "formatting": "sharegpt", "tags": {"role_tag": "role"}}, None),
    ({"file_name": "own.json", "formatting": "sharegpt", "columns": {"kto_tag": "k"}}, None),
    ({"file_name": "own.json", "columns": {"kto_tag": "k", "query": "q"}}, ['label = "k"', 'input = "q"']),
    ({"file_name": "own.json", "formatting": "other"}, None),
    ({"file_name": "own.json", "odd": 1}, None),
    ({"file_name": "own.bin"}, None),
    ({"hf_hub_url": "org/name", "subset": "s", "split": "test"},
     ['source = huggingface("org/name", config = "s", split = "test")']),
    ({}, None),
])  # fmt: skip
def test_datasets_of_llama_factory(tmp_path, entry, lines):
    """The fields and files that xtrain reads, and those that it reports as missing (None)."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.json").write_text("[]")
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"own": entry}))
    draft, spec = imported(tmp_path, FACTORY, kind="llama_factory")
    assert (fates(draft)["dataset"] is Fate.MISSING) is (lines is None)
    assert {*(lines or ())} <= {*lines_of(spec)}


def test_numbers_that_a_trainer_gives_to_deepspeed(tmp_path):
    engine = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_clipping": "auto",
              "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 2},
              "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}  # fmt: skip
    draft, spec = imported(tmp_path, json.dumps(engine), "ds.json", "deepspeed")
    assert Fate.MISSING not in fates(draft).values() and "auto" not in spec.replace("fsdp auto", "")


def test_accelerate_and_deepspeed(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n"
        "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true, fsdp_reshard_after_forward: true}\n"
    )
    draft, spec = imported(tmp_path, TRL + "accelerate_config: a.yaml\n", kind="trl")
    assert Fate.MISSING not in fates(draft).values() and "offload = true" in lines_of(spec)
    assert "num_processes = 8" in spec
    (tmp_path / "a.yaml").write_text("mixed_precision: fp16\n")
    _, spec = imported(tmp_path, TRL + "accelerate_config: a.yaml\n", kind="trl")
    assert "compute = fp16" in lines_of(spec)
    half = {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale": 0}, "train_micro_batch_size_per_gpu": 4}
    draft, spec = imported(tmp_path, json.dumps(half), "ds.json", "deepspeed")
    assert "compute = fp16 { scale = 4096, interval = 1000 }" in spec and Fate.MISSING not in fates(draft).values()
    half["fp16"]["loss_scale"] = 128
    draft, _ = imported(tmp_path, json.dumps(half), "ds.json", "deepspeed")
    assert fates(draft)["fp16.enabled"] is Fate.MISSING
    engine = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5, "bf16": {"enabled": True},
              "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.01}},
              "scheduler": {"type": "WarmupDecayLR",
                            "params": {"warmup_num_steps": 10, "total_num_steps": 90}}}  # fmt: skip
    draft, spec = imported(tmp_path, json.dumps(engine), "ds.json", "deepspeed")
    assert Fate.MISSING not in fates(draft).values()
    for line in ("micro = 4", "clip = 0.5", "compute = bf16", "offload_optimizer = nvme", 'nvme_path = "/nvme"',
                 "lr = 0.001", "warmup = 10 steps", "budget = 90 steps", "scheduler linear {"):  # fmt: skip
        assert line in lines_of(spec), line


TITAN = """\
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "own"
[training]
seq_len = 256
dataset = "c4_test"
"""
FORGE = """\
[model]
dim = 256
n_layers = 2
n_heads = 4
[train]
max_steps = 100
[data]
dataset_path = "tokens"
"""
TABLES = [
    ("torchtitan", "", ["model llama {", "dim = 256", "lr = 0.0008", "micro = 8", "budget = 10000 steps",
                        "scheduler linear {", "warmup = 200 steps", "compute = bf16", "enabled = false"]),
    ("torchtitan", "local_batch_size = 2\nglobal_batch_size = 16\nsteps = 9\nmax_norm = 0.5",
     ["micro = 2", "rows = 16", "budget = 9 steps", "clip = 0.5"]),
    ("torchtitan", "[lr_scheduler]\ndecay_ratio = 0.5\ndecay_type = \"sqrt\"\nmin_lr_factor = 0.1",
     ["scheduler wsd {", "decay = 50%", "shape = sqrt", "floor = 10%"]),
    ("torchtitan",
     "[parallelism]\ndata_parallel_shard_degree = 4\ntensor_parallel_degree = 2\ndisable_loss_parallel = true",
     ["tp 2 {", "loss = false"]),
    ("torchtitan", "[checkpoint]\nenable = true\ninterval = 7\nasync_mode = \"async\"",
     ["every 7 steps checkpoint", "mode = async", "keep = 10"]),
    ("torchtitan", "[activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = \"3\"",
     ["activation full {", "every = 3"]),
    ("torchtitan", "[validation]\nenable = true\ndataset = \"c4_test\"\nfreq = 5\nsteps = 4",
     ["every 5 steps eval validation { batches = 4 }"]),
    ("kempner_forge", "", ["model llama {", "ffn = 768", "vocab = 32000", 'source = tokens("tokens/*.npy")',
                           "budget = 100 steps", "warmup = 2000 steps", "floor = 10%", "workers = 4"]),
    ("kempner_forge",
     "[scheduler]\nname = \"wsd\"\nwarmup_steps = 10\nstable_steps = 70\nwsd_decay_type = \"sqrt\"",
     ["decay = 20 steps", "shape = sqrt"]),
    ("kempner_forge", "[optimizer]\nname = \"muon\"\nlr = 2e-2\nmuon_adam_lr = 1e-3",
     ["optimizer muon {", "adamw_lr = 0.05"]),
    ("kempner_forge", "[distributed]\ndp_shard = 2\ntp = 2\ndp_replicate = 2", ["fsdp 2 {", "tp 2", "replicate = 2"]),
    ("kempner_forge", "[metrics]\nenable_wandb = true\nlog_interval = 3",
     ["every 3 steps log", 'project = "kempnerforge"']),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "lines"), TABLES, ids=[f"{k}: {t[:50]!r}" for k, t, _ in TABLES])
def test_tables(tmp_path, kind, text, lines):
    base = TITAN if kind == "torchtitan" else FORGE
    draft, spec = imported(tmp_path, base + text + "\n", "c.toml", kind)
    assert Fate.MISSING not in fates(draft).values()
    assert [line for line in lines if line not in lines_of(spec)] == []
    errors = plan_from_text(spec, "c.xtrain", world=8).diagnostics.errors
    assert {error.code for error in errors} <= ABSENT | {"X205", "X602"}  # warm-up of 2,000 steps; no tokenizer


ARCTIC = """\
type: sft
model: {name_or_path: models/own}
data: {sources: ["org/name:train[:9]"]}
"""
XORL = """\
model: {model_path: models/own}
data: {datasets: [{path: a.jsonl, ds_type: json, type: tokenized}]}
train: {output_dir: out}
"""
NESTED = [
    ("arctic_training", {}, ['source = huggingface("org/name", split = "train[:9]")', 'messages = "messages"',
                             "lr = 0.0005", "!weight_decay = 0.1", "betas = [0.9, 0.999]", "warmup = 10%",
                             "activation full", "compute = bf16", "oversized = skip", "sequence = 8192"]),
    ("xorl", {"lora": {"enable_lora": True, "merge_lora_interval": 10}}, ["every 10 steps merge { state = keep }"]),
    ("xorl", {"lora": {"enable_lora": True, "merge_lora_interval": 9, "reset_optimizer_on_merge": True}},
     ["every 9 steps merge { state = reset }"]),
    ("arctic_training", {"type": "causal"}, ["oversized = split"]),
    ("arctic_training", {"train_iters": 100, "exit_iteration": 10}, ["budget = 100 steps", "stop_at = 10 steps"]),
    ("arctic_training", {"epochs": 2, "micro_batch_size": 3}, ["budget = 2 epochs", "micro = 3"]),
    ("arctic_training", {"optimizer": {"type": "cpu_adam", "lr": 1e-3}, "scheduler": {"name": "cosine"}},
     ["lr = 0.001", "scheduler cosine {"]),
    ("arctic_training", {"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}},
     ["offload = true"]),
    ("arctic_training", {"tiled_mlp_compute": True}, ["tile_mlp = auto"]),
    ("arctic_training", {"checkpoint": [{"type": "huggingface", "output_dir": "m", "save_end_of_training": True}]},
     ['on finish export { to = "m" }']),
    ("xorl", {}, ['tokens = "input_ids"', 'mask = "labels"', "sequence = 32000", "lr = 5e-05", "scheduler constant",
                  "compute = bf16", "activation full", "budget = 1 epoch", "!weights = none"]),
    ("xorl", {"model": {"config_path": "models/own"}}, ["weights = none"]),
    ("xorl",
     {"train": {"max_steps": 9, "lr": 1e-3, "lr_decay_style": "cosine", "lr_min": 1e-4, "lr_warmup_ratio": 0.1}},
     ["budget = 9 steps", "floor = 10%", "warmup = 10%"]),
    ("xorl", {"train": {"optimizer": "muon", "muon_lr": 0.02, "lr": 0.001, "weight_decay": 0.01}},
     ["optimizer muon {", "lr = 0.02", "adamw_lr = 0.05", "scale = original", "group embed_tokens {"]),
    ("xorl", {"train": {"max_steps": -1, "num_train_epochs": 2}}, ["budget = 2 epochs"]),
    ("xorl", {"train": {"max_steps": 0, "num_train_epochs": 2}}, ["budget = 2 epochs"]),
    ("xorl", {"train": {"save_steps": 7, "max_grad_norm": 0.5}}, ["every 7 steps checkpoint", "clip = 0.5"]),
    ("xorl", {"train": {"save_epochs": 0, "skip_param_upcast": True, "fsdp_reduce_dtype": "bf16"}},
     ["params = bf16", "reduce = bf16", "!every 1 epoch checkpoint"]),
    ("xorl", {"train": {"gradient_checkpointing_method": "no_recompute", "save_epochs": 0.5, "ep_intranode": True}},
     ["!activation full", "every 0.5 epochs checkpoint"]),
    ("xorl", {"train": {"enable_activation_offload": True, "gradient_checkpointing_method": "recompute_full_layer"}},
     ["activation full"]),
    ("xorl", {"lora": {"enable_lora": True, "lora_target_modules": ["qkv_proj"]}},
     ['targets = ["q_proj", "k_proj", "v_proj"]']),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "more", "lines"), NESTED, ids=[f"{k}: {str(m)[:50]}" for k, m, _ in NESTED])
def test_nested_configurations(tmp_path, kind, more, lines):
    base = ARCTIC if kind == "arctic_training" else XORL
    given = "".join(f"{key}: {json.dumps(value)}\n" for key, value in more.items())
    draft, spec = imported(tmp_path, without(base, more) + given, kind=kind)
    assert Fate.MISSING not in fates(draft).values()
    written = lines_of(spec)
    assert [line for line in lines if (line.removeprefix("!") in written) is line.startswith("!")] == []
    assert has_no_mistake(spec, kind)


SAID = [
    ("kempner_forge", FORGE + "[metrics]\nwandb_project = \"p\"\n", "metrics.wandb_project", Fate.MEANINGLESS,
     "W&B is off"),
    ("arctic_training", ARCTIC.replace("]}", "], train_eval_split: [1.0, 0.0]}"), "data.train_eval_split", Fate.DEFAULT,
     "nothing is held out"),
    ("trl", TRL + "logging_strategy: epoch\nlogging_steps: 5\n", "logging_steps", Fate.TRANSLATED, ""),
    ("trl", TRL + "use_peft: true\nlora_target_parameters: [a]\n", "lora_target_parameters", Fate.MISSING,
     "`targets` are matrices of linear layers"),
    ("xorl", XORL + "lora: {enable_lora: true, lora_target_modules: ['.*q_proj$']}\n", "lora.lora_target_modules",
     Fate.MISSING, "not regular expressions"),
    ("axolotl", AXOLOTL + "loss_watchdog_threshold: high\n", "loss_watchdog_threshold", Fate.MISSING, "not a number"),
    *[(kind, text, key, Fate.MEANINGLESS, "`xtrain push FOLDER REPO`") for kind, text, key in (
        ("axolotl", AXOLOTL + "hub_model_id: a/b\n", "hub_model_id"),
        ("trl", TRL + "push_to_hub: true\n", "push_to_hub"),
        ("llama_factory", FACTORY + "export_hub_model_id: a/b\n", "export_hub_model_id"),
    )],
    ("axolotl", AXOLOTL + "cpu_offload: true\n", "cpu_offload", Fate.MISSING, "no such key"),
    ("deepspeed", '{"zero_optimization": {"stage": 2}, "train_batch_size": 8, "scheduler": {"type": "WarmupCosineLR", '
     '"params": {"warmup_num_steps": 5, "cos_min_ratio": 0.05}}}', "scheduler.params.cos_min_ratio", Fate.TRANSLATED,
     ""),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "key", "fate", "why"), SAID, ids=[f"{row[0]}: {row[2]}" for row in SAID])
def test_what_is_said_of_a_key(tmp_path, kind, text, key, fate, why):
    name = {"[": "c.toml", "{": "c.json"}.get(text[0], "c.yml")
    draft, _ = imported(tmp_path, text, name, kind)
    (account,) = [account for account in draft.accounts() if account.key == key]
    assert account.fate is fate and why in account.why


@pytest.mark.parametrize(("text", "key"), [
    ("[model]\nname = \"llama4\"\nflavor = \"17bx16e\"\n[training]\nsteps = 1\n", "model.flavor"),
    (TITAN + "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n",
     "quantize.linear.float8.enable_fsdp_float8_all_gather"),
    (TITAN + "speling = 1\n", "training.speling"),
    (FORGE + "[optimizer]\nname = \"prodigy\"\n", "optimizer.name"),
    (FORGE.replace("n_heads", "num_experts = 4\nn_heads"), "model.num_experts"),
    (FORGE + "[vlm]\narch = \"mot\"\n", "vlm.arch"),
    (ARCTIC.replace("sft", "dpo"), "type"),
    (XORL.replace("out}", "out, lr_decay_ratio: 0.5}"), "train.lr_decay_ratio"),
])  # fmt: skip
def test_what_tables_have_alone(tmp_path, text, key):
    draft, _ = imported(tmp_path, text, "c.toml" if text.startswith("[") else "c.yml")
    found = fates(draft)
    assert Fate.MISSING in {found.get(key), found.get(key.rpartition(".")[0]), found.get(key.partition(".")[0])}


def test_every_format_stands_in_the_documentation():
    text = (DOCS / "importing.md").read_text(encoding="utf-8")
    assert [name for name in IMPORTERS if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize("style", ALPACA)
@pytest.mark.parametrize("more", ["", '3, 1 {x} "y"'])
def test_prompt_formats_as_templates(style, more):
    """The text is that of the format, and the answer with the end of the document is what is trained on."""
    with_input, without_input = ALPACA[style]
    talk = [{"role": "user", "content": "Sort {z}."}, {"role": "assistant", "content": "1, 3"}]
    talk = [{"role": "system", "content": more}, *talk] if more else talk
    reads = {"form": "instruction", "template": prompt_template(with_input, without_input), "train_on": "assistant"}
    tokenizer = ByteTokenizer()
    (document,) = DocumentEncoder(tokenizer, reads).encode([SourceRecord(talk, "here")])
    ids = document.ids.tolist()
    prompt = (with_input if more else without_input).replace("{input}", more).replace("{instruction}", "Sort {z}.")
    assert bytes(token for token in ids if token < 256).decode() == prompt + "1, 3"
    trained = [token for token, predicted in zip(ids, document.trained, strict=True) if predicted]
    assert bytes(trained[:-1]).decode() == "1, 3" and trained[-1] == tokenizer.eos == ids[-1]


def test_gradients_of_routing_weights_are_noted(tmp_path):
    """xorl passes none unless `train_router` is on."""
    experts = XORL.replace("models/own", "Qwen/Qwen3-30B-A3B")
    assert "routing weights have no gradient" in imported(tmp_path, experts, kind="xorl")[1]
    assert "routing weights" not in imported(tmp_path, XORL, kind="xorl")[1]
    trained = experts.replace("A3B", "A3B, train_router: true", 1)
    assert "routing weights" not in imported(tmp_path, trained, kind="xorl")[1]
    adapted = experts + "lora: {enable_lora: true}\n"
    assert "here adapters of earlier layers get it" in imported(tmp_path, adapted, kind="xorl")[1]


UNREADABLE = [
    ("c.yml", "a: 1\na: 2\n", "given twice"),
    ("c.yml", "a: !!python/object/apply:os.system ['touch pwned']\n", "not plain YAML"),
    ("c.yml", "a: !own 1\n", "not plain YAML"),
    ("c.yml", "a: &x [*x]\n", "contains itself"),
    ("c.yml", "a:\n\tb: 1\n", "invalid YAML"),
    ("c.yml", "a: [1, 2\n", "invalid YAML"),
    ("c.yml", "a: *nowhere\n", "invalid YAML"),
    ("c.yml", "a: 1\n---\nb: 2\n", "several YAML documents"),
    ("c.yml", "- 1\n- 2\n", "no keys"),
    ("c.yml", "", "no keys"),
    ("c.yml", "? [a]\n: 1\n", "a key that is not a word"),
    ("c.yml", "a: " + "[" * 5000 + "]" * 5000, "nest"),
    ("c.yml", "".join(f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9) if n else 1}]\n" for n in range(9)), "and list"),
    ("c.yml", "a: 0x" + "f" * 9 + "zz: \x00", "invalid YAML"),
    ("c.json", '{"a": 1, "a": 2}', "twice"),
    ("c.json", '{"a": NaN}', "NaN"),
    ("c.json", "[" * 100_000, "nested"),
    ("c.json", '{"a": }', "invalid JSON"),
    ("c.toml", "a = 1\na = 2\n", "invalid TOML"),
    ("c.toml", "[a\n", "invalid TOML"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "words"), UNREADABLE, ids=[f"{n}: {t[:30]!r}" for n, t, _ in UNREADABLE])
def test_files_that_cannot_be_read(tmp_path, monkeypatch, name, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    done = xtrain("import", name, cwd=tmp_path)
    assert done.returncode == 2 and "error[X750]" in done.stderr and words in done.stderr
    assert not (tmp_path / "pwned").exists()


def test_files_that_are_no_configurations(tmp_path):
    (tmp_path / "large.yml").write_text("a: 1\n" * 2_500_000)
    (tmp_path / "latin.yml").write_bytes(b"a: \xff\n")
    for name in ("large.yml", "latin.yml", "nowhere.yml", "."):
        done = xtrain("import", name, cwd=tmp_path)
        assert done.returncode == 2 and "error[X750]" in done.stderr


def test_values_of_yaml(tmp_path):
    (tmp_path / "c.yml").write_text(
        "base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\nrate: 2e-5\nwhole: 1_000\n"
        "day: 2026-01-01\nyes: on\n'q': '2e-5'\n"
    )
    config = read_config(tmp_path / "c.yml")
    assert config.root == {
        "base": {"a": 1, "b": 2}, "more": {"a": 1, "b": 3}, "rate": 2e-5, "whole": 1000, "day": "2026-01-01",
        "yes": True, "q": "2e-5",
    }  # fmt: skip
    assert [config.spans[key].line for key in ("base.a", "more.b", "rate")] == [1, 2, 3]


def test_exit_codes(tmp_path):
    (tmp_path / "good.yml").write_text(AXOLOTL)
    (tmp_path / "less.yml").write_text(AXOLOTL + "relora: true\n")
    (tmp_path / "odd.yml").write_text("a: 1\n")
    good = xtrain("import", "good.yml", "--to", "good.xtrain", cwd=tmp_path)
    assert good.returncode == 0 and (tmp_path / "good.xtrain").exists() and good.stdout == ""
    again = xtrain("import", "good.yml", "--to", "good.xtrain", cwd=tmp_path)
    assert again.returncode == 2 and "--force" in again.stderr
    assert xtrain("import", "good.yml", "--to", "good.xtrain", "--force", cwd=tmp_path).returncode == 0
    printed = xtrain("import", "good.yml", cwd=tmp_path)
    assert printed.returncode == 0 and printed.stdout == (tmp_path / "good.xtrain").read_text()
    assert xtrain("fmt", "--check", "good.xtrain", cwd=tmp_path).returncode == 0
    less = xtrain("import", "less.yml", "--to", "less.xtrain", cwd=tmp_path)
    assert less.returncode == 4 and "error[X752]" in less.stderr and not (tmp_path / "less.xtrain").exists()
    partial = xtrain("import", "less.yml", "--partial", cwd=tmp_path)
    assert partial.returncode == 0 and "warning[W752]" in partial.stderr and "relora = true" in partial.stdout
    odd = xtrain("import", "odd.yml", cwd=tmp_path)
    assert odd.returncode == 2 and "error[X751]" in odd.stderr
    assert "did you mean `axolotl`" in xtrain("import", "odd.yml", "--from", "axolotll", cwd=tmp_path).stderr
    named = xtrain("import", "odd.yml", "--from", "axolotl", cwd=tmp_path)
    assert named.returncode == 4 and "Traceback" not in named.stderr
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert xtrain("import", "good.yml", "--to", "file/x.xtrain", cwd=tmp_path).returncode == 3


@pytest.mark.parametrize(("kind", "text"), [
    ("trl", TRL + "datasets: false\n"),
    ("trl", TRL.replace("1e-3", "0") + "lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {lr_end: x}\n"),
    ("axolotl", AXOLOTL + "num_epochs: 0\nsaves_per_epoch: 2\nmicro_batch_size: 0\nbatch_size: 8\n"),
    ("arctic_training", ARCTIC + "checkpoint: 3\n"),
    ("arctic_training", ARCTIC.replace("9]\"]", "9]\"], train_eval_split: [a, b]")),
    ("kempner_forge", FORGE + "[optimizer]\nname = \"muon\"\nlr = 0\nmuon_adam_lr = 1.0\n"),
    ("xorl", XORL.replace("out}", "out, lr: 0, optimizer: muon, muon_lr: 0, lr_decay_style: cosine}")),
])  # fmt: skip
def test_values_without_a_meaning_break_nothing(tmp_path, kind, text):
    draft, spec = imported(tmp_path, text, "c.toml" if text.startswith("[") else "c.yml", kind)
    assert draft.accounts() and spec.startswith("# Imported from")


def test_with_wrong_types_nothing_breaks(tmp_path):
    """Every key of the base and of the rows, with values of other types."""
    base = AXOLOTL.replace("  - path: data/a.jsonl\n    type: chat_template\n", "")
    keys = {line.partition(":")[0] for row in AXOLOTL_ROWS for line in row[0].splitlines() if line[0].isalpha()}
    values = ["[]", "{}", "[1, a]", "{a: {b: 1}}", "-1", "x y", "true", "1e999", '"\\n\\0"', "12345678901234567890123"]
    for number, key in enumerate(sorted(keys)):
        for value in values if examples.is_long else values[number % 4 :: 4]:
            draft, spec = imported(tmp_path, without(base, {key, "datasets"}) + f"{key}: {value}\n", kind=None) if (
                key != "base_model") else imported(tmp_path, f"sequence_len: 9\n{key}: {value}\n")  # fmt: skip
            assert draft.accounts() and spec.startswith("# Imported from")
