"""`model phi3 { … }`: Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024, arXiv 2404.14219)."""

from typing import ClassVar

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.components.families._joined import JoinedNames, gate_up
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import rotary_share_key, rotary_share_setting, rotary_width, unfit_share
from xtrain.dsl.schema.model import FAMILIES, TransformerSettings, window_setting
from xtrain.dsl.schema.model_config import (
    AUTO_MAP,
    HARMLESS,
    NO_DROPOUT,
    ONLY,
    WINDOW,
    ConfigKey,
    ModelConfig,
    head_width,
    keys,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Phi3(TransformerSettings, PlannedModel):
    """`model phi3 { … }`: mistral with rotary positions on a part of each head."""

    family: str = named("phi3")
    window: int | None = window_setting()
    rotary_share: float = rotary_share_setting(1.0)
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="phi3",
        architectures=("Phi3ForCausalLM",),
        keys=keys(
            ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
            ConfigKey("head_dim", "head_dim", default=head_width),
            ConfigKey("ffn", "intermediate_size", 8192),
            rotary_share_key(1.0),
            WINDOW,
        ),
        original=4096,
        constant={"qk_norm": False},
        only={**ONLY, **dict.fromkeys(("resid_pdrop", "embd_pdrop"), NO_DROPOUT)},
        harmless=HARMLESS | {AUTO_MAP, "attention_bias", "full_attn_mod", "interpolate_factor", "lm_head_bias"},
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    def unfit(self) -> tuple[str, str, str] | None:
        if self.rope.scaling not in ("none", "longrope"):
            message = f"transformers has no phi3 whose positions are scaled by {self.rope.scaling}"
            return "rope.scaling", message, "use longrope, or none"
        return unfit_share(self, self.rotary_share) or super().unfit()

    @classmethod
    def names_in_files(cls, arch: Architecture) -> StoredNames:
        queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        rows = [("q_proj.weight", queries), ("k_proj.weight", keys), ("v_proj.weight", keys)]
        return JoinedNames(joined={"self_attn": {"qkv_proj.weight": rows}, "mlp": gate_up(arch)})

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        rotary = rotary_width(arch.head_dim, arch.own["rotary_share"])
        attention = AttentionLayer(
            "self_attn",
            qk_norm=arch.qk_norm,
            window=arch.own.get("window"),
            rotary=None if rotary == arch.head_dim else rotary,
        )
        return pre_norm(attention, SwiGLULayer("mlp"))
