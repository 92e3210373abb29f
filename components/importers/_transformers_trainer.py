"""Parts that configurations of programs on transformers' `Trainer` share: optimizer, schedule, ticks, PEFT, data.

Formulas of transformers 5.24 (`optimization.py`, `trainer.py`, `trainer_optimizer.py`) and PEFT 0.17.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from xtrain.dsl.checking.config_json import names_repo
from xtrain.dsl.importing.accounts import is_off
from xtrain.dsl.importing.draft import Draft
from xtrain.dsl.spec_text import value_text

_STATES: Final = "blocks of the 8-bit moments differ: {name} has 256 numbers in the order of memory, xtrain rows of 128"
_ADAMW: Final = (
    "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_torch_xla adamw_torch_npu_fused paged_adamw_32bit "
    "paged_adamw adamw adamw_bnb_32bit"
)
_ADAMW8: Final = "adamw_bnb_8bit adamw_8bit paged_adamw_8bit adamw_torch_8bit ao_adamw_8bit"
# Name of transformers → optimizer, and what differs.
OPTIMIZERS: Final = {
    **dict.fromkeys(_ADAMW.split(), ("adamw", "")),
    **{name: ("adamw8bit", _STATES.format(name=name)) for name in _ADAMW8.split()},
    "adamw_torch_4bit": ("adamw8bit", "its moments have 4 bits, here they have 8"),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), ("lion", "")),
    **{name: ("lion", f"{name} has 8-bit moments") for name in ("lion_8bit", "paged_lion_8bit")},
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), ("ademamix", "")),
    **{name: ("ademamix", f"{name} has 8-bit moments") for name in ("ademamix_8bit", "paged_ademamix_8bit")},
    "sgd": ("sgd", ""),
    "schedule_free_adamw": ("schedule_free", "the scheduler warms up"),
}
# Name of transformers → schedule.
SCHEDULES: Final = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "polynomial": "polynomial", "inverse_sqrt": "inverse_sqrt", "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}  # fmt: skip
# Names of models with experts.
NAMES_EXPERTS: Final = re.compile(r"moe|mixtral|\d+x\d+b|-a\d+b|gpt-oss|deepseek|dbrx|jamba|glm-?[45]|scout|maverick")
# Decay of `warmup_stable_decay` → shape of `wsd`.
SHAPES: Final = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}
FROM_ZERO: Final = (
    "its step s has the learning rate that step s - 1 has here: the first step of a warm-up has the rate 0"
)
LAST_STEP: Final = "the last step of an epoch may have fewer rows; here it takes the first rows of the next epoch"
PER_RANK: Final = (
    "it averages the loss of each rank over the rank's tokens, then over ranks; xtrain divides by all tokens"
)


def names(draft: Draft, key: str, revision: str = "", *, model: bool = True) -> None:
    """Write `model` or `tokenizer` from a folder or repository. key: names it; revision: key of its revision.

    A name that is no folder of this machine is a repository of the hub, as for transformers.
    """
    name = draft.text(key)
    if not name:
        draft.missing(key, "it is not a folder or a repository")
        return
    label, note = value_text(name), ""
    if names_repo(name) and not Path(name).is_dir():
        commit = draft.text(revision) if revision and draft.has(revision) else ""
        label = f"hub({label}, revision = {value_text(commit)})" if commit else f"hub({label})"
        note = shlex.join(["xtrain", "fetch", name, *(("--revision", commit) if commit else ())])
        draft.downloads.append(note)
    else:
        draft.meaningless(revision, "a folder has no revisions")
    draft.label("model" if model else "tokenizer", label, f"{key} {revision}", note if model else "")


def write_padding(draft: Draft) -> None:
    """Write `batch.pad_to`, if rows have one document and are not compiled, which would be done for each length."""
    multiple, rows = int(draft.number("pad_to_multiple_of", 0)), draft.collate[0] if draft.collate else ""
    shorter = 0 < multiple < int(draft.setting("batch.sequence") or 0) and not draft.get("pad_to_sequence_len")
    if shorter and rows.endswith("pack(single)") and is_off(draft.get("torch_compile")):
        draft.set("batch.pad_to", multiple, "pad_to_multiple_of")


def write_optimizer(
    draft: Draft,
    key: str,
    default: str,
    *,
    lr: str = "learning_rate",
    usual_lr: float | None = None,
    full: bool = True,
    own: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> None:
    """Write the optimizer and its numbers. full: all parameters are trained, embeddings among them. own: further names
    of the trainer, as OPTIMIZERS has them."""
    name = draft.text(key, default).removeprefix("OptimizerNames.").lower()
    kind, note = own.get(name) or OPTIMIZERS.get(name, ("", ""))
    if not kind:
        draft.missing(key, "xtrain has no such optimizer; the spec has AdamW")
    draft.label("optimizer", kind or "adamw", key, note)
    rate = draft.number(lr, usual_lr)
    if rate is None:
        draft.missing(lr, "it is not a learning rate")
        draft.note(f"the file has no `{lr}`, which is required: the spec has 1e-4")
        rate = 1e-4
    draft.set("optimizer.lr", rate, lr)
    decay = draft.number("weight_decay", 0.0)
    draft.set("optimizer.weight_decay", decay, "weight_decay")
    if full and decay and kind != "sgd":
        draft.set("group.embed_tokens.weight_decay", decay, "", "transformers decays embeddings too")
    if kind in ("adamw", "adamw8bit", "ademamix", "lion", "muon", "schedule_free", ""):
        betas = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.999)]
        draft.set("optimizer.betas", betas, "adam_beta1 adam_beta2")
    if kind in ("adamw", "adamw8bit", "ademamix", "muon", "schedule_free", ""):
        draft.set("optimizer.eps", draft.number("adam_epsilon", 1e-8), "adam_epsilon")
    if kind == "sgd":
        draft.set("optimizer.momentum", 0)
    draft.meaningless("adam_beta1 adam_beta2 adam_epsilon", f"{name} has no such number")
    draft.known("optimizer", "max_grad_norm")
    draft.unless_off("optim_args", "arguments of an optimizer as text")


def write_schedule(draft: Draft, key: str, default: str, warmup: str, warmup_keys: str, options: str) -> None:
    """Write the schedule. warmup: as the spec writes it; options: key of a mapping with further arguments."""
    name = draft.text(key, default).removeprefix("SchedulerType.").lower()
    kind = SCHEDULES.get(name, "")
    given = draft.get(options, {})
    extra = {f"{options}.{word}": value for word, value in given.items()} if isinstance(given, dict) else {}
    if not kind:
        draft.missing(key, "xtrain has no such schedule; the spec has a constant rate")
        draft.missing(options, f"arguments of {name}")
    draft.label("scheduler", kind or "constant", key)
    if name == "constant":
        draft.meaningless(warmup_keys, "transformers' `constant` has no warm-up")
    else:
        draft.set("scheduler.warmup", None, warmup_keys, text=warmup)
        draft.note(FROM_ZERO)
    if name == "polynomial":
        draft.set("scheduler.power", extra.pop(f"{options}.power", 1.0), f"{options}.power")
        extra.pop(f"{options}.lr_end", None)
        end, peak = draft.number(f"{options}.lr_end", 1e-7), draft.number("learning_rate", 5e-5)
        floor = f"{100 * end / peak:.10g}%" if peak else "0%"
        draft.set("scheduler.floor", None, f"{options}.lr_end", text=floor)
    if name == "inverse_sqrt" and f"{options}.timescale" in extra:
        draft.set("scheduler.timescale", extra.pop(f"{options}.timescale"), f"{options}.timescale")
    if name == "warmup_stable_decay" and f"{options}.num_decay_steps" in extra:
        steps = extra.pop(f"{options}.num_decay_steps")
        draft.set("scheduler.decay", None, f"{options}.num_decay_steps", text=f"{steps} steps")
        if (shape := SHAPES.get(str(extra.get(f"{options}.decay_type", "cosine")))) is not None:
            extra.pop(f"{options}.decay_type", None)
            draft.set("scheduler.shape", None, f"{options}.decay_type", text=shape)
    for word in ("min_lr", "min_lr_rate", "min_lr_ratio"):
        if f"{options}.{word}" in extra and kind in ("cosine", "wsd", "linear", "polynomial"):
            draft.known("scheduler", f"{options}.{word}")
            extra.pop(f"{options}.{word}")
    for left in extra:
        draft.unless_off(left, f"an argument of {name} that xtrain does not have")
    if isinstance(given, str) and given:
        draft.missing(options, "arguments as text")
    draft.same(options, "no arguments")


def share_or_steps(value: float, share_text: str = "") -> str:
    """Return a length that is a share of the run below 1, and a number of steps from 1 on, as a spec writes it."""
    if value < 1:
        return share_text or f"{100 * value:.10g}%"
    return f"{int(value)} {'step' if int(value) == 1 else 'steps'}"


def write_evaluations(draft: Draft, held: list[str], period: str, origin: str, patience: str = "") -> None:
    """Write the evaluations of datasets with held-out rows, and the checkpoint and the early stop that go with them.

    patience: key of the number of evaluations of `EarlyStoppingCallback`, which counts those whose loss is not below
    the least one.
    """
    if held and period:
        _write_evaluations(draft, held, period, origin, patience)
    draft.unless_off(patience, "`early_stop` follows a metric of an evaluation")
    best = "write `checkpoint { best = eval.DATASET.METRIC }`"
    draft.unless_off("metric_for_best_model", best)
    if draft.text("save_strategy") == "best":
        draft.missing("save_strategy", best)


def _write_evaluations(draft: Draft, held: list[str], period: str, origin: str, patience: str) -> None:
    actions = [f"eval {name} {{ batches = none }}" for name in held]
    metric = f"eval.{held[0]}.loss"
    follows = draft.get("metric_for_best_model", "loss") in ("loss", "eval_loss") and not draft.get("greater_is_better")
    if follows and (draft.get("load_best_model_at_end") or draft.text("save_strategy") == "best"):
        draft.set("checkpoint.best", None, "load_best_model_at_end save_strategy", text=metric)
        draft.translated("metric_for_best_model greater_is_better")
        draft.note("it ends with the weights of the best evaluation; here `checkpoints/best` has them")
    if follows and patience and draft.number(patience, 0):
        actions.append(f"early_stop {{ metric = {metric}, patience = {int(draft.number(patience))} }}")
        draft.translated(f"{patience} metric_for_best_model")
    draft.statements.append((f"every {period} {' then '.join(actions)}", origin))


def write_lora(draft: Draft, settings: dict[str, str], rank: float, alpha: float, dropout: float) -> None:
    """Write `adapter lora`. settings: xtrain's names → keys of the source; numbers: the source's defaults."""
    draft.label("adapter", "lora", settings.get("label", ""))
    for name, usual in (("rank", rank), ("alpha", alpha), ("dropout", dropout)):
        key = settings[name]
        draft.set(f"adapter.{name}", draft.number(key, usual), key)
    for name in ("scaling", "dora", "train", "layers", "init"):
        if (key := settings.get(name)) and draft.has(key):
            draft.known("adapter", key)


def write_adapter_folder(draft: Draft, key: str, settings: str) -> None:
    """Write `from`, the folder of an adapter that is trained further. settings: keys that the folder replaces."""
    folder = draft.text(key)
    if names_repo(folder) and not Path(folder).is_dir():
        draft.downloads.append(shlex.join(["hf", "download", folder, "--local-dir", folder]))
    draft.set("adapter.from", folder, key)
    draft.meaningless(settings, "adapter_config.json of the folder says it")


# A usual pattern for the linear layers of all blocks of a text model, also inside a model of images and text.
_TEXT_MODEL: Final = re.compile(
    r"\^?(\.\*)?((model|language_model)\\?\.)*layers\\?\.(\[\\d\]\+|\\d\+|\.\*|\[0-9\]\+)\\?\.(\(_checkpoint_wrapped_module\\?\.\)\?)?"
    r"\((?P<parents>\w+(\|\w+)*)\)\\?\.\((?P<names>\w(\w*\|?)*)\)_proj\$?"
)
_PARENTS: Final = {
    **dict.fromkeys(("up", "down", "gate"), "mlp"), **dict.fromkeys(("q", "k", "v", "o"), "self_attn"),
}  # fmt: skip


def module_names(value: Any) -> list[str] | None:
    """Return the parts of names that a list of PEFT's target modules chooses; None for a regular expression.

    PEFT takes every module whose name ends with an item; xtrain's parts of names say the same of linear layers.
    """
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        return None
    if items in (["all-linear"], ["all"]):
        return ["all_linear"]
    if isinstance(value, str) and (found := _TEXT_MODEL.fullmatch(value)):
        parents, kinds = found["parents"].split("|"), found["names"].split("|")
        within = all(parent in parents for name in kinds if (parent := _PARENTS.get(name)))
        return [f"{name}_proj" for name in kinds] if within and {*kinds} <= {*_PARENTS} else None
    return items if items and all(re.fullmatch(r"[\w.]+", item) for item in items) else None


def write_source(
    draft: Draft, address: str, key: str, *, files: str = "", config: str = "", split: str = "", kind: str = ""
) -> None:
    """Write the source of a dataset. The other names are keys: of its files, configuration, split and file type."""
    path = draft.text(key)
    given = draft.get(files, [])
    named = [given] if isinstance(given, str) else [item for item in given if isinstance(item, str)]
    suffix = Path(path).suffix.lstrip(".").lower()
    form = draft.text(kind) or (path if path in ("json", "parquet", "arrow", "text", "csv") else "")
    if named and names_repo(path) and not Path(path).is_dir():
        draft.downloads.append(f"hf download {path} --repo-type dataset --local-dir {path}")
    named = [f"{path}/{file}" if names_repo(path) or Path(path).is_dir() else file for file in named]
    local = bool(form) or suffix in ("json", "jsonl", "parquet", "arrow", "txt", "csv", "zst", "gz")
    if local and not (form and named and form == path) and not named:
        named = [path]
    if local or named:
        form = form or Path(named[0]).suffixes[-1:][0].lstrip(".") if named and Path(named[0]).suffixes else form
        source = {"json": "jsonl", "jsonl": "jsonl", "parquet": "parquet", "arrow": "arrow", "txt": "text",
                  "text": "text", "zst": "jsonl", "gz": "jsonl"}.get(form)  # fmt: skip
        if source is None:
            draft.missing(
                f"{key} {kind} {files}", f"files of this type are not read ({form or 'unknown'}); use JSON lines"
            )
            return
        draft.set(
            f"{address}.source", None, f"{key} {files} {kind}", text=f"{source}({', '.join(map(value_text, named))})"
        )
        if draft.text(split, "train") == "train":
            draft.same(split, "files have one split")
        else:
            draft.missing(split, "a part of files; write the part into a file")
        draft.meaningless(config, "files have no configurations")
        return
    arguments = [value_text(path)]
    arguments += [f"config = {value_text(draft.text(config))}"] if config and draft.has(config) else []
    arguments += [f"split = {value_text(draft.text(split))}"] if split and draft.text(split, "train") != "train" else []
    draft.set(f"{address}.source", None, f"{key} {config}", text=f"huggingface({', '.join(arguments)})")
    if draft.text(split, "train") == "train":
        draft.same(split, "`split` of huggingface")
    else:
        draft.translated(split)
    draft.meaningless(kind, "a repository says what its files are")
