"""`Resolved`: a spec with every choice made, from which all parts of a plan are derived."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import ceil, prod
from typing import Any, Protocol, cast

from attrs import evolve, field

from xtrain.dsl.schema.data_components import row_link
from xtrain.dsl.schema.optimizers import Optimizer, StateTensor
from xtrain.dsl.schema.parallel import Activation, Parallel, Stack
from xtrain.dsl.schema.precision import Fp8, Precision, Products, Qat
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import EMBEDDING, Architecture, LayerKind, ParameterSpec, name_in_block
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.estimates import Parameters
from xtrain.plan.groups import ParameterGroups, parameter_groups
from xtrain.plan.mesh import Cuts, Layout, device_kind, mesh_of_group, shard_axes
from xtrain.plan.parameters import (
    Layers,
    beside_bytes,
    block_tensors,
    checkpoint_bytes,
    head_product,
    largest_product,
    scaled_matrices,
)
from xtrain.plan.peft import PeftFolder
from xtrain.plan.pipeline import Pipeline, StageAssignment, by_coordinate
from xtrain.plan.plan import Mesh, PlanPhase
from xtrain.plan.weight_files import WeightFiles
from xtrain.text.units import BYTES


@frozen(kw_only=True)
class Formats:
    """Number formats: of parameters and optimizer state, of forward and backward, and of gradient sums. fp8: how blocks
    multiply, if not in the compute format. qat: how their matrices are rounded before."""

    params: str
    compute: str
    reduce: str
    fp8: Fp8 | None = None
    qat: Qat | None = None

    @property
    def products(self) -> Products | None:
        """Products of matrices of blocks that are not multiplied as stored; None without such."""
        return self.fp8 or self.qat

    @property
    def frozen(self) -> str:
        """Format of frozen parameters: nothing is added to them, so they need no more precision than the
        computation."""
        return min(self.params, self.compute, key=BYTES.__getitem__)

    @property
    def averages(self) -> str:
        """Format of averaged weights: bf16 is too coarse for the small share of new weights."""
        return "fp32" if self.params == "bf16" else self.params


def resolve_formats(precision: Precision, parallel: Parallel) -> Formats:
    """Return the number formats; `auto` is the format of the parameters."""
    params, fp8 = precision.params, precision.scaled
    compute = params if precision.compute == "auto" else precision.compute
    return Formats(
        params=params,
        compute=compute if fp8 is None else fp8.rest,
        reduce=params if parallel.fsdp.reduce == "auto" else parallel.fsdp.reduce,
        fp8=fp8,
        qat=precision.rounded,
    )


def resolve_align(spec: Spec, ring: int) -> int:
    """Return the number of positions by which padded document lengths are divisible; a ring cuts each document into
    2 · ring equal chunks."""
    given = row_link(spec.collate).align
    return (2 * ring if ring > 1 else 1) if isinstance(given, Auto) else given


LARGEST_WHOLE_GRADIENTS = 2**30
# Multiply-adds from which oneDNN's fp32 products are faster than MKL's, despite about 10 µs more per call.
SMALL_PRODUCT = 4 * 2**20
# Multiply-adds from which oneDNN saves as much in the head's product as it costs in the small products of blocks.
SMALL_HEAD = 64 * 2**20


def resolve_tile(activation: Activation, dim: int, positions: int) -> int | None:
    """Return the positions of a piece of the feed-forward layers, out of `positions` on a rank; None: they are not cut.

    auto: pieces of about `dim` positions, whose hidden values take as much memory as the matrices that make them
    (ArcticTraining: sequence / hidden size pieces, rounded up).
    """
    pieces = activation.tile_mlp
    tile = ceil(positions / (ceil(positions / dim) if isinstance(pieces, Auto) else pieces))
    return tile if tile < positions else None


def exchanges(spec: Spec, layout: Layout) -> bool:
    """Return True if a block has an all-to-all: of tokens to experts, or of the sequence for heads."""
    return spec.parallel.ep.size > 1 or layout.size("ulysses") > 1


def sums_positions(spec: Spec, layout: Layout) -> bool:
    """Return True if tensor parallelism sums results of matrices by a reduce-scatter over positions."""
    return layout.size("tp") > 1 and spec.parallel.tp.sequence


@frozen
class TrainedKind(LayerKind):
    """Layers with equal blocks and equal trained parameters. frozen: names of frozen parameters inside the block.
    below: something before the block is trained, so that the input's gradient is needed. runs_back: the block
    receives a gradient. scaled: names of modules whose matrices are multiplied in fp8 or rounded."""

    frozen: frozenset[str]
    below: bool
    runs_back: bool
    scaled: frozenset[str] = frozenset()


@frozen
class Shape:
    """Model, with the reason for every derived number (by path in the spec). weights: the files with its initial
    weights; None if weights are drawn. adapter_files: files of adapters by task, of a single adapter under an empty
    name; without adapters that are drawn."""

    architecture: Architecture
    reasons: dict[str, str] = field(factory=dict)
    weights: WeightFiles | None = None
    adapter_files: dict[str, PeftFolder] = field(factory=dict)


@frozen(kw_only=True, eq=False)
class Resolved:
    """Everything that the graph, the timeline and the estimates are derived from. training: names of the datasets.
    weights: the files with the initial weights, if these are not drawn. adapter_files: as in `Shape`. scorer: the
    model that scores completions. teacher: the teacher model, which computes alongside this one."""

    spec: Spec
    architecture: Architecture
    layout: Layout
    batch: Arithmetic
    training: tuple[str, ...]
    phases: tuple[PlanPhase, ...]
    formats: Formats
    inventory: Parameters
    cuts: Cuts
    staging: StageAssignment
    weights: WeightFiles | None = None
    adapter_files: Mapping[str, PeftFolder] = field(factory=dict)
    scorer: Shape | None = None
    teacher: "Resolved | None" = None

    @property
    def pipeline(self) -> Pipeline:
        return self.staging.pipeline

    @property
    def row_numbers(self) -> tuple[str, ...]:
        """Row numbers (`place` in the run, `dataset`) that every stage of the model needs."""
        adapter = self.architecture.adapter
        return () if adapter is None else adapter.row_numbers

    @property
    def averages(self) -> str | None:
        """Number format of averaged weights; None without averages."""
        return None if self.spec.ema is None else self.formats.averages

    @cached_property
    def groups(self) -> ParameterGroups:
        """Assignment of parameters to optimizers."""
        return parameter_groups(self.spec, lambda optimizer: arguments_of(optimizer, self))

    def moments(self, parameter: ParameterSpec) -> tuple[StateTensor, ...]:
        """Return the tensors that the optimizer keeps for a parameter."""
        return self.groups.state(parameter.name) if parameter.trained else ()

    @cached_property
    def moment_counts(self) -> frozenset[int]:
        """Distinct numbers of tensors that the optimizer keeps for a trained parameter."""
        return frozenset(len(self.moments(each)) for each in self.inventory.tensors if each.trained)

    def moment_bytes(self, parameter: ParameterSpec, shape: Sequence[int]) -> int:
        """Return the bytes of a parameter's optimizer state. shape: of the parameter, or of a rank's piece of it."""
        return sum(
            BYTES[each.format or self.formats.params] * prod(each.shape(shape)) for each in self.moments(parameter)
        )

    def updated_alike(self, kind: LayerKind) -> Iterable[Sequence[int]]:
        """Return the layers of a kind, grouped by the optimizers that update their parameters."""
        if not self.groups.several:
            return [kind.layers]
        found: dict[tuple[str, ...], list[int]] = {}
        for layer in kind.layers:
            owners = tuple(self.groups.owner(each.name) for each in block_tensors(self.inventory, layer))
            found.setdefault(owners, []).append(layer)
        return found.values()

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of a full checkpoint over all ranks."""
        formats, moments = self.formats, sum(self.moment_bytes(each, each.shape) for each in self.inventory.tensors)
        return checkpoint_bytes(self.saved, formats.params, formats.frozen, moments, self.averages, self.cuts.base)

    @property
    def saves_base(self) -> bool:
        """True if checkpoints hold frozen parameters; with an adapter they do only if an action changes them."""
        return self.architecture.adapter is None or any(action.changes_base for _, action in self.spec.actions)

    @property
    def saved(self) -> Parameters:
        """Parameters that checkpoints hold."""
        if self.saves_base:
            return self.inventory
        tensors = tuple(tensor for tensor in self.inventory.tensors if tensor.trained or tensor.begun)
        return evolve(self.inventory, total=sum(tensor.size for tensor in tensors), tensors=tensors)

    @cached_property
    def kinds(self) -> tuple[TrainedKind, ...]:
        """Decoder blocks of the model, grouped by block and by trained parameters."""
        frozen: dict[int, set[str]] = {layer: set() for layer in range(self.architecture.layers)}
        counts = dict.fromkeys(frozen, 0)
        below = True
        for tensor in self.inventory.tensors:
            if inside := name_in_block(tensor.name):
                layer = int(tensor.name.split(".")[1])
                counts[layer] += 1
                if not tensor.trained:
                    frozen[layer].add(inside)
            elif tensor.name == f"{EMBEDDING}.weight":
                below = tensor.trained
        blocks = {layer: kind.block for kind in self.architecture.kinds for layer in kind.layers}
        places = {layer: place for place, kind in enumerate(self.architecture.kinds) for layer in kind.layers}
        special: dict[int, set[str]] = {layer: set() for layer in frozen}
        for name, layers in self.scaled_matrices.items():
            for layer in layers:
                special[layer].add(name)
        found: dict[tuple[int, frozenset[str], bool, frozenset[str]], list[int]] = {}
        for layer in range(self.architecture.layers):
            key = (places[layer], frozenset(frozen[layer]), below, frozenset(special[layer]))
            found.setdefault(key, []).append(layer)
            below = below or len(frozen[layer]) < counts[layer]
        return tuple(
            TrainedKind(blocks[own[0]], tuple(own), names, before, before or len(names) < counts[own[0]], scaled)
            for (_, names, before, scaled), own in found.items()
        )

    @cached_property
    def scaled_matrices(self) -> Layers:
        """Matrices that are multiplied in fp8, or rounded."""
        if (products := self.formats.products) is None:
            return {}
        return scaled_matrices(self.architecture, self.size("tp"), products)

    @property
    def passes_head(self) -> bool:
        """True if a gradient flows back through the last norm."""
        return any(kind.runs_back and self.architecture.layers - 1 in kind.layers for kind in self.kinds)

    def state_bytes(self, tensors: Iterable[ParameterSpec]) -> int:
        """Return the bytes of parameters on the rank that owns the most of them."""
        return sum(self._state_bytes(each) for each in tensors)

    def _state_bytes(self, parameter: ParameterSpec) -> int:
        numbers, base = prod(self.cuts.shape(parameter)), self.cuts.base
        if parameter.quantised and base is not None:
            return numbers + beside_bytes(base, parameter.shape)
        return BYTES[self.formats.params if parameter.trained else self.formats.frozen] * numbers

    @cached_property
    def parameters_by_pp(self) -> tuple[list[ParameterSpec], ...]:
        """Whole parameters of every pipeline coordinate."""
        return by_coordinate(self.inventory.tensors, self.architecture, self.pipeline)

    @property
    def stack(self) -> Stack:
        return self.spec.parallel.execution

    @property
    def group_mesh(self) -> Mesh:
        """Mesh of the ranks that share a process group: all ranks, or the ranks of a replica group."""
        return mesh_of_group(self.layout.mesh) if self.stack.groups else self.layout.mesh

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Axes over which FSDP sums gradients of dense parameters."""
        return self.wide(*(() if self.stack.groups else ("replicate",)), *self.shard_axes)

    @property
    def context(self) -> int:
        return self.size("ring") * self.size("ulysses")

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes over which FSDP cuts dense parameters."""
        return shard_axes(self.spec.parallel, self.layout.mesh)

    @property
    def dense_fsdp(self) -> bool:
        """True if FSDP manages dense parameters; a single rank that computes in the storage format does not need it.

        With experts, the stage around them is an FSDP unit too: the outermost unit is told when to sum gradients.
        """
        return self._needs_fsdp(self.summed_axes) or self.expert_fsdp

    @property
    def expert_fsdp(self) -> bool:
        return self.architecture.is_moe and self._needs_fsdp(self.wide("ep_replicate", "ep_fsdp"))

    def _needs_fsdp(self, axes: tuple[str, ...]) -> bool:
        needs = bool(axes) or self.formats.compute != self.formats.params or self.spec.parallel.fsdp.offload
        return needs and self.stack.uses_fsdp

    @property
    def sharded(self) -> bool:
        """True if FSDP leaves a rank only a piece of some parameters; otherwise it only converts number formats."""
        return self.dense_fsdp and (self.cuts.fsdp > 1 or (self.expert_fsdp and self.cuts.ep_fsdp > 1))

    @property
    def reshard(self) -> bool:
        """True to free gathered parameters after the forward. A pipeline keeps them: it runs other microbatches between
        a block's forward and backward and would gather again for each. Parameters that are not sharded are kept too:
        freeing them would only convert them a second time."""
        asked = self.spec.parallel.fsdp.reshard
        return self.size("pp") == 1 and self.sharded if isinstance(asked, Auto) else asked

    @property
    def async_tp(self) -> bool:
        """True if matrices that tensor parallelism cuts are multiplied while their pieces travel."""
        return self.size("tp") > 1 and self.spec.parallel.tp.overlap

    @property
    def shared_meanwhile(self) -> bool:
        """True if shared experts are computed while tokens travel to experts of other ranks."""
        layers = (layer for kind in self.architecture.kinds for layer in kind.block.layers())
        return self.layout.ep > 1 and any(layer.shares_experts(self.architecture) for layer in layers)

    @property
    def prefetch(self) -> bool:
        """True if each FSDP unit requests the parameters of the next one before it computes its forward."""
        asked = self.spec.parallel.fsdp.prefetch
        return self.sharded and (self.architecture.is_moe if isinstance(asked, Auto) else asked)

    @property
    def sync(self) -> str:
        """`step` or `microbatch`: when gradients sharded by fsdp are summed."""
        asked = self.spec.parallel.fsdp.sync
        once = self.batch.accumulate == 1 or self.size("pp") > 1 or not self.dense_fsdp
        if asked != "auto" and not once:
            return asked
        small = not self.sharded or self.whole_gradients <= LARGEST_WHOLE_GRADIENTS
        return "step" if once or small else "microbatch"

    @property
    def whole_gradients(self) -> int:
        """Bytes of the gradients of one rank before they are summed and cut."""
        ends = [tensor for tensor in self.inventory.tensors if not tensor.name.startswith("layers.")]
        elements = self.cuts.gathered(each for each in ends if each.trained)
        for kind in self.kinds:
            tensors = block_tensors(self.inventory, kind.first)
            elements += len(kind.layers) * self.cuts.gathered(each for each in tensors if each.trained)
        return BYTES[self.formats.reduce] * elements

    @property
    def align(self) -> int:
        return resolve_align(self.spec, self.size("ring"))

    @property
    def recomputed(self) -> list[int]:
        """Number of blocks on each pipeline coordinate that the backward computes again: the last of every n
        neighbors."""
        every = self.spec.activation.every
        return [sum((layer + 1) % every == 0 for layer in self.pipeline.layers(pp)) for pp in range(self.size("pp"))]

    @property
    def tile(self) -> int | None:
        """Positions of a piece of the feed-forward layers; None: they are not computed in pieces."""
        return resolve_tile(self.spec.activation, self.architecture.dim, self.positions)

    @property
    def positions(self) -> int:
        """Positions of a microbatch on a rank, shared by all tensor-parallel ranks."""
        return self.batch.micro * self.batch.sequence // self.context

    @cached_property
    def largest_product(self) -> int:
        """Multiply-adds of the largest product of a block on a rank, over all models that compute here."""
        own = largest_product(self.architecture, self.positions) // self.size("tp")
        scorer = 0 if self.scorer is None else largest_product(self.scorer.architecture, self.positions)
        return max(own, scorer, 0 if self.teacher is None else self.teacher.largest_product)

    @cached_property
    def head_product(self) -> int:
        """Multiply-adds of the largest product of a head on a rank, over all models that compute here."""
        own = head_product(self.architecture, self.positions) // self.size("tp")
        scorer = 0 if self.scorer is None else head_product(self.scorer.architecture, self.positions)
        return max(own, scorer, 0 if self.teacher is None else self.teacher.head_product)

    @property
    def small_products(self) -> bool:
        """True if `matmul = auto` keeps `highest` on every CPU, because products are small."""
        auto = self.spec.precision.matmul == "auto" and self.formats.compute == "fp32"
        small = self.largest_product < SMALL_PRODUCT and self.head_product < SMALL_HEAD
        return auto and device_kind(self.spec) != "cuda" and small

    @property
    def tiled(self) -> list[int]:
        """Layers whose blocks have feed-forward layers in pieces."""
        return [layer for kind in self.kinds if kind.block.tiles for layer in kind.layers]

    def matches(self, layers: Iterable[int]) -> list[int]:
        """Return how many of these layers each pipeline coordinate has; a layer may be named several times."""
        wanted = Counter(layers)
        return [sum(wanted[layer] for layer in self.pipeline.layers(pp)) for pp in range(self.size("pp"))]

    def size(self, axis: str) -> int:
        return self.layout.size(axis)

    def wide(self, *axes: str) -> tuple[str, ...]:
        """Return the axes of `axes` with more than one rank."""
        sizes = {axis.name: axis.size for axis in (*self.layout.mesh.axes, *self.layout.mesh.expert_axes)}
        return tuple(axis for axis in axes if sizes[axis] > 1)

    def product(self, axes: tuple[str, ...]) -> str:
        """Return axes with their sizes: `fsdp=64`, `fsdp=8 · ulysses=2`."""
        sizes = {axis.name: axis.size for axis in (*self.layout.mesh.axes, *self.layout.mesh.expert_axes)}
        return " · ".join(f"{axis}={sizes[axis]}" for axis in axes)


class _ResolvingOptimizer(Protocol):
    """Optimizer as a resolved spec uses it; its base class is `PlannedOptimizer` (`contracts/optimizers.py`)."""

    def arguments(self, resolved: Resolved) -> dict[str, Any]: ...


def arguments_of(optimizer: Optimizer, resolved: Resolved) -> dict[str, Any]:
    """Return the JSON arguments of an optimizer's node."""
    return cast(_ResolvingOptimizer, optimizer).arguments(resolved)
