"""Device mesh and placement: axes, strides, the expert view of the ranks, and the local shape of every parameter.

Parameters are cut by rules of tensor parallelism, by FSDP over the shard axes and by expert parallelism. The runtime
checks its sharded model against these shapes. The estimates of a plan describe the first rank of every pipeline
coordinate, which has the largest piece of everything.

An optimizer whose update needs whole matrices assigns them in turn to the ranks that share them. A rank receives the
pieces of its matrices, computes, and sends each rank its piece of the result. Every axis that cuts a matrix is one
all-to-all in each direction; if two axes cut it, the pieces of the inner cut are joined first. Replicas do the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Final

from attrs import field

from xtrain.dsl.schema.parallel import Parallel
from xtrain.dsl.schema.precision import Base, base_of
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import EMBEDDING, HEAD, Architecture, ParameterSpec, expert_widths
from xtrain.plan.pipeline import Pipeline, by_coordinate
from xtrain.plan.plan import Axis, Mesh, Plan

AXES = ("pp", "replicate", "fsdp", "ring", "ulysses", "tp")
EXPERT_AXES = ("pp", "ep_replicate", "ep_fsdp", "ep")


def build_mesh(sizes: dict[str, int], *, ep: int, ranks_per_node: int) -> Mesh:
    """Lay ranks out over `sizes` (axis → size, all of AXES), and once more for experts.

    `ep` must divide fsdp · ring · ulysses · tp; a group of `ep` consecutive ranks holds every expert once.
    """
    group = prod(sizes[axis] for axis in ("fsdp", "ring", "ulysses", "tp"))
    expert_sizes = {
        "pp": sizes["pp"],
        "ep_replicate": sizes["replicate"],
        "ep_fsdp": group // ep,
        "ep": ep,
    }
    world = prod(sizes.values())
    return Mesh(
        axes=_axes(sizes, AXES, world, ranks_per_node),
        expert_axes=_axes(expert_sizes, EXPERT_AXES, world, ranks_per_node),
        world_size=world,
        ranks_per_node=ranks_per_node,
    )


def mesh_of_group(mesh: Mesh) -> Mesh:
    """Return the mesh of the ranks of one copy of the model (`replicate`)."""
    sizes = {axis.name: axis.size for axis in mesh.axes} | {"replicate": 1}
    ep = next(axis.size for axis in mesh.expert_axes if axis.name == "ep")
    return build_mesh(sizes, ep=ep, ranks_per_node=min(mesh.ranks_per_node, prod(sizes.values())))


def _axes(sizes: dict[str, int], names: tuple[str, ...], world: int, ranks_per_node: int) -> tuple[Axis, ...]:
    """Return axes from outer to inner; the innermost axis has stride 1.

    The ranks of an axis lie in an aligned block of stride · size. A group of them leaves its machine exactly when the
    end of a machine falls inside a block; the first such end, rank `ranks_per_node`, decides for all.
    """
    axes = []
    stride = world
    for name in names:
        block, stride = stride, stride // sizes[name]
        crosses = sizes[name] > 1 and ranks_per_node < world and ranks_per_node % block != 0
        axes.append(Axis(name=name, size=sizes[name], stride=stride, crosses_nodes=crosses))
    return tuple(axes)


# Number of ranks from which the groups of gloo connect lazily. Connecting at once, n ranks ask one store for n²
# addresses of 8 n bytes, and each opens n sockets: benchmarks/startup.py.
LAZY_FROM: Final = 128


def groups(mesh: Mesh, axis: str) -> list[list[int]]:
    """Return the ranks of every group of an axis (of either view), each group in the order of its coordinate."""
    found = next(a for a in (*mesh.axes, *mesh.expert_axes) if a.name == axis)
    block = found.stride * found.size
    return [
        [base + offset + index * found.stride for index in range(found.size)]
        for base in range(0, mesh.world_size, block)
        for offset in range(found.stride)
    ]


def own_group(mesh: Mesh, axis: str, rank: int) -> list[int]:
    """Return the group of an axis that a rank is in."""
    found = next(a for a in (*mesh.axes, *mesh.expert_axes) if a.name == axis)
    first = rank - rank // found.stride % found.size * found.stride
    return [first + index * found.stride for index in range(found.size)]


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`."""
    return next(d for d in range(min(limit, number), 0, -1) if number % d == 0)


def nearest_multiples(number: int, step: int) -> str:
    """Return the positive multiples of `step` around `number` as text: `4032 or 4096`."""
    low = number // step * step
    return f"{low} or {low + step}" if low else f"{step}"


# Style of a tensor-parallel rule → the dimension that it cuts: output features or rows of the table (0), input features
# (1).
DIMENSION: Final = {"column": 0, "embedding": 0, "row": 1}

Rules = tuple[tuple[str, str], ...]


def tensor_rules(architecture: Architecture) -> Rules:
    """Return (pattern, style) of every matrix that is cut. Patterns match the module that owns it; its bias is cut too
    if it has that dimension. Parameters without a rule are whole."""
    cut = {
        f"layers.*.{parameter.owner}": parameter.cut
        for kind in architecture.kinds
        for parameter in kind.block.parameters(architecture)
        if parameter.cut is not None
    }
    head = ((HEAD, "column"),) if architecture.head_module == HEAD else ()
    beside = ((each.owner, each.cut) for each in architecture.head_adapters() if each.cut is not None)
    return (*cut.items(), (EMBEDDING, "embedding"), *head, *beside)


def fits(name: str, pattern: str) -> bool:
    """Return True if a pattern matches a module: `*` stands for one part of its name."""
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def piece(extent: int, parts: int, index: int) -> int:
    """Return the rows of piece `index` if torch.chunk cuts `extent` rows: all pieces are equal except the last ones,
    which may have 0."""
    size = -(-extent // parts)
    return max(0, min(size, extent - index * size))


def found_again(extent: int, tp: int, shards: int) -> bool:
    """Return True if torch can restore the pieces that tp and then FSDP cut from a dimension.

    torch assumes that tp cut every shard last (`_StridedShard`), which gives other pieces if they are uneven.
    """
    every = [[piece(piece(extent, tp, t), shards, shard) for t in range(tp)] for shard in range(shards)]
    return all([piece(sum(pieces), tp, t) for t in range(tp)] == pieces for pieces in every)


@frozen(kw_only=True)
class CutPlace:
    """Place of a rank along the cuts; the first place has the largest piece of every parameter."""

    tp: int = 0
    shard: int = 0
    ep: int = 0
    ep_fsdp: int = 0


FIRST: Final = CutPlace()


@frozen(kw_only=True)
class Cuts:
    """Number of pieces that axes cut a parameter into: dense parameters by tp then fsdp, experts by ep then ep_fsdp.
    base: storage of quantized parameters."""

    tp: int
    fsdp: int
    ep: int
    ep_fsdp: int
    expert_dimension: int
    rules: Rules = field(default=())
    base: Base | None = None

    def shape(self, parameter: ParameterSpec, place: CutPlace = FIRST) -> tuple[int, ...]:
        """Return the shape of the piece of a parameter that a rank owns; in bytes for a quantized parameter."""
        shape = list(self.stored_shape(parameter, place))
        if parameter.expert:
            shape[self.expert_dimension] = piece(shape[self.expert_dimension], self.ep_fsdp, place.ep_fsdp)
        else:
            shape[0] = piece(shape[0], self.fsdp, place.shard)
        return tuple(shape)

    def gathered_shape(self, parameter: ParameterSpec, place: CutPlace = FIRST) -> tuple[int, ...]:
        """Return the shape of a piece before FSDP cuts it: the piece that a rank computes with."""
        shape = list(parameter.shape)
        if parameter.expert:
            shape[0] = piece(shape[0], self.ep, place.ep)
        elif (dim := self.tensor_dim(parameter)) is not None:
            shape[dim] = piece(shape[dim], self.tp, place.tp)
        return tuple(shape)

    def stored_shape(self, parameter: ParameterSpec, place: CutPlace = FIRST) -> tuple[int, ...]:
        """Return the shape of that piece as it is stored; in bytes for a quantized parameter."""
        shape = self.gathered_shape(parameter, place)
        if not parameter.quantised:
            return shape
        assert self.base is not None
        return self.base.stored_shape(shape)

    def tensor_dim(self, parameter: ParameterSpec) -> int | None:
        """Return the dim along which tensor parallelism cuts a dense parameter; None if ranks hold all of it."""
        if self.tp == 1:
            return None
        owner = parameter.name.rpartition(".")[0]
        dims = (DIMENSION[style] for pattern, style in self.rules if fits(owner, pattern))
        return next((dim for dim in dims if dim < len(parameter.shape)), None)

    def largest(self, parameters: Iterable[ParameterSpec]) -> int:
        """Return the elements that the rank with the largest pieces owns."""
        return sum(prod(self.shape(parameter)) for parameter in parameters)

    def gathered(self, parameters: Iterable[ParameterSpec]) -> int:
        """Return the elements that this rank computes with."""
        return sum(prod(self.gathered_shape(parameter)) for parameter in parameters)


def folded_axes(parallel: Parallel) -> tuple[str, ...]:
    """Return the context axes that shard parameters together with fsdp."""
    return {"all": ("ring", "ulysses"), "ring_only": ("ring",), "ulysses_only": ("ulysses",), "none": ()}[
        parallel.cp.fold
    ]


def shard_axes(parallel: Parallel, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which FSDP cuts a dense parameter, outer to inner; context axes only if they have several
    ranks."""
    return ("fsdp", *(axis for axis in folded_axes(parallel) if mesh.size(axis) > 1))


def cuts_of(parallel: Parallel, mesh: Mesh, architecture: Architecture, base: Base | None = None) -> Cuts:
    """Return the cuts of a mesh.

    Expert matrices [E, K, N] are cut along K, so that a rank holds whole experts. torch requires an even cut there;
    otherwise they are cut along E.
    """
    ep, ep_fsdp = mesh.expert_axes[3].size, mesh.expert_axes[2].size
    even = all(width % ep_fsdp == 0 for width in expert_widths(architecture))
    return Cuts(
        tp=mesh.size("tp"),
        fsdp=prod(mesh.size(axis) for axis in shard_axes(parallel, mesh)),
        ep=ep,
        ep_fsdp=ep_fsdp,
        expert_dimension=1 if even else 0,
        rules=tensor_rules(architecture),
        base=base,
    )


def local_shapes(plan: Plan, rank: int) -> dict[str, tuple[int, ...]]:
    """Return name → local shape of every parameter of a rank, in the order of the inventory.

    A piece may have no rows. A tied head on the last stage is named `embed_tokens.weight`. Raises IndexError for a rank
    outside the world.
    """
    if not 0 <= rank < plan.mesh.world_size:
        raise IndexError(f"rank {rank} of {plan.mesh.world_size}")
    cuts, place = _cuts(plan), _place(plan, rank)
    return {tensor.name: cuts.shape(tensor, place) for tensor in _owned(plan, rank)}


def _owned(plan: Plan, rank: int) -> list[ParameterSpec]:
    """Return the whole parameters of a rank's stages."""
    args = plan.node("setup.build_model").args
    pipeline = Pipeline(
        spans=tuple((first, last) for first, last in args["stages"]), owners=tuple(map(tuple, args["owners"]))
    )
    found = by_coordinate(plan.parameters.tensors, plan.architecture, pipeline)
    return found[plan.mesh.coordinates(rank)["pp"]]


def _cuts(plan: Plan) -> Cuts:
    """Return the cuts of a plan's nodes; axes without a node do not cut."""
    tensor = plan.args("setup.parallel.tp")
    experts = plan.args("setup.parallel.expert_fsdp")
    sharded = bool(plan.args("setup.parallel.fsdp"))
    return Cuts(
        tp=tensor.get("size", 1),
        fsdp=prod(plan.mesh.size(axis) for axis in _shard_axes(plan)) if sharded else 1,
        ep=plan.args("setup.parallel.ep").get("size", 1),
        ep_fsdp=next(axis.size for axis in plan.mesh.expert_axes if axis.name == "ep_fsdp") if experts else 1,
        expert_dimension=experts.get("dimension", 0),
        rules=tuple((rule["pattern"], rule["style"]) for rule in tensor.get("rules", ())),
        base=base_of_plan(plan),
    )


def base_of_plan(plan: Plan) -> Base | None:
    """Return the storage of quantized parameters; None if there are none."""
    args = plan.args("setup.quantise")
    return base_of(args["base"]) if args else None


def _place(plan: Plan, rank: int) -> CutPlace:
    """Return the place of a rank along the cuts; several shard axes are counted from the outer to the inner one."""
    coordinates = plan.mesh.coordinates(rank)
    shard = 0
    for axis in _shard_axes(plan):
        shard = shard * plan.mesh.size(axis) + coordinates[axis]
    expert = {axis.name: rank // axis.stride % axis.size for axis in plan.mesh.expert_axes}
    return CutPlace(tp=coordinates["tp"], shard=shard, ep=expert["ep"], ep_fsdp=expert["ep_fsdp"])


def _shard_axes(plan: Plan) -> list[str]:
    return plan.node("setup.mesh").args["shard_axes"]


# Minimum elements that a rank takes at a time, so that a call is worth its latency. At most this many and one more
# matrix are whole at once.
AT_ONCE = 2**23


@frozen
class MatrixCut:
    """Axis that cuts a matrix. dim: of the stack [count, rows, columns]. ranks: of the axis."""

    axis: str
    ranks: int
    dim: int

    def pieces(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shapes of the pieces of a tensor that is whole along the dim, one for each rank of the axis."""
        return [
            tuple(piece(extent, self.ranks, rank) if dim == self.dim else extent for dim, extent in enumerate(shape))
            for rank in range(self.ranks)
        ]


@frozen
class MatrixStack:
    """Matrices of one parameter that one rank computes. first: index in the stack that a rank holds of the parameter.
    shape: [count, rows, columns] of the whole matrices. cuts: from the outer to the inner. owner: computing rank
    along each cut."""

    name: str
    first: int
    shape: tuple[int, int, int]
    cuts: tuple[MatrixCut, ...]
    owner: tuple[int, ...]

    def at(self, cut: int, place: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a rank's piece before the pieces of a cut are joined. place: of the rank, along each
        cut."""
        shape: tuple[int, ...] = self.shape
        for each, rank in zip(self.cuts[: cut + 1], place, strict=False):
            shape = each.pieces(shape)[rank]
        return shape


@frozen
class MatrixBatch:
    """Stacks with the same cuts that are sent together."""

    cuts: tuple[MatrixCut, ...]
    stacks: tuple[MatrixStack, ...]

    def passing(self, cut: int, place: Sequence[int]) -> list[MatrixStack]:
        """Return the stacks that a rank holds a piece of when the pieces of a cut are joined: all stacks at the
        innermost cut; after that, stacks whose owner has the rank's place along the inner cuts."""
        inner = range(cut + 1, len(self.cuts))
        return [stack for stack in self.stacks if all(stack.owner[each] == place[each] for each in inner)]

    def sent(self, place: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Yield (axis, elements) of every all-to-all of a rank in one direction: the larger of input and output."""
        for cut, each in enumerate(self.cuts):
            if not (passing := self.passing(cut, place)):
                continue
            pieces = sum(prod(stack.at(cut, place)) for stack in passing)
            whole = sum(prod(stack.at(cut - 1, place)) for stack in passing if stack.owner[cut] == place[cut])
            yield from [(each.axis, max(pieces, whole))] * 2


def batches(stacks: Iterable[tuple[str, tuple[int, int, int], tuple[MatrixCut, ...]]]) -> list[MatrixBatch]:
    """Assign stacks of matrices to ranks.

    stacks: name, whole shape and cuts of every parameter of a pipeline stage. Stacks are sorted by shape, then by name,
    so that every rank gets about as much of each shape.
    """
    by_cuts: dict[tuple[MatrixCut, ...], list[tuple[str, tuple[int, int, int]]]] = {}
    for name, shape, cuts in sorted(stacks, key=lambda each: (each[1], each[0])):
        by_cuts.setdefault(cuts, []).append((name, shape))
    return [batch for cuts, own in by_cuts.items() for batch in _dealt(cuts, own)]


def _dealt(cuts: tuple[MatrixCut, ...], own: list[tuple[str, tuple[int, int, int]]]) -> Iterator[MatrixBatch]:
    ranks = prod(cut.ranks for cut in cuts)
    turn, taken, open_ = 0, 0, []
    for name, (count, rows, columns) in own:
        first = 0
        while first < count:
            # All ranks share a large stack; of a small stack, each rank takes one matrix.
            more = min(count - first, max(1, count // ranks))
            owner, rest = [], turn % ranks
            for cut in reversed(cuts):
                rest, place = divmod(rest, cut.ranks)
                owner.insert(0, place)
            open_.append(MatrixStack(name, first, (more, rows, columns), cuts, tuple(owner)))
            first, turn, taken = first + more, turn + 1, taken + more * rows * columns
            if turn % ranks == 0 and taken >= ranks * AT_ONCE:
                yield MatrixBatch(cuts, tuple(open_))
                taken, open_ = 0, []
    if open_:
        yield MatrixBatch(cuts, tuple(open_))


TILE: Final = 128  # rows of a product that GPUs compute together


def tokens_in(size: int, logits: int, *, whole: bool) -> int:
    """Return the number of tokens whose `logits` fp32 numbers each fit into `size` bytes. whole: a number that fills
    tiles of a product."""
    tokens = max(1, size // (4 * logits))
    return tokens // TILE * TILE if whole and tokens > TILE else tokens


def device_kind(spec: Spec) -> str:
    """Return `cpu`, `cuda`, or `auto`: cuda if there is one."""
    if spec.launch.device != "auto":
        return spec.launch.device
    return spec.cluster.device_kind() or "auto"


@frozen(kw_only=True)
class Layout:
    """Mesh, its machines, and the reason for every derived size (by path in the spec).

    unsettled: values that were guessed so that the other rules can be checked: `world`, `cp`. Empty in every plan.
    """

    mesh: Mesh
    nodes: int
    ep: int
    reasons: dict[str, str] = field(factory=dict)
    unsettled: frozenset[str] = frozenset()

    @property
    def expert_group(self) -> int:
        """Number of ranks that can share experts: the ranks of one copy of a pipeline stage."""
        return prod(self.size(axis) for axis in ("fsdp", "ring", "ulysses", "tp"))

    def size(self, axis: str) -> int:
        return self.mesh.size(axis)
