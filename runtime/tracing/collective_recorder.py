"""The collectives of a step: each call with its group, its bytes, and the node of the plan that it is made for."""

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

from xtrain.dsl.schema.stacks import stack_of_node
from xtrain.planner.plan import Mesh, Plan, Traffic
from xtrain.runtime.parallel.mesh import Meshes

C10D = torch.ops.c10d
FUNCTIONAL = torch.ops._c10d_functional

# In this node of the step, calls are told apart by their group and by who makes them.
COMPUTING = "step.forward_backward"
EXPERTS = ("setup.parallel.ep", "setup.parallel.expert_fsdp")

Args = tuple[Any, ...]
Key = tuple[str, str, str]  # axis, op, node


@frozen
class RecordedCall:
    """How to read an operator. group: which argument names it. tensors: what goes in, and what comes out."""

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
    """Counts the calls of one rank.

    node: of the step, the one that runs; None outside the step. labels: those that torch gives to what FSDP does,
    innermost last. marks: the sums when each microbatch began.
    """

    plan: Plan
    node: str | None = None
    labels: list[str] = field(factory=list)
    sums: Sums = field(factory=Sums)
    marks: list[Sums] = field(factory=list)
    _node_of: dict[str, str] = field(factory=dict)  # by name of a group
    _ranks_of: dict[str, list[int]] = field(factory=dict)  # likewise
    _along: dict[tuple[str, bool], str] = field(factory=dict)  # likewise, and whether it is for experts: the axes

    @property
    def wrapping(self) -> str:
        """The node in which the stack of the plan wraps the model; empty where it does not."""
        return next((node.id for node in self.plan.nodes if stack_of_node(node.op) is not None), "")

    def know(self, meshes: Meshes) -> None:
        """Learn which groups belong to which node."""
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
        """A step begins."""
        self.sums = Sums()
        self.marks = []

    def see(self, func: Any, args: Args, out: Any) -> str | None:
        """Take note of an operator of the namespaces `c10d` and `_c10d_functional`; gives the node it is made for."""
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
        self.sums.bytes[key] += max(map(_bytes, call.tensors(args, out)))
        return node

    def mark(self) -> None:
        """A microbatch begins."""
        self.marks.append(self.sums.copy())

    def traffic(self, pp: int, left_out: int) -> tuple[Traffic, ...]:
        """All calls, with those of `left_out` microbatches more between the first one and the last.

        pp: the rank's coordinate. What can be hidden behind computing is what the plan says of the same calls.
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
    """The node that made the FSDP unit of a label such as `FSDP::all_gather (layers.3.mlp.experts)`."""
    if label.endswith(".experts)"):
        return "setup.parallel.expert_fsdp"
    return "setup.parallel.fsdp" if "(layers." in label else "setup.parallel.root_fsdp"


def _axes(mesh: Mesh, ranks: list[int], *, experts: bool) -> str:
    """The axes along which the ranks differ: those of experts, or of dense parameters, if the group is made along
    them."""
    kinds = (mesh.expert_axes, mesh.axes) if experts else (mesh.axes, mesh.expert_axes)
    found = [[a for a in axes if len({rank // a.stride % a.size for rank in ranks}) > 1] for axes in kinds]
    along = next((axes for axes in found if prod(a.size for a in axes) == len(ranks)), found[0])
    return " · ".join(axis.name for axis in along)


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))
