"""Blocks and stored names of families that mix gated delta nets with gated attention."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.delta_net import DeltaNetLayer
from xtrain.dsl.schema.family_parts import rotary_width
from xtrain.dsl.schema.model_config import HARMLESS, WholeModel
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, ParameterSpec
from xtrain.plan.weight_files import Alternatives, StoredNames, StoredPart

MIXER = ".linear_attn."
Rows = list[tuple[str, int]]
"""Parameters of a stored tensor with their rows, one after the other."""


def delta_net_blocks(
    arch: Architecture, feed_forward: Callable[[int], BlockPiece], *, bias: bool
) -> tuple[BlockPiece, ...]:
    """Return the blocks of all layers. feed_forward: of a layer. bias: on the matrices of attention."""
    own = arch.own
    attention = AttentionLayer(
        "self_attn",
        qk_norm=arch.qk_norm,
        plus_one=True,
        bias=bias,
        output_bias=bias,
        rotary=rotary_width(arch.head_dim, own["rotary_share"]),
        gated=True,
    )
    delta_net = DeltaNetLayer(
        name="linear_attn",
        key_heads=own["delta_key_heads"],
        value_heads=own["delta_value_heads"],
        key_dim=own["delta_key_dim"],
        value_dim=own["delta_value_dim"],
        kernel=own["delta_kernel"],
    )
    attends = set(own["attention_layers"])
    return tuple(
        pre_norm(attention if layer in attends else delta_net, feed_forward(layer), plus_one=True)
        for layer in range(arch.layers)
    )


def qwen3_5_whole(model_type: str, architecture: str) -> WholeModel:
    """Return the model with images that contains the text part of Qwen3.5."""
    tokens = {f"{kind}_token_id" for kind in ("image", "video", "vision_start", "vision_end")}
    return WholeModel(
        model_type=model_type,
        architectures=(architecture,),
        part="text_config",
        replaces=("tie_word_embeddings",),
        harmless=HARMLESS | tokens | {"initializer_range", "language_model_only", "vision_config"},
    )


@frozen(kw_only=True)
class DeltaNetNames(StoredNames):
    """Stored names of a family with delta nets. key_heads: number of key heads in one layer. own: settings. by_group:
    a stored tensor has the rows of one key head after the other, as in Qwen3-Next; otherwise the rows of all heads of
    a projection are together."""

    own: Mapping[str, Any]
    by_group: bool

    @classmethod
    def of_qwen3_5(cls, arch: Architecture) -> "DeltaNetNames":
        """Return the names of the text part of Qwen3.5."""
        enclosed = {"model.language_model.": "model."}
        return cls(own=arch.own, by_group=False, enclosed=enclosed, beside=("mtp.", "model.visual."))

    def of(self, parameter: ParameterSpec) -> Alternatives:
        start, mixer, name = parameter.name.partition(MIXER)
        stored = next((tensor for tensor, rows in self._tensors() if name in dict(rows)), "") if mixer else ""
        if not stored:
            return super().of(parameter)
        rows = next(rows for tensor, rows in self._tensors() if tensor == stored)
        return (tuple(self._parts(f"model.{start}{MIXER}{stored}", rows, name, parameter.shape)),)

    def _parts(self, stored: str, rows: Rows, name: str, shape: tuple[int, ...]) -> Iterator[StoredPart]:
        groups = self.own["delta_key_heads"] if self.by_group and "conv" not in stored else 1
        total, top, count = sum(each for _, each in rows), 0, dict(rows)[name] // groups
        for other, each in rows:
            if other == name:
                break
            top += each // groups
        for group in range(groups):
            own = None if groups == 1 else (group * count, (group + 1) * count)
            yield StoredPart(stored, (total, *shape[1:]), rows=own, top=group * total // groups + top)

    def _tensors(self) -> Iterator[tuple[str, Rows]]:
        """Yield stored tensors with several parameters, or with another name."""
        keys = self.own["delta_key_heads"] * self.own["delta_key_dim"]
        values, heads = self.own["delta_value_heads"] * self.own["delta_value_dim"], self.own["delta_value_heads"]
        together = [("q", keys), ("k", keys), ("v", values)]
        yield "conv1d.weight", [(f"{part}_conv.weight", rows) for part, rows in together]
        if self.by_group:
            together = [*together, ("z", values)]
            yield "in_proj_qkvz.weight", [(f"{part}_proj.weight", rows) for part, rows in together]
            yield "in_proj_ba.weight", [("b_proj.weight", heads), ("a_proj.weight", heads)]
            return
        yield "in_proj_qkv.weight", [(f"{part}_proj.weight", rows) for part, rows in together]
        for part, rows in (("z", values), ("b", heads), ("a", heads)):
            yield f"in_proj_{part}.weight", [(f"{part}_proj.weight", rows)]
