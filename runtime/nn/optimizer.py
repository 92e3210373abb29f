"""Parameter groups that optimizers are built from, element-wise optimizers, and the learning rate of a step.

The optimizers are in `components/optimizers/`. The closed form of the learning rate is in the planner.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from xtrain.dsl.schema.optimizers import Rate, StateTensor
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.groups import ParameterGroups, is_in, name_of
from xtrain.plan.learning_rate import learning_rate
from xtrain.plan.plan import Node, Plan
from xtrain.runtime.base.ops import PlanMismatch, op, op_of
from xtrain.runtime.base.state import Progress, Resources
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.pipeline import WrappedModel
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.updates import (
    PLAIN,
    Box,
    MomentFormat,
    StochasticRounding,
    UpdateRule,
    compiled_rule,
    row_ranges,
    tensors_of,
    wide,
    write_back,
)
from xtrain.runtime.nn.weights import first_state


@frozen(eq=False)
class Storage:
    """Storage of weights and moments. states: format of moments; empty: the weights' format. rounding: of weights;
    None: to the nearest number."""

    states: str = ""
    rounding: StochasticRounding | None = None

    @property
    def converts(self) -> bool:
        """True if numbers are converted to another format for an update."""
        return bool(self.states) or self.rounding is not None

    def first(self, parameter: Tensor, moment: str) -> Tensor:
        """Return the initial value of a moment."""
        return first_state(parameter, StateTensor(moment, self.states))

    def box(self, parameter: Tensor, first: int = 0) -> Box | None:
        """Return the place of rows of a shard, from row `first` on, for stochastic rounding; None without it."""
        return None if self.rounding is None else self.rounding.box(parameter, first)

    def write(self, parameter: Tensor, first: int, stored: Tensor, value: Tensor) -> None:
        """Write new weights to rows of this rank's shard of a parameter, from row `first` on."""
        if value is not stored:
            write_back(stored, value, self.box(parameter, first))


def storage_of(
    plan: Plan, model: ModelParts, progress: Progress, states: str = "", stochastic_rounding: bool = False
) -> Storage:
    """Return the storage of an optimizer. states, stochastic_rounding: arguments of its node."""
    if not stochastic_rounding:
        return Storage(states)
    return Storage(states, StochasticRounding(model.trained(), plan.seed, progress))


class LocalOptimizer(Optimizer):
    """An element-wise optimizer: a rank updates its shards as plain tensors, without communication.

    With DTensors, torch would derive their layout from all parameters again, which takes a second for a few hundred of
    them in the first step, and part of that in each later step.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        storage: Storage | None = None,
        cautious_decay: bool = False,
        compiled: bool = False,
    ) -> None:
        """Initialize the optimizer. compiled: the whole update of a tensor is compiled."""
        super().__init__(params, {"weight_decay": 0.0, **defaults})
        self._storage, self._cautious_decay, self._compiles = storage or Storage(), cautious_decay, compiled
        self._compiled: dict[tuple[MomentFormat, ...], Callable[..., None]] = {}

    @property
    def converts(self) -> bool:
        """True if numbers are converted to another format for an update, some rows at a time."""
        return self._storage.converts

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: Sequence[list[Tensor]],
        counts: list[Tensor],
    ) -> None:
        """Update weights and moments in place: by `rule`, one tensor after the other. moments: for each name in
        `moments`, of all weights. counts: numbers of updates, with this one, if `counts`."""
        rule, by = self.rule, self.numbers(group)
        for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            rule(weight, gradient, [each[place] for each in moments], counts[place] if counts else None, by)

    @property
    def rule(self) -> UpdateRule:
        """The formula of an update."""
        raise NotImplementedError

    def numbers(self, group: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers that the rule takes from a parameter group."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. closure: not used."""
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not used:
                continue
            for parameter in used:
                self._begin(parameter)
            counts = [self.state[parameter]["step"] for parameter in used] if self.counts else []
            if counts:
                torch._foreach_add_(counts, 1)  # pyright: ignore[reportPrivateImportUsage]
            if self._compiles:
                by = tensors_of(self.numbers(group), used[0])
                for place, parameter in enumerate(used):
                    self._update_compiled(parameter, counts[place] if counts else None, by)
                continue
            if self.converts:
                for place, parameter in enumerate(used):
                    self._update_converted(group, parameter, counts[place : place + 1])
                continue
            moments = [[local(self.state[parameter][name]) for parameter in used] for name in self.moments]
            self.update(group, list(map(local, used)), [local(p.grad) for p in used], moments, counts)

    def _begin(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if self.counts and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in self.moments:
            if name not in state:
                self.begin(parameter, name)

    def begin(self, parameter: Tensor, moment: str) -> None:
        """Create the initial value of a moment."""
        self.state[parameter][moment] = self._storage.first(parameter, moment)

    def stored(self, parameter: Tensor, moment: str) -> tuple[MomentFormat, list[Tensor]]:
        """Return the format of a moment, and the tensors of this rank's shard."""
        return PLAIN, [local(self.state[parameter][moment])]

    def _formats(self, parameter: Tensor) -> tuple[tuple[MomentFormat, ...], list[list[Tensor]]]:
        every = [self.stored(parameter, name) for name in self.moments]
        return tuple(form for form, _ in every), [tensors for _, tensors in every]

    def _update_compiled(self, parameter: Tensor, count: Tensor | None, by: dict[str, Tensor]) -> None:
        formats, moments = self._formats(parameter)
        if formats not in self._compiled:
            self._compiled[formats] = compiled_rule(self.rule, formats)
        gradient = local(parameter.grad)  # pyright: ignore[reportArgumentType]
        self._compiled[formats](local(parameter), gradient, moments, count, by, self._storage.box(parameter))

    def _update_converted(self, group: dict[str, Any], parameter: Tensor, counts: list[Tensor]) -> None:
        """Update some rows at a time, converted to the format of the update."""
        weights, gradients = local(parameter), local(parameter.grad)  # pyright: ignore[reportArgumentType]
        formats, whole = self._formats(parameter)
        for rows in row_ranges(weights):
            piece, pieces = weights[rows], [[tensor[rows] for tensor in tensors] for tensors in whole]
            moments = [form.load(own, piece) for form, own in zip(formats, pieces, strict=True)]
            weight = wide(piece, piece)
            self.update(group, [weight], [wide(gradients[rows], piece)], [[m] for m in moments], counts)
            for form, own, moment in zip(formats, pieces, moments, strict=True):
                form.store(own, moment)
            self._storage.write(parameter, rows.start, piece, weight)


def updated(plan: Plan, model: ModelParts) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trained parameters, by name, of the optimizer being built: those of `model.group`."""
    owner = ParameterGroups.of(plan).owner
    return ((name, parameter) for name, parameter in model.trained() if owner(name) == model.group)


def groups_of(
    plan: Plan, model: ModelParts, weight_decay: float, only: Callable[[str], bool] = lambda name: True
) -> list[dict[str, Any]]:
    """Return the parameter groups of a torch optimizer: with and without decay, split by every `group`. only: True for
    the names to include.

    A fused update takes tensors of one mesh only: experts are in groups of their own.
    """
    decays = {p.name: p.decays for p in plan.parameters.tensors}
    group_of = ParameterGroups.of(plan).group
    roles = _roles(plan) if any(node.op == "setup.parametrization" for node in plan.nodes) else {}
    groups: dict[tuple[bool, str | None, DeviceMesh | None, str], list[nn.Parameter]] = {}
    for name, parameter in updated(plan, model):
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if only(name):
            groups.setdefault((decays[name], group_of(name), mesh, roles.get(name, "")), []).append(parameter)
    if not groups:  # of a stage without trained parameters: an optimizer needs a group
        return [{"params": [], "weight_decay": weight_decay}]
    return [
        {"params": parameters, "weight_decay": weight_decay if decay else 0.0}
        for (decay, *_), parameters in groups.items()
    ]


def _roles(plan: Plan) -> Mapping[str, str]:
    from xtrain.plan.parametrization import roles_of

    return roles_of(plan.architecture)


@runtime_checkable
class MovesWeights(Protocol):
    """An optimizer whose gradients are computed elsewhere than at its updated weights."""

    def to_training_point(self) -> None:
        """Move the weights there; the update of the step moves them back."""
        ...


@runtime_checkable
class KeepsPieces(Protocol):
    """An optimizer whose state belongs to other pieces than the parameters' shards."""

    def tensors(self, plan: Plan) -> dict[str, Tensor]:
        """Return `optimizer.<name>.<moment>` → state of the parameter, for a checkpoint. Collective."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return `model.<name>` → parameters that are in such pieces too. Collective."""
        ...

    def take_weights(self, tensors: dict[str, Tensor]) -> None:
        """Resume from loaded parameters, with those of `weights` in these tensors. Collective."""
        ...

    def take(self, plan: Plan, tensors: dict[str, Tensor]) -> None:
        """Resume from the loaded state in these tensors. Collective."""
        ...


class SeveralOptimizers(Optimizer):
    """Optimizers of different parameters, as one."""

    def __init__(self, optimizers: Sequence[Optimizer], tasks: Sequence[str] = ()) -> None:
        """Combine optimizers. tasks: tasks whose parameters the last optimizers update, one each."""
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers, self.tasks = tuple(optimizers), tuple(tasks)
        self.left_out: Set[str] = frozenset()
        self._share_state()

    def _share_state(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.state[parameter] = optimizer.state[parameter]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters, one optimizer after the other, except tasks in `left_out`. closure: not used."""
        first = len(self.optimizers) - len(self.tasks)
        for place, optimizer in enumerate(self.optimizers):
            if place < first or self.tasks[place - first] not in self.left_out:
                optimizer.step()
        self._share_state()


@op("setup.stack_optimizer", gives="optimizer")
def of_stack(wrapped: WrappedModel) -> Optimizer:
    """Return the optimizer that the stack has wrapped."""
    assert wrapped.optimizer is not None
    return wrapped.optimizer


@op("setup.parametrization", gives="optimizer")
def set_rates(plan: Plan, model: ModelParts, optimizer: Optimizer, roles: dict[str, dict[str, float]]) -> Optimizer:
    """Multiply learning rate, weight decay and `eps` of the parameters of each role by its factors.

    Raises PlanMismatch if the optimizer has put parameters of several roles in one group of torch.
    """
    names, role_of = {parameter: name for name, parameter in model.trained()}, _roles(plan)
    for group in optimizer.param_groups:
        meant = {role_of[names[parameter]] for parameter in group["params"]}
        if len(meant) > 1:
            raise PlanMismatch(f"the optimizer has joined parameters of several roles: {', '.join(sorted(meant))}")
        by = {name: factor for role in meant for name, factor in roles.get(role, {}).items()}
        group["lr_scale"] = group.get("lr_scale", 1.0) * by.get("lr", 1.0)
        for name in ("weight_decay", "eps"):
            if name in group:
                group[name] *= by.get(name, 1.0)
    return optimizer


@op("setup.group", gives="optimizer")
def set_group(
    plan: Plan,
    model: ModelParts,
    resources: Resources,
    optimizer: Optimizer,
    pattern: str = "",
    task: str = "",
    lr_scale: float = 1.0,
    weight_decay: float | None = None,
    own: dict[str, Any] | None = None,
) -> Optimizer:
    """Set another learning rate, weight decay or update rule for the parameters of a pattern, or of a task.

    own: arguments of an optimizer of their own. Raises PlanMismatch if the optimizer has put some of them in one group
    of torch with others.
    """
    args = {"task": task} if task else {"pattern": pattern}
    if own is not None:
        node = Node(id=f"setup.group.{name_of(args)}", kind="setup", op="setup.optimizer", does="", args=own)
        built = op_of(node).bind(node, {**resources, "model": evolve(model, group=name_of(args))})()
        before, tasks = (optimizer,), ()
        if isinstance(optimizer, SeveralOptimizers):
            before, tasks = optimizer.optimizers, optimizer.tasks
        optimizer = SeveralOptimizers([*before, built], (*tasks, task) if task else tasks)
    names = {parameter: name for name, parameter in model.trained()}
    for group in optimizer.param_groups:
        meant = {is_in(args, names[parameter]) for parameter in group["params"]}
        if meant == {True}:
            group["lr_scale"] = group.get("lr_scale", 1.0) * lr_scale
            if weight_decay is not None:
                group["weight_decay"] = weight_decay
        elif len(meant) > 1:
            which = f"task {task}" if task else f"group {pattern}"
            raise PlanMismatch(
                f"the optimizer has joined parameters of `{which}` with others: it must keep the groups that "
                "it is given apart"
            )
    return optimizer


Schedule = Rate


@op("setup.scheduler", gives="schedule", traced=False)
def build_schedule(
    feed: Feed,
    kind: str,
    lr: float,
    steps: int | None,
    **own: Any,
) -> Schedule:
    """Return the function from step index (from 0) to learning rate, with the factor of the step's phase.

    Lengths in tokens and epochs count from the checkpoint, once a resumed run has read it. own: further arguments of
    the schedule.
    """
    args = {"kind": kind, "lr": lr, "steps": steps, **own}
    known: list[tuple[Arithmetic, Rate]] = []

    def rate(index: int) -> float:
        assert feed.batch is not None
        if not known or known[0][0] is not feed.batch:
            known[:] = [(feed.batch, learning_rate(args, feed.batch, feed.phases))]
        return known[0][1](index)

    return rate
