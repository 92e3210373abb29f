"""What an installed package offers: a model family, attention with biases and a plain feed-forward layer, side by side;
and a tracker."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from attrs import frozen

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, Chain, Layer, NormLayer, Residual, Sum
from xtrain.blocks.op_trace import TracedTensor
from xtrain.blocks.tracer import Tracer
from xtrain.contracts.actions import PlannedTracker
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, TransformerSettings
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.schema.setting import Role, setting
from xtrain.plan.architecture import Architecture, BlockParameter


@frozen
class GeluLayer(Layer):
    """down(gelu(up(x)))"""

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        up, down = f"{self.name}.up_proj.weight", f"{self.name}.down_proj.weight"
        yield BlockParameter(name=up, shape=(arch.ffn, arch.dim), decays=True, initial="normal", cut="column")
        yield BlockParameter(name=down, shape=(arch.dim, arch.ffn), decays=True, initial="residual", cut="row")

    def trace(self, on: Tracer, x: TracedTensor) -> TracedTensor:
        up = on.linear(on.column_parallel_input(x), f"{self.name}.up_proj", on.local.tokens)
        active = on.ops.op(up, makes=up.size, keeps=(up,))
        return on.row_parallel_output(on.linear(active, f"{self.name}.down_proj", on.local.tokens))


@FAMILIES.register()
@frozen
class SideBySide(TransformerSettings, PlannedModel):
    """`model side_by_side { … }`: both layers of a block read the same residual stream (GPT-J)."""

    family: str = named("side_by_side")
    one_norm: bool = setting("both layers read the same norm", default=True, resuming="shape")

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        attention = AttentionLayer("attn", qk_norm=arch.qk_norm, bias=True)
        if arch.own["one_norm"]:
            return Residual.of(NormLayer("norm"), Sum.of(attention, GeluLayer("mlp")))
        mlp = Chain.of(NormLayer("mlp_norm"), GeluLayer("mlp"))
        return Residual.of(Sum.of(Chain.of(NormLayer("attn_norm"), attention), mlp))


@TRACKERS.register()
@frozen
class Tally(PlannedTracker):
    """`tally { … }`: what a run records, a line for each call."""

    kind: ClassVar[str] = "tally"
    title = "the tally"
    file: str = setting("the file in the run's directory", default="tally.jsonl", role=Role.EXECUTION)

    def does(self) -> str:
        return f"notes what it records in {self.file}"

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return f"the tally in {args['file']}"
