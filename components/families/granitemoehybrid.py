"""`model granitemoehybrid { … }`: Granite 4 with Mamba-2 mixers (IBM 2025)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from attrs import evolve

from xtrain.blocks.block import BlockPiece, Layer, pre_norm
from xtrain.blocks.feed_forward import ExpertsLayer, SwiGLULayer
from xtrain.components.families._joined import JoinedNames, Rows
from xtrain.components.families._mamba2 import mamba2_layer, mamba2_tensors
from xtrain.components.families.granite import FACTOR_KEYS, GraniteSettings
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import FULL
from xtrain.dsl.schema.mamba2 import MAMBA_HARMLESS, MAMBA_KEYS, Mamba2Settings
from xtrain.dsl.schema.model import FAMILIES, ExpertTransformer
from xtrain.dsl.schema.model_config import (
    HARMLESS,
    MOST_EXPERTS,
    ONLY,
    Config,
    ConfigKey,
    ModelConfig,
    Only,
    WrongKey,
    keys,
    layer_count,
    query_heads,
)
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, between, not_negative, setting, settings_of
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, ParameterSpec
from xtrain.plan.weight_files import Alternatives, StoredNames, StoredPart

_TYPES: Final = {"linear_attention": False, "mamba": False, FULL: True, "attention": True}
_POSITIONS: Final = "position_embedding_type"
_SHARED: Final = "shared_intermediate_size"


def _attention_layers(config: Config) -> Any:
    layers, types = layer_count(config), config.get("layer_types", config.get("layers_block_type"))
    if types is None or layers is None:
        return []
    if not isinstance(types, list) or len(types) != layers or not all(each in _TYPES for each in types):
        return WrongKey("layer_types", f"{', '.join(_TYPES)} for each of the {layers} layers")
    return [layer for layer, kind in enumerate(types) if _TYPES[kind]]


def _write_types(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    attends = settings["attention_layers"]
    return {"layer_types": [FULL if layer in attends else "linear_attention" for layer in range(settings["layers"])]}


def _head_dim(config: Config) -> Any:
    """Return the width of a head of a mixer, which a config may leave to others."""
    width, dim = config.get("mamba_d_head", "auto"), config.get("hidden_size")
    expand, heads = config.get("mamba_expand", 2), config.get("mamba_n_heads", 128)
    if width != "auto" or not all(isinstance(each, int) and each > 0 for each in (dim, expand, heads)):
        return width
    return expand * dim // heads


def _write_widths(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    width = settings["mamba_head_dim"]
    return {"mamba_d_head": width, "mamba_expand": settings["mamba_heads"] * width // settings["dim"]}


def _write_shared(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return {_SHARED: settings["shared_ffn" if settings["experts"] else "ffn"]}


def _has_experts(config: Config) -> bool:
    return bool(config.get("num_local_experts", 8))


@frozen(kw_only=True)
class _GraniteNames(JoinedNames):
    """Names of tensors: files have their own names for the router and for the stacks of experts."""

    def of(self, parameter: ParameterSpec) -> Alternatives:
        ways = super().of(parameter)
        if not parameter.expert and not parameter.name.endswith(".mlp.gate.weight"):
            return ways
        usual = {"gate.weight": "router.layer.weight", "experts.gate_up_proj": "input_linear.weight"}
        usual["experts.down_proj"] = "output_linear.weight"
        return tuple(_routed(ways[0][0], names) for names in (usual, {"gate.weight": "router.weight"}))


def _routed(part: StoredPart, names: Mapping[str, str]) -> tuple[StoredPart, ...]:
    start, _, inside = part.name.partition(".mlp.")
    return (evolve(part, name=f"{start}.block_sparse_moe.{names.get(inside, inside)}"),)


@FAMILIES.register()
@frozen
class GraniteMoeHybrid(GraniteSettings, ExpertTransformer, Mamba2Settings, PlannedModel):
    """`model granitemoehybrid { … }`: granite with Mamba-2 mixers in most blocks, and experts next to the SwiGLU."""

    family: str = named("granitemoehybrid")
    attention_layers: tuple[int, ...] | Auto = setting(
        "numbers of blocks with attention; the others have a Mamba-2 mixer, and the first block is 0; auto: every "
        "fourth block",
        default=AUTO,
        check=not_negative,
        resuming="shape",
    )
    rotary: bool = setting("attention has rotary positions", default=False, resuming="meaning")
    experts: int = setting(
        "number of routed experts in a block; 0: each block has a SwiGLU alone",
        default=0,
        check=between(0, MOST_EXPERTS),
        example="8",
        resuming="shape",
    )
    shared_experts: int = setting(
        "number of SwiGLUs next to experts, which process every token; computed as one",
        default=1,
        check=at_least(1),
        resuming="shape",
    )
    shared_ffn: int | Auto = setting(
        "width of the SwiGLU next to experts; auto: expert_ffn", default=AUTO, check=at_least(1), resuming="shape"
    )
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="granitemoehybrid",
        architectures=("GraniteMoeHybridForCausalLM",),
        scores=None,
        keys=keys(
            *FACTOR_KEYS,
            ConfigKey("kv_heads", "num_key_value_heads", default=query_heads, null=query_heads),
            ConfigKey("attention_layers", "layer_types", computed=_attention_layers, writes=_write_types),
            ConfigKey("rotary", _POSITIONS, computed=lambda config: config.get(_POSITIONS) == "rope",
                writes=lambda settings: {_POSITIONS: "rope" if settings["rotary"] else None}),
            ConfigKey("mamba_heads", "mamba_n_heads", 128),
            ConfigKey("mamba_head_dim", "mamba_d_head", computed=_head_dim, writes=_write_widths),
            *MAMBA_KEYS,
            ConfigKey("experts", "num_local_experts", 8),
            ConfigKey("experts_per_token", "num_experts_per_tok", 2, when=_has_experts),
            ConfigKey("expert_ffn", "intermediate_size", 11008, when=_has_experts),
            ConfigKey("shared_ffn", _SHARED, 1024, when=_has_experts, writes=_write_shared),
            ConfigKey("ffn", _SHARED, 1024, when=lambda config: not _has_experts(config), writes=_write_shared),
        ),
        heads_divide=True,
        constant={
            "qk_norm": False, "mamba_least_step": 0.0, "shared_experts": 1, "router.score": "softmax",
            "router.normalise": True,
        },
        only={
            **ONLY,
            _POSITIONS: Only((None, "nope", "rope")),
            "normalization_function": Only(("rmsnorm",)),
            "time_step_limit": Only(([0.0, {"__float__": "Infinity"}],)),
        },
        # Keys of the auxiliary loss in training, whose weight here is `router { aux_loss }`, an unused width, and how
        # weights were drawn.
        harmless=(HARMLESS | MAMBA_HARMLESS - {"time_step_limit"})
        | {"output_router_logits", "router_aux_loss_coef", "intermediate_size", "init_method"},
    )  # fmt: skip

    @property
    def has_dense(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.experts

    def auto(self) -> dict[str, tuple[Any, str]]:
        found = super().auto()
        width = found["expert_ffn"][0] if isinstance(self.expert_ffn, Auto) else self.expert_ffn
        every = list(range(3, self.layers, 4))
        return {
            **found,
            "shared_ffn": (width, f"expert_ffn {width}"),
            "attention_layers": (every, "every fourth block"),
        }

    def idle(self) -> dict[str, tuple[str, str]]:
        found, (values, _) = super().idle(), self.resolved()
        attends = set(values["attention_layers"])
        if not self.rotary or not attends:
            why = ("attention has no rotary positions", "remove it")
            found |= {"rope_theta": why} | {f"rope.{name}": why for name in settings_of(type(self.rope))}
        names = [] if self.experts else ["experts_per_token", "expert_ffn", "shared_experts", "shared_ffn", "router"]
        found |= dict.fromkeys(names, ("no block has experts", "give `experts`, or remove it"))
        if attends >= set(range(self.layers)):
            mamba = [name for name in settings_of(Mamba2Settings) if name.startswith("mamba_")]
            found |= dict.fromkeys(mamba, ("every block has attention", "leave blocks out of `attention_layers`"))
        return found

    def unfit(self) -> tuple[str, str, str] | None:
        values, _ = self.resolved()
        if beyond := [layer for layer in values["attention_layers"] if layer >= self.layers]:
            message = f"block {beyond[0]} does not exist: the model has blocks 0 to {self.layers - 1}"
            return "attention_layers", message, "name existing blocks"
        if self.experts == 1:
            return "experts", "experts is 1, and a router chooses between two or more", "use 0, or two or more"
        inner = values["mamba_heads"] * values["mamba_head_dim"]
        if len(set(values["attention_layers"])) < self.layers and inner % self.dim:
            message = f"mamba_heads · mamba_head_dim = {inner} is not divisible by dim {self.dim}, which files need"
            return "mamba_heads", message, f"use heads that are {self.dim} or {2 * self.dim} wide together"
        return super().unfit() if self.experts else Mamba2Settings.unfit(self)

    @classmethod
    def names_in_files(cls, arch: Architecture) -> StoredNames:
        shared, width = ("mlp.shared_experts", arch.own["shared_ffn"]) if arch.experts else ("mlp", arch.ffn)
        rows: dict[str, Rows] = {
            "input_linear.weight": [("gate_proj.weight", width), ("up_proj.weight", width)],
            "output_linear.weight": [("down_proj.weight", arch.dim)],
        }
        return _GraniteNames(
            modules={shared: "shared_mlp"},
            joined={"mamba": mamba2_tensors(arch), shared: rows},
            experts=("stacked",),
        )

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        own = arch.own
        layer: Layer = ExpertsLayer("mlp", shared_ffn=own["shared_ffn"]) if arch.experts else SwiGLULayer("mlp")
        mixers = mamba2_layer("mamba", arch), cls.attention_layer(arch, rope=own["rotary"])
        attends, scale = own["attention_layers"], own["residual_scale"]
        return tuple(pre_norm(mixers[number in attends], layer, scale=scale) for number in range(arch.layers))
