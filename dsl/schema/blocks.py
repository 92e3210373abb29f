"""Table of block kinds, their labels and settings."""

from typing import Any, Final, Literal, TypeGuard, get_args, get_origin

import attrs

from xtrain.dsl.schema import actions, adapters, cluster, data, losses, model, optimizers, parallel, precision, sweep
from xtrain.dsl.schema import adapters as tasks
from xtrain.dsl.schema import cluster as fault_tolerance
from xtrain.dsl.schema import cluster as launchers
from xtrain.dsl.schema import cluster as serving
from xtrain.dsl.schema import data_components as tokenizers
from xtrain.dsl.schema import optimizers as ema
from xtrain.dsl.schema import optimizers as schedules
from xtrain.dsl.schema import parallel as stacks
from xtrain.dsl.schema import policy as rollout
from xtrain.dsl.schema import run as alerts
from xtrain.dsl.schema import run as checkpoint
from xtrain.dsl.schema import run as experiment
from xtrain.dsl.schema import run as hooks
from xtrain.dsl.schema import run as log
from xtrain.dsl.schema.component import Component, registry_of
from xtrain.dsl.schema.model import FOLDER
from xtrain.dsl.schema.setting import attributes_of, complete, settings_of

# Kind → class, in the recommended order of a spec.
KINDS: Final[dict[str, type]] = {
    "experiment": experiment.Experiment,
    "workspace": experiment.Workspace,
    "launch": experiment.Launch,
    "cluster": cluster.Cluster,
    "launcher": launchers.Launcher,
    "model": model.Model,
    "adapter": adapters.Adapter,
    "task": tasks.AdapterTask,
    "tokenizer": tokenizers.Tokenizer,
    "dataset": data.Dataset,
    "mixture": data.Mixture,
    "phase": data.Phase,
    "batch": data.Batch,
    "optimizer": optimizers.Optimizer,
    "group": optimizers.ParameterGroup,
    "parametrization": optimizers.Parametrization,
    "scheduler": schedules.Scheduler,
    "loss": losses.Loss,
    "rollout": rollout.Rollout,
    "reward": rollout.Reward,
    "environment": rollout.Environment,
    "engine": rollout.SamplingEngine,
    "ema": ema.Ema,
    "precision": precision.Precision,
    "parallel": parallel.Parallel,
    "activation": parallel.Activation,
    "compile": parallel.Compile,
    "checkpoint": checkpoint.Checkpoint,
    "fault_tolerance": fault_tolerance.FaultTolerance,
    "alerts": alerts.Alerts,
    "log": log.Log,
    "hook": hooks.Hook,
    "step": hooks.StepBody,
    "evaluation_step": hooks.EvaluationBody,
    "train": hooks.OwnTraining,
    "epoch": hooks.OwnEpoch,
    "policy": experiment.Policy,
    "sweep": sweep.Sweep,
    "serve": serving.Serve,
}
# Kind → field of `Spec`; blocks of one kind with different labels are separate objects.
NAMED: Final[dict[str, str]] = {
    "dataset": "datasets",
    "phase": "phases",
    "group": "groups",
    "hook": "hooks",
    "environment": "environments",
    "task": "tasks",
}
# Blocks that have no defaults: without the block the spec has no such part.
OPTIONAL: Final = (
    "adapter", "parametrization", "rollout", "reward", "engine", "ema", "step", "evaluation_step", "train", "epoch",
    "policy", "sweep", "serve", "launcher",
)  # fmt: skip
REQUIRED: Final[dict[str, str]] = {
    "experiment": "experiment quickstart { budget = 600 steps }",
    "model": "model qwen3 { dim = 192, layers = 4, heads = 6 }",
    "tokenizer": "tokenizer bytes",
    "batch": "batch { sequence = 512 }",
    "optimizer": "optimizer adamw { lr = 3e-4 }",
}
# Blocks of a server spec → their settings there; None: all settings.
OF_SERVERS: Final[dict[str, tuple[str, ...] | None]] = {
    "experiment": ("seed",),
    "workspace": None,
    "launch": ("nodes", "ranks_per_node", "device", "threads", "stop_deadline"),
    "cluster": None,
    "model": None,
    "adapter": ("rank", "alpha", "scaling", "targets", "layers"),
    "tokenizer": None,
    "precision": None,
    "parallel": None,
    "activation": ("every", "save"),
    "serve": None,
}
# Words that settings do not have yet, by class and name.
RESERVED: Final[dict[tuple[type, str], tuple[str, ...]]] = {
    (parallel.Pp, "schedule"): ("dual_pipe",),
    (losses.Loss, "kind"): ("kl",),
}
ACTIONS: Final = actions.ACTIONS
EVENTS: Final[tuple[str, ...]] = get_args(actions.EventName)


def is_of_servers(path: str) -> bool:
    """Return True if a server spec supports the block or setting at a path."""
    kind, _, name = path.partition(".")
    if kind not in OF_SERVERS:
        return False
    names = OF_SERVERS[kind]
    return names is None or not name or name.partition(".")[0] in names


def blocks_of(*, serves: bool) -> dict[str, tuple[str, ...]]:
    """Return the block kinds of a spec or of a server spec, each with the settings that are unavailable there."""
    return {kind: not_of_servers(kind) for kind in OF_SERVERS} if serves else dict.fromkeys(KINDS, ())


def not_of_servers(kind: str) -> tuple[str, ...]:
    """Return the settings of a block that a server spec does not have."""
    names = OF_SERVERS[kind]
    return () if names is None else tuple(name for name in settings_of(KINDS[kind]) if name not in names)


def label_of(block: type) -> attrs.Attribute | None:
    """Return the attribute that the label of a block fills, or None if the block has no label."""
    registry = registry_of(block)
    if registry is not None:
        return registry.label()
    labels = (a for a in attrs.fields(block) if a.init and "setting" not in a.metadata and FOLDER not in a.metadata)
    return next(labels, None)


def fields_of(block: type) -> tuple[attrs.Attribute, ...]:
    """Return the label and all settings of a block, in order."""
    if registry_of(block) is None:
        return attributes_of(complete(block))
    label = label_of(block)
    assert label is not None
    return (label, *(attribute for attribute, _ in settings_of(block).values()))


def nested(block: type) -> dict[str, type]:
    """Return the settings of a block that are blocks themselves, such as the axes of `parallel`."""
    return {name: a.type for name, (a, _) in settings_of(block).items() if is_block(a.type)}


def is_block(kind: Any) -> TypeGuard[type]:
    """Return True if an annotation is a block class, not a call."""
    if not isinstance(kind, type):
        return False
    if issubclass(kind, Component):
        registry = getattr(kind, "components", None)
        return (registry is None or not registry.call) and (attrs.has(kind) or registry_of(kind) is not None)
    return attrs.has(kind) and (kind.__module__.startswith(_SCHEMA) or issubclass(kind, stacks.StackSettings))


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the words of a `Literal`, also inside a union; empty if there are none."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for part in get_args(annotation) for word in choices_of(part))


_SCHEMA: Final = experiment.__name__.rpartition(".")[0]
