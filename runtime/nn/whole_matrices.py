"""Optimizers of whole matrices: matrices that ranks share, whole on one rank at a time, and sums over all shards."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import prod

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor

from xtrain.plan.mesh import MatrixBatch, MatrixCut, MatrixStack, batches
from xtrain.runtime.nn.axes import local

OPS = torch.ops._c10d_functional

Compute = Callable[[MatrixStack, Tensor], Tensor]
"""Matrices [count, rows, columns] of a stack → as many of the same shape."""
Pieces = Callable[[MatrixStack], Tensor]
"""Returns a rank's shard of a stack: [count, …], cut in rows or columns or both."""


@define(eq=False)
class WholeMatrices:
    """The matrices among the parameters of a rank, and the rank that computes each of them."""

    batches: list[MatrixBatch]
    _groups: dict[tuple[MatrixCut, ...], list[ProcessGroup]]
    _places: dict[tuple[MatrixCut, ...], list[int]]
    _device: torch.device

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], device: torch.device) -> "WholeMatrices":
        """Plan the exchanges. parameters: matrices [rows, columns] and stacks of them [count, rows, columns], by name;
        every rank that shares one names the same in any order. device: of messages."""
        groups: dict[tuple[MatrixCut, ...], list[ProcessGroup]] = {}
        places: dict[tuple[MatrixCut, ...], list[int]] = {}
        stacks = []
        for name, parameter in parameters.items():
            own = local(parameter)
            cuts, among, at = _cuts(parameter)
            groups[cuts], places[cuts] = among, at
            rows, columns = parameter.shape[-2:]
            count = own.shape[0] if own.dim() == 3 else 1
            stacks.append((name, (count, rows, columns), cuts))
        return cls(batches(stacks), groups, places, device)

    def apply(self, pieces: Pieces, compute: Compute) -> Iterator[list[tuple[MatrixStack, Tensor]]]:
        """Yield the results of `compute` for each batch, sharded like the matrices: this rank's shard of each stack.

        pieces: called once for each stack. Collective: every rank takes all results. The next batch's shards are in
        transit while one is computed.
        """
        started: MatrixExchange | None = None
        for batch in (*self.batches, None):
            current, started = started, None if batch is None else self._started(batch, pieces)
            if current is not None:
                yield list(zip(current.batch.stacks, current.finish(compute), strict=True))

    def _started(self, batch: MatrixBatch, pieces: Pieces) -> "MatrixExchange":
        own = [pieces(stack).to(self._device) for stack in batch.stacks]
        exchange = MatrixExchange(batch, self._groups[batch.cuts], self._places[batch.cuts], own)
        exchange.start()
        return exchange


def _cuts(parameter: Tensor) -> tuple[tuple[MatrixCut, ...], list[ProcessGroup], list[int]]:
    """Return the cuts of a parameter from the outer to the inner, with the groups of ranks, and the places in them."""
    if not isinstance(parameter, DTensor):
        return (), [], []
    mesh, cut_axes = parameter.device_mesh, []
    stacked = parameter.dim() == 3
    # FSDP, whose axes come first in a mesh, cuts what tensor parallelism left.
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        if mesh.size(axis) == 1 or placement.is_replicate():
            continue
        assert not placement.is_partial()
        dim = placement.dim + (0 if stacked else 1)  # pyright: ignore[reportAttributeAccessIssue]
        if dim > 0:  # others have whole matrices of the stack
            name = (mesh.mesh_dim_names or ())[axis]
            cut_axes.append((MatrixCut(name, mesh.size(axis), dim), mesh.get_group(axis), mesh.get_local_rank(axis)))
    cuts, groups, places = zip(*cut_axes, strict=True) if cut_axes else ((), (), ())
    return cuts, list(groups), list(places)


@define(eq=False)
class MatrixExchange:
    """Exchange of one batch. pieces: of the stacks that pass the next cut."""

    batch: MatrixBatch
    groups: list[ProcessGroup]
    place: list[int]
    pieces: list[Tensor]
    _sent: Tensor | None = field(default=None, init=False)
    _nothing: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._nothing = self.pieces[0].new_empty(0)

    def start(self) -> None:
        """Send the pieces of the innermost cut."""
        if self.batch.cuts:
            self._sent = self._send(len(self.batch.cuts) - 1)

    def finish(self, compute: Compute) -> list[Tensor]:
        """Return this rank's piece of every stack's result."""
        cuts = range(len(self.batch.cuts))
        for cut in reversed(cuts):
            if self.batch.passing(cut, self.place):
                self._receive(cut)
        own = self.batch.passing(-1, self.place)
        self.pieces = [compute(stack, matrices) for stack, matrices in zip(own, self.pieces, strict=True)]
        for cut in cuts:
            if self.batch.passing(cut, self.place):
                self._return(cut)
        return self.pieces

    def _by_owner(self, cut: int) -> list[list[int]]:
        """Return for each rank along a cut the passing stacks that it owns."""
        passing = self.batch.passing(cut, self.place)
        every = range(self.batch.cuts[cut].ranks)
        return [[i for i, stack in enumerate(passing) if stack.owner[cut] == rank] for rank in every]

    def _shapes(self, cut: int) -> list[list[tuple[int, ...]]]:
        """Return for each rank along a cut the shapes of its pieces of this rank's stacks."""
        passing, own = self.batch.passing(cut, self.place), self._by_owner(cut)[self.place[cut]]
        pieces = [self.batch.cuts[cut].pieces(passing[i].at(cut - 1, self.place)) for i in own]
        return [[shapes[rank] for shapes in pieces] for rank in range(self.batch.cuts[cut].ranks)]

    def _exchange(self, cut: int, sent: list[list[Tensor]], sizes: list[int]) -> Tensor:
        """Start an all-to-all along a cut: to each rank its tensors, from each `sizes` numbers."""
        flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
        message = torch.cat(flat) if flat else self._nothing
        ins = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        return OPS.all_to_all_single(message, sizes, ins, self.groups[cut].group_name)

    def _send(self, cut: int) -> Tensor:
        sent = [[self.pieces[i] for i in own] for own in self._by_owner(cut)]
        return self._exchange(cut, sent, [sum(map(prod, shapes)) for shapes in self._shapes(cut)])

    def _receive(self, cut: int) -> None:
        """Join the pieces of a cut."""
        came = functional.wait_tensor(self._send(cut) if self._sent is None else self._sent)
        self._sent = None
        dim = self.batch.cuts[cut].dim
        by_rank = _unpack(came, self._shapes(cut))
        self.pieces = [torch.cat(rank_pieces, dim) for rank_pieces in zip(*by_rank, strict=True)]

    def _return(self, cut: int) -> None:
        """Send every rank its pieces of this rank's stacks, and receive those of the others' stacks."""
        passing, owners, shapes = self.batch.passing(cut, self.place), self._by_owner(cut), self._shapes(cut)
        dim = self.batch.cuts[cut].dim
        split = [
            whole.split([shapes[rank][i][dim] for rank in range(len(shapes))], dim)
            for i, whole in enumerate(self.pieces)
        ]
        sent = [[matrix_parts[rank] for matrix_parts in split] for rank in range(len(shapes))]
        theirs = [[passing[i].at(cut, self.place) for i in own] for own in owners]
        came = functional.wait_tensor(self._exchange(cut, sent, [sum(map(prod, sizes)) for sizes in theirs]))
        order = [i for own in owners for i in own]
        parts = [piece for pieces in _unpack(came, theirs) for piece in pieces]
        self.pieces = [piece for _, piece in sorted(zip(order, parts, strict=True), key=lambda placed: placed[0])]


def _unpack(message: Tensor, shapes: list[list[tuple[int, ...]]]) -> list[list[Tensor]]:
    """Return the tensors of these shapes, which are consecutive in the message."""
    tensors, at = [], 0
    for own in shapes:
        tensors.append([])
        for shape in own:
            tensors[-1].append(message[at : at + prod(shape)].view(shape))
            at += prod(shape)
    return tensors


@define(eq=False)
class SumsOverPieces:
    """Sums over the shards of parameters. device: of messages."""

    device: torch.device
    _groups: dict[str, ProcessGroup] = field(factory=dict, init=False)

    def cuts_of(self, parameter: Tensor) -> dict[str, int]:
        """Return the axes along which other ranks have the rest of a parameter: name → dim that is cut."""
        cuts: dict[str, int] = {}
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for axis, (name, placement) in enumerate(zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)):
                if mesh.size(axis) > 1 and not placement.is_replicate():
                    cuts[name] = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
                    self._groups[name] = mesh.get_group(axis)
        return cuts

    def sum_up(self, wanted: Iterable[tuple[Tensor, Mapping[str, int], Collection[int]]]) -> None:
        """Sum tensors in place over the ranks that share a parameter, in one call along each axis.

        wanted: a tensor, the cuts of its parameter, and the dims of the parameter that it sums over.
        """
        wanted = list(wanted)
        for axis, group in self._groups.items():
            tensors = [tensor for tensor, cuts, dims in wanted if cuts.get(axis) in dims]
            if not tensors:
                continue
            sums = torch.cat([tensor.flatten() for tensor in tensors]).to(self.device)
            dist.all_reduce(sums, group=group)
            for tensor, total in zip(tensors, sums.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(total.view(tensor.shape))
