"""How parameters are cut: by rules of tensor parallelism, by FSDP over the shard axes, by expert parallelism."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from math import prod
from typing import Final

from attrs import field, frozen

from xtrain.dsl.schema.bases import Base
from xtrain.dsl.schema.parallel import Parallel
from xtrain.planner.architecture import EMBEDDING, HEAD, Architecture, ParameterSpec, expert_widths
from xtrain.planner.plan import Mesh

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
