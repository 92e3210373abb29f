"""`model falcon_h1 { … }`: Falcon-H1 (arXiv 2507.22448), whose blocks have attention next to a Mamba-2 mixer."""

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar, Final, Literal

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, Chain, NormLayer, Residual, ScaledChain, Sum
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.components.families._joined import JoinedNames
from xtrain.components.families._mamba2 import mamba2_layer, mamba2_tensors
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.mamba2 import MAMBA_HARMLESS, MAMBA_KEYS, Mamba2Settings
from xtrain.dsl.schema.model import FAMILIES, ModelEnds, attention_biases, mlp_biases
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    HARMLESS,
    MLP_BIAS,
    ONLY,
    Config,
    ConfigKey,
    ModelConfig,
    Only,
    WrongKey,
    head_width,
    keys,
    query_heads,
)
from xtrain.dsl.schema.setting import positive, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, ParameterSpec
from xtrain.plan.weight_files import Alternatives, StoredNames

_PARTS: Final = 5  # of the projection before a mixer: gate, values, write and read vectors, step sizes
_INNER, _NORM, _NORM_FIRST = "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"


def _factor(text: str) -> Any:
    return setting(text, default=1.0, check=positive, resuming="meaning")


def _head_dim(config: Config) -> Any:
    """Return the width of a head of a mixer, which a config may leave to others."""
    width, heads = config.get("mamba_d_head", "auto"), config.get("mamba_n_heads", 128)
    inner = (config.get(_INNER, 1024),)
    if inner == (None,):
        inner = (config.get("mamba_expand", 2), config.get("hidden_size", 4096))
    if not all(isinstance(each, int) and each > 0 for each in (*inner, heads)):
        return WrongKey(_INNER, "a width above 0")
    width = prod(inner) // heads if width == "auto" else width
    if not isinstance(width, int) or prod(inner) != heads * width:
        return WrongKey(_INNER, "mamba_n_heads · mamba_d_head")
    return width


def _write_widths(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    width = settings["mamba_head_dim"]
    return {"mamba_d_head": width, _INNER: settings["mamba_heads"] * width}


def _norm(config: Config) -> Any:
    norm, first = config.get(_NORM, False), config.get(_NORM_FIRST, True)
    for name, value in ((_NORM, norm), (_NORM_FIRST, first)):
        if not isinstance(value, bool):
            return WrongKey(name, "true or false")
    return ("first" if first else "gated") if norm else "none"


def _write_norm(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    norm = settings["mamba_norm"]
    return {_NORM: norm != "none", _NORM_FIRST: norm == "first"}


def _list(numbers: tuple[float, ...], layers: int) -> list[float]:
    return list(numbers)


class _FalconNames(JoinedNames):
    """Names of tensors: the norm before the head has a name of its own."""

    def of(self, parameter: ParameterSpec) -> Alternatives:
        found = super().of(parameter)
        if parameter.name != "norm.weight":
            return found
        return tuple((evolve(part, name="model.final_layernorm.weight"),) for (part,) in found)


@FAMILIES.register()
@frozen
class FalconH1(Mamba2Settings, PlannedModel):
    """`model falcon_h1 { … }`: blocks with attention next to a Mamba-2 mixer, and factors of what layers take and
    return."""

    family: str = named("falcon_h1")
    embedding_scale: float = _factor("factor of embeddings")
    logit_scale: float = _factor("factor of logits")
    key_scale: float = _factor("factor of keys")
    attention_input_scale: float = _factor("factor of what attention takes")
    attention_output_scale: float = _factor("factor of what attention returns")
    mamba_input_scale: float = _factor("factor of what a Mamba-2 mixer takes")
    mamba_output_scale: float = _factor("factor of what a Mamba-2 mixer returns")
    mamba_scales: tuple[float, ...] = setting(
        "factors of a Mamba-2 mixer's gate, values, write vectors, read vectors and step sizes",
        default=(1.0,) * _PARTS,
        check=positive,
        resuming="meaning",
    )
    ffn_scales: tuple[float, ...] = setting(
        "factors of the SwiGLU's gate, before its activation, and of what the SwiGLU returns",
        default=(1.0, 1.0),
        check=positive,
        resuming="meaning",
    )
    mamba_norm: Literal["gated", "first", "none"] = setting(
        "RMSNorm of a Mamba-2 mixer's output: after its gate, before it, or none", default="none", resuming="shape"
    )
    mamba_output_bias: bool = setting("a bias on the matrix after a Mamba-2 mixer", default=False, resuming="shape")
    attention_bias: bool = attention_biases()
    mlp_bias: bool = mlp_biases()
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="falcon_h1",
        architectures=("FalconH1ForCausalLM",),
        scores=None,
        keys=keys(
            ATTENTION_BIAS,
            MLP_BIAS,
            ConfigKey("kv_heads", "num_key_value_heads", default=8, null=query_heads),
            ConfigKey("head_dim", "head_dim", default=head_width),
            ConfigKey("ffn", "intermediate_size", 14336),
            ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
            ConfigKey("mamba_heads", "mamba_n_heads", 128),
            ConfigKey("mamba_head_dim", "mamba_d_head", computed=_head_dim, writes=_write_widths),
            *MAMBA_KEYS,
            ConfigKey("mamba_output_bias", "projectors_bias", default=False),
            ConfigKey("mamba_norm", _NORM, computed=_norm, writes=_write_norm),
            ConfigKey("embedding_scale", "embedding_multiplier", 1.0),
            ConfigKey("logit_scale", "lm_head_multiplier", 1.0),
            ConfigKey("key_scale", "key_multiplier", 1.0),
            ConfigKey("attention_input_scale", "attention_in_multiplier", 1.0),
            ConfigKey("attention_output_scale", "attention_out_multiplier", 1.0),
            ConfigKey("mamba_input_scale", "ssm_in_multiplier", 1.0),
            ConfigKey("mamba_output_scale", "ssm_out_multiplier", 1.0),
            ConfigKey("mamba_scales", "ssm_multipliers", [1.0] * _PARTS, [1.0] * _PARTS, write=_list),
            ConfigKey("ffn_scales", "mlp_multipliers", [1.0, 1.0], [1.0, 1.0], write=_list),
        ),
        constant={"qk_norm": False, "mamba_least_step": 0.0},
        only={**ONLY, "time_step_limit": Only(([0.0, {"__float__": "Infinity"}],))},
        # Keys of how weights were drawn and of widths that others give, and of other versions of the code.
        harmless=(HARMLESS | MAMBA_HARMLESS - {"time_step_limit"})
        | {_INNER, _NORM_FIRST, "mamba_use_mlp", "mlp_expansion_factor", "attn_layer_indices", "num_logits_to_keep"},
    )

    def unfit(self) -> tuple[str, str, str] | None:
        for name, count in (("mamba_scales", _PARTS), ("ffn_scales", 2)):
            if (given := len(getattr(self, name))) != count:
                return name, f"{name} has {given} numbers, and needs {count}", f"give {count} numbers"
        return super().unfit()

    @classmethod
    def names_in_files(cls, arch: Architecture) -> StoredNames:
        return _FalconNames(
            modules={"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm"},
            joined={"mamba": mamba2_tensors(arch)},
        )

    @classmethod
    def ends(cls, arch: Architecture) -> ModelEnds:
        scale = arch.own["embedding_scale"]
        return ModelEnds(
            embedding_scale=None if scale == 1 else scale,
            norm_scale=arch.own["logit_scale"] if arch.has_logits else 1.0,
        )

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        own = arch.own
        bias, key_scale = own.get("attention_bias", False), own["key_scale"]
        scale = None if key_scale == 1 else key_scale * arch.head_dim**-0.5
        attention = AttentionLayer("self_attn", bias=bias, output_bias=bias, scale=scale)
        mixer = evolve(
            mamba2_layer("mamba", arch),
            output_bias=own["mamba_output_bias"],
            factors=tuple(own["mamba_scales"]),
            norm=own["mamba_norm"],
        )
        scales = (own[f"{layer}_{side}_scale"] for layer in ("attention", "mamba") for side in ("input", "output"))
        attention_in, attention_out, mamba_in, mamba_out = scales
        side_by_side = Sum.of(
            ScaledChain.of(attention, before=attention_in, after=attention_out),
            ScaledChain.of(mixer, before=mamba_in, after=mamba_out),
        )
        gate_scale, ffn_scale, *_ = (*own["ffn_scales"], 1.0, 1.0)  # other numbers of factors are reported as unfit
        mlp = SwiGLULayer("mlp", bias=own.get("mlp_bias", False), gate_scale=gate_scale)
        return Chain.of(
            Residual.of(NormLayer("input_layernorm"), side_by_side),
            Residual((NormLayer("post_attention_layernorm"), mlp), scale=ffn_scale),
        )
