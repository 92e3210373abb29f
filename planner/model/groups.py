"""`group NAME { … }`: parameters that are updated in a way of their own, and what the optimizers keep for all."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from xtrain.dsl.schema.optimizers import OPTIMIZERS, Optimizer, ParameterGroup
from xtrain.dsl.schema.state_tensors import StateTensor
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture, parameters, task_in
from xtrain.planner.findings import Findings
from xtrain.planner.model.frozen import blocks_beyond, covers, frozen_names, instead
from xtrain.planner.model.tasks import optimizer_of
from xtrain.planner.plan import Plan
from xtrain.planner.units import count_text, plural

if TYPE_CHECKING:
    from xtrain.planner.resolved import Resolved

OP: Final = "setup.group"


@define(frozen=True, slots=False)
class ParameterGroups:
    """Which optimizer updates which parameter, and what it keeps for it.

    main: the arguments of the optimizer's node. groups: those of the nodes of groups.
    """

    main: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...] = field(default=())

    @classmethod
    def of(cls, plan: Plan) -> "ParameterGroups":
        return cls(plan.node("setup.optimizer").args, tuple(node.args for node in plan.nodes if node.op == OP))

    @cached_property
    def _own(self) -> Mapping[str, Mapping[str, Any]]:
        """Name → arguments of the optimizer, of groups with one of their own."""
        return {name_of(group): group["own"] for group in self.groups if "own" in group}

    @cached_property
    def _with_own(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(group for group in self.groups if "own" in group)

    @property
    def several(self) -> bool:
        """Whether some parameters have another optimizer than the others."""
        return bool(self._own)

    @cached_property
    def _of_spec(self) -> tuple[type[Optimizer], Mapping[str, Any]]:
        return OPTIMIZERS.of(self.main), self.main

    def args(self, owner: str) -> Mapping[str, Any]:
        """The arguments of the optimizer of a group; of an empty name those of the optimizer of the spec."""
        return self._own[owner] if owner else self.main

    def owner(self, name: str) -> str:
        """The name of the group whose own optimizer updates a parameter; empty where that of the spec does."""
        return next((name_of(group) for group in self._with_own if is_in(group, name)), "")

    def optimizer(self, name: str) -> tuple[type[Optimizer], Mapping[str, Any]]:
        """The optimizer that updates a parameter, and its arguments."""
        if not self._own or not (owner := self.owner(name)):
            return self._of_spec
        args = self.args(owner)
        return OPTIMIZERS.of(args), args

    def state(self, name: str) -> tuple[StateTensor, ...]:
        """The tensors that are kept for a parameter."""
        chosen, args = self.optimizer(name)
        return chosen.state(args, name)

    def scalars(self, name: str) -> tuple[str, ...]:
        """The names of the single numbers that are kept for a parameter, in fp32."""
        chosen, args = self.optimizer(name)
        return chosen.scalars(args, name)

    def title(self) -> str:
        """What tells the state from that of other optimizers, in words."""
        own = (f"{OPTIMIZERS.of(args).title(args)} of {name}" for name, args in sorted(self._own.items()))
        return "; ".join((OPTIMIZERS.of(self.main).title(self.main), *own))


def name_of(group: Mapping[str, Any]) -> str:
    """What a group is called: its pattern, or `task sql`. group: the arguments of its node."""
    return group["pattern"] if "pattern" in group else f"task {group['task']}"


def is_in(group: Mapping[str, Any], name: str) -> bool:
    """Whether a parameter is of a group. group: the arguments of its node."""
    return covers(group["pattern"], name) if "pattern" in group else task_in(name) == group["task"]


def optimizers_of(spec: Spec) -> dict[str, Optimizer]:
    """The optimizer of the spec, under an empty name, and those of groups and tasks by their names."""
    groups = {group.name: group.optimizer for group in spec.groups.values() if group.optimizer is not None}
    return {"": spec.optimizer, **groups, **{f"task {task}": optimizer_of(spec, task) for task in spec.tasks}}


def written_optimizers(spec: Spec) -> dict[str, Optimizer]:
    """Those that the spec declares, by what stands before `optimizer` in their paths."""
    groups = {f"group.{name}.": group.optimizer for name, group in spec.groups.items()}
    tasks = {f"task.{name}.": task.optimizer for name, task in spec.tasks.items()}
    return {"": spec.optimizer, **{path: own for path, own in (groups | tasks).items() if own is not None}}


def all_group_args(run: "Resolved") -> tuple[dict[str, Any], ...]:
    """The JSON arguments of the nodes of all groups. The parameters of each task are one, with an optimizer of its
    own."""
    spec = run.spec
    groups = (group_args(run, each) for each in spec.groups.values())
    return (*groups, *(task_args(run, task) for task in spec.tasks))


def task_args(run: "Resolved", task: str) -> dict[str, Any]:
    """The same of the parameters of a task."""
    own = optimizer_of(run.spec, task)
    scale = own.lr / run.spec.optimizer.lr
    return {"task": task, **({"lr_scale": scale} if scale != 1.0 else {}), "own": own.arguments(run)}


def task_text(run: "Resolved", task: str) -> str:
    """How many parameters a task has, and how they are updated, in words."""
    own = optimizer_of(run.spec, task)
    meant = [each for each in run.inventory.tensors if each.task == task]
    size, reads = count_text(sum(each.size for each in meant)), ", ".join(run.spec.tasks[task].reads)
    does = f"{own.does(run.formats.params)}, peak {own.lr:g}"
    return f"{plural(len(meant), 'tensor')}, {size} parameters, on {reads}: {does}"


def group_args(run: "Resolved", group: ParameterGroup) -> dict[str, Any]:
    """The JSON arguments of the node of a group; what it leaves as it is, is not among them.

    lr_scale: factor on the learning rate of a step. own: the arguments of its own optimizer, whose `lr` `lr_scale`
    contains.
    """
    own = group.optimizer
    scale = group.lr_scale if own is None else group.lr_scale * (own.lr / run.spec.optimizer.lr)
    args: dict[str, Any] = {"pattern": group.name, **({"lr_scale": scale} if scale != 1.0 else {})}
    if group.weight_decay is not None:
        args["weight_decay"] = group.weight_decay
    return args if own is None else {**args, "own": own.arguments(run)}


def group_text(run: "Resolved", group: ParameterGroup) -> str:
    """How many parameters a group has, and what becomes of them, in words."""
    meant = [each for each in run.inventory.tensors if each.trained and covers(group.name, each.name)]
    size, own = count_text(sum(each.size for each in meant)), group.optimizer
    parts = [] if own is None else [own.does(run.formats.params), f"peak {own.lr:g}"]
    if group.lr_scale != 1.0:
        parts.append(f"learning rate × {group.lr_scale:g}")
    if group.weight_decay is not None:
        vectors = sum(len(each.shape) == 1 for each in meant)
        also = f", of which {plural(vectors, 'vector')}," if 0 < vectors < len(meant) else ""
        parts.append(f"all{also} decay by {group.weight_decay:g}" if group.weight_decay else "nothing decays")
    return f"{plural(len(meant), 'tensor')}, {size} parameters: {'; '.join(parts)}"


def check_groups(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Every group must have parameters that are trained and in no other group, and change something for them."""
    if not spec.groups:
        return
    names = [tensor.name for tensor in parameters(arch)]
    frozen = frozen_names(arch, spec.model.frozen)
    taken: dict[str, str] = {}
    for group in spec.groups.values():
        rule, path = f"group.{group.name}", f"group.{group.name}.name"
        meant = [name for name in names if covers(group.name, name)]
        shared = [name for name in meant if name in taken]
        taken = {**dict.fromkeys(meant, group.name), **taken}
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
            found.passed(rule, f"{trained:,} of {len(names) - len(frozen):,} trained tensors are updated apart")
    _check_rest(spec, [name for name in names if name not in frozen], found)


def _other_targets(pattern: str, arch: Architecture) -> str | None:
    """What to do where a group means parameters of an adapter that the matrices it names do not have."""
    module, dot, _ = pattern.rpartition(".")
    if arch.adapter is None or not dot:
        return None
    named = [tensor.name for tensor in parameters(arch.base) if covers(module, tensor.name)]
    adapted = {tensor.adapter for tensor in parameters(arch)}
    if not named or not adapted.isdisjoint(named):
        return None
    return f"the adapter is of no matrix in `{module}`: name some in its `targets` and `layers`, or remove the group"


def _to_train(meant: Sequence[str], arch: Architecture) -> str:
    """What to do where nothing that a group means is trained."""
    if arch.adapter is None:
        return "remove the group, or train some of it"
    beside = next((tensor.name for tensor in parameters(arch) if tensor.adapter in meant and not tensor.begun), None)
    if beside is not None:
        return f"the adapter is trained beside it: name its parameters, as {beside}"
    return "remove the group, or name it in `train` of the adapter"


def _check_settings(spec: Spec, group: ParameterGroup, found: Findings) -> None:
    """Report what a group says that its optimizer cannot do, or that changes nothing."""
    rule, path, own = f"group.{group.name}.settings", f"group.{group.name}", group.optimizer
    chosen = spec.optimizer if own is None else own
    if group.weight_decay is not None and not chosen.decays(chosen.args()):
        message = f"`{chosen.kind}` has no weight decay"
        found.fail(rule, "X436", f"{path}.weight_decay", message, "remove it, or give the group another optimizer")
    elif own is None and group.weight_decay is None and group.lr_scale == 1.0:
        message = f"the group `{group.name}` changes nothing"
        found.warn(rule, "W401", f"{path}.name", message, "set lr_scale, weight_decay or optimizer, or remove it")
    elif own is not None and group.weight_decay is not None and _written(spec, f"{path}.optimizer.weight_decay"):
        message = "weight_decay changes nothing, as that of the group counts"
        found.warn(rule, "W401", f"{path}.optimizer.weight_decay", message, "keep one of the two")


def _written(spec: Spec, path: str) -> bool:
    origin = spec.origins.get(path)
    return origin is not None and origin.kind != "default"


def _check_rest(spec: Spec, trained: list[str], found: Findings) -> None:
    """Something must be left for the optimizer of the spec."""
    own = [group.name for group in spec.groups.values() if group.optimizer is not None]
    if trained and own and all(any(covers(pattern, name) for pattern in own) for name in trained):
        message = f"`{spec.optimizer.kind}` updates nothing, as every parameter has the optimizer of a group"
        found.fail("group", "X436", "optimizer", message, "make that of a group the optimizer, and remove the group")
