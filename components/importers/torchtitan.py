"""Configurations of torchtitan (TOML, or the JSON that its Python configurations print), of releases 0.1 and 0.2."""

from typing import ClassVar, Final

from xtrain.components.importers._transformers_trainer import share_or_steps
from xtrain.dsl.importing.draft import Draft, identifier
from xtrain.dsl.importing.importer import IMPORTERS, Importer
from xtrain.dsl.schema.component import named
from xtrain.dsl.spec_text import value_text
from xtrain.lazy_attrs import frozen

# Model and flavor → sizes of the published models (arXiv 2407.21783, table 3; Qwen3's config.json).
_SIZES: Final = {
    ("llama3", "debugmodel"): "dim=256 layers=6 heads=16 kv_heads=16 ffn=768 rope_theta=500000",
    ("llama3", "8B"): "dim=4096 layers=32 heads=32 kv_heads=8 ffn=14336 rope_theta=500000",
    ("llama3", "70B"): "dim=8192 layers=80 heads=64 kv_heads=8 ffn=28672 rope_theta=500000",
    ("llama3", "405B"): "dim=16384 layers=126 heads=128 kv_heads=8 ffn=53248 rope_theta=500000",
    ("qwen3", "0.6B"): "dim=1024 layers=28 heads=16 kv_heads=8 head_dim=128 ffn=3072 rope_theta=1000000",
    ("qwen3", "1.7B"): "dim=2048 layers=28 heads=16 kv_heads=8 head_dim=128 ffn=6144 rope_theta=1000000",
    ("qwen3", "4B"): "dim=2560 layers=36 heads=32 kv_heads=8 head_dim=128 ffn=9728 rope_theta=1000000",
    ("qwen3", "8B"): "dim=4096 layers=36 heads=32 kv_heads=8 head_dim=128 ffn=12288 rope_theta=1000000",
    ("qwen3", "14B"): "dim=5120 layers=40 heads=40 kv_heads=8 head_dim=128 ffn=17408 rope_theta=1000000",
    ("qwen3", "32B"): "dim=5120 layers=64 heads=64 kv_heads=8 head_dim=128 ffn=25600 rope_theta=1000000",
}
_TIED: Final = (("qwen3", "0.6B"), ("qwen3", "1.7B"), ("qwen3", "4B"))
_EPS: Final = {"llama3": 1e-5, "qwen3": 1e-6}
_ACROSS: Final = "rows are cut from one stream of tokens, across documents that see each other; here they do not"
_RATE: Final = "its warm-up of W steps begins with 1 / (W + 1) of the peak; here step s has s / W"


@IMPORTERS.register()
@frozen
class TorchtitanImporter(Importer):
    """Configurations of torchtitan."""

    title = "torchtitan"
    marks = ("model.name|model.flavor", "training.seq_len|training.steps|training.local_batch_size|training.batch_size")
    settings: ClassVar = {
        "optimizer": "training.max_norm",
        "parallel.fsdp": "parallelism.fsdp_reshard_after_forward training.enable_cpu_offload "
        "training.mixed_precision_reduce",
        "checkpoint": "checkpoint.async_mode checkpoint.keep_latest_k",
    }
    without_meaning: ClassVar = {
        "folders and texts of the program": (
            "job.dump_folder job.description job.print_config job.save_config_file job.print_args job.config_file "
            "checkpoint.folder profiling.save_* profiling.profile_freq profiling.profiler_* comm.save_traces_* "
            "metrics.save_* metrics.log_dir metrics.log_rank* model.print_after_conversion"
        ),
        "kernels and memory; xtrain chooses its own": (
            "optimizer.implementation training.gc_freq training.gc_debug memory_estimation memory_estimation.* "
            "compile.backend activation_checkpoint.early_stop activation_checkpoint.memory_budget "
            "activation_checkpoint.visualize* activation_checkpoint.preserve_rng_state "
            "activation_checkpoint.determinism_check activation_checkpoint.debug "
            "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
        ),
        "communication and its limits": "comm.* parallelism.expert_tensor_parallel_degree experimental.custom_*",
        "a run's last checkpoint has all, and its weights apart": (
            "checkpoint.last_save_model_only checkpoint.last_save_in_hf checkpoint.export_dtype "
            "checkpoint.enable_first_step_checkpoint checkpoint.create_seed_checkpoint checkpoint.exclude_from_loading"
        ),
        "the sequence is sharded between blocks with tp": "parallelism.disable_sequence_parallel",
    }
    lacking: ClassVar = {
        "write `compute = fp8 { … }`": "quantize* float8* mx* model.converters",
        "it is a checkpoint of torchtitan": (
            "checkpoint.initial_load_path checkpoint.load_step checkpoint.initial_load_model_only "
            "checkpoint.initial_load_in_hf*"
        ),
        "write `every 1000 steps profile`": "profiling.enable_profiling profiling.enable_memory_snapshot",
        "the batches of the pipeline follow from `batch`": (
            "parallelism.pipeline_parallel_microbatch_size parallelism.pipeline_parallel_split_points "
            "parallelism.module_fqns_per_model_part parallelism.pipeline_parallel_layers_per_stage "
            "parallelism.pipeline_parallel_first_stage_less_layers "
            "parallelism.pipeline_parallel_last_stage_less_layers parallelism.pipeline_parallel_schedule_csv"
        ),
        "its own hooks": "experimental.custom_import experimental.custom_args_module job.custom_config_module",
        "TorchFT is `stack = torchft`": "fault_tolerance.enable",
    }

    kind: str = named("torchtitan")

    def write(self, draft: Draft) -> None:
        draft.name_experiment()
        seed = "training.seed" if draft.has("training.seed") else "debug.seed"
        draft.set("experiment.seed", draft.number(seed, 0), seed)
        steps = draft.number("training.steps", 10_000)
        draft.set("experiment.budget", None, "training.steps", text=share_or_steps(steps))
        _write_model(draft)
        _write_data(draft)
        _write_optimizer(draft)
        _write_schedule(draft)
        _write_precision(draft)
        _write_ranks(draft)
        _write_ticks(draft)
        draft.meaningless("fault_tolerance.*", "off")


def _write_model(draft: Draft) -> None:
    chosen = (draft.text("model.name", "llama3"), draft.text("model.flavor", "debugmodel"))
    sizes = _SIZES.get(chosen)
    if sizes is None:
        draft.missing("model.name model.flavor", "xtrain does not know its sizes; write `model` with them")
    else:
        draft.label("model", "llama" if chosen[0] == "llama3" else chosen[0], "model.name model.flavor")
        for entry in sizes.split():
            name, _, value = entry.partition("=")
            draft.set(f"model.{name}", None, "model.flavor", text=value)
        draft.set("model.norm_eps", _EPS[chosen[0]], "model.flavor")
        if chosen in _TIED:
            draft.set("model.tie_embeddings", True, "model.flavor")
        draft.note("initial weights have other standard deviations by layer; here all have init_std")
    for key in ("model.hf_assets_path", "model.tokenizer_path"):
        if draft.has(key):
            draft.label("tokenizer", value_text(draft.text(key)), key)
            break
    else:
        draft.label("tokenizer", '"./tests/assets/tokenizer"', "")


def _write_data(draft: Draft) -> None:
    for part, base, usual in (("training", "", "c4_test"), ("validation", "validation", "c4_validation")):
        if base and not (draft.get("validation.enable") or draft.get("validation.enabled")):
            draft.meaningless("validation.*", "no evaluation is made")
            continue
        kind, path = draft.text(f"{part}.dataset", usual), draft.text(f"{part}.dataset_path")
        name = base or identifier(kind, "data")
        keys = f"{part}.dataset {part}.dataset_path"
        if kind in ("c4", "c4_validation"):
            split = ', split = "validation"' if base else ""
            text = f'huggingface("{path or "allenai/c4"}", config = "en"{split})'
            draft.set(f"dataset.{name}.source", None, keys, text=text)
        elif kind == "c4_test" or path:
            files = (path or "tests/assets/c4_test").rstrip("/")
            files = files if files.endswith((".json", ".jsonl")) else f"{files}/*.json"
            draft.set(f"dataset.{name}.source", None, keys, text=f"jsonl({value_text(files)})")
        else:
            draft.missing(keys, "a dataset of torchtitan's own code")
            continue
        if base:
            draft.set(f"dataset.{name}.holdout", None, "validation.enable validation.enabled", text="100%")
            period, count = draft.number("validation.freq", 10), draft.number("validation.steps", -1)
            batches = "none" if count < 1 else str(count)
            text = f"every {share_or_steps(period)} eval {name} {{ batches = {batches} }}"
            draft.statements.append((text, "validation.freq"))
            draft.translated("validation.freq validation.steps")
            draft.meaningless("validation.*", "an evaluation has rows like a step")
    draft.set("batch.sequence", draft.number("training.seq_len", 2048), "training.seq_len")
    micro = "training.local_batch_size" if draft.has("training.local_batch_size") else "training.batch_size"
    draft.set("batch.micro", draft.number(micro, 8), micro)
    total = draft.number("training.global_batch_size", -1)
    if total > 0:
        draft.set("batch.rows", total, "training.global_batch_size")
    draft.same("training.global_batch_size", "the ranks' batches")
    draft.collate = ("to_tensor -> flatten -> shift_tokens -> pack(sequential)", "documents in their order")
    draft.note(_ACROSS)


def _write_optimizer(draft: Draft) -> None:
    name = draft.text("optimizer.name", "AdamW")
    draft.label("optimizer", "adamw", "optimizer.name" if name == "AdamW" else "")
    draft.missing("optimizer.name", "xtrain has no such optimizer; the spec has AdamW")
    draft.set("optimizer.lr", draft.number("optimizer.lr", 8e-4), "optimizer.lr")
    decay = draft.number("optimizer.weight_decay", 0.1)
    draft.set("optimizer.weight_decay", decay, "optimizer.weight_decay")
    if decay:
        draft.set("group.embed_tokens.weight_decay", decay, "", "it decays all parameters")
        draft.note("norms decay too; here they do not")
    draft.set("optimizer.betas", [draft.number("optimizer.beta1", 0.9), draft.number("optimizer.beta2", 0.95)],
              "optimizer.beta1 optimizer.beta2")  # fmt: skip
    draft.set("optimizer.eps", draft.number("optimizer.eps", 1e-8), "optimizer.eps")
    draft.unless_off("optimizer.early_step_in_backward", "the optimizer steps after the backward")


def _write_schedule(draft: Draft) -> None:
    shape = draft.text("lr_scheduler.decay_type", "linear")
    ratio = draft.get("lr_scheduler.decay_ratio")
    kind = "wsd" if isinstance(ratio, int | float) and not isinstance(ratio, bool) else shape
    if kind not in ("wsd", "linear", "cosine"):
        kind = "wsd"
        ratio = 1.0
    draft.label("scheduler", kind, "lr_scheduler.decay_type")
    warmup = draft.number("lr_scheduler.warmup_steps", draft.number("training.warmup_steps", 200))
    draft.set("scheduler.warmup", None, "lr_scheduler.warmup_steps training.warmup_steps", text=f"{warmup} steps")
    if kind == "wsd":
        draft.known("scheduler", "lr_scheduler.decay_ratio")
        draft.set("scheduler.shape", None, "lr_scheduler.decay_type", text=shape)
    word = "min_lr_factor" if draft.has("lr_scheduler.min_lr_factor") else "lr_min"
    draft.set("scheduler.floor", None, f"lr_scheduler.{word}",
              text=f"{100 * draft.number(f'lr_scheduler.{word}', 0):.10g}%")  # fmt: skip
    draft.note(_RATE)


def _write_precision(draft: Draft) -> None:
    param = draft.text("training.mixed_precision_param", "bfloat16")
    if param in ("bfloat16", "float32"):
        draft.set("precision.compute", None, "training.mixed_precision_param",
                  text="bf16" if param == "bfloat16" else "fp32")  # fmt: skip
    if draft.text("training.dtype", "float32") == "bfloat16":
        draft.set("precision.params", None, "training.dtype", text="bf16")
    draft.same("training.dtype", "fp32")
    for key in ("training.deterministic", "debug.deterministic"):
        if draft.get(key):
            draft.set("precision.deterministic", True, key)
        draft.same(key, "off")
    mode, option = draft.text("activation_checkpoint.mode", "selective"), "activation_checkpoint.selective_ac_option"
    if mode == "selective" and draft.text(option, "2").isdigit():
        draft.label("activation", "full", "activation_checkpoint.mode")
        draft.set("activation.every", int(draft.text(option, "2")), option)
    elif mode in ("full", "selective"):
        draft.label("activation", mode, f"activation_checkpoint.mode {option}")
    if mode == "none":
        draft.same("activation_checkpoint.mode", "off")
    draft.missing("activation_checkpoint.mode", "blocks are recomputed in full, selectively, or not")
    draft.meaningless(option, "nothing is recomputed selectively")
    if draft.get("compile.enable") or draft.get("training.compile"):
        draft.label("compile", "", "compile.enable training.compile")
    draft.same("compile.enable training.compile", "off")
    draft.meaningless("compile.components", "blocks are compiled")


def _write_ranks(draft: Draft) -> None:
    shards = draft.number("parallelism.data_parallel_shard_degree", -1)
    draft.label("parallel.fsdp", "auto" if shards < 1 else str(shards), "parallelism.data_parallel_shard_degree")
    replicas = draft.number("parallelism.data_parallel_replicate_degree", 1)
    draft.set("parallel.fsdp.replicate", replicas, "parallelism.data_parallel_replicate_degree")
    for axis, word in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        key = f"parallelism.{word}_parallel_degree"
        size = draft.number(key, 1)
        if size > 1:
            draft.label(f"parallel.{axis}", str(size), key)
        draft.same(key, "one rank")
    if draft.number("parallelism.pipeline_parallel_degree", 1) > 1:
        draft.known("parallel.pp", "parallelism.pipeline_parallel_schedule")
    draft.meaningless("parallelism.pipeline_parallel_schedule", "no pipeline")
    if draft.number("parallelism.tensor_parallel_degree", 1) > 1:
        draft.set("parallel.tp.overlap", bool(draft.get("parallelism.enable_async_tensor_parallel", False)),
                  "parallelism.enable_async_tensor_parallel")  # fmt: skip
        draft.set("parallel.tp.loss", not draft.get("parallelism.disable_loss_parallel", False),
                  "parallelism.disable_loss_parallel")  # fmt: skip
    words = "parallelism.enable_async_tensor_parallel parallelism.disable_loss_parallel"
    draft.meaningless(words, "no tensor parallel")
    draft.meaningless("parallelism.context_parallel_rotate_method parallelism.enable_compiled_autograd",
                      "how ranks communicate")  # fmt: skip


def _write_ticks(draft: Draft) -> None:
    period = draft.number("metrics.log_freq", 10)
    draft.statements.append((f"every {share_or_steps(period)} log", "metrics.log_freq"))
    draft.translated("metrics.log_freq")
    word = "enable_checkpoint" if draft.has("checkpoint.enable_checkpoint") else "enable"
    if draft.get(f"checkpoint.{word}"):
        interval = draft.number("checkpoint.interval", 500)
        draft.statements.append((f"every {share_or_steps(interval)} checkpoint", "checkpoint.interval"))
        draft.translated(f"checkpoint.{word} checkpoint.interval")
        if not draft.has("checkpoint.keep_latest_k"):
            draft.set("checkpoint.keep", 10)
    else:
        draft.set("checkpoint.enabled", False, f"checkpoint.{word}")
        draft.meaningless("checkpoint.*", "no checkpoints are saved")
    if draft.get("metrics.enable_tensorboard"):
        draft.set("log.tensorboard", True, "metrics.enable_tensorboard")
    if draft.get("metrics.enable_wandb"):
        draft.set("log.wandb.project", "torchtitan", "metrics.enable_wandb")
    draft.same("metrics.enable_tensorboard metrics.enable_wandb", "off")
    draft.meaningless("metrics.disable_color_printing", "colors of the program's own output")
