"""Blocks and stored names of families that mix gated delta nets with gated attention."""

from collections.abc import Callable
from typing import Any, ClassVar

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.delta_net import DeltaNetLayer
from xtrain.components.families._joined import JoinedNames, Rows
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.delta_net import DeltaNetSettings
from xtrain.dsl.schema.family_parts import rotary_width
from xtrain.dsl.schema.model import ExpertTransformer, ModelEnds
from xtrain.dsl.schema.model_config import HARMLESS, WholeModel
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames

MIXER = "linear_attn"


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
        name=MIXER,
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


@frozen
class DeltaNetFamily(DeltaNetSettings, PlannedModel):
    """Base of families whose blocks have a gated delta net or gated attention."""

    stored: ClassVar[StoredNames | None] = StoredNames()

    @classmethod
    def ends(cls, arch: Architecture) -> ModelEnds:
        return ModelEnds(norm_plus_one=True)


@frozen
class DeltaNetExpertFamily(DeltaNetFamily, ExpertTransformer):
    """Base of such families whose blocks have experts, and a shared expert with its own gate."""

    shared_ffn: int | Auto = setting(
        "width of the shared expert, which processes every token; auto: expert_ffn",
        default=AUTO,
        check=at_least(1),
        resuming="shape",
    )

    def auto(self) -> dict[str, tuple[Any, str]]:
        found = super().auto()
        width = found["expert_ffn"][0] if isinstance(self.expert_ffn, Auto) else self.expert_ffn
        return {**found, "shared_ffn": (width, f"expert_ffn {width}")}


def delta_net_names(arch: Architecture, *, by_group: bool) -> StoredNames:
    """Return the stored names of a family with delta nets. by_group: a stored tensor has the rows of one key head after
    the other, as in Qwen3-Next; otherwise the rows of all heads of a projection are together."""
    own = arch.own
    groups, heads = own["delta_key_heads"], own["delta_value_heads"]
    keys, values = groups * own["delta_key_dim"], heads * own["delta_value_dim"]
    together = [("q", keys), ("k", keys), ("v", values)]
    tensors: dict[str, Rows] = {"conv1d.weight": [(f"{part}_conv.weight", rows) for part, rows in together]}
    if by_group:
        together = [*together, ("z", values)]
        tensors["in_proj_qkvz.weight"] = [(f"{part}_proj.weight", rows) for part, rows in together]
        tensors["in_proj_ba.weight"] = [("b_proj.weight", heads), ("a_proj.weight", heads)]
        grouped: dict[str, int] = {"in_proj_qkvz.weight": groups, "in_proj_ba.weight": groups}
        return JoinedNames(joined={MIXER: tensors}, groups=grouped, beside=("mtp.",))
    tensors["in_proj_qkv.weight"] = [(f"{part}_proj.weight", rows) for part, rows in together]
    for part, rows in (("z", values), ("b", heads), ("a", heads)):
        tensors[f"in_proj_{part}.weight"] = [(f"{part}_proj.weight", rows)]
    enclosed = {"model.language_model.": "model."}
    beside = ("mtp.", "model.visual.")
    return JoinedNames(joined={MIXER: tensors}, enclosed=enclosed, beside=beside, peft_gathers=False)
