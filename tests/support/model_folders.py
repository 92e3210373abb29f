"""Folders of a small model, as files of zeros, and specs that begin with them."""

import json
import struct
from pathlib import Path
from typing import Any

from attrs import frozen

from xtrain.planner.compile import Compiled
from xtrain.planner.load import plan_from_spec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
}
SPEC = """experiment tiny {{ seed = 1, budget = 4 steps }}
model {model}
tokenizer {tokenizer}
dataset code {{ source = python_stdlib() }}
batch {{ sequence = 64, micro = 2 }}
optimizer adamw {{ lr = 1e-3 }}
{more}
"""


def shapes(config: dict[str, Any] = CONFIG) -> dict[str, list[int]]:
    """The tensors of a llama."""
    dim, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    width = dim // config["num_attention_heads"]
    keys = width * config["num_key_value_heads"]
    found = {"model.embed_tokens.weight": [vocab, dim], "model.norm.weight": [dim], "lm_head.weight": [vocab, dim]}
    for layer in range(config["num_hidden_layers"]):
        own = {
            "input_layernorm": [dim], "post_attention_layernorm": [dim],
            "self_attn.q_proj": [dim, dim], "self_attn.k_proj": [keys, dim], "self_attn.v_proj": [keys, dim],
            "self_attn.o_proj": [dim, dim],
            "mlp.gate_proj": [ffn, dim], "mlp.up_proj": [ffn, dim], "mlp.down_proj": [dim, ffn],
        }  # fmt: skip
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return found


QUERY = "model.layers.1.self_attn.q_proj.weight"


def safetensors(tensors: dict[str, list[int]], formats: dict[str, str] | None = None) -> bytes:
    """A file of zeros. formats: of tensors that are not bf16."""
    sizes = {"BF16": 2, "F32": 4, "I8": 1, "F8_E4M3": 1}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        format = (formats or {}).get(name, "BF16")
        size = sizes[format]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": format, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


@frozen
class Folder:
    """A model in `model`, and a spec beside it."""

    path: Path

    def config(self, **changes: Any) -> None:
        """Write the config with other keys; None leaves one out, and "null" is null."""
        keys = {**CONFIG, **changes}
        keys = {name: None if value == "null" else value for name, value in keys.items() if value is not None}
        (self.path / "model" / "config.json").write_text(json.dumps(keys, indent=2))

    def weights(self, content: bytes, name: str = "model.safetensors") -> None:
        (self.path / "model" / name).write_bytes(content)

    def index(self, places: Any) -> None:
        (self.path / "model" / "model.safetensors").unlink(missing_ok=True)
        (self.path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    @classmethod
    def whole(cls, path: Path) -> "Folder":
        """One with nothing wrong."""
        (path / "model").mkdir()
        found = cls(path)
        found.config()
        found.weights(safetensors(shapes()))
        return found

    def spec(self, model: str = '"model"', *, tokenizer: str = "bytes", more: str = "") -> Path:
        path = self.path / "spec.xtrain"
        path.write_text(SPEC.format(model=model, tokenizer=tokenizer, more=more))
        return path

    def plan(self, model: str = '"model"', *sets: str, more: str = "") -> Compiled:
        return plan_from_spec(self.spec(model, more=more), sets)
