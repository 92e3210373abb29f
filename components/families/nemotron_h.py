"""`model nemotron_h { … }`: Nemotron-H (arXiv 2504.03624) and Nemotron 3 (arXiv 2512.20848)."""

import re
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any, ClassVar, Final

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, Layer, NormLayer, Residual
from xtrain.blocks.feed_forward import ExpertsLayer, SwiGLULayer
from xtrain.components.families._joined import JoinedNames
from xtrain.components.families._mamba2 import mamba2_layer, mamba2_tensors
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import FULL, GroupedExperts
from xtrain.dsl.schema.mamba2 import MAMBA_HARMLESS, Mamba2Settings
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import (
    AUTO_MAP,
    HARMLESS,
    MOST_EXPERTS,
    NO_DROPOUT,
    OFF,
    Config,
    ConfigKey,
    ModelConfig,
    Only,
    WrongKey,
    keys,
)
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, between, setting, settings_of
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, ParameterSpec
from xtrain.plan.weight_files import Alternatives, StoredNames, StoredPart

_TYPES: Final = {"M": "linear_attention", "*": FULL, "-": "mlp", "E": "moe"}
_CHARACTERS: Final = {**{kind: each for each, kind in _TYPES.items()}, "mamba": "M", "attention": "*"}
_PATTERN, _LISTED = "hybrid_override_pattern", "layers_block_type"


def _pattern(config: Config) -> Any:
    """Return the pattern, which config.json has as a text or as the type of each layer."""
    types, text = config.get(_LISTED, config.get("layer_types")), config.get(_PATTERN)
    if types is not None:
        right = isinstance(types, list) and all(isinstance(each, str) and each in _CHARACTERS for each in types)
        return "".join(_CHARACTERS[each] for each in types) if right else WrongKey(_LISTED, ", ".join(_CHARACTERS))
    right = isinstance(text, str) and set(text) <= set(_TYPES)
    return text if right and text else WrongKey(_PATTERN, f"a text of {' '.join(_TYPES)}, one for each layer")


def _layers(config: Config) -> Any:
    pattern = _pattern(config)
    return pattern if isinstance(pattern, WrongKey) else len(pattern)


def _has(kind: str) -> Any:
    """Return a function that says whether the pattern of a config has a kind of layers."""
    return lambda config: kind in str(_pattern(config))


def _write_pattern(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return {_LISTED: [_TYPES[each] for each in settings["pattern"]]}


def _untied(*own: ConfigKey) -> tuple[ConfigKey, ...]:
    return tuple(key for key in keys(*own) if key.setting != "tie_embeddings")


@frozen(kw_only=True)
class _NemotronNames(JoinedNames):
    """Names of tensors: the layer of a block is its `mixer`, and files call the model `backbone`."""

    def of(self, parameter: ParameterSpec) -> Alternatives:
        found = super().of(parameter)
        if parameter.name == "norm.weight":
            found = ((StoredPart("model.norm_f.weight", parameter.shape),),)
        modules = (self._of_mixers(parts) for parts in found)
        return tuple(way for parts in dict.fromkeys(modules) for way in dict.fromkeys((_in_files(parts), parts)))

    def in_modules(self, parameter: ParameterSpec) -> tuple[StoredPart, ...]:
        found = super().in_modules(parameter)
        return tuple(evolve(part, name=re.sub(r"^backbone\.", "model.", part.name)) for part in self._of_mixers(found))

    def _of_mixers(self, parts: tuple[StoredPart, ...]) -> tuple[StoredPart, ...]:
        return tuple(evolve(part, name=self._renamed(part.name)) for part in parts)


def _in_files(parts: tuple[StoredPart, ...]) -> tuple[StoredPart, ...]:
    return tuple(evolve(part, name=re.sub(r"^model\.", "backbone.", part.name)) for part in parts)


@FAMILIES.register()
@frozen
class NemotronH(GroupedExperts, Mamba2Settings, PlannedModel):
    """`model nemotron_h { … }`: blocks of one layer each, a Mamba-2 mixer, attention without positions, a feed-forward
    layer with squared ReLU, or experts of that kind, chosen with biases."""

    family: str = named("nemotron_h")
    pattern: str | Auto = setting(
        "the layer of each block: M a Mamba-2 mixer, * attention, - a feed-forward layer, E experts; auto: M E * E, "
        "or without experts M - * -, again and again",
        default=AUTO,
        example='"MEM*E"',
        resuming="shape",
    )
    experts: int = setting(
        "number of routed experts in a block of kind E; 0: no block has experts",
        default=0,
        check=between(0, MOST_EXPERTS),
        example="8",
        resuming="shape",
    )
    shared_ffn: int | Auto = setting(
        "width of the shared experts together; auto: shared_experts · expert_ffn",
        default=AUTO,
        check=at_least(1),
        resuming="shape",
    )
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="nemotron_h",
        architectures=("NemotronHForCausalLM",),
        scores=None,
        keys=_untied(
            ConfigKey("layers", "num_hidden_layers", computed=_layers, writes=lambda values: {}),
            ConfigKey("pattern", _LISTED, computed=_pattern, writes=_write_pattern, also=_PATTERN),
            ConfigKey("norm_eps", "layer_norm_epsilon", 1e-5),
            ConfigKey("kv_heads", "num_key_value_heads", 8),
            ConfigKey("head_dim", "head_dim", 128),
            ConfigKey("ffn", "intermediate_size", 21504, when=_has("-")),
            ConfigKey("mamba_heads", "mamba_num_heads", 128),
            ConfigKey("mamba_head_dim", "mamba_head_dim", 64),
            ConfigKey("mamba_groups", "n_groups", 8, also="mamba_n_groups"),
            ConfigKey("mamba_state", "ssm_state_size", 128),
            ConfigKey("mamba_kernel", "conv_kernel", 4, also="mamba_d_conv"),
            ConfigKey("mamba_conv_bias", "use_conv_bias", default=True, also="mamba_conv_bias"),
            ConfigKey("mamba_bias", "use_bias", default=False),
            ConfigKey("mamba_least_step", "time_step_min", 0.001, also="mamba_dt_min"),
            ConfigKey("experts", "n_routed_experts", 8, also="num_local_experts", when=_has("E")),
            ConfigKey("experts_per_token", "num_experts_per_tok", 2, when=_has("E")),
            ConfigKey("expert_ffn", "moe_intermediate_size", 7688, when=_has("E")),
            ConfigKey("shared_experts", "n_shared_experts", 1, when=_has("E")),
            ConfigKey("shared_ffn", "moe_shared_expert_intermediate_size", 7688, when=_has("E")),
            ConfigKey("expert_groups", "n_group", 1, when=_has("E")),
            ConfigKey("groups_per_token", "topk_group", 1, when=_has("E")),
            ConfigKey("expert_scale", "routed_scaling_factor", 1.0, when=_has("E")),
            ConfigKey("router.normalise", "norm_topk_prob", default=True, when=_has("E")),
        ),
        constant={"router.score": "sigmoid", "qk_norm": False, "tie_embeddings": False},
        only={
            "mlp_hidden_act": Only(("relu2",)),
            "mamba_hidden_act": Only(("silu",)),
            "attention_bias": OFF,
            "mlp_bias": OFF,
            "attention_dropout": NO_DROPOUT,
            "hidden_dropout": NO_DROPOUT,
            "moe_latent_size": Only((None,)),
            "residual_in_fp32": OFF,
            "tie_word_embeddings": OFF,  # which transformers would not read
            "sliding_window": Only((None,)),
        },
        # Rotary positions and a second epsilon, which published files have and no layer uses; modules that predict
        # further tokens, which transformers does not compute.
        harmless=HARMLESS
        | MAMBA_HARMLESS
        | {"norm_eps", "partial_rotary_factor", "num_logits_to_keep", "moe_shared_expert_overlap", "layer_types"}
        | {"num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "output_router_logits"}
        | {AUTO_MAP},
    )

    @property
    def has_dense(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "-" in self._blocks

    @property
    def _blocks(self) -> str:
        if not isinstance(self.pattern, Auto):
            return self.pattern
        return "".join(islice(cycle("ME*E" if self.experts else "M-*-"), self.layers))

    def auto(self) -> dict[str, tuple[Any, str]]:
        found = super().auto()
        width = found["expert_ffn"][0] if isinstance(self.expert_ffn, Auto) else self.expert_ffn
        shared = (self.shared_experts * width, f"shared_experts {self.shared_experts} · expert_ffn {width}")
        return {
            **found,
            "pattern": (self._blocks, "a mixer, another layer, attention, another layer, again and again"),
            "shared_ffn": shared,
        }

    def idle(self) -> dict[str, tuple[str, str]]:
        found, blocks = super().idle(), self._blocks
        names = {"M": [name for name in settings_of(Mamba2Settings) if name.startswith("mamba_")]}
        names["*"] = ["head_dim", "qk_norm", "attention"]
        names["E"] = ["experts_per_token", "expert_ffn", "shared_experts", "shared_ffn", "expert_groups"]
        names["E"] += ["groups_per_token", "expert_scale", "router"]
        for kind, idle in names.items():
            if kind not in blocks:
                found |= dict.fromkeys(idle, (f"no block is of kind {kind}", "change `pattern`, or remove it"))
        why = ("attention has no rotary positions", "remove it")
        return found | {"rope_theta": why} | {f"rope.{name}": why for name in settings_of(type(self.rope))}

    def unfit(self) -> tuple[str, str, str] | None:
        blocks = self._blocks
        if wrong := sorted(set(blocks) - set(_TYPES)):
            return "pattern", f"no kind of blocks is named {wrong[0]!r}", f"use {', '.join(_TYPES)}"
        if len(blocks) != self.layers:
            message = f"pattern has {len(blocks)} blocks, and layers is {self.layers}"
            return "pattern", message, f"use layers {len(blocks)}, or a pattern of {self.layers}"
        if ("E" in blocks) != (self.experts > 0) or self.experts == 1:
            number = "no" if "E" not in blocks else "some"
            message = f"experts is {self.experts}, and {number} block of pattern is of kind E"
            return "experts", message, "use two or more experts and blocks of kind E, or neither"
        return super().unfit() if self.experts else Mamba2Settings.unfit(self)

    @classmethod
    def names_in_files(cls, arch: Architecture) -> StoredNames:
        modules = {"embed_tokens": "embeddings", "input_layernorm": "norm"}
        return _NemotronNames(
            modules=modules | dict.fromkeys(("mamba", "self_attn", "mlp"), "mixer"),
            joined={"mamba": mamba2_tensors(arch)},
            beside=("mtp.",),
            buffers=("e_score_correction_bias",),
            gated=False,
        )

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        own = arch.own
        kinds: dict[str, Layer] = {
            "M": mamba2_layer("mamba", arch),
            "*": AttentionLayer("self_attn", qk_norm=arch.qk_norm, rope=False),
            "-": SwiGLULayer("mlp", activation="relu2"),
            "E": ExpertsLayer(
                "mlp",
                groups=own["expert_groups"],
                groups_per_token=own["groups_per_token"],
                scale=own["expert_scale"],
                choice_bias=True,
                activation="relu2",
                shared_ffn=own["shared_ffn"],
            ),
        }
        blocks = {kind: Residual.of(NormLayer("input_layernorm"), layer) for kind, layer in kinds.items()}
        # A pattern that is reported as unfit gives each layer a block too.
        pattern = own["pattern"].ljust(arch.layers, "M")[: arch.layers]
        blocks["E"] = blocks["E" if arch.experts else "-"]
        return tuple(blocks.get(kind, blocks["M"]) for kind in pattern)
