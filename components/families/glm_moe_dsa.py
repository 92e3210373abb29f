"""`model glm_moe_dsa { … }`: GLM-5 (GLM Team 2026), in which layers may share the choice of positions (arXiv
2603.12201)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from attrs import evolve

from xtrain.blocks.block import BlockPiece
from xtrain.components.families.deepseek_v32 import DeepseekV32, config_of, sparse_attention
from xtrain.contracts.models import dense_then_experts
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import Config, ConfigKey, ModelConfig, Only, WrongKey, layer_count
from xtrain.dsl.schema.setting import not_negative, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture

CHOSEN: Final = "chosen_positions"
_TYPES = "indexer_types"
_WORDS = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}


def _shared(config: Config) -> Any:
    """Return the layers without an indexer: by a list of types, by a pattern, or all but every nth from an offset."""
    layers = layer_count(config)
    if layers is None:
        return []
    given = config.get(_TYPES)
    name = _TYPES if given is not None else "index_topk_pattern"
    given = config.get("index_topk_pattern") if given is None else given
    if given is None:
        every, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
        if not all(type(each) is int for each in (every, offset)):
            return WrongKey("index_topk_freq", "a whole number, as `index_skip_topk_offset`")
        return [layer for layer in range(layers) if max(layer - offset + 1, 0) % max(every, 1)]
    types = [_WORDS.get(str(each)) for each in given] if isinstance(given, list | str) else []
    if len(types) != layers or None in types or types[0] == "shared":
        return WrongKey(name, f"full or shared for each of the {layers} layers, and full for the first")
    return [layer for layer, each in enumerate(types) if each == "shared"]


def _write_types(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    shared = settings.get("index_shared", ())
    return {_TYPES: ["shared" if layer in shared else "full" for layer in range(settings["layers"])]}


@FAMILIES.register()
@frozen
class GlmMoeDsa(DeepseekV32):
    """`model glm_moe_dsa { … }`: deepseek_v32 in which blocks may take the positions that an earlier block chose."""

    family: str = named("glm_moe_dsa")
    index_shared: tuple[int, ...] = setting(
        "numbers of blocks that take the positions that the last block before them with an indexer chose; the first "
        "block is 0",
        default=(),
        check=not_negative,
        resuming="shape",
    )
    config: ClassVar[ModelConfig | None] = config_of(
        ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
        ConfigKey("q_rank", "q_lora_rank", 2048),
        ConfigKey("nope_dim", "qk_nope_head_dim", 192),
        ConfigKey("value_dim", "v_head_dim", 256),
        ConfigKey("expert_groups", "n_group", 1),
        ConfigKey("groups_per_token", "topk_group", 1),
        ConfigKey("index_heads", "index_n_heads", 32),
        ConfigKey("index_shared", _TYPES, computed=_shared, writes=_write_types),
        harmless=("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"),
        model_type="glm_moe_dsa",
        architectures=("GlmMoeDsaForCausalLM",),
        only={"indexer_rope_interleave": Only((True, None)), "rope_interleave": Only((True, None))},
    )

    def unfit(self) -> tuple[str, str, str] | None:
        beyond = [layer for layer in self.index_shared if layer >= self.layers]
        if beyond:
            message = f"there is no layer {beyond[0]}: the {self.layers} layers are 0 to {self.layers - 1}"
            return "index_shared", message, "name existing layers"
        if 0 in self.index_shared:
            return "index_shared", "no block before block 0 chooses positions", "leave 0 out"
        return super().unfit()

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        own, shared = sparse_attention(arch, interleaved=True), set(arch.own.get("index_shared", ()))
        kinds = (own, evolve(own, gives=CHOSEN), evolve(own, takes=CHOSEN))
        blocks = [dense_then_experts(arch, each) for each in kinds]

        def kind(layer: int) -> int:
            return 2 if layer in shared else int(layer + 1 in shared)

        return tuple(blocks[kind(layer)][layer] for layer in range(arch.layers))
