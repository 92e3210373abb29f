"""`task NAME { … }`: several adapters over one model, each trained on the rows of its own datasets."""

from collections.abc import Iterator
from typing import Any, Final

from attrs import evolve

from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.schema.adapters import Adapter, TaskAdapters
from xtrain.dsl.schema.optimizers import Optimizer
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture
from xtrain.planner.findings import Findings
from xtrain.planner.schedule.mixing import amounts, trainable

CODE: Final = "X440"


def alone(arch: Architecture, task: str) -> Architecture:
    """The model with the adapter of one task alone."""
    assert isinstance(arch.adapter, TaskAdapters)
    return evolve(arch, adapter=arch.adapter.tasks[task])


def unfit_task(arch: Architecture, task: str | None) -> tuple[str, str] | None:
    """(what is wrong, what to do) where a task is named and the model has none of that name, or none is named and it
    has several; else None."""
    names = list(arch.adapter.tasks) if isinstance(arch.adapter, TaskAdapters) else []
    if task is None:
        return ("the run trains the adapters of several tasks", f"name one: {', '.join(names)}") if names else None
    if not names:
        return f"the run has no tasks, and `{task}` is named", "leave it out"
    if task not in names:
        return f"the run has no task `{task}`", did_you_mean(task, names) or f"name one: {', '.join(names)}"
    return None


def task_of(spec: Spec, dataset: str) -> str | None:
    """The task that a dataset is of."""
    return next((name for name, task in spec.tasks.items() if dataset in task.reads), None)


def optimizer_of(spec: Spec, task: str) -> Optimizer:
    """The optimizer of a task: its own, or one with the settings of that of the spec."""
    return spec.tasks[task].optimizer or spec.optimizer


def clip_args(spec: Spec) -> dict[str, dict[str, Any]]:
    """Of each task the arguments of the node that scales its gradients: its datasets, and the norm that they are
    clipped to."""
    found: dict[str, dict[str, Any]] = {}
    for name, task in spec.tasks.items():
        limit = optimizer_of(spec, name).clip
        found[name] = {"datasets": list(task.reads), **({} if limit is None else {"max_norm": limit})}
    return found


def check_tasks(spec: Spec, arch: Architecture, found: Findings) -> None:
    """What tasks need: an adapter and datasets each, as many rows of these in every step, and nothing else of the spec
    that treats the gradients of all of them as one."""
    if not spec.tasks:
        return
    rule = "model.tasks"
    for path, message, hint in (*_wrong(spec, arch), *_beside(spec, arch)):
        found.fail(rule, CODE, path, message, hint)
        return
    found.passed(rule, ", ".join(f"{name} on {', '.join(task.reads)}" for name, task in spec.tasks.items()))


def _wrong(spec: Spec, arch: Architecture) -> Iterator[tuple[str, str, str]]:
    """The setting at fault, what is wrong, and what to do."""
    names = list(spec.tasks)
    if spec.adapter is not None:
        yield "adapter", "an adapter of its own beside those of tasks", "make it that of a task, or remove the tasks"
    if len(names) == 1:
        message = f"`{names[0]}` is the only task"
        yield f"task.{names[0]}", message, "write its adapter as `adapter` of the spec, or add a second task"
    taken: dict[str, str] = {}
    training = {
        name for phase in (None, *spec.phases.values()) for name, share in amounts(spec, phase).items() if share
    }
    for name, task in spec.tasks.items():
        path = f"task.{name}"
        if task.adapter is None:
            yield path, f"task {name} has no adapter", "add one, such as `adapter lora { rank = 16 }`"
        elif isinstance(arch.adapter, TaskAdapters) and (unfit := _unfit(arch.adapter.tasks[name])) is not None:
            setting, message, hint = unfit
            said = f"{path}.adapter.{setting}"
            if task.adapter.from_ is not None and spec.origins[said].kind == "default":
                said, message = f"{path}.adapter.from", f"`{setting}` of this adapter: {message}"
                free = setting in task.adapter.free
                hint = f"write another `{setting}` beside it" if free else "train this adapter alone, with `adapter`"
            yield said, message, hint
        where = f"{path}.datasets" if task.datasets else path
        for dataset in task.reads:
            if dataset not in spec.datasets:
                known = ", ".join(spec.datasets) or "none"
                hint = did_you_mean(dataset, spec.datasets) or f"datasets of this spec: {known}"
                yield where, f"task {name} reads the unknown dataset `{dataset}`", hint
            elif dataset in taken:
                message = f"`{dataset}` is read by task {taken[dataset]} and by task {name}"
                yield where, message, "let each dataset be of one task"
            elif dataset not in training:
                yield where, f"`{dataset}` of task {name} is not trained on", "give it a weight in `mixture`"
            taken[dataset] = name
    for dataset in trainable(spec):
        if dataset.name in training and dataset.name not in taken:
            message = f"the rows of `{dataset.name}` are trained on, and no task reads them"
            yield f"dataset.{dataset.name}", message, "name it in the `datasets` of a task, or hold it out"
    if not spec.mixture.exact:
        message = "tasks need as many rows of each dataset in every step"
        yield "mixture", message, "write `exact = true` in `mixture`"
    if spec.phases and any(phase.mix for phase in spec.phases.values()):
        phase = next(phase for phase in spec.phases.values() if phase.mix)
        message = "tasks take the same rows from the first step to the last"
        yield f"phase.{phase.name}.mix", message, "leave it out"


def _unfit(adapter: Adapter) -> tuple[str, str, str] | None:
    """What of an adapter, as it was written or read, keeps it from being that of a task: the setting, what is wrong,
    and what to do."""
    if adapter.train:
        message = "the model under the adapters is that of all tasks, and none of them trains a part of it"
        return "train", message, "leave it out"
    return adapter.unfit_for_task()


def _beside(spec: Spec, arch: Architecture) -> Iterator[tuple[str, str, str]]:
    """What of the spec would not hold for each task by itself."""
    if spec.groups:
        name = next(iter(spec.groups))
        yield f"group.{name}", "parameters are grouped by their tasks", "give tasks an `optimizer`, or remove the group"
    if spec.optimizer.clip_spikes is not None:
        message = "clip_spikes compares norms of the whole model, and each task has its own"
        yield "optimizer.clip_spikes", message, "use clip alone"
    if spec.step is not None:
        yield "step", "a step of your own does not know of tasks", "remove it"
    if spec.evaluation_step is not None:
        yield "evaluation_step", "an evaluation of your own does not know of tasks", "remove it"
    if spec.loss.unit != "token":
        message = f"the loss is divided by its {spec.loss.unit}s, and that of a task by its tokens"
        yield "loss", message, "use a loss of single tokens, or train the adapters one by one"
    if spec.ema is not None:
        yield "ema", "averages go on where a task leaves a step out", "remove it"
    if spec.compile.mode != "none":
        message = "compiled blocks have rows of fixed tasks, and these differ from microbatch to microbatch"
        yield "compile.mode", message, "use compile mode none"
    if spec.activation.tile_mlp != 1:
        message = "pieces of feed-forward layers do not know which rows they are of"
        yield "activation.tile_mlp", message, "use tile_mlp 1"
    for name, value in (("aux_loss", arch.router_aux_loss), ("z_loss", arch.router_z_loss)):
        if arch.is_moe and value > 0:
            message = "losses of routers are of the rows of all tasks together, and routers are not trained"
            yield f"model.router.{name}", message, f"use {name} 0"
