"""`CodeLayer`: a layer that transformers' own code computes: its parameters and costs, from the model's description.

Sizes in a description are polynomials [c0, c1, c2] of the positions S of a row, in bytes, for one row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import evolve, field

from xtrain.blocks.attention import AttentionLayer, trace_kernel
from xtrain.blocks.block import AxisRanks, Layer, later
from xtrain.blocks.feed_forward import Gate, join_pieces, own_piece, to_experts, trace_experts, weigh
from xtrain.blocks.op_trace import ATTENTION, INDEX, TP, CollectiveCall, TracedTensor
from xtrain.dsl.schema.model import Model
from xtrain.lazy_attrs import define, frozen
from xtrain.plan.architecture import Architecture, BlockParameter

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer

# Bytes of a number in the compute format → the format of the trace, and how many times as large its sizes are.
TRACES: Final = {2: ("bfloat16", 1), 4: ("float32", 1), 8: ("float32", 2)}


def code_size(polynomial: Sequence[float], rows: int, sequence: int, times: int = 1) -> int:
    """Return the bytes, or FLOPs, for `rows` rows of `sequence` positions."""
    c0, c1, c2 = polynomial[:3]
    return round(times * (c0 + rows * (c1 * sequence + c2 * sequence**2)))


def position_flops(costs: Mapping[str, Any], parameters: Iterable[BlockParameter]) -> int:
    """Return the FLOPs of one position that operations of a description, without attention by xtrain's kernels, have in
    addition to one product with each matrix; less than 0 if a matrix is in no product. costs: operations by number
    format."""
    own = (each for each in parameters if len(each.shape) > 1 and not each.expert)
    matrices = sum(round(prod(each.shape) * each.multiplied) for each in own)
    return round(sum(op["flops"][1] for op in costs["float32"] if "attention" not in op)) - 2 * matrices


def attention_flops(op: Mapping[str, Any]) -> int:
    """Return the FLOPs of an attention operation for one pair of positions."""
    return 4 * op["attention"]["heads"] * op["attention"]["head_dim"]


@frozen
class CodeLayer(Layer):
    """All of a layer. kind: its place among the distinct layers of the description. experts: xtrain computes its
    experts."""

    composable: ClassVar[bool] = False
    settings: ClassVar[type[Model]] = Model
    adapts: ClassVar[bool] = True
    attends: ClassVar[bool] = True

    kind: int
    window: int | None = later(None)  # pyright: ignore[reportIncompatibleVariableOverride]
    experts: bool = later(False)

    @property
    def has_experts(self) -> bool:
        return self.experts

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        for each in self._described(arch)["parameters"]:
            shape = tuple(each["shape"])
            chosen, experts = each.get("chosen", (1, 1))
            yield BlockParameter(
                name=each["name"],
                shape=shape,
                decays=_decays(each["name"], shape),
                initial="normal",
                cut=each.get("cut"),
                partial="always" if each.get("partial") else "never",
                multiplied=chosen / experts,
                linear=each.get("linear", False) and not each.get("idle", False),
                expert=each.get("expert", False),
                turned=each.get("turned", False),
            )

    def buffers(self, arch: Architecture) -> dict[str, list[int]]:
        return dict(self._described(arch)["buffers"])

    def pair_flops(self, arch: Architecture) -> int:
        ops = self._described(arch)["costs"]["float32"]
        return round(sum(attention_flops(op) if "attention" in op else op["flops"][2] for op in ops))

    def position_flops(self, arch: Architecture) -> int:
        return position_flops(self._described(arch)["costs"], self.parameters(arch))

    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str], exact: int = 1) -> int:
        if arch.own["code"]["caches"] != "kernels":
            return 0
        described = self._described(arch)
        ops = divided(described["costs"]["float32"], _ways(described))
        ((own, parts),) = ((op["attention"], tp if is_cut else 1) for op, _, _, is_cut in ops if "attention" in op)
        seen = positions if own["window"] is None else min(positions, own["window"])
        return 2 * own["kv_heads"] // parts * own["head_dim"] * seen

    def shared(self, arch: Architecture, rows: int, sequence: int, formats: tuple[int, int], ways: AxisRanks) -> int:
        format, times = TRACES[formats[0]]
        return code_size(arch.own["code"]["shared"][format], rows, sequence, times)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        described = self._described(on.resolved.architecture)
        return trace_described(on, x, described["costs"], _ways(described) if on.axes.tensor else {})

    def _described(self, arch: Architecture) -> Mapping[str, Any]:
        return arch.own["code"]["kinds"][self.kind]


def _decays(name: str, shape: Sequence[int]) -> bool:
    """Return True for matrices, but not for biases of several experts or heads, and norms of several heads."""
    module, _, own = name.rpartition(".")
    return len(shape) > 1 and not own.endswith("bias") and "norm" not in module.rpartition(".")[2].lower()


Ways = Mapping[str, tuple[str, bool]]
"""Matrix → how tensor parallelism cuts it, and whether its outputs or inputs are whole on every rank."""


def _ways(described: Mapping[str, Any]) -> Ways:
    matrices = (each for each in described["parameters"] if "cut" in each and each.get("linear"))
    return {each["name"]: (each["cut"], each.get("joins", False)) for each in matrices}


def divided(ops: Iterable[Mapping[str, Any]], ways: Ways) -> Iterator[tuple[Mapping[str, Any], str, bool, bool]]:
    """Yield each operation of a description with the way of its matrix, and whether features of its results are
    divided over tensor-parallel ranks, before they are gathered if these are whole on every rank."""
    cut = set[int]()
    for op in ops:
        way, joins = next((ways[name] for name in op["parameters"] if name in ways), ("", False))
        is_cut = way == "column" or (not way and not cut.isdisjoint(op["inputs"]))
        if is_cut and not joins:
            cut.update(number for number, *_ in op["new"])
        yield op, way, joins, is_cut


def trace_described(on: "Tracer", x: TracedTensor, costs: Mapping[str, Any], ways: Ways) -> TracedTensor:
    """Record the operations of a description; return the last one's first result. costs: by number format."""
    format, times = TRACES[on.local.width]
    trace, out = _LayerTrace(on, times, {0: x}), x
    for operation in divided(costs[format], ways):
        out = trace.record(*operation)
    return out


def _gate(kept: float) -> Gate:
    """Return what records hidden values from one product. kept: for the backward, relative to the hidden values."""

    def gate_of(on: "Tracer", inner: int, products: Sequence[Callable[[], TracedTensor]]) -> TracedTensor:
        (product,) = products
        both = product()
        with on.ops.scope():
            if not kept:
                return on.ops.op(both, makes=inner, keeps=(both,))
            more = round((kept - 1) * inner)
            active = on.ops.op(both, makes=inner, keeps=(both,), extra=(more,) if more > 0 else ())
            return on.ops.op(active, both, makes=inner, keeps=(active, both))

    return gate_of


@define(eq=False)
class _LayerTrace:
    """Trace of a layer from the operations of its description.

    times: factor of sizes in the description's format. tensors: by their numbers. entered: whole inputs of cut
    matrices.
    """

    on: "Tracer"
    times: int
    tensors: dict[int, TracedTensor]
    entered: dict[int, TracedTensor] = field(factory=dict)

    def record(self, op: Mapping[str, Any], way: str, joins: bool, is_cut: bool) -> TracedTensor:
        """Record one operation of the description, as `divided` yields it; return its first result."""
        number, *size = op["new"][0]
        inputs = {number: self._input(number, way, joins) for number in op["inputs"] if number in self.tensors}
        parts = self.on.resolved.size("tp") if way or is_cut else 1
        if "experts" in op:
            out = self._experts(*inputs.values())
        elif "attention" in op:
            out = self._attention(op["attention"], list(inputs.values()), parts)
        else:
            out = self._op(op, inputs, parts, parts if is_cut else 1)
        if way == "row":
            out = self._summed(out)
        elif joins:
            out = self._joined(out, self._size(size))
        self.tensors[number] = out
        return out

    def _input(self, number: int, way: str, joins: bool) -> TracedTensor:
        """Return an input as an operation with a matrix that is cut in this way takes it."""
        x = self.tensors[number]
        if way == "column":
            if number not in self.entered:
                call = CollectiveCall("tp", "all_reduce", TP, x.gradient)
                self.entered[number] = self.on.ops.views(x, back_calls=(call,))[0]
            return self.entered[number]
        return self.on.ops.op(x, makes=x.gradient // self.on.resolved.size("tp")) if way and joins else x

    def _op(self, op: Mapping[str, Any], inputs: Mapping[int, TracedTensor], parts: int, made: int) -> TracedTensor:
        """Record an operation. parts: ranks that its FLOPs are divided over. made: ranks that its results are."""
        on = self.on
        (number, *first), *others = op["new"]
        known = {**self.tensors, **inputs}
        unpacked = sum(on.unpacked(name, prod(on.shapes[name])) for name in op["parameters"])
        there, back = map(self._size, op.get("scratch", ((0, 0, 0), (0, 0, 0))))
        output = on.ops.op(
            *inputs.values(),
            makes=self._size(first) // made,
            keeps=[known[each] for each in op["keeps"] if each in known],
            keeps_output=number in op["keeps"],
            extra=[self._size(each[1:]) // made for each in others if each[0] in op["keeps"]],
            weights=on.bytes_of(*op["parameters"]),
            parameters=op["parameters"],
            saved=op["word"],
            scratch=(there + unpacked, back + unpacked),
            flops=code_size(op["flops"], on.local.rows, on.local.tokens // on.local.rows) // parts,
            attends=op["word"] == ATTENTION,
        )
        if len(first) > 3:  # indices have no gradient
            output.gradient = 0
        for name in op["parameters"]:
            if (adapter := on.adapted.get(name)) is not None:
                output = adapter.trace(on, next(iter(inputs.values())), output, on.local.tokens)
        for each in others:
            self.tensors[each[0]] = TracedTensor(0, 0, output)
        return output

    def _attention(self, own: Mapping[str, Any], inputs: Sequence[TracedTensor], parts: int) -> TracedTensor:
        """Record attention that xtrain's kernels compute."""
        on, sinks = self.on, own["sinks"]
        heads, kv_heads = own["heads"] // parts, own["kv_heads"] // parts
        spread = kv_heads if kv_heads % on.axes.ulysses == 0 else on.axes.ulysses
        local = evolve(on.local, heads=heads, kv_heads=kv_heads, spread_kv=spread, head_dim=own["head_dim"])
        layer = AttentionLayer(
            (sinks or ".sinks").rpartition(".")[0],
            window=own["window"],
            scale=own["scale"],
            cap=own["cap"],
            sinks=sinks is not None,
        )
        return trace_kernel(layer, evolve(on, local=local), inputs)

    def _experts(self, x: TracedTensor, *routed: TracedTensor) -> TracedTensor:
        """Record experts that xtrain computes. routed: numbers and weights of the chosen ones."""
        on, own = self.on, self.on.resolved.architecture.own["code"]["experts"]
        weights = routed[-1] if routed else on.ops.op(x, makes=0)
        module, width, (first, last) = own["module"], own["width"], own["matrices"]
        inner = prod(on.shapes[f"{module}.{first}"][1:]) // on.local.dim
        biased = f"{module}.{last}_bias" in on.shapes
        widths = {first: inner, last: on.local.dim}
        experts = partial(trace_experts, on, module, widths, width, biased, _gate(own["kept"]))
        on.ops.choices = on.local.routed * own["chosen"] * INDEX
        if on.resolved.architecture.router_aux_loss:
            self._router_loss(weights, own["count"])
        spread = bool(on.axes.tensor)
        x = own_piece(on, x) if spread else x
        out = weigh(on, to_experts(on, x, module, experts), weights)
        return join_pieces(on, out) if spread else out

    def _router_loss(self, weights: TracedTensor, experts: int) -> None:
        """Record the loss of a router: which positions are real, and its probabilities, which are kept."""
        on, local = self.on, self.on.local
        size = local.tokens * experts * local.exact
        counts = CollectiveCall(on.axes.row, "all_reduce", on.axes.row_node, local.rows * (experts + 1) * INDEX)
        calls = (counts,) if on.axes.row else ()
        on.ops.op(weights, makes=0, extra=(size, local.tokens), scratch=(2 * size, 2 * size), calls=calls)

    def _summed(self, x: TracedTensor) -> TracedTensor:
        """Record the sum over ranks of products with a matrix that is cut by input."""
        call = CollectiveCall("tp", "all_reduce", TP, x.gradient)
        return self.on.ops.op(x, makes=x.gradient, fresh=False, scratch=(0, 0), calls=(call,))

    def _joined(self, x: TracedTensor, size: int) -> TracedTensor:
        """Record the gather of outputs of a matrix that is cut by output. size: bytes of all of them."""
        call = CollectiveCall("tp", "all_gather", TP, size)
        return self.on.ops.op(x, makes=size, scratch=(size, 0), calls=(call,))

    def _size(self, polynomial: Sequence[float]) -> int:
        """Return bytes for this rank's positions of the rows."""
        local = self.on.local
        return code_size(polynomial, local.rows, local.tokens // local.rows, self.times)
