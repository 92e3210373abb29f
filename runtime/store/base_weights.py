"""Identity, values and residuals of the frozen weights below an adapter."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtrain.blocks.adapted import AdaptedMatrix, adapted_matrices
from xtrain.dsl.schema.precision import Base
from xtrain.plan.architecture import ParameterSpec
from xtrain.plan.checkpoints import base_names, base_sizes
from xtrain.plan.mesh import base_of_plan
from xtrain.plan.parameters import name_of
from xtrain.plan.plan import Plan
from xtrain.plan.weight_layout import assign
from xtrain.runtime.base.mesh import CollectiveErrors
from xtrain.runtime.base.ops import PlanMismatch, op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.nn.adapters import begun_part, decomposed
from xtrain.runtime.nn.averages import Which
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.build import DTYPES
from xtrain.runtime.nn.layers import splitmix64, stream_of
from xtrain.runtime.nn.number_formats import QuantisedMatrix
from xtrain.runtime.nn.transformer import ModelParts, QuantisedParameter
from xtrain.runtime.nn.weights import drawing, fill, model_tensors, own_indices, store, store_experts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.runtime.store.beginning import check_base, check_origin, find, planned_files, starting_point
from xtrain.runtime.store.checkpoints import CheckpointEntry
from xtrain.runtime.store.reading import WholeTensors
from xtrain.runtime.store.stored_weights import WeightReader


def prefix(entry: CheckpointEntry, which: Which) -> str:
    """Return the prefix of such weights in a checkpoint; a checkpoint of weights alone has only one kind."""
    return "ema." if which == "averaged" and entry.is_full else "model."


def published(entry: CheckpointEntry) -> Which:
    """Return the kind of weights that a run publishes from a full state, or has published."""
    return "averaged" if _is_of_averages(entry, "publish") else "trained"


def averaged_flaw(entry: CheckpointEntry, *, averaged: bool) -> str:
    """Say why a checkpoint has no averaged (or no trained) weights; empty if it has them."""
    state = entry.state()
    if not entry.is_full:
        has = state.get("weights") == "averaged"
        return "" if has == averaged else f"holds {'averaged' if has else 'trained'} weights alone"
    said = state.get("ema")
    if not averaged or (said and said["updates"]):
        return ""
    return "has no average yet: it was never updated" if said else "has no averaged weights: its run has no `ema`"


def evaluated(entry: CheckpointEntry) -> Which:
    """Return the kind of weights that the run evaluates in a full state, or that a checkpoint of weights alone
    holds."""
    return "averaged" if _is_of_averages(entry, "eval") else "trained"


def _is_of_averages(entry: CheckpointEntry, use: str) -> bool:
    """Return True if averages serve a use; in a full state only once the averages have been updated."""
    state = entry.state()
    if not entry.is_full:
        return state.get("weights") == "averaged"
    said = state.get("ema")
    return bool(said and said["updates"] and said.get(use))


# Elements processed at a time: their int64 bits fit into a CPU cache.
CHUNK: Final = 2**18
DIGEST_BYTES: Final = 8
MASK: Final = 2**64 - 1
# Odd multipliers of the three fp32 parts of an fp64 value.
_PARTS: Final = (1, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@frozen(kw_only=True)
class TensorSum:
    """Checksum of a rank's piece of a tensor. numbers: count of elements; sum: not negative."""

    numbers: int
    sum: int


def piece_of(name: str, tensor: Tensor, report: Callable[[], None] = lambda: None) -> TensorSum:
    """Return the checksum of this rank's piece of a tensor; independent of how the tensor is sharded."""
    piece = local(tensor)
    if piece.numel() == 0:
        return TensorSum(numbers=0, sum=0)
    rows, columns = _weights(name, tensor, piece.device)
    matrix, total = piece.reshape(-1, piece.shape[-1] if piece.ndim else 1), 0
    chunk_rows = max(1, CHUNK // matrix.shape[1])
    for begin in range(0, matrix.shape[0], chunk_rows):
        part, weights = matrix[begin : begin + chunk_rows], rows[begin : begin + chunk_rows]
        for multiplier, bits in zip(_PARTS, _bits(part), strict=False):
            total += multiplier * int((bits.mul_(columns).sum(1) * weights).sum().item())
        report()
    return TensorSum(numbers=piece.numel(), sum=total & MASK)


def digest_of(sums: Mapping[str, int]) -> str:
    """Return one digest for tensors with these sums."""
    content = "".join(f"{name}\0{sums[name]:016x}\n" for name in sorted(sums))
    return blake2b(content.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _bits(part: Tensor) -> list[Tensor]:
    """Return new int64 tensors with the bits of each element; for fp64 of three fp32 values that add up to it."""
    if not part.dtype.is_floating_point:
        return [part.to(torch.int64, copy=True)]
    bits = []
    for _ in range(3 if part.dtype == torch.float64 else 1):
        rounded = part.to(torch.float32)
        bits.append(rounded.contiguous().view(torch.int32).to(torch.int64))
        part = part - rounded
    return bits


def _weights(name: str, tensor: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return int64 factors [R], [C] for the rows and columns of this rank's piece; all dimensions but the last are
    rows."""
    dims = [_drawn_factors(own_indices(tensor, dim), f"{name}:{dim}") for dim in range(tensor.ndim)]
    columns = dims.pop() if dims else torch.ones(1, dtype=torch.int64)
    rows = torch.ones(1, dtype=torch.int64)
    for weights in dims:
        rows = (rows[:, None] * weights).flatten()
    return rows.to(device), columns.to(device)


def _drawn_factors(indices: Tensor, seed: str) -> Tensor:
    """Return an odd int64 factor for each index."""
    return splitmix64(indices.to(torch.int64), stream_of(seed)) | 1


@op("setup.base", gives="base", traced=False)
def name_base(plan: Plan, model: ModelParts, rank: Rank, beat: HeartbeatWriter, parameters: int) -> str:
    """Return the digest of all frozen parameters. Collective: each rank sums its own pieces, and the sums are added.

    A replicated piece is counted on each rank; the total is divided by the number of copies.
    """
    sizes, own = base_sizes(plan), model_tensors(model, "")
    names = sorted(sizes)
    pieces = [piece_of(name, own[name], beat.mark) if name in own else TensorSum(numbers=0, sum=0) for name in names]
    # In halves, so that the sum over ranks fits into int64.
    counts = torch.tensor([[piece.numbers, piece.sum >> 32, piece.sum & (2**32 - 1)] for piece in pieces])
    group = CollectiveErrors.of(rank).group
    if group is not None:
        dist.all_reduce(counts, group=group)
    sums: dict[str, int] = {}
    for name, (numbers, high, low) in zip(names, counts.tolist(), strict=True):
        times, rest = divmod(numbers, sizes[name])
        assert times and not rest, f"{name}: {numbers:,} numbers are in pieces of ranks, and it has {sizes[name]:,}"
        sums[name] = ((high << 32) + low) // times & MASK
    return digest_of(sums)


# Parameter → the whole of it, in any number format; with an expert's index, the matrix of that expert.
Read = Callable[[ParameterSpec, int | None], Tensor]


def _read_nothing(spec: ParameterSpec, expert: int | None) -> Tensor:
    raise KeyError(spec.name)


@define
class BaseWeights:
    """Base parameters, which checkpoints of the run do not hold. specs: by name. format: of parameters that are not
    quantized."""

    specs: dict[str, ParameterSpec]
    format: str
    base: Base | None
    _read: Read
    _one_by_one: bool = False
    _open: ExitStack = field(factory=ExitStack)

    @classmethod
    def of(cls, plan: Plan, folder: Path, device: torch.device) -> "BaseWeights":
        """Open the base as a run of the plan started in `folder` reads it. device: where weights are drawn. Raises
        EnvironmentFault or OSError."""
        opened, names, one_by_one = ExitStack(), base_names(plan), False
        args = {node.op: node.args for node in plan.nodes}
        if not names:  # checkpoints hold all parameters
            return cls({}, "", None, _read_nothing)
        if "setup.pretrained" in args:
            read = _of_run(plan, folder / args["setup.pretrained"]["path"])
        elif "setup.read_weights" in args:
            where = dict(args["setup.read_weights"])
            if "folder" in where:
                where["folder"] = str(folder / where["folder"])
            files = planned_files(**where)
            reader = WeightReader(files, assign(plan.architecture, files), lambda done: None)
            read, one_by_one = _of_folder(opened.enter_context(reader), args["setup.freeze"]["format"]), True
        else:
            chosen = args["setup.weights"]
            read = _read_drawn(plan, chosen["seed"], chosen["init_std"], chosen.get("scales", {}), device)
        specs = {tensor.name: tensor for tensor in plan.parameters.tensors if tensor.name in names}
        return cls(specs, args["setup.freeze"]["format"], base_of_plan(plan), read, one_by_one, opened)

    def __enter__(self) -> "BaseWeights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def whole(self, name: str) -> Tensor:
        """Return a whole parameter as read or drawn, before quantization. Raises OSError."""
        return self._read(self.specs[name], None)

    def experts(self, name: str) -> Callable[[int], Tensor]:
        """Return a function that reads the matrix of one expert of a stack; from a folder, each is read separately.
        Raises OSError."""
        spec = self.specs[name]
        if self._one_by_one:
            return lambda number: self._read(spec, number)
        whole = self.whole(name)
        return lambda number: whole[number]

    def read(self, name: str, less: Tensor | None = None) -> Tensor:
        """Return a whole parameter as the run computes with it; fp32 if it is quantized. less: subtracted before it is
        stored, in the number format of `less`. Raises OSError."""
        stored = self._stored(name, less)
        if (matrix := self._matrix(name)) is None:
            return stored[name]
        return matrix.values(stored[name], stored.get(matrix.scales), torch.float32)

    def check(self, entry: CheckpointEntry, take: Callable[[str, Tensor], object] = lambda name, whole: None) -> None:
        """Read all parameters, and raise ResumeRefused if the checkpoint's adapter has another base. take: called with
        each tensor as the run stores it. Raises OSError."""
        sums: dict[str, int] = {}
        if not self.specs:
            return
        for name in sorted(self.specs):
            for stored, whole in self._stored(name).items():
                sums[stored] = piece_of(stored, whole).sum
                take(stored, whole)
        check_base(entry, digest_of(sums))

    @property
    def digest(self) -> str:
        """Digest of all base parameters. Raises OSError."""
        return digest_of(
            {
                part_name: piece_of(part_name, whole).sum
                for name in self.specs
                for part_name, whole in self._stored(name).items()
            }
        )

    def _stored(self, name: str, less: Tensor | None = None) -> dict[str, Tensor]:
        """Return a parameter's tensors in a run: its values, or its codes and their scales."""
        whole = self.whole(name)
        whole = whole if less is None else whole.to(less.dtype) - less.to(whole.device)
        if (matrix := self._matrix(name)) is None:
            return {name: whole.to(DTYPES[self.format])}
        codes, scales = matrix.pack(whole)
        return {name: codes} if scales is None else {name: codes, matrix.scales: scales}

    def _matrix(self, name: str) -> QuantisedMatrix | None:
        spec = self.specs[name]
        if not spec.quantised or self.base is None:
            return None
        scales = f"{name}_scales" if self.base.double else ""
        return QuantisedMatrix(self.base, spec.shape, spec.shape, (0,) * len(spec.shape), scales)


def _of_run(plan: Plan, path: Path) -> Read:
    entry = find(path, weights=True)
    check_origin(plan, entry)
    if "base" in entry.state():
        message = f"{entry.path} has quantized matrices; export it with --dequantise and start from that folder"
        raise OSError(message)
    tensors, before = WholeTensors(entry.path), prefix(entry, published(entry))
    return lambda spec, expert: tensors.read(f"{before}{spec.name}")


def _of_folder(reader: WeightReader, format: str) -> Read:
    def read(spec: ParameterSpec, expert: int | None) -> Tensor:
        shape = spec.shape if expert is None else spec.shape[1:]
        whole = torch.empty(shape, dtype=torch.float32 if spec.quantised else DTYPES[format])
        if expert is None:
            reader.read([(spec.name, whole)])
        else:
            reader.read_whole(spec.name, whole, expert)
        return whole

    return read


def _read_drawn(plan: Plan, seed: int, init_std: float, scales: Mapping[str, float], device: torch.device) -> Read:
    draw = drawing(plan.architecture, seed, init_std, device, scales)
    return lambda spec, expert: draw(spec.name, spec.shape).cpu()


@op("setup.decompose", traced=False)
@torch.no_grad()
def decompose(
    plan: Plan, model: ModelParts, rank: Rank, records: Records, beat: HeartbeatWriter, matrices: int
) -> None:
    """Initialize an adapter from a decomposition of the matrices as read or drawn. In each turn every rank decomposes
    one matrix or one stack of experts, and shares the result. A resumed run reads its checkpoint instead.

    Raises PlanMismatch unless it decomposes `matrices` matrices; StorageFailed on all ranks if one cannot read the
    model.
    """
    if starting_point(plan, records.directory).entry is not None:
        return
    own, todo = model_tensors(model, ""), _as_planned(plan, matrices)
    collective, exact = CollectiveErrors.of(rank), _exact(plan)
    format = DTYPES[plan.node("setup.freeze").args["format"]]
    with BaseWeights.of(plan, Path(), rank.device) as base:

        def values(at: int) -> dict[str, Tensor]:
            if at >= len(todo):
                return {}
            start, matrix = todo[at]
            spec = base.specs[name := f"{start}{matrix.name}"]
            if not spec.expert:
                made = decomposed(matrix, base.whole(name).to(rank.device, exact), format)
            else:
                read = base.experts(name)
                stacks = (read(number)[None].to(rank.device, exact) for number in range(spec.shape[0]))
                initial_values = [decomposed(matrix, stack, format) for stack in stacks]
                made = {own: torch.cat([one[own] for one in initial_values]) for own in initial_values[0]}
            return {f"{start}{own}": value.cpu() for own, value in made.items()}

        for turn in range(0, len(todo), rank.world_size):
            for rank_values in collective.all(lambda at=turn + rank.rank: values(at)):
                for name, whole in rank_values.items():
                    if name in own:
                        fill(own[name], whole.to(rank.device))
            beat.mark()


@op("setup.residual", traced=False)
def take_out(plan: Plan, model: ModelParts, rank: Rank, matrices: int) -> None:
    """Subtract from the matrices the part that the adapter starts with. Raises PlanMismatch unless these are `matrices`
    matrices."""
    _as_planned(plan, matrices)
    leave_residual(plan, model, rank, Path())


@torch.no_grad()
def leave_residual(plan: Plan, model: ModelParts, rank: Rank, folder: Path) -> None:
    """Do the same for a model whose matrices are still whole and whose adapter holds its initial values. Collective.
    folder: where the run was started. Raises EnvironmentFault or OSError."""
    own, exact = model_tensors(model, ""), _exact(plan)
    quantised = {parameter.name: parameter for parameter in model.quantised()}
    with BaseWeights.of(plan, folder, rank.device) as base:
        for start, matrix in _decomposed(plan):
            if (name := f"{start}{matrix.name}") not in own:  # of another stage
                continue
            names = [tensor.name for tensor in plan.parameters.tensors if tensor.begun and tensor.adapter == name]
            beside = {
                own_name.removeprefix(start): whole_of(own[own_name], rank.device).to(exact) for own_name in names
            }
            if base.specs[name].expert:
                _leave_of_experts(matrix, base.experts(name), beside, own[name], quantised.get(name))
                continue
            part = begun_part(matrix, beside)
            if (quantised_parameter := quantised.get(name)) is not None:
                store(quantised_parameter, base.whole(name).to(rank.device, exact) - part)
                continue
            piece = torch.empty_like(own[name], dtype=exact)
            fill(piece, part)
            local(own[name]).copy_(local(own[name]).to(exact) - local(piece))


def _leave_of_experts(
    matrix: AdaptedMatrix,
    read: Callable[[int], Tensor],
    beside: Mapping[str, Tensor],
    parameter: Tensor,
    quantised_parameter: QuantisedParameter | None,
) -> None:
    """Do the same for a stack of experts, one at a time. read: reads the matrix of one expert."""

    def part_of(expert: int) -> Tensor:
        return begun_part(matrix, {name: tensor[expert : expert + 1] for name, tensor in beside.items()})[0]

    if quantised_parameter is not None:

        def rest(expert: int) -> Tensor:
            part = part_of(expert)
            return read(expert).to(part) - part

        store_experts(quantised_parameter, rest, every=True)
        return
    piece, experts = local(parameter), own_indices(parameter, 0).tolist()
    cut = torch.meshgrid(*(own_indices(parameter, dim).to(piece.device) for dim in (1, 2)), indexing="ij")
    for place, expert in enumerate(experts):
        part = part_of(expert)
        piece[place] = (piece[place].to(part.dtype) - part[cut]).to(piece.dtype)


def whole_of(parameter: Tensor, device: torch.device) -> Tensor:
    """Gather a whole parameter from the pieces of all ranks. Collective over the ranks that share it."""
    if not isinstance(parameter, DTensor):
        return parameter.to(device)
    indices = [own_indices(parameter, dim).to(device) for dim in range(parameter.ndim)]
    whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    whole[torch.meshgrid(*indices, indexing="ij")] = local(parameter).to(device)
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            dist.all_reduce(whole, group=parameter.device_mesh.get_group(axis))  # zeros but in one place
    return whole


def _decomposed(plan: Plan) -> Iterator[tuple[str, AdaptedMatrix]]:
    """Yield (prefix of names in the block, matrix) for each matrix that an adapter decomposes."""
    for layer, matrix in adapted_matrices(plan.architecture):
        if matrix.decomposes:
            yield name_of(layer, ""), matrix


def _as_planned(plan: Plan, matrices: int) -> list[tuple[str, AdaptedMatrix]]:
    planned = list(_decomposed(plan))
    if len(planned) != matrices:
        raise PlanMismatch(f"an adapter begins with a part of {len(planned)} matrices, and the node says {matrices}")
    return planned


def _exact(plan: Plan) -> torch.dtype:
    return torch.float64 if plan.node("setup.build_model").args["params"] == "fp64" else torch.float32
