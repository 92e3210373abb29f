"""Models that transformers' own code computes: the class for a config, its parts, and their names in a plan.

The trunk is the module between the token ids and the head's input; its layers are the longest list of modules in it.
Shapes: B rows, S positions, D width of the residual stream, V vocabulary.
"""

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Final

import torch
from attrs import frozen
from torch import nn

from xtrain.dsl.checking.model_code import source_digest
from xtrain.plan.architecture import EMBEDDING, HEAD

LAYERS: Final = "layers"


class UnknownCode(Exception):
    """A model whose code cannot be used: what is wrong, and what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@contextmanager
def quiet() -> Iterator[None]:
    """Use transformers without advice and without downloads, also where huggingface_hub was imported before."""
    constants = None
    with suppress(ImportError):
        from huggingface_hub import constants
    offline = constants is not None and constants.HF_HUB_OFFLINE
    if constants is not None:
        constants.HF_HUB_OFFLINE = True
    before = os.environ.get("TRANSFORMERS_VERBOSITY")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        yield
    finally:
        if constants is not None:
            constants.HF_HUB_OFFLINE = offline
        if before is None:
            del os.environ["TRANSFORMERS_VERBOSITY"]


def config_of(content: Mapping[str, Any]) -> Any:
    """Return the config of transformers with the keys of a `config.json`. Raises UnknownCode."""
    with quiet():
        try:
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        except ImportError as error:
            message = f"the model is computed by transformers, which cannot be imported: {error}"
            raise UnknownCode(message, "pip install 'xtrain[transformers]'") from error
        kind = str(content.get("model_type"))
        if content.get("quantization_config"):
            message = "the config has a `quantization_config`: its weights are quantized"
            raise UnknownCode(message, "give the folder with the weights before; `precision { base }` quantizes them")
        if kind not in CONFIG_MAPPING and content.get("auto_map"):
            message = f"transformers has no model type {kind!r}, and code beside the weights (`auto_map`) is not run"
            raise UnknownCode(message, "export the model in a type that transformers has")
        if kind not in CONFIG_MAPPING:
            hint = "install a version of transformers that has it, or export the model in a type that it has"
            raise UnknownCode(f"the installed transformers has no model type {kind!r}", hint)
        try:
            return CONFIG_MAPPING[kind].from_dict(dict(content))
        except Exception as error:  # the checks of a config class raise whatever they like
            message = f"transformers rejects the config: {_first_line(error)}"
            raise UnknownCode(message, "correct config.json") from error


def class_of(config: Any) -> type[nn.Module]:
    """Return the class of transformers with a language head for a config. Raises UnknownCode."""
    with quiet():
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        if getattr(config, "is_encoder_decoder", False):
            raise UnknownCode(f"{config.model_type} is an encoder with a decoder", "use a decoder-only model")
        if not hasattr(config, "vocab_size") and hasattr(config, "text_config"):
            message = f"a {config.model_type} has more parts than its language model"
            raise UnknownCode(message, "give a folder with the language model alone")
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            hint = "use a model that transformers' AutoModelForCausalLM can load"
            raise UnknownCode(f"transformers has no causal language model of the type {config.model_type}", hint)
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # pyright: ignore[reportReturnType]


def code_digest(cls: type[nn.Module]) -> str:
    """Return 16 hex digits over the source file of a class."""
    return source_digest(inspect.getfile(cls))


def build(config: Any, experts: str = "eager") -> nn.Module:
    """Return a model of transformers with a config, on the default device, without loading anything.

    experts: how its experts are computed, if it lets one choose. Raises UnknownCode.
    """
    cls = class_of(config)
    config.return_dict, config.dtype = True, torch.get_default_dtype()
    for name in ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits"):
        if hasattr(config, name):
            setattr(config, name, False)
    choices = {"_attn_implementation": "sdpa", "_experts_implementation": experts}
    while True:
        for name in ("_attn_implementation", "_experts_implementation"):
            setattr(config, name, choices.get(name))
        with quiet():
            try:
                return cls(config)
            except Exception as error:  # code of any model
                text = _first_line(error)
                kind = next((name for name in choices if name.split("_")[1][:4] in text), None)
                if not isinstance(error, ValueError) or kind is None:
                    raise UnknownCode(f"{cls.__name__} cannot be built: {text}", "correct config.json") from error
                del choices[kind]  # a model without such a choice


def _first_line(error: Exception) -> str:
    """Return the first line of an error, and the reason after it if it only announces one."""
    text = repr(error) if isinstance(error, KeyError) else str(error)
    first, *others = text.strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


@frozen(eq=False)
class CodeModel:
    """A model of transformers and its parts. Raises UnknownCode where a part is missing."""

    model: Any

    @cached_property
    def trunk(self) -> nn.Module:
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model.base_model
        if decoder is self.model:
            raise UnknownCode(f"{self.title} has no part without the head", "use another model")
        return decoder

    @property
    def title(self) -> str:
        return type(self.model).__name__

    @cached_property
    def embedding(self) -> nn.Embedding:
        found = self.model.get_input_embeddings()
        if not isinstance(found, nn.Embedding):
            raise UnknownCode(f"{self.title} has no embedding of tokens", "use another model")
        return found

    @cached_property
    def head(self) -> nn.Linear:
        found = self.model.get_output_embeddings()
        if type(found) is not nn.Linear:  # a class of its own may do more than multiply
            raise UnknownCode(f"{self.title} has no head that is a matrix alone", "use another model")
        return found

    @property
    def tied(self) -> bool:
        return self.head.weight is self.embedding.weight

    @cached_property
    def layers_path(self) -> str:
        """Name of the list of layers, in the whole model."""
        inside = set(self.trunk.modules())
        lists = {
            name: sum(p.numel() for p in module.parameters())
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) and module in inside
        }
        if not lists:
            raise UnknownCode(f"{self.title} has no list of layers", "use another model")
        return max(lists, key=lists.__getitem__)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.get_submodule(self.layers_path)

    @cached_property
    def names(self) -> dict[str, str]:
        """Name of each parameter and saved buffer in the code → its name in a plan."""
        paths = {id(module): name for name, module in self.model.named_modules()}
        embedding, head, trunk = (paths[id(each)] for each in (self.embedding, self.head, self.trunk))
        saved = self.model.state_dict().keys()
        buffers = [name for name, _ in self.model.named_buffers() if name in saved]
        found = {}
        for name in (*(name for name, _ in self.model.named_parameters()), *buffers):
            if name == f"{embedding}.weight":
                found[name] = f"{EMBEDDING}.weight"
            elif name.rpartition(".")[0] == head:
                found[name] = f"{HEAD}.{name.rpartition('.')[2]}"
            elif name.startswith(f"{self.layers_path}."):
                found[name] = LAYERS + name.removeprefix(self.layers_path)
            else:
                found[name] = name.removeprefix(f"{trunk}.")
        if len(set(found.values())) < len(found):
            raise UnknownCode(f"two parameters of {self.title} would have one name", "use another model")
        return found

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Names of the arguments of the trunk."""
        return frozenset(inspect.signature(self.trunk.forward).parameters)

    def hidden(self, ids_BS: torch.Tensor, positions_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Return the head's input [B, S, D]. positions_BS: None: counted from 0."""
        more = {} if positions_BS is None or "position_ids" not in self.arguments else {"position_ids": positions_BS}
        return first(self.trunk(input_ids=ids_BS, use_cache=False, **more))


def first(result: Any) -> torch.Tensor:
    """Return the first tensor of what a module of transformers returns."""
    return result if isinstance(result, torch.Tensor) else result[0]
