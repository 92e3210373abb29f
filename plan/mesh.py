"""Device mesh and placement: axes, strides, the expert view of the ranks, and the local shape of every parameter.

Parameters are cut by rules of tensor parallelism, by FSDP over the shard axes and by expert parallelism. The runtime
checks the model that it has built and sharded against these shapes. The estimates of a plan are those of the first
rank of every pipeline coordinate, which has the largest piece of everything.

An optimizer whose update needs whole matrices deals them out in turns to the ranks that share them. A rank receives
the pieces of its matrices, computes, and sends each rank its piece of the result. Every axis that cuts a matrix is
one all-to-all in each direction; of a matrix cut by two axes the pieces of the inner cut are joined first. Replicas
do the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Final

from attrs import field, frozen

from xtrain.dsl.schema.parallel import Parallel
from xtrain.dsl.schema.precision import Base, base_of
from xtrain.plan.architecture import EMBEDDING, HEAD, Architecture, ParameterSpec, expert_widths
from xtrain.plan.pipeline import Pipeline, by_coordinate
from xtrain.plan.plan import Axis, Mesh, Plan

AXES = ("pp", "replicate", "fsdp", "ring", "ulysses", "tp")
EXPERT_AXES = ("pp", "ep_replicate", "ep_fsdp", "ep")


def build_mesh(sizes: dict[str, int], *, ep: int, ranks_per_node: int) -> Mesh:
    """Lay ranks out over `sizes` (axis → size, all of AXES), and once more with experts in mind.

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
    """The ranks of one copy of the model (`replicate`), as a mesh of their own."""
    sizes = {axis.name: axis.size for axis in mesh.axes} | {"replicate": 1}
    ep = next(axis.size for axis in mesh.expert_axes if axis.name == "ep")
    return build_mesh(sizes, ep=ep, ranks_per_node=min(mesh.ranks_per_node, prod(sizes.values())))


def _axes(sizes: dict[str, int], names: tuple[str, ...], world: int, ranks_per_node: int) -> tuple[Axis, ...]:
    """Outer to inner; the innermost axis has stride 1.

    The ranks of an axis lie in an aligned block of stride · size. A group of them leaves its machine exactly when
    the end of a machine falls inside a block, and the first such end, rank `ranks_per_node`, decides it for all.
    """
    axes = []
    stride = world
    for name in names:
        block, stride = stride, stride // sizes[name]
        crosses = sizes[name] > 1 and ranks_per_node < world and ranks_per_node % block != 0
        axes.append(Axis(name=name, size=sizes[name], stride=stride, crosses_nodes=crosses))
    return tuple(axes)


# Ranks from which on those of gloo's groups connect only where they first need each other. At once, n of them ask the
# one store that they meet in for n² addresses of 8 n bytes, and each opens n sockets: benchmarks/startup.py.
LAZY_FROM: Final = 128


def groups(mesh: Mesh, axis: str) -> list[list[int]]:
    """The ranks of every group of an axis (of either view), each group in the order of its coordinate."""
    found = next(a for a in (*mesh.axes, *mesh.expert_axes) if a.name == axis)
    block = found.stride * found.size
    return [
        [base + offset + index * found.stride for index in range(found.size)]
        for base in range(0, mesh.world_size, block)
        for offset in range(found.stride)
    ]


def own_group(mesh: Mesh, axis: str, rank: int) -> list[int]:
    """That of `groups` which a rank is in."""
    found = next(a for a in (*mesh.axes, *mesh.expert_axes) if a.name == axis)
    first = rank - rank // found.stride % found.size * found.stride
    return [first + index * found.stride for index in range(found.size)]


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(d for d in range(min(limit, number), 0, -1) if number % d == 0)


def nearest_multiples(number: int, step: int) -> str:
    """`4032 or 4096`: the multiples of `step` around `number`, above zero."""
    low = number // step * step
    return f"{low} or {low + step}" if low else f"{step}"


# Style of a rule of tensor parallelism → the dimension that it cuts: output features or rows of the table (0), input
# features (1).
DIMENSION: Final = {"column": 0, "embedding": 0, "row": 1}

Rules = tuple[tuple[str, str], ...]


def tensor_rules(architecture: Architecture) -> Rules:
    """(pattern, style) of every matrix that is cut, over the modules that own one, with a bias that has the dimension
    that is cut; what has no rule is whole."""
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
    """Whether a pattern means a module: `*` stands for one part of its name."""
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def piece(extent: int, parts: int, index: int) -> int:
    """Rows of the piece `index` where torch.chunk cuts `extent` rows: all equal but the last ones, which may be 0."""
    size = -(-extent // parts)
    return max(0, min(size, extent - index * size))


def found_again(extent: int, tp: int, shards: int) -> bool:
    """Whether torch finds the pieces that tp and then FSDP cut from a dimension.

    It takes every shard for one that tp has cut last (`_StridedShard`), which differs where pieces are uneven.
    """
    every = [[piece(piece(extent, tp, t), shards, shard) for t in range(tp)] for shard in range(shards)]
    return all([piece(sum(pieces), tp, t) for t in range(tp)] == pieces for pieces in every)


@frozen(kw_only=True)
class CutPlace:
    """The place of a rank along the cuts; the first place has the largest piece of every parameter."""

    tp: int = 0
    shard: int = 0
    ep: int = 0
    ep_fsdp: int = 0


FIRST: Final = CutPlace()


@frozen(kw_only=True)
class Cuts:
    """Into how many pieces the axes cut a parameter: dense ones by tp then fsdp, experts by ep then ep_fsdp. base: how
    quantised ones are stored."""

    tp: int
    fsdp: int
    ep: int
    ep_fsdp: int
    expert_dimension: int
    rules: Rules = field(default=())
    base: Base | None = None

    def shape(self, parameter: ParameterSpec, place: CutPlace = FIRST) -> tuple[int, ...]:
        """The piece of a parameter that a rank owns; of a quantised one its bytes."""
        shape = list(self.stored_shape(parameter, place))
        if parameter.expert:
            shape[self.expert_dimension] = piece(shape[self.expert_dimension], self.ep_fsdp, place.ep_fsdp)
        else:
            shape[0] = piece(shape[0], self.fsdp, place.shard)
        return tuple(shape)

    def gathered_shape(self, parameter: ParameterSpec, place: CutPlace = FIRST) -> tuple[int, ...]:
        """A piece before FSDP cuts it: what a rank computes with."""
        shape = list(parameter.shape)
        if parameter.expert:
            shape[0] = piece(shape[0], self.ep, place.ep)
        elif (dim := self.tensor_dim(parameter)) is not None:
            shape[dim] = piece(shape[dim], self.tp, place.tp)
        return tuple(shape)

    def stored_shape(self, parameter: ParameterSpec, place: CutPlace = FIRST) -> tuple[int, ...]:
        """The same as it is stored: of a quantised parameter its bytes."""
        shape = self.gathered_shape(parameter, place)
        if not parameter.quantised:
            return shape
        assert self.base is not None
        return self.base.stored_shape(shape)

    def tensor_dim(self, parameter: ParameterSpec) -> int | None:
        """The dim along which tensor parallelism cuts a dense parameter; None where ranks have all of it."""
        if self.tp == 1:
            return None
        owner = parameter.name.rpartition(".")[0]
        dims = (DIMENSION[style] for pattern, style in self.rules if fits(owner, pattern))
        return next((dim for dim in dims if dim < len(parameter.shape)), None)

    def largest(self, parameters: Iterable[ParameterSpec]) -> int:
        """Elements that the rank with the largest pieces owns."""
        return sum(prod(self.shape(parameter)) for parameter in parameters)

    def gathered(self, parameters: Iterable[ParameterSpec]) -> int:
        """Elements that it computes with."""
        return sum(prod(self.gathered_shape(parameter)) for parameter in parameters)


def folded_axes(parallel: Parallel) -> tuple[str, ...]:
    """The context axes that shard parameters together with fsdp."""
    return {"all": ("ring", "ulysses"), "ring_only": ("ring",), "ulysses_only": ("ulysses",), "none": ()}[
        parallel.cp.fold
    ]


def shard_axes(parallel: Parallel, mesh: Mesh) -> tuple[str, ...]:
    """The axes over which FSDP cuts a dense parameter, outer to inner; context axes only where they have ranks."""
    return ("fsdp", *(axis for axis in folded_axes(parallel) if mesh.size(axis) > 1))


def cuts_of(parallel: Parallel, mesh: Mesh, architecture: Architecture, base: Base | None = None) -> Cuts:
    """The cuts a mesh makes.

    Expert matrices [E, K, N] are cut along K, which leaves whole experts on a rank; torch wants that even, so otherwise
    along E.
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
    """Name → local shape of every parameter of a rank, in the order of the inventory.

    A piece may have no rows. A tied head on the last stage is there as `embed_tokens.weight`. Raises IndexError for a
    rank outside the world.
    """
    if not 0 <= rank < plan.mesh.world_size:
        raise IndexError(f"rank {rank} of {plan.mesh.world_size}")
    cuts, place = _cuts(plan), _place(plan, rank)
    return {tensor.name: cuts.shape(tensor, place) for tensor in _owned(plan, rank)}


def _owned(plan: Plan, rank: int) -> list[ParameterSpec]:
    """The parameters whose stage lies on a rank, whole."""
    args = plan.node("setup.build_model").args
    pipeline = Pipeline(
        spans=tuple((first, last) for first, last in args["stages"]), owners=tuple(map(tuple, args["owners"]))
    )
    found = by_coordinate(plan.parameters.tensors, plan.architecture, pipeline)
    return found[plan.mesh.coordinates(rank)["pp"]]


def _cuts(plan: Plan) -> Cuts:
    """The cuts that the nodes of a plan make; what has no node is not cut."""
    tensor = _args(plan, "setup.parallel.tp")
    experts = _args(plan, "setup.parallel.expert_fsdp")
    sharded = bool(_args(plan, "setup.parallel.fsdp"))
    return Cuts(
        tp=tensor.get("size", 1),
        fsdp=prod(plan.mesh.size(axis) for axis in _shard_axes(plan)) if sharded else 1,
        ep=_args(plan, "setup.parallel.ep").get("size", 1),
        ep_fsdp=_expert_size(plan.mesh, "ep_fsdp") if experts else 1,
        expert_dimension=experts.get("dimension", 0),
        rules=tuple((rule["pattern"], rule["style"]) for rule in tensor.get("rules", ())),
        base=base_of_plan(plan),
    )


def base_of_plan(plan: Plan) -> Base | None:
    """How quantised parameters are stored; None where there are none."""
    args = _args(plan, "setup.quantise")
    return base_of(args["base"]) if args else None


def _place(plan: Plan, rank: int) -> CutPlace:
    """Where a rank stands along the cuts; over several shard axes it counts from the outer to the inner one."""
    coordinates = plan.mesh.coordinates(rank)
    shard = 0
    for axis in _shard_axes(plan):
        shard = shard * plan.mesh.size(axis) + coordinates[axis]
    expert = {axis.name: rank // axis.stride % axis.size for axis in plan.mesh.expert_axes}
    return CutPlace(tp=coordinates["tp"], shard=shard, ep=expert["ep"], ep_fsdp=expert["ep_fsdp"])


def _shard_axes(plan: Plan) -> list[str]:
    return plan.node("setup.mesh").args["shard_axes"]


def _expert_size(mesh: Mesh, name: str) -> int:
    return next(axis.size for axis in mesh.expert_axes if axis.name == name)


def _args(plan: Plan, node: str) -> dict[str, Any]:
    """The arguments of a node, none if the plan does not have it."""
    return next((n.args for n in plan.nodes if n.id == node), {})


# A rank takes matrices of at least so many elements at a time, so that a call is worth its latency, and no more than
# that and one matrix, which are whole at once.
AT_ONCE = 2**23


@frozen
class MatrixCut:
    """An axis that cuts a matrix. dim: of the stack [count, rows, columns]. ranks: of the axis."""

    axis: str
    ranks: int
    dim: int

    def pieces(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes of the pieces that its ranks have of what is whole along the dim."""
        return [
            tuple(piece(extent, self.ranks, rank) if dim == self.dim else extent for dim, extent in enumerate(shape))
            for rank in range(self.ranks)
        ]


@frozen
class MatrixStack:
    """Matrices of one parameter that one rank takes. first: in the stack that a rank holds of the parameter. shape:
    [count, rows, columns], of the whole matrices. cuts: from the outer to the inner. owner: along each cut."""

    name: str
    first: int
    shape: tuple[int, int, int]
    cuts: tuple[MatrixCut, ...]
    owner: tuple[int, ...]

    def at(self, cut: int, place: Sequence[int]) -> tuple[int, ...]:
        """The shape of what a rank has before the pieces of a cut are put together. place: of the rank, along each
        cut."""
        shape: tuple[int, ...] = self.shape
        for each, rank in zip(self.cuts[: cut + 1], place, strict=False):
            shape = each.pieces(shape)[rank]
        return shape


@frozen
class MatrixBatch:
    """Stacks with the same cuts that travel together."""

    cuts: tuple[MatrixCut, ...]
    stacks: tuple[MatrixStack, ...]

    def passing(self, cut: int, place: Sequence[int]) -> list[MatrixStack]:
        """Those that a rank has a piece of when those of a cut are put together: all of them at the innermost cut; then
        those whose owner is its neighbour along the cuts inside."""
        inner = range(cut + 1, len(self.cuts))
        return [stack for stack in self.stacks if all(stack.owner[each] == place[each] for each in inner)]

    def sent(self, place: Sequence[int]) -> Iterator[tuple[str, int]]:
        """(axis, elements) of every all-to-all of a rank, there and back: the larger of what goes in and comes out."""
        for cut, each in enumerate(self.cuts):
            if not (passing := self.passing(cut, place)):
                continue
            pieces = sum(prod(stack.at(cut, place)) for stack in passing)
            whole = sum(prod(stack.at(cut - 1, place)) for stack in passing if stack.owner[cut] == place[cut])
            yield from [(each.axis, max(pieces, whole))] * 2


def batches(stacks: Iterable[tuple[str, tuple[int, int, int], tuple[MatrixCut, ...]]]) -> list[MatrixBatch]:
    """Deal stacks of matrices out.

    stacks: name, whole shape and cuts of every parameter of a pipeline stage. Those of one shape follow one another,
    by name, so that every rank gets as much of each shape as the others.
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
            # A large stack is shared by all ranks; of a small one, each takes one matrix.
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
