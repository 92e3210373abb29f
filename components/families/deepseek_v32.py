"""`model deepseek_v32 { … }`: DeepSeek-V3.2 (DeepSeek-AI 2025)."""

from typing import Any, ClassVar

import attrs

from xtrain.blocks.block import BlockPiece
from xtrain.blocks.sparse_attention import SparseLatentAttentionLayer
from xtrain.components.families.deepseek_v3 import DeepseekV3, latent_fields
from xtrain.components.families.glm4_moe_lite import first_dense_key
from xtrain.contracts.models import dense_then_experts
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import PARTIAL, Config, ConfigKey, ModelConfig, Only
from xtrain.dsl.schema.setting import at_least, not_negative, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames

FIRST_DENSE = first_dense_key(3)
INDEXED = Only(
    fits=lambda types: types is None or (isinstance(types, list) and set(types) <= {"indexed_attention"}),
    words="indexed_attention for every layer",
)


def _has_dense(config: Config) -> bool:
    assert FIRST_DENSE.computed is not None
    return FIRST_DENSE.computed(config) != 0


def config_of(*own: ConfigKey, only: dict[str, Only], harmless: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    """Return the config of a family with an indexer. own: keys with other defaults than DeepSeek-V3.2. harmless:
    further keys that may have any value."""
    base = DeepseekV3.config
    assert base is not None
    left_out = ("interleaved", "q_rank", "ffn", "first_dense")
    keys = (
        *(key for key in base.keys if key.setting not in left_out),
        ConfigKey("q_rank", "q_lora_rank", 1536),
        ConfigKey("ffn", "intermediate_size", 18432, when=_has_dense),
        FIRST_DENSE,
        ConfigKey("index_heads", "index_n_heads", 64),
        ConfigKey("index_dim", "index_head_dim", 128),
        ConfigKey("index_topk", "index_topk", 2048),
    )
    return attrs.evolve(
        base,
        scores=None,
        keys=tuple({key.setting: key for key in (*keys, *own)}.values()),
        only={**base.only, PARTIAL: Only((1.0, 1)), "layer_types": INDEXED, "mlp_bias": Only((False, None)), **only},
        harmless=base.harmless | {"first_k_dense_replace", *harmless},
        aliases=(),
        whole=None,
        **changes,
    )


def sparse_attention(arch: Architecture, *, interleaved: bool = False) -> SparseLatentAttentionLayer:
    """Return the attention of a layer with an indexer. interleaved: index heads rotate pairs of adjacent numbers;
    otherwise of one number from each half."""
    own = arch.own
    return SparseLatentAttentionLayer(
        **latent_fields(arch),
        index_heads=own["index_heads"],
        index_dim=own["index_dim"],
        chosen=own["index_topk"],
        index_interleaved=interleaved,
        index_loss=own.get("index_loss", 0.0),
    )


@FAMILIES.register()
@frozen
class DeepseekV32(DeepseekV3):
    """`model deepseek_v32 { … }`: deepseek_v3 in which a query sees the positions that an indexer scores highest."""

    family: str = named("deepseek_v32")
    q_rank: int = setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        "width of the low-rank projection of queries, which the indexer takes too",
        check=at_least(1),
        example="96",
        resuming="shape",
    )
    index_heads: int = setting("number of heads of the indexer", check=at_least(1), example="16", resuming="shape")
    index_dim: int = setting(
        "width of an index head, at least rope_dim", check=at_least(1), example="32", resuming="shape"
    )
    index_topk: int = setting(
        "number of positions of its document that a query sees at most, its own included: the highest scores decide",
        check=at_least(1),
        example="16",
        resuming="stage",
    )
    index_loss: float = setting(
        "weight of the loss of indexers, the divergence of their scores from the attention of their block; they learn "
        "from it alone; 0: indexers are frozen",
        default=0.0,
        check=not_negative,
        example="1.0",
        added=True,
        resuming="loss",
    )
    interleaved: bool = attrs.field(default=True, init=False)
    config: ClassVar[ModelConfig | None] = config_of(
        model_type="deepseek_v32",
        architectures=("DeepseekV32ForCausalLM",),
        only={"indexer_rope_interleave": Only((False, None)), "rope_interleave": Only((True, None))},
    )
    stored: ClassVar[StoredNames | None] = StoredNames(
        buffers=("e_score_correction_bias",), further_tokens="eh_proj.weight"
    )

    def resolved(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, reasons = super().resolved()
        return {**values, "interleaved": True}, reasons

    def unfit(self) -> tuple[str, str, str] | None:
        rotated: int = self.rope_dim  # pyright: ignore[reportAttributeAccessIssue]
        if self.index_dim < rotated:
            message = f"index_dim {self.index_dim} is below rope_dim {rotated}, and so many numbers are rotated"
            return "index_dim", message, f"use an index_dim of at least {rotated}"
        return super().unfit()

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        return dense_then_experts(arch, sparse_attention(arch))
