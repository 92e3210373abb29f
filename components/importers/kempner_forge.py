"""Configurations of KempnerForge (TOML): pre-training of a transformer that the file describes."""

from typing import Any, ClassVar

from xtrain.components.importers._transformers_trainer import FROM_ZERO, share_or_steps
from xtrain.dsl.importing.draft import Draft, identifier
from xtrain.dsl.importing.importer import IMPORTERS, Importer
from xtrain.dsl.schema.component import named
from xtrain.dsl.spec_text import value_text
from xtrain.lazy_attrs import frozen


@IMPORTERS.register()
@frozen
class KempnerForgeImporter(Importer):
    """Configurations of KempnerForge."""

    title = "KempnerForge"
    whole: ClassVar = False
    marks = (
        "model.dim|model.n_layers",
        "train.batch_size|train.max_steps|train.grad_accum_steps|train.seq_len",
        "!training",
        "!job",
    )
    settings: ClassVar = {
        "model": "model.dim model.n_layers model.n_heads model.n_kv_heads model.vocab_size model.rope_theta "
        "model.tie_embeddings model.qk_norm model.init_std",
        "optimizer": "train.grad_clip_norm",
        "loss": "train.z_loss_weight",
    }
    without_meaning: ClassVar = {
        "rows have `batch { sequence }` positions": "model.max_seq_len",
        "the model is a transformer": "model.model_type",
        "kernels and memory; xtrain chooses its own": "model.sdpa_backend optimizer.fused train.ce_chunk_size "
        "model.moe_packed_experts",
        "how the data is read; the data is the same": "data.pin_memory data.prefetch_factor data.hf_streaming",
        "communication is xtrain's": "distributed.nccl_timeout_sec distributed.backend "
        "train.nccl_health_check_interval "
        "train.shutdown_timeout_sec",
        "the run's folder is `workspace`": "checkpoint.dir metrics.tensorboard_dir profiling.trace_dir",
        "no profile is made": "profiling.start_step profiling.end_step",
        "images are not read": "data.hf_dataset_image_field data.hf_dataset_prompt_field data.hf_image_size",
        "the order of data follows from the seed": "train.data_seed",
        "an export says its format": "checkpoint.export_dtype checkpoint.ignore_freeze_mismatch",
        "one schedule of each kind": "scheduler.rex_alpha optimizer.schedule_free_warmup_steps",
    }
    lacking: ClassVar = {
        "images and videos are not read": "vlm vlm.* vision_encoder vision_encoder.* adapter adapter.* video video.*",
        "experts are routed and balanced by other formulas here: write a family with experts": "model.num_experts",
        "write `every 1000 steps profile`": "profiling.enable",
        "checkpoints at powers of two are not there": "checkpoint.dyn_ckpt_window*",
        "it is a checkpoint of KempnerForge": "checkpoint.load_path checkpoint.exclude_from_loading",
        "write `phase NAME { … }`": "data.phases data.anneal_start_step data.anneal_weights",
        "each run has an id of its own in W&B": "metrics.wandb_run_id",
    }

    kind: str = named("kempner_forge")

    def write(self, draft: Draft) -> None:
        draft.name_experiment()
        draft.set("experiment.seed", draft.number("train.seed", 42), "train.seed")
        steps = draft.number("train.max_steps", 100_000)
        draft.set("experiment.budget", None, "train.max_steps", text=share_or_steps(steps))
        _write_model(draft)
        _write_data(draft)
        draft.set("batch.sequence", draft.number("train.seq_len", 2048), "train.seq_len")
        draft.set("batch.micro", draft.number("train.batch_size", 8), "train.batch_size")
        draft.set("batch.accumulate", draft.number("train.grad_accum_steps", 1), "train.grad_accum_steps")
        draft.set("batch.workers", draft.number("data.num_workers", 4), "data.num_workers")
        _write_optimizer(draft)
        _write_schedule(draft, steps)
        _write_precision(draft)
        _write_ranks(draft)
        _write_ticks(draft)
        if draft.number("train.z_loss_weight", 0):
            draft.label("loss", "cross_entropy", "", "train.z_loss_weight")
        if not draft.get("model.num_experts"):
            draft.meaningless("model.moe_*", "the model has no experts")
        draft.missing("model.moe_*", "experts are routed and balanced by other formulas here")
        if draft.text("train.loss_fn", "cross_entropy").removeprefix("chunked_") == "cross_entropy":
            draft.same("train.loss_fn", "cross-entropy")


def _write_model(draft: Draft) -> None:
    draft.label("model", "llama", "", "pre-norm blocks, RMSNorm, RoPE, SwiGLU")
    dim = draft.number("model.dim", 4096)
    for name, usual in (("n_layers", 32), ("n_heads", 32), ("vocab_size", 32000), ("dim", 4096)):
        if not draft.has(f"model.{name}"):
            setting = {"n_layers": "layers", "n_heads": "heads", "vocab_size": "vocab"}.get(name, name)
            draft.set(f"model.{setting}", usual)
    wide = draft.number("model.ffn_hidden_dim", 0)
    if not wide:
        factor = draft.number("model.ffn_dim_multiplier", 1.0)
        wide = 256 * -(-int(4 * dim * (2 / 3) * factor) // 256)
    draft.set("model.ffn", wide, "model.ffn_hidden_dim model.ffn_dim_multiplier")
    draft.set("model.norm_eps", draft.number("model.norm_eps", 1e-5), "model.norm_eps")
    if draft.text("model.norm_type", "rmsnorm") == "rmsnorm":
        draft.same("model.norm_type", "RMSNorm")
    if draft.text("model.activation", "silu") == "silu":
        draft.same("model.activation", "SwiGLU")
    draft.missing("model.norm_type model.activation", "the blocks of llama have RMSNorm and SwiGLU")
    draft.note("output projections start with a standard deviation divided by √(2 · layers); here all have init_std")


def _write_data(draft: Draft) -> None:
    entries = draft.get("data.datasets", [])
    taken: list[str] = []
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        key = f"data.datasets.{number}"
        if isinstance(entry, dict):
            name = identifier(str(entry.get("name") or entry.get("path") or entry.get("hf_name")), "data")
            taken.append(name)
            _write_source(draft, name, f"{key}.path", f"{key}.hf_name", f"{key}.hf_config")
            draft.set(f"mixture.{name}", draft.number(f"{key}.weight", 1), f"{key}.weight")
            draft.translated(f"{key}.name")
    if not taken:
        name = identifier(draft.text("data.hf_dataset_name") or draft.text("data.dataset_path") or "data", "data")
        _write_source(draft, name, "data.dataset_path", "data.hf_dataset_name", "data.hf_dataset_config")
    if len(taken) > 1 and draft.has("data.mix_temperature"):
        draft.set("mixture.temperature", draft.number("data.mix_temperature", 1), "data.mix_temperature")
    draft.meaningless("data.mix_temperature", "one dataset")
    tokenizer = draft.text("data.tokenizer_path")
    if tokenizer:
        draft.label("tokenizer", value_text(tokenizer), "data.tokenizer_path", "a folder with tokenizer.json")
    if not draft.get("data.pack_sequences"):
        draft.note("rows are cut from one stream of tokens, across documents that see each other; here they do not")
    draft.collate = ("to_tensor -> flatten -> shift_tokens -> pack(sequential)", "documents in their order")
    draft.translated("data.pack_sequences")
    if draft.get("eval.enabled"):
        _write_source(draft, "validation", "eval.dataset_path", "eval.hf_dataset_name", "eval.hf_dataset_config")
        draft.set("dataset.validation.holdout", None, "eval.enabled", text="100%")
        period = share_or_steps(draft.number("eval.interval", 1000))
        count = draft.number("eval.steps", 50)
        draft.statements.append((f"every {period} eval validation {{ batches = {count} }}", "eval"))
        draft.translated("eval.interval eval.steps")
    draft.meaningless("eval.*", "no evaluation is made")


def _write_source(draft: Draft, name: str, path: str, repository: str, config: str) -> None:
    base = path.rpartition(".")[0]
    if draft.has(path) and draft.text(path):
        pattern = draft.text(f"{base}.file_pattern", draft.text("data.file_pattern", "*.npy"))
        files = "/".join((draft.text(path).rstrip("/"), pattern))
        text = f"tokens({value_text(files)})"
        draft.set(f"dataset.{name}.source", None, f"{path} {base}.file_pattern data.file_pattern", text=text)
        draft.meaningless(repository, "the files come first")
    elif draft.has(repository):
        arguments = [value_text(draft.text(repository))]
        arguments += [f"config = {value_text(draft.text(config))}"] if draft.has(config) else []
        split = draft.text(f"{base}.hf_dataset_split", "train" if base != "eval" else "validation")
        arguments += [f"split = {value_text(split)}"] if split != "train" else []
        draft.set(f"dataset.{name}.source", None, f"{repository} {config} {base}.hf_dataset_split",
                  text=f"huggingface({', '.join(arguments)})")  # fmt: skip
        field = draft.text("data.hf_dataset_text_field", "text")
        draft.set(f"dataset.{name}.text", field, "data.hf_dataset_text_field")
    draft.meaningless(f"{path} {base}.file_pattern data.hf_dataset_split data.hf_dataset_text_field data.file_pattern",
                      "another key names the data")  # fmt: skip


def _write_optimizer(draft: Draft) -> None:
    name = draft.text("optimizer.name", "adamw").lower()
    kind = {"adamw": "adamw", "lion": "lion", "muon": "muon", "schedule_free_adamw": "schedule_free"}.get(name, "")
    draft.label("optimizer", kind or "adamw", "optimizer.name" if kind else "")
    draft.missing("optimizer.name", "xtrain has no such optimizer; the spec has AdamW")
    draft.set("optimizer.lr", draft.number("optimizer.lr", 3e-4), "optimizer.lr")
    decay = draft.number("optimizer.weight_decay", 0.1)
    draft.set("optimizer.weight_decay", decay, "optimizer.weight_decay")
    if decay:
        draft.set("group.embed_tokens.weight_decay", decay, "", "embeddings decay too")
    betas: Any = draft.get("optimizer.betas", [0.9, 0.95])
    draft.set("optimizer.betas", betas, "optimizer.betas")
    if kind != "lion":
        draft.set("optimizer.eps", draft.number("optimizer.eps", 1e-8), "optimizer.eps")
    if kind == "muon":
        draft.set("optimizer.momentum", draft.number("optimizer.muon_momentum", 0.95), "optimizer.muon_momentum")
        draft.set("optimizer.ns_steps", draft.number("optimizer.muon_ns_steps", 5), "optimizer.muon_ns_steps")
        rate = draft.number("optimizer.muon_adam_lr", 0)
        if rate and draft.number("optimizer.lr", 3e-4):
            share = rate / draft.number("optimizer.lr", 3e-4)
            draft.set("optimizer.adamw_lr", None, "optimizer.muon_adam_lr", text=f"{share:.10g}")
    draft.meaningless("optimizer.muon_* optimizer.eps", "the optimizer has no such number")


def _write_schedule(draft: Draft, steps: float) -> None:
    name = draft.text("scheduler.name", "cosine").lower()
    kind = {"cosine": "cosine", "linear": "linear", "wsd": "wsd", "constant": "constant"}.get(name, "")
    if name == "none" or not kind:
        if name == "none":
            draft.translated("scheduler.name")
        draft.missing("scheduler.name", "xtrain has no such schedule; the spec has a constant rate")
        draft.meaningless("scheduler.*", "the rate is constant")
        return
    draft.label("scheduler", kind, "scheduler.name")
    warmup = draft.number("scheduler.warmup_steps", 2000)
    draft.set("scheduler.warmup", None, "scheduler.warmup_steps", text=f"{warmup} steps")
    if kind != "constant":
        draft.set("scheduler.floor", None, "scheduler.min_lr_ratio",
                  text=f"{100 * draft.number('scheduler.min_lr_ratio', 0.1):.10g}%")  # fmt: skip
    stable, decay = draft.number("scheduler.stable_steps", 0), draft.number("scheduler.decay_steps", 0)
    if kind == "wsd":
        decay = decay or steps - warmup - stable
        draft.set("scheduler.decay", None, "scheduler.decay_steps scheduler.stable_steps", text=f"{int(decay)} steps")
        draft.set("scheduler.shape", None, "scheduler.wsd_decay_type",
                  text=draft.text("scheduler.wsd_decay_type", "cosine"))  # fmt: skip
    elif decay and decay != steps - warmup:
        draft.missing("scheduler.decay_steps", "the rate falls until the end of the run")
    draft.translated("scheduler.decay_steps")
    draft.meaningless("scheduler.stable_steps scheduler.wsd_decay_type scheduler.min_lr_ratio", "the schedule has none")
    draft.note(FROM_ZERO)


def _write_precision(draft: Draft) -> None:
    name = draft.text("train.mixed_precision", "bf16")
    if name in ("bf16", "fp32"):
        draft.set("precision.compute", None, "train.mixed_precision", text=name)
    elif name == "fp8":
        draft.set("precision.compute", None, "train.mixed_precision", text="fp8")
    draft.missing(
        "train.mixed_precision",
        "without a scale of the loss small gradients are 0; write `compute = fp16`, which has one",
    )
    mode = draft.text("train.activation_checkpointing", "none")
    if mode == "full":
        draft.label("activation", "full", "train.activation_checkpointing")
    elif mode == "selective":
        draft.label("activation", "full", "train.activation_checkpointing", "whole blocks, not attention alone")
    draft.same("train.activation_checkpointing", "off")
    if draft.get("train.compile_model", True):
        draft.label("compile", "", "train.compile_model")
    draft.same("train.compile_model", "off")


def _write_ranks(draft: Draft) -> None:
    shards = draft.number("distributed.dp_shard", -1)
    draft.label("parallel.fsdp", "auto" if shards < 1 else str(shards), "distributed.dp_shard")
    replicas = draft.number("distributed.dp_replicate", 1)
    draft.set("parallel.fsdp.replicate", replicas, "distributed.dp_replicate")
    for axis in ("tp", "pp", "cp", "ep"):
        size = draft.number(f"distributed.{axis}", 1)
        if size > 1:
            draft.label(f"parallel.{axis}", str(size), f"distributed.{axis}")
        draft.same(f"distributed.{axis}", "one rank")
    if draft.number("distributed.pp", 1) > 1:
        draft.set(
            "parallel.pp.schedule", None, "distributed.pp_schedule", text=draft.text("distributed.pp_schedule", "1f1b")
        )
    draft.meaningless("distributed.pp_schedule", "no pipeline")


def _write_ticks(draft: Draft) -> None:
    every = draft.number("metrics.log_interval", 10)
    draft.statements.append((f"every {share_or_steps(every)} log", "metrics.log_interval"))
    draft.translated("metrics.log_interval")
    interval = draft.number("checkpoint.interval", 1000)
    draft.statements.append((f"every {share_or_steps(interval)} checkpoint", "checkpoint.interval"))
    draft.translated("checkpoint.interval")
    keep = draft.number("checkpoint.keep_last_n", 3)
    draft.set("checkpoint.keep", None, "checkpoint.keep_last_n", text=str(keep) if keep > 0 else "none")
    draft.known("checkpoint", "checkpoint.async_mode")
    if draft.get("metrics.enable_wandb"):
        draft.set("log.wandb.project", draft.text("metrics.wandb_project", "kempnerforge"),
                  "metrics.enable_wandb metrics.wandb_project")  # fmt: skip
        if draft.has("metrics.wandb_run_name"):
            draft.set("log.wandb.name", draft.text("metrics.wandb_run_name"), "metrics.wandb_run_name")
    if draft.get("metrics.enable_tensorboard"):
        draft.set("log.tensorboard", True, "metrics.enable_tensorboard")
    draft.same("metrics.enable_wandb metrics.enable_tensorboard", "off")
    draft.meaningless("metrics.wandb_project metrics.wandb_run_name", "W&B is off")
