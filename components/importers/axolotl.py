"""Configurations of axolotl (YAML), as its release 0.18 computes them."""

from typing import ClassVar, Final

from xtrain.components.importers._axolotl_data import is_preference, write_data
from xtrain.components.importers._axolotl_keys import KERNELS, LACKING, WITHOUT_MEANING
from xtrain.components.importers._axolotl_model import write_adapter, write_model, write_precision, write_ranks
from xtrain.components.importers._transformers_trainer import (
    LAST_STEP,
    PER_RANK,
    share_or_steps,
    write_evaluations,
    write_optimizer,
    write_padding,
    write_schedule,
)
from xtrain.dsl.importing.draft import Draft
from xtrain.dsl.importing.importer import IMPORTERS, Importer
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen

_PACKING = (
    "axolotl packs micro_batch_size · sequence_len tokens into one row of attention; here each row has sequence_len"
)
# axolotl-contribs-mit's, with the scale of arXiv 2502.16982.
_OPTIMIZERS = {"muon": ("muon", "norms and biases stay frozen there; here AdamW trains them")}
_PLUGINS = {"cut_cross_entropy": KERNELS, "liger": KERNELS, "kernels": KERNELS, "expert_parallel": KERNELS,
            "swanlab": "`use_swanlab` says whether it is used"}  # fmt: skip


@IMPORTERS.register()
@frozen
class AxolotlImporter(Importer):
    """Configurations of axolotl."""

    title = "axolotl"
    marks = (
        "base_model",
        "datasets.0.type|pretraining_dataset.0.path|datasets.0.path",
        "sequence_len|num_epochs|micro_batch_size",
    )
    settings: ClassVar = {
        "batch": "micro_batch_size gradient_accumulation_steps dataloader_num_workers neftune_noise_alpha",
        "experiment": "seed",
    }
    without_meaning: ClassVar = WITHOUT_MEANING
    lacking: ClassVar = LACKING

    kind: str = named("axolotl")

    def write(self, draft: Draft) -> None:
        adapter = draft.text("adapter").lower()
        draft.name_experiment()
        if not draft.has("seed"):
            draft.set("experiment.seed", 42)
        _write_length(draft)
        write_model(draft)
        write_adapter(draft, adapter)
        write_data(draft)
        _write_batch(draft)
        write_padding(draft)
        write_optimizer(draft, "optimizer", "adamw_torch_fused", full=not adapter, own=_OPTIMIZERS)
        _write_schedule(draft)
        write_precision(draft, adapter)
        write_ranks(draft)
        _write_loss(draft, adapter)
        _write_ticks(draft)
        _write_trackers(draft)
        _write_plugins(draft)
        draft.note(PER_RANK)


def _write_length(draft: Draft) -> None:
    epochs, steps = draft.number("num_epochs", 1), draft.number("max_steps", 0)
    if steps and steps > 0:
        draft.set("experiment.budget", None, "max_steps", text=share_or_steps(steps))
        draft.meaningless("num_epochs", "max_steps is the length")
        if draft.has("num_epochs"):
            draft.note(f"it ends before max_steps if num_epochs ({epochs}) of the data are shorter; here steps count")
        return
    draft.same("max_steps", "no limit")
    draft.set("experiment.budget", None, "num_epochs", text=f"{epochs} {'epoch' if epochs == 1 else 'epochs'}")
    draft.note(LAST_STEP)


def _write_batch(draft: Draft) -> None:
    length = draft.number("sequence_len", 512)
    packed = draft.number("max_packed_sequence_len", 0)
    draft.set("batch.sequence", packed or length, "max_packed_sequence_len" if packed else "sequence_len")
    draft.meaningless("sequence_len", "max_packed_sequence_len is the length of rows")
    draft.same("max_packed_sequence_len", "off")
    micro, total = draft.number("micro_batch_size", 1), draft.number("batch_size", 0)
    if total and not draft.has("gradient_accumulation_steps"):
        draft.set(
            "batch.accumulate", max(int(total) // max(int(micro), 1), 1), "batch_size", "batch_size // micro_batch_size"
        )
    draft.meaningless("batch_size", "gradient_accumulation_steps and micro_batch_size say it")
    if draft.has("eval_sequence_len") and draft.get("eval_sequence_len") != length:
        draft.missing("eval_sequence_len", "evaluations have rows of the same length")
    draft.same("eval_sequence_len", "the same as sequence_len")
    rows = "pack(multipack)" if draft.get("sample_packing") or packed else "pack(single)"
    if draft.get("rl") == "kto":
        rows = "pack(multipack)"
        draft.note("`micro_batch_size` counts answers there, here rows with several: its reference point needs several")
    elif is_preference(draft):
        rows = "pack(single)"
    why = "sample_packing" if draft.has("sample_packing") else "its default: one document in a row"
    draft.collate = (f"to_tensor -> flatten -> shift_tokens -> {rows}", why)
    draft.translated("sample_packing")
    if "multipack" in rows and micro > 1:
        draft.note(_PACKING)
    draft.meaningless("pretraining_sample_concatenation", "documents of a row do not see each other")


def _write_schedule(draft: Draft) -> None:
    steps, warmup, keys = draft.number("max_steps", 0), "", ""
    if draft.has("warmup_steps"):
        count = draft.number("warmup_steps", 0)
        warmup, keys = share_or_steps(2 if count == 1 else count), "warmup_steps"
        warmup = "0 steps" if not count else warmup
        draft.meaningless("warmup_ratio", "warmup_steps is the length")
    elif draft.has("warmup_ratio"):
        ratio = draft.number("warmup_ratio", 0.0)
        warmup, keys = f"{100 * ratio:.10g}%", "warmup_ratio"
        if steps and steps > 0:
            count = int(ratio * steps)
            warmup = share_or_steps(2 if count == 1 else count) if count else "0 steps"
    elif steps and steps > 0:
        count = min(int(0.03 * steps), 100)
        warmup = share_or_steps(2 if count == 1 else count) if count else "0 steps"
    else:
        warmup = "3%"
        draft.note("its default warm-up is 3% of the steps, at most 100; here it is 3%")
    write_schedule(draft, "lr_scheduler", "cosine", warmup, keys, "lr_scheduler_kwargs")
    if draft.has("cosine_min_lr_ratio"):
        if draft.text("lr_scheduler", "cosine") == "cosine":
            draft.known("scheduler", "cosine_min_lr_ratio")
        else:
            draft.meaningless("cosine_min_lr_ratio", "only `cosine` reads it")


def _write_ticks(draft: Draft) -> None:
    epochs = draft.number("num_epochs", 1)
    every = draft.number("logging_steps", 0)
    if every:
        draft.statements.append((f"every {share_or_steps(every)} log", "logging_steps"))
        draft.translated("logging_steps")
    saves, evals = draft.number("saves_per_epoch", 0), draft.number("evals_per_epoch", 0)
    steps, keep = draft.number("save_steps", 0), draft.number("save_total_limit", 4) or 4
    strategy = draft.text("save_strategy", "epoch").lower()
    draft.set("checkpoint.keep", keep, "save_total_limit")
    if saves:
        period, key = _share(saves * epochs), "saves_per_epoch"
    elif steps:
        period, key = share_or_steps(steps), "save_steps"
    else:
        period = "" if strategy in ("no", "false", "best") else "1 epoch"
        key = "save_strategy" if draft.has("save_strategy") else ""
    if period and period != "100%":
        draft.statements.append((f"every {period} checkpoint", key or "axolotl's default"))
    if strategy != "best":
        draft.translated(key)
        draft.meaningless("save_strategy", "how often is said by another key")
    draft.same("saves_per_epoch save_steps", "off")
    held = [name for name in draft.labels("dataset") if draft.setting(f"dataset.{name}.holdout")]
    steps, strategy = (
        draft.number("eval_steps", 0),
        draft.text("eval_strategy", draft.text("evaluation_strategy", "no")),
    )
    period, key = (
        (_share(evals * epochs), "evals_per_epoch")
        if evals
        else (share_or_steps(steps), "eval_steps")
        if steps
        else ("", "")
    )
    if not period and strategy == "epoch":
        period, key = "1 epoch", "eval_strategy evaluation_strategy"
    write_evaluations(draft, held, period, key, "early_stopping_patience")
    draft.meaningless("save_only_model load_best_model_at_end greater_is_better", "checkpoints hold the full state")
    if held and period:
        draft.translated(key)
    draft.meaningless("evals_per_epoch eval_steps eval_strategy evaluation_strategy",
                      "another key says how often" if held else "nothing is held out for evaluation")  # fmt: skip
    draft.meaningless("eval_max_new_tokens", "evaluations measure the loss")
    if (limit := draft.number("loss_watchdog_threshold")) is not None:
        draft.set("alerts.loss_above", limit, "loss_watchdog_threshold")
        draft.set("alerts.loss_patience", int(draft.number("loss_watchdog_patience", 3)), "loss_watchdog_patience")
        draft.statements.append(("on loss_above checkpoint then stop", "loss_watchdog_threshold"))
    draft.meaningless("loss_watchdog_patience", "it goes with `loss_watchdog_threshold`")
    if resumed := draft.get("resume_from_checkpoint"):
        draft.missing("resume_from_checkpoint", f"{resumed} is a checkpoint of transformers")
    profile = draft.number("profiler_steps", 0)
    if profile:
        draft.missing("profiler_steps profiler_steps_start", "write `every 1000 steps profile { active = 3 }`")
    draft.same("profiler_steps profiler_steps_start resume_from_checkpoint", "off")


def _share(times: float) -> str:
    return f"{100 / times:.10g}%" if times > 0 else ""


# Tracker → its settings, with axolotl's keys for them.
_TRACKERS: Final = {
    "wandb": {"project": "wandb_project", "entity": "wandb_entity", "name": "wandb_name", "mode": "wandb_mode"},
    "mlflow": {"project": "mlflow_experiment_name", "name": "mlflow_run_name", "uri": "mlflow_tracking_uri"},
    "comet": {"project": "comet_project_name", "workspace": "comet_workspace", "mode": "comet_online"},
    "trackio": {"project": "trackio_project_name", "name": "trackio_run_name", "space": "trackio_space_id"},
    "swanlab": {
        "project": "swanlab_project", "name": "swanlab_experiment_name", "workspace": "swanlab_workspace",
        "description": "swanlab_description", "mode": "swanlab_mode",
    },
}  # fmt: skip
_MODES: Final = {"cloud": "online", True: "online", False: "offline"}


def _write_trackers(draft: Draft) -> None:
    for tracker, keys in _TRACKERS.items():
        uses = draft.get(f"use_{tracker}", tracker == "wandb" and draft.has(keys["project"]))
        if uses and draft.get(keys.get("mode", "")) != "disabled":
            draft.set(f"log.{tracker}.project", draft.text(keys["project"], "huggingface"), keys["project"])
            for name, key in keys.items():
                if name != "project" and draft.has(key) and draft.get(key) != "":
                    value = draft.get(key) if name == "mode" else draft.text(key)
                    draft.set(f"log.{tracker}.{name}", _MODES.get(value, value), key)
            draft.translated(f"use_{tracker}")
        draft.same(f"use_{tracker}", "off")
        draft.meaningless(" ".join(keys.values()), f"{tracker} is off")
    if draft.get("use_tensorboard"):
        draft.set("log.tensorboard", True, "use_tensorboard")
    draft.same("use_tensorboard", "off")


def _write_plugins(draft: Draft) -> None:
    for key, plugin in list(draft.values.items()):
        if key.startswith("plugins.") and isinstance(plugin, str):
            part = plugin.removeprefix("axolotl.integrations.").partition(".")[0]
            if part in _PLUGINS:
                draft.meaningless(key, _PLUGINS[part])
            else:
                draft.missing(key, "a plugin may change anything; xtrain has no counterpart")


def _write_loss(draft: Draft, adapter: str) -> None:
    kind = draft.text("rl").lower()
    beta = next((key for key in ("trl.beta", "rl_beta", "orpo_alpha", "dpo_beta") if draft.has(key)), "")
    simple = {
        "dpo": ("dpo", 0.1),
        "ipo": ("dpo", 0.1),
        "kto": ("kto", 0.1),
        "orpo": ("orpo", 0.1),
        "simpo": ("simpo", 0.1),
    }
    if kind in simple:
        loss, usual = simple[kind]
        draft.label("loss", loss, "rl")
        draft.set("loss.beta", draft.number(beta, usual) if beta else usual, beta)
        if kind == "ipo":
            draft.set("loss.form", None, "rl", text="ipo")
        if loss in ("dpo", "kto") and adapter:
            draft.set("loss.reference", None, "", "the model with its adapter off", text="adapter_off")
        if kind == "kto":
            draft.set("loss.desirable", draft.number("kto_desirable_weight", 1.0), "kto_desirable_weight")
            draft.set("loss.undesirable", draft.number("kto_undesirable_weight", 1.0), "kto_undesirable_weight")
            draft.set("loss.reference_point", None, "", "TRL estimates it from the batch", text="estimated")
        if kind == "simpo":
            draft.set("loss.gamma", draft.number("simpo_gamma", 0.5), "simpo_gamma")
            if draft.number("cpo_alpha", 1.0):
                draft.missing("cpo_alpha rl", "`loss simpo` has no cross-entropy; set cpo_alpha to 0")
        draft.set("loss.label_smoothing", draft.number("dpo_label_smoothing", 0.0), "dpo_label_smoothing") if (
            draft.has("dpo_label_smoothing") and loss == "dpo") else None  # fmt: skip
        draft.unless_off("dpo_use_weighting dpo_loss_type dpo_loss_weights", "this form of the loss is not there")
        draft.meaningless("precompute_ref_log_probs dpo_use_liger_kernel dpo_padding_free",
                          "the reference is computed before the first step")  # fmt: skip
        draft.meaningless("max_prompt_len", "a pair longer than a row is left out")
    elif kind:
        draft.missing("rl", "rewards are functions with another signature; write `reward` and `rollout`")
        draft.missing("trl vllm", "settings of rollouts")
    if draft.get("reward_model"):
        draft.label("loss", "bradley_terry", "reward_model")
        draft.set("loss.centre", draft.number("center_rewards_coefficient", 0.0), "center_rewards_coefficient")
        draft.meaningless("num_labels", "a reward model has one number")
    draft.same("reward_model", "off")
    draft.unless_off("num_labels trl vllm", "it belongs to a method that is not there")
