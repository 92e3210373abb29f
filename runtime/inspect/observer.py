"""Observation of a traced rank: operators and collectives, with FSDP's bookkeeping limited to this rank."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import ceil, prod
from typing import Any, overload

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.dsl.schema.parallel import stack_of_node
from xtrain.plan.estimates import Traffic
from xtrain.plan.plan import Mesh, Plan
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.inspect.ledger import Ledger

C10D = torch.ops.c10d
FUNCTIONAL = torch.ops._c10d_functional

# In this node of the step, calls are attributed by their group and by FSDP's labels.
COMPUTING = "step.forward_backward"
EXPERTS = ("setup.parallel.ep", "setup.parallel.expert_fsdp")

Args = tuple[Any, ...]
Key = tuple[str, str, str]  # axis, op, node


@frozen
class RecordedCall:
    """Signature of a collective operator. group: index of its group argument. tensors: its inputs and outputs."""

    op: str
    group: int
    tensors: Callable[[Args, Any], list[Any]]


def _first(args: Args, out: Any) -> list[Any]:
    return [args[0]]


def _first_two(args: Args, out: Any) -> list[Any]:
    return [args[0], args[1]]


def _first_and_out(args: Args, out: Any) -> list[Any]:
    return [args[0], out]


CALLS = {
    C10D.allreduce_.default: RecordedCall("all_reduce", 1, _first),
    C10D.broadcast_.default: RecordedCall("broadcast", 1, _first),
    C10D.send.default: RecordedCall("send", 1, _first),
    C10D.recv_.default: RecordedCall("recv", 1, _first),
    C10D._allgather_base_.default: RecordedCall("all_gather", 2, _first_two),
    C10D._reduce_scatter_base_.default: RecordedCall("reduce_scatter", 2, _first_two),
    C10D.alltoall_base_.default: RecordedCall("all_to_all", 2, _first_two),
    FUNCTIONAL.all_reduce.default: RecordedCall("all_reduce", 2, _first),
    FUNCTIONAL.broadcast.default: RecordedCall("broadcast", 2, _first),
    FUNCTIONAL.all_gather_into_tensor.default: RecordedCall("all_gather", 2, _first_and_out),
    FUNCTIONAL.reduce_scatter_tensor.default: RecordedCall("reduce_scatter", 3, _first_and_out),
    FUNCTIONAL.all_to_all_single.default: RecordedCall("all_to_all", 3, _first_and_out),
}


@frozen
class IssuedCall:
    """A collective as a rank issued it. axes: of its group, whose ranks are `ranks`. shapes: of its inputs and outputs.
    peer: the other rank of a send or a receive."""

    axes: str
    ranks: tuple[int, ...]
    op: str
    node: str
    shapes: tuple[str, ...]
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.op} of {', '.join(self.shapes)} over {self.axes} for {self.node}"


@frozen
class Sums:
    """Calls and bytes, for each axis, op and node."""

    count: Counter[Key] = field(factory=Counter)
    bytes: Counter[Key] = field(factory=Counter)

    def since(self, other: "Sums") -> "Sums":
        return Sums(self.count - other.count, self.bytes - other.bytes)

    def add(self, other: "Sums") -> None:
        self.count.update(other.count)
        self.bytes.update(other.bytes)

    def copy(self) -> "Sums":
        return Sums(self.count.copy(), self.bytes.copy())


@define(kw_only=True, eq=False)
class CollectiveRecorder:
    """Counter of a rank's collectives.

    node: of the running step node; None outside the step. labels: torch's labels of FSDP's work, innermost last. marks:
    the sums at the start of each microbatch. log: every call in order, if it is asked for.
    """

    plan: Plan
    node: str | None = None
    labels: list[str] = field(factory=list)
    sums: Sums = field(factory=Sums)
    marks: list[Sums] = field(factory=list)
    log: list[IssuedCall] | None = None
    _node_of: dict[str, str] = field(factory=dict)  # by name of a group
    _ranks_of: dict[str, list[int]] = field(factory=dict)  # by name of a group
    _along: dict[tuple[str, bool], str] = field(factory=dict)  # by name of a group, and True for experts: the axes

    @property
    def wrapping(self) -> str:
        """The node in which the plan's stack wraps the model; empty without one."""
        return next((node.id for node in self.plan.nodes if stack_of_node(node.op) is not None), "")

    def know(self, meshes: Meshes) -> None:
        """Map groups to the nodes that use them."""
        nodes = {node.id for node in self.plan.nodes}
        rows = "setup.parallel.cp" if "setup.parallel.cp" in nodes else "setup.parallel.tp"
        for axis, node in (
            ("row", rows),
            ("tp", "setup.parallel.tp"),
            ("ring", "setup.parallel.cp"),
            ("ulysses", "setup.parallel.cp"),
            ("ep", "setup.parallel.ep"),
            ("pp", "setup.parallel.pp"),
        ):
            if meshes.has(axis):
                self._node_of[meshes.group(axis).group_name] = node

    def begin(self) -> None:
        """Begin a step."""
        self.sums = Sums()
        self.marks = []

    def see(self, func: Any, args: Args, out: Any) -> str | None:
        """Count an operator of the namespaces `c10d` and `_c10d_functional`; return the node it belongs to."""
        if self.node is None or func is C10D.barrier.default:
            return None
        call = CALLS[func]
        group = args[call.group]
        name = group if isinstance(group, str) else ProcessGroup.unbox(group).group_name
        ranks = self._ranks(name)
        if len(ranks) < 2:
            return None
        node = self._node(name)
        key = (self._axes(name, node in EXPERTS), call.op, node)
        self.sums.count[key] += 1
        tensors = call.tensors(args, out)
        self.sums.bytes[key] += max(map(_bytes, tensors))
        if self.log is not None:
            peer = ranks[args[2]] if call.op in ("send", "recv") else None
            self.log.append(IssuedCall(key[0], tuple(ranks), call.op, node, tuple(_shapes(tensors)), peer))
        return node

    def mark(self) -> None:
        """Mark the start of a microbatch."""
        self.marks.append(self.sums.copy())

    def traffic(self, pp: int, left_out: int) -> tuple[Traffic, ...]:
        """Return all calls, with `left_out` more microbatches between the first and the last.

        pp: the rank's coordinate. `exposed` is copied from the plan's entries for the same calls.
        """
        assert left_out == 0 or self.marks[2].since(self.marks[1]) == self.marks[3].since(self.marks[2])
        more = self.marks[3].since(self.marks[2]) if left_out else Sums()
        planned = {(t.axis, t.op, t.node): t.exposed for t in self.plan.estimates.classes[pp].traffic}
        return tuple(
            Traffic(
                axis=axis,
                op=op,  # pyright: ignore[reportArgumentType]
                node=node,
                count=count + left_out * more.count[key],
                bytes=self.sums.bytes[key] + left_out * more.bytes[key],
                exposed=planned.get(key, True),
            )
            for key, count in self.sums.count.items()
            for axis, op, node in [key]
        )

    def _node(self, group: str) -> str:
        assert self.node is not None
        if self.node != COMPUTING:
            return self.node
        if group in self._node_of:
            return self._node_of[group]
        for label in reversed(self.labels):
            if label.startswith(("FSDP::all_gather", "FSDP::post_backward_reduce")):
                return _unit(label)
        assert self.wrapping, f"nothing in the plan says who calls the group {group} while it computes"
        return self.wrapping

    def _axes(self, name: str, experts: bool) -> str:
        if (name, experts) not in self._along:
            self._along[name, experts] = _axes(self.plan.mesh, self._ranks(name), experts=experts)
        return self._along[name, experts]

    def _ranks(self, name: Any) -> list[int]:
        if name not in self._ranks_of:
            self._ranks_of[name] = dist.get_process_group_ranks(_resolve_process_group(name))
        return self._ranks_of[name]


def _unit(label: str) -> str:
    """Return the node of an FSDP unit from a label such as `FSDP::all_gather (layers.3.mlp.experts)`."""
    if label.endswith(".experts)"):
        return "setup.parallel.expert_fsdp"
    return "setup.parallel.fsdp" if "(layers." in label else "setup.parallel.root_fsdp"


def _axes(mesh: Mesh, ranks: list[int], *, experts: bool) -> str:
    """Return the axes along which the ranks differ: of experts, or else of dense parameters, whichever matches the
    group."""
    kinds = (mesh.expert_axes, mesh.axes) if experts else (mesh.axes, mesh.expert_axes)
    differing = [[a for a in axes if len({rank // a.stride % a.size for rank in ranks}) > 1] for axes in kinds]
    along = next((axes for axes in differing if prod(a.size for a in axes) == len(ranks)), differing[0])
    return " · ".join(axis.name for axis in along)


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


def _shapes(tensors: Any) -> Iterator[str]:
    if isinstance(tensors, Tensor):
        yield f"{'×'.join(map(str, tensors.shape)) or 'one'} {str(tensors.dtype).removeprefix('torch.')}"
    else:
        for each in tensors:
            yield from _shapes(each)


LABEL = torch.ops.profiler._record_function_enter_new.default
DEVICE = torch.ops.prim.device.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
BROADCAST = torch.ops.c10d.broadcast_.default


class TraceObserver(TorchDispatchMode):
    """Dispatch mode that records operators. heard: content of another rank's broadcast. ends: called when a
    label ends."""

    def __init__(self, ledger: Ledger, collectives: CollectiveRecorder) -> None:
        super().__init__()
        self.ledger, self.collectives = ledger, collectives
        self.heard: Tensor | None = None
        self._works_out = False  # while DTensor computes the metadata of an operator's output
        self.ends: dict[str, Callable[[], None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].fake_device  # the fake mode's answer, which would take a tenth of a trace
        if DTensor in types:
            return NotImplemented  # its local parts are dispatched by themselves
        if func is WAIT:
            return args[0]  # no new tensor, as for real tensors
        out = func(*args, **(kwargs or {}))
        if not self._works_out:
            self._see(out)
        namespace = func.namespace
        if namespace == "profiler":
            self._label(args[0] if func is LABEL else None)
        elif namespace in ("c10d", "_c10d_functional"):
            stack = stack_of_node(self.collectives.see(func, args, out) or "")
            if stack is not None and stack.buckets:
                self.ledger.assign("unreduced", args[0])
            if func is BROADCAST and self.heard is not None:
                args[0][0].copy_(self.heard)
        return out

    @contextmanager
    def blind_to_shapes(self) -> Iterator[None]:
        """Ignore the calls in which DTensor computes an operator's output metadata with full shapes, which need no
        memory in a run."""
        original = ShardingPropagator._propagate_tensor_meta_non_cached

        def work_out(propagator: ShardingPropagator, schema: OpSchema) -> Any:
            self._works_out = True
            try:
                return original(propagator, schema)
            finally:
                self._works_out = False

        with ExitStack() as stack:
            stack.callback(setattr, ShardingPropagator, original.__name__, original)
            setattr(ShardingPropagator, original.__name__, work_out)
            yield

    def _see(self, out: Any) -> None:
        if isinstance(out, FakeTensor):
            self.ledger.see(out)
        elif isinstance(out, tuple | list):
            for part in out:
                self._see(part)

    def _label(self, begins: str | None) -> None:
        """Record that a label begins, or that the innermost one ends."""
        if begins is not None:
            self.collectives.labels.append(begins)
        else:
            end = self.ends.get(self.collectives.labels.pop())
            if end is not None:
                end()


class TracedPieces(Sequence[Tensor]):
    """Result of `torch.chunk`, cut only where it is indexed; missing pieces are empty."""

    def __init__(self, tensor: Tensor, number: int, dim: int) -> None:
        self._tensor, self._number, self._dim = tensor, number, dim

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._number))]
        if not 0 <= index < self._number:
            raise IndexError(index)
        length = self._tensor.size(self._dim)
        size = ceil(length / self._number)
        start = min(index * size, length)
        return self._tensor.narrow(self._dim, start, min(size, length - start))

    def joined(self, dim: int) -> Tensor:
        """Return a new tensor for the concatenation of the equal pieces along another dim."""
        shape = list(self._tensor.shape)
        assert shape[self._dim] % self._number == 0, "FSDP cuts a dim behind the first one into equal pieces"
        shape[self._dim] //= self._number
        shape[dim] *= self._number
        return self._tensor.new_empty(shape)


class _JoinsPieces:
    """Replacement of torch in FSDP's collectives for pieces of a matrix sharded along a later dim: memory is the same,
    without a tensor for every rank's piece."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def chunk(self, tensor: Tensor, number: int, dim: int = 0) -> TracedPieces:
        return TracedPieces(tensor, number, dim)

    def cat(self, tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
        if not isinstance(tensors, TracedPieces):
            return torch.cat(tensors, dim, out=out)  # pyright: ignore[reportArgumentType]
        return tensors.joined(dim) if out is None else out


@contextmanager
def joined_pieces() -> Iterator[None]:
    """Replace torch in FSDP's collectives, so that full parameters and gradients are not cut into pieces."""
    module: Any = _fsdp_collectives
    with ExitStack() as stack:
        stack.callback(setattr, module, "torch", module.torch)
        module.torch = _JoinsPieces()
        yield


@contextmanager
def own_pieces() -> Iterator[None]:
    """Make FSDP cut only its own piece of a parameter, and join each pair of meshes once."""
    meshes: dict[tuple[int, ...], tuple[Any, DeviceMesh]] = {}
    make: Callable[[list[DeviceMesh]], DeviceMesh] | None = getattr(DeviceMesh, "_concatenate", None)

    def joined(parts: list[DeviceMesh]) -> DeviceMesh:
        assert make is not None
        key = tuple(map(id, parts))
        if key not in meshes:
            meshes[key] = parts, make(parts)
        return meshes[key][1]

    with ExitStack() as stack:
        module: Any = _fsdp_param
        stack.callback(setattr, module, "_chunk_with_empty", module._chunk_with_empty)
        module._chunk_with_empty = TracedPieces
        if make is not None:
            stack.callback(setattr, DeviceMesh, "_concatenate", DeviceMesh.__dict__["_concatenate"])
            DeviceMesh._concatenate = staticmethod(joined)  # pyright: ignore[reportAttributeAccessIssue]
        yield
