"""Inputs of rules: a rule gives a verdict only if every setting that could change it is known.

A setting with an error of its own is unknown. An error that follows only from its stand-in value would send the user
after a mistake that nobody made.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from xtrain.dsl.schema.data import Dataset
from xtrain.dsl.schema.setting import Auto, settings_of
from xtrain.dsl.spec import Spec
from xtrain.plan.findings import Findings

# Settings that decide how the records of a dataset are read, and datasets named by ticks and events.
_RECORDS: Final = tuple(f"dataset.{{}}.{name}" for name in settings_of(Dataset) if name != "bad_records")
_EVALUATED: Final = ("every.*.actions.*.dataset", "on.*.actions.*.dataset")
_MODEL: Final = ("model.*", "adapter", "adapter.*", "task", "task.*", "tokenizer.source", "loss.kind")

# Rule → paths of settings, as in `Spec.origins`; a word in braces is one of the groups of `_GROUPS` or `_group`.
INPUTS: Final[dict[str, tuple[str, ...]]] = {
    "compile.deterministic": ("compile.mode", "precision.deterministic"),
    "model.head_dim": ("model.dim", "model.heads", "model.head_dim"),
    "model.groups": ("{kv_heads}",),
    "model.layers": ("model.*",),
    "model.rope": ("model.rope.*", "batch.sequence"),
    "model.routing": ("model.family", "model.experts", "model.experts_per_token"),
    "model.every.*": ("every.{}", "every.{}.*", *_MODEL, "precision.base", "precision.base.*"),
    "model.on.*": ("on.{}", "on.{}.*", *_MODEL, "precision.base", "precision.base.*"),
    "model.folder": ("model.*", "checkpoint.pretrained", "checkpoint.from", "loss.kind"),
    "model.block": ("model.*",),
    "loss.teacher": ("loss.*", "model.*", "tokenizer.source"),
    "loss.reference": ("loss.*", *_MODEL, "checkpoint.pretrained", "checkpoint.from", "collate"),
    "reward.folder": ("reward", "reward.*", "rollout", "model.*", "precision.params", "tokenizer.source"),
    "loss.mismatched": ("loss.*", "collate", "dataset.*", "task", "task.*"),
    "loss.top": ("loss.top", "model.*", "tokenizer.source"),
    "loss.*": ("loss.*",),
    "launcher.*": ("launcher", "launcher.*", "launch.stop_deadline"),
    "model.mtp": (
        *_MODEL,
        "loss.*",
        "parallel.pp.size",
        "parallel.pp.schedule",
        "checkpoint.pretrained",
        "checkpoint.from",
        "rollout",
        "rollout.*",
        "step",
        "step.*",
        "compile.mode",
    ),
    "model.frozen": ("model.*", "adapter.*", "tokenizer.source", "loss.kind"),
    "model.adapter": ("model.*", "adapter", "adapter.*", "tokenizer.source", "loss.kind"),
    "model.tasks": (
        "task",
        "task.*",
        "adapter.*",
        "{datasets}",
        "mixture.*",
        "phase",
        "phase.*",
        "group",
        "optimizer.*",
        "step.*",
        "evaluation_step.*",
        "ema.*",
        "loss.*",
        "compile.mode",
        "activation.tile_mlp",
        "model.*",
    ),
    "model.tasks.*": ("model.*", "task.{}.*", "tokenizer.source"),
    "model.adapter_files.*": ("model.*", "task.{}.*", "tokenizer.source"),
    "model.adapter_files": ("model.*", "adapter", "adapter.*", "tokenizer.source"),
    "serve.adapter": ("serve.adapters", "serve.mode", "adapter", "adapter.*"),
    "serve.losses": ("model.*",),
    "serve.key": ("serve.host", "serve.key"),
    "serve.tls": ("serve.certificate", "serve.private_key"),
    "serve.mesh": ("{context}", "parallel.pp.size", "parallel.stack"),
    "group": (
        "group",
        "group.*.name",
        "group.*.optimizer.kind",
        "optimizer.kind",
        "model.*",
        "adapter.*",
        "tokenizer.source",
    ),
    "model.base": (
        "precision.base",
        "precision.base.*",
        "model.*",
        "adapter",
        "adapter.*",
        "tokenizer.source",
        "parallel.tp.size",
    ),
    "data.tokenizer": ("tokenizer.source", "model.vocab"),
    "data.vocab": ("tokenizer.source", "model.vocab"),
    "data.rewards": ("loss.kind", "evaluation_step.*"),
    "data.loss.*": (
        *_RECORDS,
        "dataset",
        "mixture.*",
        "phase",
        "phase.*.mix",
        "loss.*",
        "rollout.*",
        "collate",
        *_EVALUATED,
    ),
    "data.training": ("dataset", "dataset.*.holdout", "mixture.*"),
    "data.mixture": ("{datasets}", "mixture.*"),
    "idle.mixture": ("{datasets}", "mixture.*", "phase"),
    "idle.mixture.exact": ("{datasets}", "mixture.*", "phase", "phase.*.mix"),
    "data.exact": ("{datasets}", "mixture.*", "phase", "phase.*.mix", "batch.*"),
    "idle.mixture.temperature": ("{datasets}", "mixture.*", "phase", "phase.*.mix"),
    "data.mix.*": ("{datasets}", "phase.{}.mix"),
    "data.weights": ("{datasets}", "mixture.*", "phase", "phase.*.from"),
    "data.weights.*": ("{datasets}", "mixture.*", "phase.{}.mix"),
    "data.epochs": ("{datasets}", "mixture.*"),
    "data.epochs.*": ("{datasets}", "mixture.*", "phase.{}.mix"),
    "data.form.*": _RECORDS,
    "data.template.*": (*_RECORDS, "tokenizer.source"),
    "data.prompts.*": ("{}.chat", *(path.format("*") for path in _RECORDS), "tokenizer.source"),
    "data.separator.*": ("dataset.{}.source", "tokenizer.source"),
    "data.files.*": ("dataset.{}.source",),
    "data.eval.*": ("dataset", "dataset.*.name", "dataset.{}.holdout", *_EVALUATED),
    "data.collate": ("collate",),
    "data.group": ("collate",),
    "data.dealing": ("collate", "batch.micro", "{accumulate}", "{data_ranks}"),
    "rollout.replay": ("rollout.*", "model.*", "tokenizer.source"),
    "rollout.*": (
        "rollout.*",
        "reward.*",
        "loss.*",
        "dataset",
        "dataset.*",
        "mixture.*",
        "phase.*.mix",
        "collate",
        "optimizer.kind",
        "batch.sequence",
        "batch.ramp_from",
        "adapter",
        "adapter.*",
        *_EVALUATED,
        "every.*.actions.*.answers",
        "on.*.actions.*.answers",
        "task",
        "step.*",
    ),
    "mesh.auto": ("parallel.pp.size", "parallel.fsdp.size", "parallel.fsdp.replicate", "parallel.tp.size"),
    "mesh.cp": ("parallel.cp.size", "parallel.cp.ring", "parallel.cp.ulysses"),
    "mesh.world": ("{world}",),
    "mesh.nodes": ("{world}",),
    "mesh.nodes.groups": ("parallel.stack", "{world}"),
    "cluster.nodes": ("{world}",),
    "cluster.devices": ("{world}",),
    "cluster.device": ("cluster.preset", "launch.device"),
    "mesh.ep": ("parallel.ep.size", "{world}"),
    "mesh.ep.family": ("parallel.ep.size", "model.family", "model.experts"),
    "mesh.ep.experts": ("parallel.ep.size", "model.family", "model.experts"),
    "mesh.tp.heads": ("parallel.tp.size", "model.heads"),
    "mesh.tp.kv_heads": ("parallel.tp.size", "{kv_heads}"),
    "mesh.tp.ffn": ("parallel.tp.size", "model.family", "{ffn}"),
    "mesh.tp.weights": ("parallel.tp.size", "model.*"),
    "mesh.tp.vocab": ("parallel.tp.size", "model.vocab", "tokenizer.source", "{world}", "parallel.cp.fold"),
    "mesh.ulysses.heads": ("parallel.tp.size", "model.heads", "{context}"),
    "mesh.ulysses.kv_heads": ("parallel.tp.size", "{kv_heads}", "{context}"),
    "model.attention": ("model.attention", "launch.device", "cluster.preset"),
    "model.attention_heads": (
        "model.attention",
        "model.family",
        "model.dim",
        "model.heads",
        "model.head_dim",
        "launch.device",
        "cluster.preset",
    ),
    "mesh.ring.attention": ("model.attention", "{context}"),
    "mesh.pp.schedule": ("parallel.pp.size", "parallel.pp.schedule", "parallel.pp.stages_per_rank"),
    "mesh.pp.layers": ("{stages}", "parallel.pp.layers", "model.layers", "model.mtp"),
    "mesh.pp.costs": ("parallel.pp.size", "parallel.pp.layers", "parallel.pp.embedding_cost", "parallel.pp.head_cost"),
    "mesh.pp.microbatches": ("parallel.pp.size", "parallel.pp.schedule", "{accumulate}", "{ramp}"),
    "mesh.pp.reshard": ("parallel.pp.size", "parallel.pp.schedule", "parallel.fsdp.reshard"),
    "mesh.pp.sync": ("parallel.pp.size", "parallel.fsdp.sync"),
    "mesh.pp.tied": ("parallel.pp.size", "parallel.pp.schedule", "model.tie_embeddings", "loss.kind"),
    "mesh.pp.step": ("step.name", "parallel.pp.size"),
    "mesh.pp.evaluation_step": ("evaluation_step.name", "parallel.pp.size"),
    "mesh.pp.tile_mlp": ("parallel.pp.size", "parallel.pp.schedule", "activation.tile_mlp"),
    "mesh.pp.compile": ("parallel.pp.size", "parallel.pp.schedule", "compile.mode"),
    "group.*.settings": (
        "group.{}.*",
        "optimizer.*",
        "precision.params",
        "scheduler.kind",
        "model.*",
        "parallel.tp.size",
        "{world}",
    ),
    "task.*.settings": (
        "task.{}.*",
        "optimizer.*",
        "precision.params",
        "scheduler.kind",
        "model.*",
        "parallel.tp.size",
        "{world}",
    ),
    "group.*": ("group", "group.*.name", "model.*", "tokenizer.source"),
    "optimizer.*": ("optimizer.*", "precision.params", "scheduler.kind", "model.*", "parallel.tp.size", "{world}"),
    "mesh.offload": ("parallel.fsdp.offload", "launch.device", "cluster.preset"),
    "mesh.stack.package": ("parallel.stack",),
    "mesh.stack.with.*": ("parallel.*", "{}", "{}.*"),
    "mesh.stack.*": ("parallel.stack", "parallel.{}", "precision.params", "precision.compute"),
    "precision.fp8": (
        "precision.*",
        "model.*",
        "adapter",
        "adapter.*",
        "task",
        "parallel.tp.size",
        "parallel.pp.size",
        "parallel.pp.schedule",
        "activation.tile_mlp",
        "cluster.preset",
        "launch.device",
    ),
    "mesh.tp.overlap": (
        "parallel.tp.size",
        "parallel.tp.overlap",
        "parallel.tp.sequence",
        "compile.mode",
        "launch.device",
        "cluster.preset",
    ),
    "activation.every": ("activation.mode", "activation.every", "model.layers", "model.mtp"),
    "activation.tile_mlp": ("activation.tile_mlp", "model.*", "batch.micro", "batch.sequence", "{context}"),
    "activation.save": ("activation.mode", "activation.save", "parallel.ep.size", "{context}"),
    "batch.sequence": ("batch.sequence", "model.family", "parallel.tp.size", "parallel.tp.sequence", "{context}"),
    "data.align": ("collate", "batch.sequence", "{context}"),
    "log.*": ("log.{}",),
    "elastic.stack": ("fault_tolerance.elastic", "parallel.stack"),
    "elastic.axis": ("fault_tolerance.elastic", "parallel.fsdp.size"),
    "elastic.worlds": ("*",),  # whole plans, one for each number of ranks
    "elastic.range": ("fault_tolerance.elastic", "launch.nodes", "launch.ranks_per_node"),
    "elastic.use": ("fault_tolerance.elastic", "fault_tolerance.restarts"),
    "health.stuck": ("*",),  # from the time of a step, which depends on everything
    "failures.restarts": ("*",),  # from the time of the whole run
    "batch.rows": ("batch.micro", "batch.accumulate", "batch.rows", "{data_ranks}"),
    "batch.ramp": ("{ramp}", "batch.micro", "batch.sequence", "{data_ranks}"),
    "schedule.phase.*.start": ("phase.{}.from", "{steps}", "batch.sequence", "{rows}"),
    "schedule.phases": ("phase.*.from", "{steps}"),
    "schedule.phase.*.order": ("phase", "phase.*.from", "{steps}", "batch.sequence", "{rows}"),
    "schedule.warmup": ("scheduler.kind", "scheduler.warmup", "{decay}", "{steps}"),
    "schedule.*.nan": ("{}.event", "{}.actions"),
    "schedule.nan": ("on.*.event", "on.*.actions", "on.*.count"),
    "checkpoint.rollback": (
        "on.*.event",
        "on.*.actions",
        "every.*.actions",
        "every.*.every",
        "checkpoint.enabled",
        "checkpoint.keep",
        "{steps}",
    ),
    "schedule.*.ends": ("{}.event", "{}.actions", "{}.actions.*"),
    "schedule.*.length": ("{}.every", "{}.actions", "{}.actions.*", "launch.device", "cluster.preset", "{tokens}"),
    "schedule.*.alone": (
        "every.*.every",
        "every.*.actions",
        "every.*.actions.*",
        "launch.device",
        "cluster.preset",
        "{steps}",
        "{tokens}",
    ),
    "schedule.on.*": ("on", "on.*.event", "on.*.actions", "{stops}"),
    "schedule.alert.*": (
        "on.*.event",
        "on.*.actions",
        "alerts.*",
        "launch.device",
        "cluster.preset",
    ),
    "alerts.stalled": ("alerts.stalled", "fault_tolerance.stuck"),
    "schedule.every.*.place": ("every.{}.actions",),
    "schedule.stop_file": ("launch.stop_file",),
    "schedule.stop_at": ("launch.stop_at", "{steps}", "{tokens}"),
    "schedule.stop_after": ("launch.stop_after", "{steps}", "{tokens}"),
    "checkpoint.*.place": ("checkpoint.from", "checkpoint.{}", "checkpoint.resume", "workspace.*", "experiment.name"),
    "checkpoint.backend": ("checkpoint.backend", "checkpoint.enabled", "{world}"),
    "checkpoint.from": ("checkpoint.from", "{steps}"),
    "checkpoint.from.stop_at": ("checkpoint.from", "launch.stop_at", "{steps}", "{tokens}"),
    "checkpoint.best.direction": ("checkpoint.best", "checkpoint.best_is", "checkpoint.enabled"),
    "checkpoint.best": (
        "checkpoint.best",
        "checkpoint.best_is",
        "hook.*",
        "checkpoint.enabled",
        "dataset",
        "dataset.*.name",
        "every.*.actions",
        "every.*.every",
        "on.*.event",
        "on.*.actions",
        "{steps}",
    ),
    "checkpoint.best.objective": (
        "checkpoint.best",
        "every.*.actions",
        "dataset",
        "dataset.*",
        "loss.*",
        "rollout.*",
        "evaluation_step.*",
        "collate",
    ),
    "ema.every": ("ema.every", "{steps}"),
    "schedule.every.*.every": ("every.{}.every", "{steps}", "{tokens}"),
}


class Verdicts(Findings):
    """Findings of the rules whose inputs are all known; the other rules are noted as unknown."""

    def __init__(self, spec: Spec, unknown: frozenset[str] = frozenset()) -> None:
        super().__init__(spec)
        self.unknown_settings = unknown

    def mark_unknown(self, *paths: str) -> None:
        """Treat these settings as unknown from now on."""
        self.unknown_settings |= frozenset(paths)

    def _is_decidable(self, rule: str) -> bool:
        unknown = self.unknown_settings
        return not (unknown and any(is_unknown(rule_input, unknown) for rule_input in rule_inputs(rule, self.spec)))


def is_unknown(rule_input: str, unknown: frozenset[str]) -> bool:
    """Return True if a setting, or any setting that a pattern with `*` matches, is unknown."""
    if rule_input in unknown:
        return True
    paths = unknown if "*" in rule_input else _patterns(unknown)
    return any(fnmatchcase(path, rule_input) or fnmatchcase(rule_input, path) for path in paths)


@lru_cache(maxsize=1)
def _patterns(paths: frozenset[str]) -> tuple[str, ...]:
    return tuple(path for path in paths if "*" in path)


def rule_inputs(rule: str, spec: Spec) -> Iterator[str]:
    """Yield the paths of the settings that a rule depends on in this spec."""
    paths = INPUTS.get(rule)
    if paths is not None:
        yield from _expanded(paths, spec)
        return
    for pattern, paths in INPUTS.items():
        before, star, after = pattern.partition("*")
        if star and rule.startswith(before) and rule.endswith(after):
            name = rule[len(before) : len(rule) - len(after)]
            yield from _expanded(tuple(path.replace("{}", name) for path in paths), spec)
            return
    yield "*"  # a rule that is not listed depends on everything


def _expanded(paths: tuple[str, ...], spec: Spec) -> Iterator[str]:
    for path in paths:
        if path.startswith("{"):
            yield from _expanded(_group(path.strip("{}"), spec), spec)
        else:
            yield path


def _group(name: str, spec: Spec) -> tuple[str, ...]:
    """Return the settings of a group shared by rules. Written settings depend on nothing; derived values depend on
    everything that they are derived from."""
    parallel, batch = spec.parallel, spec.batch
    groups = ("parallel.stack", f"parallel.{parallel.stack}.*") if parallel.execution.groups else ()
    copies = ("parallel.fsdp.replicate", *groups)
    match name:
        case "datasets":
            return ("dataset", "dataset.*.name", "dataset.*.holdout")
        case "world":
            sizes = tuple(f"parallel.{axis}.size" for axis in ("pp", "fsdp", "tp", "cp"))
            context = ("parallel.cp.ring", "parallel.cp.ulysses")
            return (*sizes, *context, *copies, "{machines}")
        case "machines":
            return ("launch.nodes", "launch.ranks_per_node", "cluster.nodes", "cluster.devices")
        case "data_ranks":
            rest = ("{world}",) if isinstance(parallel.fsdp.size, Auto) else ()
            return ("parallel.fsdp.size", *copies, *rest)
        case "kv_heads":
            return ("model.heads", "model.kv_heads")
        case "context":
            own = ("parallel.cp.size", "parallel.cp.ring", "parallel.cp.ulysses")
            derived = isinstance(parallel.cp.ring, Auto) and isinstance(parallel.cp.ulysses, Auto)
            return (*own, "{kv_heads}", "parallel.tp.size") if derived and parallel.cp.size > 1 else own
        case "ffn":
            return ("model.ffn", *(("model.dim",) if isinstance(spec.model.ffn, Auto) else ()))
        case "stages":
            return ("parallel.pp.size", "parallel.pp.stages_per_rank", "parallel.pp.schedule")
        case "accumulate":
            rest = ("batch.rows", "batch.micro", "{data_ranks}") if isinstance(batch.accumulate, Auto) else ()
            return ("batch.accumulate", *rest)
        case "rows":
            rest = ("batch.micro", "batch.accumulate", "{data_ranks}") if isinstance(batch.rows, Auto) else ()
            return ("batch.rows", *rest, *(("{ramp}",) if batch.ramp_from is not None else ()))
        case "ramp":
            return ("batch.ramp_from", "batch.ramp", "batch.rows", "experiment.budget")
        case "steps":
            return ("experiment.budget", *(("{tokens}",) if spec.experiment.budget.unit == "tokens" else ()))
        case "tokens":
            return ("batch.sequence", "{rows}") if spec.experiment.budget.unit != "epochs" else ()
        case "stops":
            return ("launch.time_limit", "launch.stop_at", "launch.stop_after", "launch.stop_file")
        case "decay":
            return tuple(f"scheduler.{name}" for name in spec.scheduler.lengths() if name != "warmup")
    raise AssertionError(name)
