"""`CodeLayer`: a layer that transformers' own code computes: its parameters and costs, from the model's description.

Sizes in a description are polynomials [c0, c1, c2] of the positions S of a row, in bytes, for one row.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import frozen

from xtrain.blocks.block import Layer
from xtrain.blocks.op_trace import ATTENTION, TracedTensor
from xtrain.dsl.schema.model import Model
from xtrain.plan.architecture import Architecture, BlockParameter

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer

# Bytes of a number in the compute format → the format of the trace, and how many times as large its sizes are.
TRACES: Final = {2: ("bfloat16", 1), 4: ("float32", 1), 8: ("float32", 2)}


def code_size(polynomial: Sequence[float], rows: int, sequence: int, times: int = 1) -> int:
    """Return the bytes, or FLOPs, for `rows` rows of `sequence` positions."""
    c0, c1, c2 = polynomial[:3]
    return round(times * (c0 + rows * (c1 * sequence + c2 * sequence**2)))


@frozen
class CodeLayer(Layer):
    """All of a layer. kind: its place among the distinct layers of the description."""

    settings: ClassVar[type[Model]] = Model
    adapts: ClassVar[bool] = True
    attends: ClassVar[bool] = True

    kind: int

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        for each in self._described(arch)["parameters"]:
            shape = tuple(each["shape"])
            chosen, experts = each.get("chosen", (1, 1))
            yield BlockParameter(
                name=each["name"],
                shape=shape,
                decays=len(shape) > 1,
                initial="normal",
                multiplied=chosen / experts,
                linear=each.get("linear", False),
            )

    def buffers(self, arch: Architecture) -> dict[str, list[int]]:
        return dict(self._described(arch)["buffers"])

    def pair_flops(self, arch: Architecture) -> int:
        ops = self._described(arch)["costs"]["float32"]
        return round(sum(op["flops"][2] for op in ops))

    def shared(self, arch: Architecture, rows: int, sequence: int, width: int) -> int:
        format, times = TRACES[width]
        return code_size(arch.own["code"]["shared"][format], rows, sequence, times)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        local, code = on.local, on.resolved.architecture.own["code"]
        format, times = TRACES[local.width]

        def size(polynomial: Sequence[float]) -> int:
            return code_size(polynomial, local.rows, local.sequence, times)

        tensors = {0: x}
        out = x
        for op in code["kinds"][self.kind]["costs"][format]:
            out = self._op(on, op, tensors, size)
        return out

    @staticmethod
    def _op(on: "Tracer", op: Mapping[str, Any], tensors: dict[int, TracedTensor], size: Any) -> TracedTensor:
        """Record one operation of the description."""
        (number, *first), *others = op["new"]
        inputs = [tensors[each] for each in op["inputs"] if each in tensors]
        kept = [tensors[each] for each in op["keeps"] if each in tensors]
        unpacked = sum(on.unpacked(name, prod(on.shapes[name])) for name in op["parameters"])
        there, back = map(size, op.get("scratch", ((0, 0, 0), (0, 0, 0))))
        output = on.ops.op(
            *inputs,
            makes=size(first),
            keeps=kept,
            keeps_output=number in op["keeps"],
            extra=[size(each[1:]) for each in others if each[0] in op["keeps"]],
            weights=on.bytes_of(*op["parameters"]),
            parameters=op["parameters"],
            saved=op["word"],
            scratch=(there + unpacked, back + unpacked),
            flops=code_size(op["flops"], on.local.rows, on.local.sequence),
            attends=op["word"] == ATTENTION,
        )
        if len(first) > 3:  # indices have no gradient
            output.gradient = 0
        for name in op["parameters"]:
            if (adapter := on.adapted.get(name)) is not None:
                output = adapter.trace(on, inputs[0], output, on.local.tokens)
        tensors[number] = output
        for each in others:
            tensors[each[0]] = TracedTensor(0, 0, output)
        return output

    def _described(self, arch: Architecture) -> Mapping[str, Any]:
        return arch.own["code"]["kinds"][self.kind]
