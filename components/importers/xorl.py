"""Configurations of xorl's local trainer (YAML)."""

from typing import Any, ClassVar, Final

from xtrain.components.importers._transformers_trainer import (
    LAST_STEP,
    NAMES_EXPERTS,
    module_names,
    names,
    share_or_steps,
)
from xtrain.dsl.importing.accounts import is_off
from xtrain.dsl.importing.draft import Draft, identifier
from xtrain.dsl.importing.importer import IMPORTERS, Importer
from xtrain.dsl.schema.component import named
from xtrain.dsl.spec_text import value_text
from xtrain.lazy_attrs import frozen

_AXES: Final = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "ep": "expert_parallel_size"}


@IMPORTERS.register()
@frozen
class XorlImporter(Importer):
    """Configurations of xorl."""

    title = "xorl"
    marks = ("model.model_path|model.config_path", "train.lr|train.output_dir|train.micro_batch_size", "data.datasets")
    without_meaning: ClassVar = {
        "kernels and memory; xtrain chooses its own": (
            "model.attn_implementation model.flash_attention_deterministic model.moe_implementation model.ep_dispatch "
            "model.deepep_* train.ce_mode train.ce_num_chunks train.empty_cache_steps train.gc_steps "
            "train.compile_dynamic_shapes train.init_device train.load_weights_mode train.enable_full_shard "
            "train.enable_reentrant model.rmsnorm_mode train.activation_gpu_limit "
            "train.activation_offload_prefetch_count"
        ),
        "how the data is read and stored": (
            "data.select_columns data.dataset_prepared_path data.dataloader_pin_memory data.dataloader_prefetch_factor "
            "data.dataloader_drop_last data.pad_to_multiple_of data.sample_packing_group_size "
            "data.sample_packing_mp_start_method data.sample_packing_bin_size data.dataset_num_proc "
            "data.fa_max_length_bucket data.sample_packing_sequentially data.eval_sample_packing"
        ),
        "xorl has no evaluation loop": "data.test_datasets data.val_set_size",
        "placement of ranks on nodes": "train.ep_intranode train.ep_outside",
        "records of a run are xtrain's own": "train.log_format",
        "the run's folder is `workspace`": "train.output_dir",
        "checkpoints are in xtrain's own format": "train.ckpt_manager train.save_hf_weights lora.save_lora_only",
        "the routing of a step is not replayed": "model.record_routing_weights",
    }
    lacking: ClassVar = {
        "codes in this format are not there; write `base nf4`": (
            "lora.enable_qlora lora.quant_format lora.quant_group_size"
        ),
        "a quantized base is not merged": "lora.merge_lora_interval lora.reset_optimizer_on_merge",
        "teachers are written `loss distill`": "distill distill.*",
        "sizes of a model's folder cannot be changed": "model.foundation.*",
        "it is a checkpoint of xorl": "train.load_checkpoint_path",
    }

    kind: str = named("xorl")

    def write(self, draft: Draft) -> None:
        draft.name_experiment()
        draft.set("experiment.seed", draft.number("train.seed", 42), "train.seed")
        steps, epochs = draft.number("train.max_steps", 0), draft.number("train.num_train_epochs", 1)
        if steps > 0:
            draft.set("experiment.budget", None, "train.max_steps", text=share_or_steps(steps))
            draft.meaningless("train.num_train_epochs", "max_steps is the length")
        else:
            draft.same("train.max_steps", "no limit")
            text = f"{epochs} {'epoch' if epochs == 1 else 'epochs'}"
            draft.set("experiment.budget", None, "train.num_train_epochs", text=text)
            draft.note(LAST_STEP)
        model = "model.model_path" if draft.has("model.model_path") else "model.config_path"
        names(draft, model)
        if model == "model.config_path":
            draft.set("model.weights", None, "", "without model_path weights are drawn", text="none")
        names(draft, "model.tokenizer_path" if draft.has("model.tokenizer_path") else model, model=False)
        draft.meaningless("model.config_path", "model_path has its configuration")
        adapter = bool(draft.get("lora.enable_lora") or draft.get("lora.enable_qlora"))
        _write_adapter(draft, adapter)
        _write_data(draft)
        _write_optimizer(draft, adapter)
        _write_precision(draft, adapter)
        _write_ranks(draft)
        _write_ticks(draft)


def _write_adapter(draft: Draft, adapter: bool) -> None:
    draft.same("lora.enable_lora lora.enable_qlora", "off") if not adapter else draft.translated("lora.enable_lora")
    if not adapter:
        draft.meaningless("lora.*", "no adapter is trained")
        return
    draft.label("adapter", "lora", "lora.enable_lora")
    for name in ("rank", "alpha"):
        draft.set(f"adapter.{name}", draft.number(f"lora.lora_{name}", 16), f"lora.lora_{name}")
    targets = module_names(draft.get("lora.lora_target_modules", ["all"]))
    if targets is None:
        draft.missing("lora.lora_target_modules", "`targets` are parts of names, not regular expressions")
        targets = ["all_linear"]
    separate = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    if any(name in separate for name in targets):
        draft.note("joint matrices have one adapter there; here each of their parts has its own")
    parts = [part for name in targets for part in separate.get(name, [name])]
    draft.set("adapter.targets", parts, "lora.lora_target_modules")
    steps, key = int(draft.number("lora.merge_lora_interval", 0)), "lora.merge_lora_interval"
    if steps > 0 and not draft.get("lora.enable_qlora"):
        state = "reset" if draft.get("lora.reset_optimizer_on_merge") else "keep"
        draft.statements.append((f"every {steps} steps merge {{ state = {state} }}", key))
        draft.translated(f"{key} lora.reset_optimizer_on_merge")


def _write_data(draft: Draft) -> None:
    entries: Any = draft.get("data.datasets", [])
    taken: list[str] = []
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        key = f"data.datasets.{number}"
        if not isinstance(entry, dict):
            draft.missing(key, "a mapping is expected")
            continue
        path = draft.text(f"{key}.path")
        name = identifier(path, "data")
        name = name if name not in taken else f"{name}_{len(taken) + 1}"
        taken.append(name)
        if path == "dummy":
            length = draft.number(f"{key}.max_seq_len", 4096)
            text = f"synthetic(length = {length}, spread = 0)"
            draft.set(f"dataset.{name}.source", None, f"{key}.path {key}.max_seq_len {key}.type", text=text)
            draft.meaningless(f"{key}.num_samples {key}.split {key}.name", "the data is made up")
            continue
        arguments = [value_text(path)]
        for word, setting in (("name", "config"), ("split", "split")):
            if draft.has(f"{key}.{word}") and draft.text(f"{key}.{word}") != "train":
                arguments.append(f"{setting} = {value_text(draft.text(f'{key}.{word}'))}")
        source = f"huggingface({', '.join(arguments)})"
        files = draft.get(f"{key}.data_files")
        if draft.text(f"{key}.ds_type") == "json" or isinstance(files, list | str):
            given = files if isinstance(files, list) else [files or path]
            source = f"jsonl({', '.join(value_text(str(file)) for file in given)})"
        keys = " ".join(f"{key}.{word}" for word in ("path", "name", "split", "data_files", "ds_type", "type"))
        draft.set(f"dataset.{name}.source", None, keys, text=source)
        draft.set(f"dataset.{name}.tokens", "input_ids", "", "its columns")
        draft.set(f"dataset.{name}.mask", "labels", "", "labels, -100 where nothing is predicted")
        draft.meaningless(f"{key}.max_seq_len {key}.trust_remote_code", "a document may be as long as a row")
        draft.unless_off(f"{key}.shards {key}.shards_idx {key}.num_samples", "write the part of the data into files")
    for name in taken if len(taken) > 1 else ():
        draft.set(f"mixture.{name}", None, "", "every document once an epoch", text="1 epoch")
    draft.set("batch.sequence", draft.number("data.sample_packing_sequence_len", 32_000),
              "data.sample_packing_sequence_len")  # fmt: skip
    method = draft.text("data.sample_packing_method", "sequential")
    if method in ("sequential", "multipack"):
        draft.collate = (f"to_tensor -> flatten -> shift_tokens -> pack({method})", "data.sample_packing_method")
        draft.translated("data.sample_packing_method")
    for name, key, usual in (("micro", "train.micro_batch_size", 1), ("workers", "data.dataloader_num_workers", 8),
                             ("accumulate", "train.gradient_accumulation_steps", 1)):  # fmt: skip
        draft.set(f"batch.{name}", draft.number(key, usual), key)
    draft.same("data.shuffle_merged_datasets data.shuffle_before_merging_datasets", "rows are drawn in random order")


def _write_optimizer(draft: Draft, adapter: bool) -> None:
    name = draft.text("train.optimizer", "adamw")
    kind = {"adamw": "adamw", "anyprecision_adamw": "adamw", "sgd": "sgd", "muon": "muon"}.get(name, "")
    draft.label("optimizer", kind or "adamw", "train.optimizer" if kind else "")
    draft.missing("train.optimizer", "xtrain has no such optimizer; the spec has AdamW")
    rate = draft.number("train.lr", 5e-5)
    peak = draft.number("train.muon_lr", 0.02) if kind == "muon" else rate
    draft.set("optimizer.lr", peak, "train.muon_lr" if kind == "muon" else "train.lr")
    if kind == "muon":
        draft.set("optimizer.adamw_lr", None, "train.lr", text=f"{rate / (peak or 1):.10g}")
        draft.set("optimizer.momentum", draft.number("train.muon_momentum", 0.95), "train.muon_momentum")
        draft.set("optimizer.nesterov", bool(draft.get("train.muon_nesterov", True)), "train.muon_nesterov")
        draft.set("optimizer.ns_steps", draft.number("train.muon_ns_steps", 5), "train.muon_ns_steps")
        draft.set("optimizer.scale", None, "train.muon_adjust_lr_fn",
                  text=draft.text("train.muon_adjust_lr_fn", "original"))  # fmt: skip
        draft.note("each rank orthogonalizes its shard of a matrix there unless it has full_gradient; here whole ones")
    draft.meaningless("train.muon_*", "how Muon is computed" if kind == "muon" else "the optimizer is not muon")
    decay = draft.number("train.weight_decay", 0)
    draft.set("optimizer.weight_decay", decay, "train.weight_decay")
    if decay and not adapter:
        draft.set("group.embed_tokens.weight_decay", decay, "", "it decays all parameters")
        draft.note("norms and biases decay too; here they do not")
    draft.known("optimizer", "train.max_grad_norm")
    if draft.get("train.cautious_weight_decay"):
        draft.set("optimizer.cautious_decay", True, "train.cautious_weight_decay")
    draft.same("train.cautious_weight_decay", "off")
    if draft.text("train.optimizer_dtype", "fp32") == "bf16" and kind in ("adamw", "muon"):
        draft.set("optimizer.states", None, "train.optimizer_dtype", text="bf16")
    draft.translated("train.optimizer_dtype")
    style = draft.text("train.lr_decay_style", "constant")
    if style in ("constant", "linear", "cosine"):
        draft.label("scheduler", style, "train.lr_decay_style")
        ratio = draft.number("train.lr_warmup_ratio", 0)
        warmup = f"{100 * ratio:.10g}%" if ratio else "0 steps"
        draft.set("scheduler.warmup", None, "train.lr_warmup_ratio", text=warmup)
        if style != "constant":
            share = draft.number("train.lr_min", 1e-7) / (rate or 1)
            draft.set("scheduler.floor", None, "train.lr_min", text=f"{100 * min(share, 1):.10g}%")
    if draft.number("train.lr_decay_ratio", 1) == 1:
        draft.same("train.lr_decay_ratio", "the rate falls until the end")
    draft.missing("train.lr_decay_ratio", "the rate falls until the end of the run")
    if not draft.number("train.lr_start", 0):
        draft.same("train.lr_start", "a warm-up from 0")
    draft.meaningless("train.lr_min", "the rate is constant")


def _write_precision(draft: Draft, adapter: bool) -> None:
    if draft.get("train.enable_mixed_precision", True):
        draft.set("precision.compute", None, "train.enable_mixed_precision", text="bf16")
        if draft.get("train.skip_param_upcast") and not adapter:
            draft.set("precision.params", None, "train.skip_param_upcast", text="bf16")
        draft.meaningless("train.skip_param_upcast", "frozen matrices have the format of the computation")
    draft.same("train.enable_mixed_precision train.skip_param_upcast", "off")
    _write_recomputation(draft)
    if draft.get("train.enable_compile"):
        draft.label("compile", "", "train.enable_compile")
    if draft.get("train.enable_full_determinism"):
        draft.set("precision.deterministic", True, "train.enable_full_determinism")
    draft.same("train.enable_compile train.enable_full_determinism", "off")
    _write_routers(draft, adapter)


def _write_recomputation(draft: Draft) -> None:
    keys = "train.enable_gradient_checkpointing train.gradient_checkpointing_method train.moe_checkpoint_method"
    method = draft.text("train.gradient_checkpointing_method", "recompute_full_layer")
    offloads = draft.get("train.enable_activation_offload")
    if (draft.get("train.enable_gradient_checkpointing", True) and method != "no_recompute") or offloads:
        draft.label("activation", "full", f"{keys} train.enable_activation_offload")
        if offloads:
            draft.note("it moves saved activations to host memory; here blocks are recomputed, with the same numbers")
    draft.same(f"{keys} train.enable_activation_offload", "off")


def _write_routers(draft: Draft, adapter: bool) -> None:
    """Account for routing weights, which have no gradient in xorl unless `train_router` is on."""
    trained = not is_off(draft.get("model.train_router", False))
    path = draft.text("model.model_path") or draft.text("model.config_path")
    if trained and not adapter:
        draft.same("model.train_router", "routers are trained")
    elif not trained and NAMES_EXPERTS.search(path.lower()) and (adapter or not draft.has("model.train_router")):
        who = "adapters of earlier layers get it" if adapter else "routers are trained"
        draft.note(f"routing weights have no gradient there, as `train_router` is off; here {who}")
    if adapter:
        draft.meaningless("model.train_router model.freeze_router", "an adapter leaves routers frozen")
    draft.unless_off("model.freeze_router", "write `frozen` of `model`")
    if draft.has("model.train_router"):
        why = "routing weights have a gradient here; without it, routers and layers before them get another one"
        draft.missing("model.train_router", why)


def _write_ranks(draft: Draft) -> None:
    if draft.text("train.data_parallel_mode", "fsdp2") in ("fsdp1", "fsdp2"):
        draft.same("train.data_parallel_mode", "`fsdp`")
    draft.missing("train.data_parallel_mode", "see `xtrain docs parallel.stack`")
    shards = draft.number("train.data_parallel_shard_size", -1)
    draft.label("parallel.fsdp", str(shards) if shards > 0 else "auto", "train.data_parallel_shard_size")
    draft.set("parallel.fsdp.replicate", draft.number("train.data_parallel_replicate_size", 1),
              "train.data_parallel_replicate_size")  # fmt: skip
    if isinstance(draft.get("train.reshard_after_forward"), bool):
        draft.set("parallel.fsdp.reshard", draft.get("train.reshard_after_forward"), "train.reshard_after_forward")
    reduced = draft.text("train.fsdp_reduce_dtype", "fp32")
    if reduced in ("fp32", "bf16"):
        draft.set("parallel.fsdp.reduce", None, "train.fsdp_reduce_dtype", text=reduced)
    for axis, word in _AXES.items():
        if (size := draft.number(f"train.{word}", 1)) > 1:
            draft.label(f"parallel.{axis}", str(size), f"train.{word}")
        draft.same(f"train.{word}", "one rank")
    ulysses, ring = draft.number("train.ulysses_parallel_size", 1), draft.number("train.ringattn_parallel_size", 1)
    if ulysses * ring > 1:
        draft.label("parallel.cp", str(ulysses * ring), "train.ulysses_parallel_size train.ringattn_parallel_size")
        draft.set("parallel.cp.ulysses", ulysses, "train.ulysses_parallel_size")
        draft.set("parallel.cp.ring", ring, "train.ringattn_parallel_size")
    draft.same("train.ulysses_parallel_size train.ringattn_parallel_size", "one rank")
    if draft.number("train.pipeline_parallel_size", 1) > 1:
        draft.known("parallel.pp", "train.pipeline_parallel_schedule")
        draft.set("parallel.pp.stages_per_rank", draft.number("train.pipeline_parallel_virtual_stages", 1),
                  "train.pipeline_parallel_virtual_stages") if draft.has(
            "train.pipeline_parallel_virtual_stages") else None  # fmt: skip
    draft.meaningless("train.pipeline_parallel_schedule train.pipeline_parallel_virtual_stages", "no pipeline")


def _write_ticks(draft: Draft) -> None:
    every = draft.number("train.save_steps", 0)
    if every:
        draft.statements.append((f"every {share_or_steps(every)} checkpoint", "train.save_steps"))
    draft.translated("train.save_steps")
    if epochs := draft.number("train.save_epochs", 1):
        period, key = f"{epochs} {'epoch' if epochs == 1 else 'epochs'}", "train.save_epochs"
        draft.statements.append((f"every {period} checkpoint", key if draft.has(key) else "xorl's default"))
    draft.translated("train.save_epochs")
    if draft.get("train.use_wandb"):
        for name in ("project", "name"):
            if draft.has(f"train.wandb_{name}"):
                draft.set(f"log.wandb.{name}", draft.text(f"train.wandb_{name}"), f"train.wandb_{name}")
        tags = draft.get("train.wandb_tags", [])
        if isinstance(tags, list) and tags:
            draft.set("log.wandb.tags", [str(tag) for tag in tags], "train.wandb_tags")
        draft.translated("train.use_wandb")
    draft.same("train.use_wandb", "off")
    draft.meaningless("train.wandb_*", "W&B is off")
