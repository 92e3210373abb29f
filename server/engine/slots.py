"""Slots of a rank of a server, each free or with the adapter of a client."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from attrs import define, evolve, field
from torch import Tensor, nn

from xtrain.blocks.adapted import adapted_matrices, alone_name
from xtrain.dsl.schema.adapters import Adapter, TaskAdapters
from xtrain.plan.architecture import Architecture, ParameterSpec, parameters
from xtrain.plan.graph import slots_of
from xtrain.plan.mesh import local_shapes
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import PlanMismatch, op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.nn.adapters import TaskLinear, first_values
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.gradients import copies_of_parameter
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.weights import fill
from xtrain.server.engine.writing import SamplePages
from xtrain.server.engine_interface import AdapterSettings

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
MOST_SAMPLED: Final = 32  # adapters whose values stay in memory after sampling


@define(eq=False)
class AdapterSlot:
    """Slot of an adapter. name: as in parameter names. parameters: of this rank, by their names without slots. shape:
    of its adapter; None if it is free. step: number of updates."""

    number: int
    name: str
    parameters: dict[str, nn.Parameter]
    specs: dict[str, ParameterSpec]
    modules: list[nn.Module]
    shape: AdapterSettings | None = None
    step: int = 0
    moments: dict[str, dict[str, Tensor]] = field(factory=dict)

    @torch.no_grad()
    def clear(self) -> None:
        """Free the slot: zero its parameters and drop its state."""
        for parameter in self.parameters.values():
            parameter.zero_()
        self.shape, self.step = None, 0
        self.drop_gradients()
        self.forget_moments()

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def forget_moments(self) -> None:
        self.step, self.moments = 0, {}

    def begin_moments(self) -> None:
        """Create zero Adam moments, sharded like the parameters."""
        if not self.moments:
            self.moments = {
                name: {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
                for name, parameter in self.parameters.items()
            }

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Fill its parameters from whole ones [r, D], [F, r]; missing ones become zero."""
        for name, parameter in self.parameters.items():
            put(parameter, values.get(name))


@torch.no_grad()
def put(parameter: Tensor, value: Tensor | None) -> None:
    """Fill this rank's piece of a parameter whose whole starts with `value`, followed by zeros."""
    whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if value is not None:
        whole[tuple(slice(length) for length in value.shape)] = value.to(whole)
    fill(parameter, whole)


@define(eq=False)
class Slots:
    """All slots, and the clients' names of the adapters in them.

    specs: of a slot's parameters in the whole model, by their names without slots; stages: name → the pipeline
    coordinate that has it. copies: name → number of ranks with the same elements. sampled: by folder, rank and values
    of exported adapters used in sampling. most_sampled: how many of these stay in memory. replaced: this rank's pieces
    of the trained content of slots that sampling uses. pages: of samples, until another request needs their memory.
    begun: if the model itself is trained, this rank's pieces of its initial weights, in host memory.
    """

    architecture: Architecture
    adapter: Adapter | None
    rank: Rank
    model: ModelParts
    slots: tuple[AdapterSlot, ...]
    specs: dict[str, ParameterSpec]
    stages: dict[str, int]
    copies: dict[str, int]
    attends: frozenset[str]
    of_model: dict[str, AdapterSlot] = field(factory=dict)
    sampled: dict[str, tuple[int, dict[str, Tensor]]] = field(factory=dict)
    most_sampled: int = MOST_SAMPLED
    begun: dict[str, Tensor] = field(factory=dict)
    replaced: dict[int, dict[str, Tensor]] = field(factory=dict)
    pages: SamplePages | None = None

    @torch.no_grad()
    def replace(self, slot: AdapterSlot, values: Mapping[str, Tensor], rank: int) -> None:
        """Put an exported adapter of a rank into a slot until `restore`, whatever it holds."""
        reshard(self.model)
        if slot.number not in self.replaced:
            self.replaced[slot.number] = {name: local(p).detach().clone() for name, p in slot.parameters.items()}
        slot.put(values)
        self.scale(slot, rank)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the trained content of all slots, and free the pages."""
        self.pages = None
        if self.replaced:
            reshard(self.model)
        for number, values in self.replaced.items():
            slot = self.slots[number]
            for name, parameter in slot.parameters.items():
                local(parameter).copy_(values[name])
            if slot.shape is not None:
                self.scale(slot, slot.shape.rank)
        self.replaced = {}

    def free(self) -> AdapterSlot | None:
        taken = {slot.number for slot in self.of_model.values()}
        return next((slot for slot in self.slots if slot.number not in taken), None)

    def shaped(self, rank: int) -> Architecture:
        """Return the model with one adapter of a rank alone."""
        assert self.adapter is not None
        return evolve(self.architecture.base, adapter=self.adapter.of_rank(rank))

    def trained(self, shape: AdapterSettings) -> tuple[ParameterSpec, ...]:
        """Return the parameters of an adapter, as a run that trains it alone has them; or the trained parameters of the
        model."""
        if self.adapter is None:
            return tuple(spec for spec in self.specs.values() if spec.trained)
        adapter_specs = (spec for spec in parameters(self.shaped(shape.rank)) if spec.adapter)
        return tuple(spec for spec in adapter_specs if self.has(spec.name, shape))

    def has(self, name: str, shape: AdapterSettings) -> bool:
        """Return True if an adapter of this shape has the slot's parameter."""
        if self.specs[name].adapter == self.architecture.head_parameter.name:
            return shape.unembed
        return shape.attn if name in self.attends else shape.mlp

    @torch.no_grad()
    def open(self, slot: AdapterSlot, shape: AdapterSettings) -> None:
        """Put a new adapter into a slot, drawn from its seed as its own run draws it; or reset the model."""
        slot.clear()
        if self.adapter is None:
            self.begin(slot)
            slot.shape = shape
            return
        args, device, kind = self.adapter.args(), self.rank.device, type(_matrix(self.architecture))
        own = [spec for spec in self.trained(shape) if spec.name in slot.parameters]
        slot.put({spec.name: first_values(kind, spec, shape.seed, device, args) for spec in own})
        slot.shape = shape
        self.scale(slot, shape.rank)

    @torch.no_grad()
    def begin(self, slot: AdapterSlot) -> None:
        """Reset the model to its initial weights."""
        for name, parameter in slot.parameters.items():
            local(parameter).copy_(self.begun[name])

    def scale(self, slot: AdapterSlot, rank: int) -> None:
        """Scale a slot's products as an adapter of this rank does."""
        if self.adapter is None:
            return
        factor = _matrix(self.shaped(rank)).scale / _matrix(self.shaped(self.adapter.largest)).scale
        for module in slot.modules:
            module.factor = factor  # pyright: ignore[reportAttributeAccessIssue]


def _matrix(arch: Architecture) -> Any:
    """Return one adapted matrix; all have the same scale."""
    return next(matrix for _, matrix in adapted_matrices(arch))


def attending(arch: Architecture) -> Iterator[str]:
    """Yield the names of all parameters of attention layers."""
    for kind in arch.kinds:
        for layer in kind.block.layers():
            if layer.attends:
                names = [parameter.name for parameter in layer.parameters(arch)]
                yield from (f"layers.{number}.{name}" for number in kind.layers for name in names)


@op("setup.serve", gives="slots")
def open_slots(plan: Plan, model: ModelParts, rank: Rank, adapters: int, **others: object) -> Slots:
    """Create the slots, all free. Raises PlanMismatch if the model has other slots."""
    arch, names = plan.architecture, slots_of(plan)
    if not names:
        return _whole_model(plan, model, rank)
    routing = model.axes.tasks
    if routing is None or routing.names != names or len(names) != adapters:
        raise PlanMismatch(f"the model has not the {adapters} slots of the plan")
    assert isinstance(arch.adapter, TaskAdapters)
    routing.of_dataset = tuple(range(adapters))
    specs = {tensor.name: tensor for tensor in plan.parameters.tensors if tensor.task}
    own = {name: parameter for name, parameter in model.named_parameters() if name in specs}
    slots = []
    for number, name in enumerate(names):
        mine = {n: p for n, p in own.items() if specs[n].task == name}
        slots.append(
            AdapterSlot(
                number=number,
                name=name,
                parameters={alone_name(specs[n]): p for n, p in mine.items()},
                specs={alone_name(specs[n]): specs[n] for n in mine},
                modules=list(_modules_of(model, name)),
            )
        )
    attends = frozenset(attending(arch.base))
    one = {alone_name(spec): spec for spec in specs.values() if spec.task == names[0]}
    created = Slots(
        architecture=arch,
        adapter=arch.adapter.tasks[names[0]],
        rank=rank,
        model=model,
        slots=tuple(slots),
        specs=one,
        stages=_stages(plan, one),
        copies=_copies(slots[0], rank),
        attends=frozenset(name for name, spec in one.items() if spec.adapter in attends),
    )
    for slot in slots:
        slot.clear()
    model.train(True)
    return created


def _whole_model(plan: Plan, model: ModelParts, rank: Rank) -> Slots:
    """Return one slot for the model itself, with its trained parameters."""
    own = dict(model.trained())
    specs = {tensor.name: tensor for tensor in plan.parameters.tensors}
    slot = AdapterSlot(number=0, name="", parameters=own, specs={name: specs[name] for name in own}, modules=[])
    model.train(True)
    return Slots(
        architecture=plan.architecture,
        adapter=None,
        rank=rank,
        model=model,
        slots=(slot,),
        specs=specs,
        stages=_stages(plan, specs),
        copies=_copies(slot, rank),
        attends=frozenset(),
        most_sampled=1,
        begun={name: local(p).detach().to("cpu", copy=True) for name, p in own.items()},
    )


def _copies(slot: AdapterSlot, rank: Rank) -> dict[str, int]:
    ranks = rank.world_size // rank.pipeline_ranks
    return {name: copies_of_parameter(parameter, ranks) for name, parameter in slot.parameters.items()}


def _stages(plan: Plan, specs: Mapping[str, ParameterSpec]) -> dict[str, int]:
    """Return the pipeline coordinate that has each of these."""
    size = plan.mesh.size("pp")
    firsts = range(0, plan.mesh.world_size, plan.mesh.world_size // size)
    place = {name: pp for pp, first in enumerate(firsts) for name in local_shapes(plan, first)}
    return {alone: place[spec.name] for alone, spec in specs.items()}


def _modules_of(model: ModelParts, task: str) -> Iterator[nn.Module]:
    """Yield the modules that an adapter added for a task."""
    for module in model.modules():
        tasks = getattr(module, "tasks", None)
        if isinstance(module, TaskLinear) or isinstance(tasks, nn.Module):
            task_module = tasks.get(task)  # pyright: ignore
            if task_module is not None:
                yield task_module
