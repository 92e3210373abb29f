"""`model minimax_m2 { … }`: MiniMax-M2 (MiniMax 2025)."""

from typing import Any, ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import ExpertsLayer
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import rotary_share_key, rotary_share_setting, rotary_width, unfit_share
from xtrain.dsl.schema.model import FAMILIES, ExpertTransformer, Router
from xtrain.dsl.schema.model_config import (
    AUTO_MAP,
    HARMLESS,
    NO_DROPOUT,
    ONLY,
    PARTIAL,
    Config,
    ConfigKey,
    ModelConfig,
    Only,
    keys,
)
from xtrain.dsl.schema.setting import setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, ParameterSpec
from xtrain.plan.weight_files import Alternatives, StoredNames

_WIDTH = "rotary_dim"  # in published configs: the rotated numbers of a head


def _share(config: Config) -> Any:
    """Return the share of a head that is rotated, from its width if no key has the share."""
    width, head_dim = config.get(_WIDTH), config.get("head_dim", 128)
    if isinstance(width, int) and isinstance(head_dim, int) and head_dim > 0:
        config = {PARTIAL: width / head_dim, **config}
    return _SHARE.computed(config) if _SHARE.computed is not None else None


_SHARE = rotary_share_key(1.0)


def _is(*values: Any) -> Only:
    """Return a key of published configs that transformers does not read, with the only values that it computes."""
    return Only(fits=lambda value: value in values, words=" or ".join(map(str, values)))


@frozen(kw_only=True)
class _Names(StoredNames):
    """Stored names in which the biases of a router are next to it, not inside."""

    def of(self, parameter: ParameterSpec) -> Alternatives:
        ways = super().of(parameter)
        if not parameter.name.endswith(self.buffers):
            return ways
        return tuple(tuple(evolve(part, name=part.name.replace(".gate.", ".")) for part in parts) for parts in ways)


@FAMILIES.register()
@frozen
class MiniMaxM2(ExpertTransformer, PlannedModel):
    """`model minimax_m2 { … }`: mixtral with sigmoid routers that choose by score + bias, an RMSNorm on all heads of
    queries and one on all keys, and rotary positions on a part of each head."""

    family: str = named("minimax_m2")
    rotary_share: float = rotary_share_setting(1.0)
    router: Router = setting("how tokens choose experts", default=Router(score="sigmoid"))
    has_qk_norm: ClassVar[bool] = True
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="minimax_m2",
        architectures=("MiniMaxM2ForCausalLM",),
        scores=None,
        keys=keys(
            ConfigKey("kv_heads", "num_key_value_heads", 8),
            ConfigKey("head_dim", "head_dim", 128),
            ConfigKey("experts", "num_local_experts", 256, also="num_experts"),
            ConfigKey("experts_per_token", "num_experts_per_tok", 8),
            ConfigKey("expert_ffn", "intermediate_size", 1536),
            evolve(_SHARE, computed=_share),
        ),
        rope_theta=5e6,
        constant={"qk_norm": True, "shared_experts": 0, "router.score": "sigmoid", "router.normalise": True},
        only={
            **ONLY,
            "router_jitter_noise": NO_DROPOUT,
            "attn_type_list": Only(fits=lambda value: set(value) <= {1}, words="1 for each layer"),
            **dict.fromkeys(
                (f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")), _is(1)
            ),
            "qk_norm_type": _is("per_layer"),
            "scoring_func": _is("sigmoid"),
            "shared_intermediate_size": _is(0, None),
            "sliding_window": _is(None),
            "use_qk_norm": _is(True),
            "use_routing_bias": _is(True),
        },
        # Layers that predict further tokens, which transformers does not compute, and keys of the auxiliary loss in
        # training, whose weight here is `router { aux_loss }`.
        harmless=HARMLESS
        | {"mtp_transformer_layers", "num_mtp_modules", "use_mtp", "mlp_intermediate_size", "shared_moe_mode"}
        | {"output_router_logits", "router_aux_loss_coef", _WIDTH, AUTO_MAP},
    )
    stored: ClassVar[StoredNames | None] = _Names(
        modules={"mlp": "block_sparse_moe"},
        matrices={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        buffers=("e_score_correction_bias",),
    )

    def unfit(self) -> tuple[str, str, str] | None:
        return unfit_share(self, self.rotary_share) or super().unfit()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        rotary = rotary_width(arch.head_dim, arch.own["rotary_share"])
        attention = AttentionLayer(
            "self_attn",
            qk_norm=arch.qk_norm,
            wide_norm=True,
            rotary=None if rotary == arch.head_dim else rotary,
        )
        return pre_norm(attention, ExpertsLayer("mlp", choice_bias=True))
