"""`model gemma4 { … }`: the text part of Gemma 4 (Gemma Team 2026), without experts."""

from collections.abc import Container, Mapping
from typing import Any, ClassVar

from attrs import evolve

from xtrain.blocks.block import BlockPiece, Chain, NormLayer, Residual
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.blocks.layer_inputs import LayerInputLayer, LayerInputsLayer
from xtrain.components.families._gemma4 import NAMES, Gemma4Family, Gemma4Names, config_of
from xtrain.contracts.models import layer_windows
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import FULL, WINDOWED
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import Config, ConfigKey, ModelConfig
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, ParameterSpec
from xtrain.plan.weight_files import LAYERS, Alternatives, StoredNames

_INPUTS = "per_layer_inputs"
_IDLE = tuple(f"self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm"))
_OUTSIDE = {  # parameters that files do not have in the first block
    f"layers.0.{_INPUTS}.table.weight": "model.embed_tokens_per_layer.weight",
    f"layers.0.{_INPUTS}.projection.weight": "model.per_layer_model_projection.weight",
    f"layers.0.{_INPUTS}.norm.weight": "model.per_layer_projection_norm.weight",
}


@frozen(kw_only=True)
class _InputNames(Gemma4Names):
    """Names of tensors: files have the makers of per-layer inputs next to the embedding."""

    def of(self, parameter: ParameterSpec) -> Alternatives:
        ways = super().of(parameter)
        name = _OUTSIDE.get(parameter.name)
        return ways if name is None else ((evolve(ways[0][0], name=name),),)

    def is_ignored(self, name: str, arch: Architecture, stored: Container[str]) -> bool:
        """Return True also for the keys and values that published files have of blocks with shared ones."""
        (own,) = self.own_names((name,))
        layer, _, inside = own.removeprefix(LAYERS).partition(".")
        if own.startswith(LAYERS) and inside.startswith(_IDLE) and layer.isdecimal():
            return int(layer) >= arch.layers - arch.own.get("shared_kv", 0)
        return super().is_ignored(name, arch, stored)


def _has_inputs(config: Config) -> bool:
    return bool(config.get("hidden_size_per_layer_input", 256))


def _shares(config: Config) -> bool:
    return bool(config.get("num_kv_shared_layers"))


def _write_vocab(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"vocab_size_per_layer_input": settings.get("layer_vocab") or settings["vocab"]}


@FAMILIES.register()
@frozen
class Gemma4(Gemma4Family):
    """`model gemma4 { … }`: gemma3 with norms of values, and other heads in blocks without a window."""

    family: str = named("gemma4")
    layer_input: int = setting(
        "width of the vector that each token has for each block, as in Gemma 4 E2B and E4B; 0: none",
        default=0,
        check=at_least(0),
        added=True,
        resuming="shape",
    )
    layer_vocab: int | Auto = setting(
        "number of tokens with such vectors, at least vocab; auto: vocab",
        default=AUTO,
        check=at_least(1),
        added=True,
        resuming="shape",
    )
    shared_kv: int = setting(
        "number of blocks, the last ones, that compute with the keys and values of the last block before them with the "
        "same window",
        default=0,
        check=at_least(0),
        added=True,
        resuming="shape",
    )
    double_ffn: bool = setting(
        "feed-forward layers are twice as wide in blocks that share keys and values",
        default=False,
        added=True,
        resuming="shape",
    )
    config: ClassVar[ModelConfig | None] = config_of(
        ConfigKey("layer_input", "hidden_size_per_layer_input", 256),
        ConfigKey("layer_vocab", "vocab_size_per_layer_input", 262_144, when=_has_inputs, writes=_write_vocab),
        ConfigKey("shared_kv", "num_kv_shared_layers", 0),
        ConfigKey("double_ffn", "use_double_wide_mlp", default=False, when=_shares),
        experts=False,
        inputs=None,
    )
    stored: ClassVar[StoredNames | None] = _InputNames(
        enclosed=NAMES.enclosed,
        beside=NAMES.beside,
        buffers=NAMES.buffers,
        ends={
            **NAMES.ends,
            "per_layer_input.gate.weight": "per_layer_input_gate.weight",
            "per_layer_input.projection.weight": "per_layer_projection.weight",
        },
    )

    def unfit(self) -> tuple[str, str, str] | None:
        windowed = [self.window is not None and layer not in self.full_layers for layer in range(self.layers)]
        owners = windowed[: max(self.layers - self.shared_kv, 0)]
        if missing := set(windowed[len(owners) :]) - set(owners):
            kind = "with the window" if missing.pop() else "without a window"
            message = f"of the first {len(owners)} blocks none {kind} has keys and values to share"
            least = max(windowed.index(each) for each in set(windowed))
            return "shared_kv", message, f"use a shared_kv of at most {self.layers - 1 - least}"
        if isinstance(self.layer_vocab, int) and isinstance(self.vocab, int) and self.layer_vocab < self.vocab:
            message = f"layer_vocab {self.layer_vocab} is below vocab {self.vocab}, and every token has vectors"
            return "layer_vocab", message, f"use layer_vocab {self.vocab}"
        return super().unfit()

    def idle(self) -> dict[str, tuple[str, str]]:
        found = dict(super().idle())
        if not self.layer_input and not isinstance(self.layer_vocab, Auto):
            found["layer_vocab"] = ("layer_input is 0", "remove it, or use a layer_input above 0")
        if not self.shared_kv and self.double_ffn:
            found["double_ffn"] = ("shared_kv is 0", "remove it, or use a shared_kv above 0")
        return found

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        own, windows = arch.own, layer_windows(arch)
        width, shared = own.get("layer_input", 0), own.get("shared_kv", 0)
        if not width and not shared:
            return super().blocks(arch)
        full, local = cls.attentions(arch)
        first = arch.layers - shared
        wide = Chain.of(
            NormLayer("pre_feedforward_layernorm"),
            SwiGLULayer("mlp", activation="gelu_tanh", wider=1 + own.get("double_ffn", False)),
        )
        added = (
            (Residual.of(LayerInputLayer("per_layer_input", width), NormLayer("post_per_layer_input_norm")),)
            if width
            else ()
        )
        last = {window is None: layer for layer, window in enumerate(windows[:first])} if shared else {}
        found = list[BlockPiece]()
        for layer, window in enumerate(windows):
            attention, name = (full, FULL) if window is None else (local, WINDOWED)
            if layer >= first:
                attention = evolve(attention, takes=name)
            elif last.get(window is None) == layer and window in windows[first:]:
                attention = evolve(attention, gives=name)
            found.append(cls.block_of(attention, wide if layer >= first else cls.feed_forward(arch), *added))
        if width:
            vocab = own.get("layer_vocab")
            maker = LayerInputsLayer(_INPUTS, width, vocab if isinstance(vocab, int) else arch.vocab)
            found[0] = Chain.of(maker, found[0])
        return tuple(found)
