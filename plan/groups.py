"""Parameter groups and tasks: parameters with an optimizer of their own, and several adapters over one model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, Final

from attrs import evolve, field

from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.schema.adapters import Adapter, TaskAdapters
from xtrain.dsl.schema.optimizers import OPTIMIZERS, Optimizer, ParameterGroup, StateTensor
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.amounts import amounts, trainable
from xtrain.plan.architecture import Architecture, parameters, task_in
from xtrain.plan.findings import Findings, checks
from xtrain.plan.parameters import Patterns, blocks_beyond, covers, frozen_names, instead
from xtrain.plan.plan import Plan

CODE: Final = "X440"
ArgumentsOf = Callable[[Optimizer], dict[str, Any]]


# Elements that are converted to the update's format at once, if they are stored in another format.
ELEMENTS_AT_ONCE: Final = 2**24


def alone(arch: Architecture, task: str) -> Architecture:
    """Return the model with the adapter of one task only."""
    assert isinstance(arch.adapter, TaskAdapters)
    return evolve(arch, adapter=arch.adapter.tasks[task])


def unfit_task(arch: Architecture, task: str | None) -> tuple[str, str] | None:
    """Return (error, remedy) if `task` is not one of the model's tasks, or is missing although the model has several;
    otherwise None."""
    names = list(arch.adapter.tasks) if isinstance(arch.adapter, TaskAdapters) else []
    if task is None:
        return ("the run trains the adapters of several tasks", f"name one: {', '.join(names)}") if names else None
    if not names:
        return f"the run has no tasks, and `{task}` is named", "leave it out"
    if task not in names:
        return f"the run has no task `{task}`", did_you_mean(task, names) or f"name one: {', '.join(names)}"
    return None


def task_of(spec: Spec, dataset: str) -> str | None:
    """Return the task that trains on a dataset."""
    return next((name for name, task in spec.tasks.items() if dataset in task.reads), None)


def optimizer_of(spec: Spec, task: str) -> Optimizer:
    """Return a task's optimizer: its own, or the optimizer of the spec."""
    return spec.tasks[task].optimizer or spec.optimizer


def clip_args(spec: Spec) -> dict[str, dict[str, Any]]:
    """Return task → arguments of the node that clips its gradients: its datasets and their maximum norm."""
    found: dict[str, dict[str, Any]] = {}
    for name, task in spec.tasks.items():
        limit = optimizer_of(spec, name).clip
        found[name] = {"datasets": list(task.reads), **({} if limit is None else {"max_norm": limit})}
    return found


@checks(
    "model.tasks",
    reads="task task.* adapter.* {datasets} mixture.* phase phase.* group optimizer.* step.* evaluation_step.* "
    "ema.* loss.* compile.mode activation.tile_mlp model.*",
)
def check_tasks(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Check the needs of tasks: each has an adapter and datasets, with a fixed number of rows in every step, and
    nothing else in the spec treats the gradients of all tasks as one."""
    if not spec.tasks:
        return
    rule = "model.tasks"
    for path, message, hint in (*_wrong(spec, arch), *_beside(spec, arch)):
        found.fail(rule, CODE, path, message, hint)
        return
    found.passed(rule, ", ".join(f"{name} on {', '.join(task.reads)}" for name, task in spec.tasks.items()))


def _wrong(spec: Spec, arch: Architecture) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, error, remedy) for invalid tasks."""
    names = list(spec.tasks)
    if spec.adapter is not None:
        yield "adapter", "an adapter in addition to the tasks' adapters", "move it into a task, or remove the tasks"
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
                hint = f"set another `{setting}` next to it" if free else "train this adapter alone, with `adapter`"
            yield said, message, hint
        where = f"{path}.datasets" if task.datasets else path
        for dataset in task.reads:
            if dataset not in spec.datasets:
                known = ", ".join(spec.datasets) or "none"
                hint = did_you_mean(dataset, spec.datasets) or f"datasets of this spec: {known}"
                yield where, f"task {name} reads the unknown dataset `{dataset}`", hint
            elif dataset in taken:
                message = f"`{dataset}` is read by task {taken[dataset]} and by task {name}"
                yield where, message, "assign each dataset to one task"
            elif dataset not in training:
                yield where, f"`{dataset}` of task {name} is not trained on", "give it a weight in `mixture`"
            taken[dataset] = name
    for dataset in trainable(spec):
        if dataset.name in training and dataset.name not in taken:
            message = f"the rows of `{dataset.name}` are trained on, and no task reads them"
            yield f"dataset.{dataset.name}", message, "name it in the `datasets` of a task, or hold it out"
    if not spec.mixture.exact:
        message = "tasks need the same number of rows of each dataset in every step"
        yield "mixture", message, "write `exact = true` in `mixture`"
    if spec.phases and any(phase.mix for phase in spec.phases.values()):
        phase = next(phase for phase in spec.phases.values() if phase.mix)
        message = "tasks take the same rows from the first step to the last"
        yield f"phase.{phase.name}.mix", message, "leave it out"


def _unfit(adapter: Adapter) -> tuple[str, str, str] | None:
    """Return (setting, error, remedy) if an adapter, written or read, cannot belong to a task."""
    if adapter.train:
        message = "all tasks share the model under the adapters, so none of them can train a part of it"
        return "train", message, "leave it out"
    return adapter.unfit_for_task()


def _beside(spec: Spec, arch: Architecture) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, error, remedy) for settings of the spec that would not hold for each task separately."""
    if spec.groups:
        name = next(iter(spec.groups))
        yield f"group.{name}", "parameters are grouped by their tasks", "give tasks an `optimizer`, or remove the group"
    if spec.optimizer.clip_spikes is not None:
        message = "clip_spikes compares norms of the whole model, and each task has its own"
        yield "optimizer.clip_spikes", message, "use clip alone"
    if spec.step is not None:
        yield "step", "your own step does not support tasks", "remove it"
    if spec.evaluation_step is not None:
        yield "evaluation_step", "your own evaluation does not support tasks", "remove it"
    if spec.loss.unit != "token":
        message = f"the loss is divided by its {spec.loss.unit}s, but a task's loss by its tokens"
        yield "loss", message, "use a loss of single tokens, or train the adapters one by one"
    if spec.ema is not None:
        yield "ema", "averages are updated in steps that a task skips", "remove it"
    if spec.compile.mode != "none":
        message = "compiled blocks need fixed rows for each task, which differ between microbatches"
        yield "compile.mode", message, "use compile mode none"
    if spec.activation.tile_mlp != 1:
        message = "pieces of feed-forward layers do not know the tasks of their rows"
        yield "activation.tile_mlp", message, "use tile_mlp 1"
    for name, value in (("aux_loss", arch.router_aux_loss), ("z_loss", arch.router_z_loss)):
        if arch.is_moe and value > 0:
            message = "router losses cover the rows of all tasks, and routers are not trained"
            yield f"model.router.{name}", message, f"use {name} 0"
    if arch.learning_indexers:
        yield "model.index_loss", "the loss of indexers covers the rows of all tasks", "use index_loss 0"


OP: Final = "setup.group"


@frozen
class ParameterGroups:
    """Assignment of parameters to optimizers, and the state that each optimizer keeps.

    main: arguments of the optimizer's node. groups: arguments of the groups' nodes.
    """

    main: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...] = field(default=())

    @classmethod
    def of(cls, plan: Plan) -> "ParameterGroups":
        return cls(plan.node("setup.optimizer").args, tuple(node.args for node in plan.nodes if node.op == OP))

    @cached_property
    def _own(self) -> Mapping[str, Mapping[str, Any]]:
        """Name → arguments of the optimizer, for groups with an optimizer of their own."""
        return {name_of(group): group["own"] for group in self.groups if "own" in group}

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns(group["pattern"] for group in self.groups if "pattern" in group)

    def group(self, name: str) -> str | None:
        """Return the name of a parameter's group; None without one."""
        task = task_in(name)
        return next(iter(self._patterns.of(name)), f"task {task}" if task else None)

    @property
    def several(self) -> bool:
        """True if the parameters have more than one optimizer."""
        return bool(self._own)

    @cached_property
    def _of_spec(self) -> tuple[type[Optimizer], Mapping[str, Any]]:
        return OPTIMIZERS.of(self.main), self.main

    def args(self, owner: str) -> Mapping[str, Any]:
        """Return the arguments of a group's optimizer; for an empty name, of the spec's optimizer."""
        return self._own[owner] if owner else self.main

    def owner(self, name: str) -> str:
        """Return the name of the group whose own optimizer updates a parameter; empty if the spec's optimizer does."""
        group = self.group(name)
        return group if group is not None and group in self._own else ""

    def optimizer(self, name: str) -> tuple[type[Optimizer], Mapping[str, Any]]:
        """Return the optimizer that updates a parameter, and its arguments."""
        if not self._own or not (owner := self.owner(name)):
            return self._of_spec
        args = self.args(owner)
        return OPTIMIZERS.of(args), args

    def state(self, name: str) -> tuple[StateTensor, ...]:
        """Return the tensors that the optimizer keeps for a parameter."""
        chosen, args = self.optimizer(name)
        return chosen.state(args, name)

    def scalars(self, name: str) -> tuple[str, ...]:
        """Return the names of the single fp32 numbers that the optimizer keeps for a parameter."""
        chosen, args = self.optimizer(name)
        return chosen.scalars(args, name)

    def title(self) -> str:
        """Return words that distinguish this optimizer state from the state of other optimizers."""
        own = (f"{OPTIMIZERS.of(args).title(args)} of {name}" for name, args in sorted(self._own.items()))
        return "; ".join((OPTIMIZERS.of(self.main).title(self.main), *own))


def name_of(group: Mapping[str, Any]) -> str:
    """Return the name of a group: its pattern, or `task sql`. group: the arguments of its node."""
    return group["pattern"] if "pattern" in group else f"task {group['task']}"


def is_in(group: Mapping[str, Any], name: str) -> bool:
    """Return True if a parameter belongs to a group. group: the arguments of its node."""
    return covers(group["pattern"], name) if "pattern" in group else task_in(name) == group["task"]


def optimizers_of(spec: Spec) -> dict[str, Optimizer]:
    """Return name → optimizer of groups and tasks, with the optimizer of the spec under an empty name."""
    groups = {group.name: group.optimizer for group in spec.groups.values() if group.optimizer is not None}
    return {"": spec.optimizer, **groups, **{f"task {task}": optimizer_of(spec, task) for task in spec.tasks}}


def written_optimizers(spec: Spec) -> dict[str, Optimizer]:
    """Return path prefix of `optimizer` → optimizer, for the optimizers that the spec declares."""
    groups = {f"group.{name}.": group.optimizer for name, group in spec.groups.items()}
    tasks = {f"task.{name}.": task.optimizer for name, task in spec.tasks.items()}
    return {"": spec.optimizer, **{path: own for path, own in (groups | tasks).items() if own is not None}}


@checks("group.*", reads="group group.*.name model.* tokenizer.source")
def check_groups(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Check that every group has trained parameters that are in no other group, and changes something for them."""
    if not spec.groups:
        return
    names = [tensor.name for tensor in parameters(arch)]
    frozen = frozen_names(arch, spec.model.frozen)
    taken: dict[str, str] = {}
    matches = Patterns(spec.groups).matches(names)
    for group in spec.groups.values():
        rule, path = f"group.{group.name}", f"group.{group.name}.name"
        meant = matches[group.name]
        shared = [name for name in meant if name in taken]
        for name in meant:
            taken.setdefault(name, group.name)
        if not meant:
            message = f"no parameter of the model is in `{group.name}`"
            found.fail(
                rule, "X436", path, message, _other_targets(group.name, arch) or instead(group.name, names, arch)
            )
        elif frozen.issuperset(meant):
            message = f"every parameter in `{group.name}` is frozen, so no optimizer updates it"
            found.fail(rule, "X436", path, message, _to_train(meant, arch))
        elif shared:
            more = f" and {len(shared) - 1:,} more" if len(shared) > 1 else ""
            message = f"`{group.name}` and `{taken[shared[0]]}` both have {shared[0]}{more}"
            found.fail(rule, "X436", path, message, "write the groups so that no parameter is in two")
        elif (beyond := blocks_beyond(group.name, arch)) is not None:
            found.warn(rule, "W401", path, *beyond)
        else:
            _check_settings(spec, group, found)
            trained = len(meant) - len(frozen.intersection(meant))
            found.passed(rule, f"{trained:,} of {len(names) - len(frozen):,} trained tensors are in groups")
    _check_rest(spec, [name for name in names if name not in frozen], found)


def _other_targets(pattern: str, arch: Architecture) -> str | None:
    """Return a remedy for a group that names adapter parameters of matrices without adapter."""
    module, dot, _ = pattern.rpartition(".")
    if arch.adapter is None or not dot:
        return None
    named = [tensor.name for tensor in parameters(arch.base) if covers(module, tensor.name)]
    adapted = {tensor.adapter for tensor in parameters(arch)}
    if not named or not adapted.isdisjoint(named):
        return None
    return f"no matrix in `{module}` has an adapter: name some in `targets` and `layers`, or remove the group"


def _to_train(meant: Sequence[str], arch: Architecture) -> str:
    """Return a remedy for a group without trained parameters."""
    if arch.adapter is None:
        return "remove the group, or train some of it"
    beside = next((tensor.name for tensor in parameters(arch) if tensor.adapter in meant and not tensor.begun), None)
    if beside is not None:
        return f"the adapter is trained instead: name its parameters, such as {beside}"
    return "remove the group, or name it in `train` of the adapter"


def _check_settings(spec: Spec, group: ParameterGroup, found: Findings) -> None:
    """Report settings of a group that its optimizer does not support or that change nothing."""
    rule, path, own = f"group.{group.name}.settings", f"group.{group.name}", group.optimizer
    chosen = spec.optimizer if own is None else own
    if group.weight_decay is not None and not chosen.decays(chosen.args()):
        message = f"`{chosen.kind}` has no weight decay"
        found.fail(rule, "X436", f"{path}.weight_decay", message, "remove it, or give the group another optimizer")
    elif own is None and group.weight_decay is None and group.lr_scale == 1.0:
        message = f"the group `{group.name}` changes nothing"
        found.warn(rule, "W401", f"{path}.name", message, "set lr_scale, weight_decay or optimizer, or remove it")
    elif own is not None and group.weight_decay is not None and _written(spec, f"{path}.optimizer.weight_decay"):
        message = "weight_decay changes nothing, because the group's own counts"
        found.warn(rule, "W401", f"{path}.optimizer.weight_decay", message, "keep one of the two")


def _written(spec: Spec, path: str) -> bool:
    origin = spec.origins.get(path)
    return origin is not None and origin.kind != "default"


@checks("group", reads="group group.*.name group.*.optimizer.kind optimizer.kind model.* adapter.* tokenizer.source")
def _check_rest(spec: Spec, trained: list[str], found: Findings) -> None:
    """Check that some parameters are left for the optimizer of the spec."""
    own = Patterns(group.name for group in spec.groups.values() if group.optimizer is not None)
    if trained and all(map(own.of, trained)):
        message = f"`{spec.optimizer.kind}` updates nothing, because every parameter has a group's optimizer"
        found.fail(
            "group", "X436", "optimizer", message, "use a group's optimizer as `optimizer`, and remove the group"
        )


def rows_at_once(shape: Sequence[int]) -> int:
    """Return how many rows, along the first dim, of a rank's piece of a parameter are updated at once if their numbers
    are converted to another format."""
    return max(1, ELEMENTS_AT_ONCE // max(1, prod(shape[1:])))


def _group_args(spec: Spec, group: ParameterGroup, arguments_of: ArgumentsOf) -> dict[str, Any]:
    """Return the JSON arguments of a group's node, without settings that it does not change.

    lr_scale: factor on the learning rate of a step. own: the arguments of its own optimizer, whose `lr` is part of
    `lr_scale`.
    """
    own = group.optimizer
    scale = group.lr_scale if own is None else group.lr_scale * (own.lr / spec.optimizer.lr)
    args: dict[str, Any] = {"pattern": group.name, **({"lr_scale": scale} if scale != 1.0 else {})}
    if group.weight_decay is not None:
        args["weight_decay"] = group.weight_decay
    return args if own is None else {**args, "own": arguments_of(own)}


def _task_args(spec: Spec, task: str, arguments_of: ArgumentsOf) -> dict[str, Any]:
    """Return the JSON arguments of the node of a task's parameters, which form a group with an optimizer of their
    own."""
    own = optimizer_of(spec, task)
    scale = own.lr / spec.optimizer.lr
    return {"task": task, **({"lr_scale": scale} if scale != 1.0 else {}), "own": arguments_of(own)}


def parameter_groups(spec: Spec, arguments_of: ArgumentsOf) -> ParameterGroups:
    """Return the groups of a spec. arguments_of: JSON arguments of an optimizer's node."""
    groups = [_group_args(spec, each, arguments_of) for each in spec.groups.values()]
    tasks = [_task_args(spec, task, arguments_of) for task in spec.tasks]
    return ParameterGroups(arguments_of(spec.optimizer), (*groups, *tasks))
