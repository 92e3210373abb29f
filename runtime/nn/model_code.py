"""Models that transformers' own code computes: the class for a config, its parts, and their names in a plan.

The trunk is the module between the token ids and the head's input; its layers are the longest list of modules in it.
Shapes: B rows, S positions, D width of the residual stream, V vocabulary.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor, nn

from xtrain.dsl.checking.model_code import source_digest
from xtrain.dsl.diagnostics.diagnostic import Remediable
from xtrain.plan.architecture import EMBEDDING, HEAD
from xtrain.runtime.nn.code_attention import register

LAYERS: Final = "layers"


class UnknownCode(Remediable):
    """A model whose code cannot be used: what is wrong, and what to do."""


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
    """Return the config of transformers with the keys of a `config.json`; for a model with several parts the config of
    its language model. Raises UnknownCode."""
    whole = whole_config_of(content)
    if hasattr(whole, "vocab_size") or not hasattr(whole, "text_config"):
        return whole
    text = whole.text_config
    if not hasattr(text, "vocab_size"):
        raise UnknownCode(f"`text_config` of a {whole.model_type} is no language model", "use another model")
    if hasattr(whole, "tie_word_embeddings"):
        text.tie_word_embeddings = whole.tie_word_embeddings
    return text


def whole_config_of(content: Mapping[str, Any]) -> Any:
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
            message = f"transformers has no model type {kind!r}, and the folder's own code (`auto_map`) is not run"
            hint = '`model "folder" { code = remote }` executes it; read its files before'
            raise UnknownCode(message, hint)
        if kind not in CONFIG_MAPPING:
            hint = "install a version of transformers that has it, or export the model in a type that it has"
            written = content.get("transformers_version")
            of = f" of a file of transformers {written}" if isinstance(written, str) else ""
            raise UnknownCode(f"the installed transformers has no model type {kind!r}{of}", hint)
        try:
            config = CONFIG_MAPPING[kind].from_dict(_with_floats(content))
        except Exception as error:  # the checks of a config class raise whatever they like
            message = f"transformers rejects the config: {_first_line(error)}"
            raise UnknownCode(message, "correct config.json") from error
        if getattr(config, "is_encoder_decoder", False):
            raise UnknownCode(f"{config.model_type} is an encoder with a decoder", "use a decoder-only model")
        return config


def _with_floats(value: Any) -> Any:
    """Return the value of a JSON file of transformers, which writes an infinite number as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        tagged = value.keys() == {"__float__"}
        return float(value["__float__"]) if tagged else {name: _with_floats(each) for name, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def class_of(config: Any) -> type[nn.Module]:
    """Return the class of transformers with a language head for a config. Raises UnknownCode."""
    with quiet():
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CLASSES
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

        if type(config) in CLASSES:
            return CLASSES[type(config)]  # pyright: ignore[reportReturnType]
        package = type(config).__module__.rpartition(".")[0]
        for kind, name in NAMES.items():  # of the language model of a model with several parts
            if package.endswith(f".{kind}") and getattr(transformers, name).config_class is type(config):
                return getattr(transformers, name)
        hint = "use a model that transformers' AutoModelForCausalLM can load"
        raise UnknownCode(f"transformers has no causal language model of the type {config.model_type}", hint)


def whole_class_of(content: Mapping[str, Any]) -> type[nn.Module] | None:
    """Return the class that a model with several parts is saved as; None for a language model alone. Raises
    UnknownCode."""
    config = whole_config_of(content)
    if config_of(content).model_type == config.model_type:
        return None
    with quiet():
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as CLASSES

        named = [getattr(transformers, str(name), None) for name in content.get("architectures") or ()]
        cls: Any
        for cls in (*named, CLASSES.get(type(config), None)):
            if getattr(cls, "config_class", None) is type(config):
                return cls
        hint = "write the name of its class under `architectures` of config.json"
        raise UnknownCode(f"transformers has no class for a whole {config.model_type}", hint)


def code_digest(cls: type[nn.Module]) -> str:
    """Return 16 hex digits over the source file of a class, or over all modeling files that it is one of."""
    package = cls.__module__.partition(".")[0]
    if package.startswith(EXECUTED):
        return package.removeprefix(EXECUTED)
    return source_digest(inspect.getfile(cls))


def execute_files(content: Mapping[str, Any], folder: Path) -> None:
    """Let transformers compute models of a config's type by the modeling files of a folder: those that `auto_map` of
    its `config.json` names are executed, and what they import of the folder. Raises UnknownCode."""
    names = content.get("auto_map")
    names = names if isinstance(names, Mapping) else {}
    hint = 'write `auto_map` with AutoConfig and AutoModelForCausalLM in config.json, each as "file.Class"'
    if "AutoModelForCausalLM" not in names:
        raise UnknownCode(f"config.json of {folder} names no modeling file for AutoModelForCausalLM", hint)
    with quiet():
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        except ImportError as error:
            message = f"the model is computed with transformers, which cannot be imported: {error}"
            raise UnknownCode(message, "pip install 'xtrain[transformers]'") from error
        package, kind = f"{EXECUTED}{source_digest(str(folder))}", str(content.get("model_type"))
        open_package(package, str(folder.absolute()))
        own = {name: _executed(package, str(names[name]), folder, hint) for name in MAPPED if name in names}
        try:
            config = own.get("AutoConfig") or CONFIG_MAPPING[kind]
            own["AutoModelForCausalLM"].config_class = config
            AutoConfig.register(kind, config, exist_ok=True)
            AutoModelForCausalLM.register(config, own["AutoModelForCausalLM"], exist_ok=True)
        except Exception as error:  # code of any model
            message = f"transformers does not take the classes of {folder}: {_first_line(error)}"
            raise UnknownCode(message, "correct the modeling files") from error


EXECUTED: Final = "xtrain_modeling_files_"  # name of their package, before their digest
MAPPED: Final = ("AutoConfig", "AutoModelForCausalLM")


def open_package(package: str, folder: str) -> None:
    """Let the modeling files of a folder be imported as modules of a package."""
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [folder]


def executed_packages() -> dict[str, str]:
    """Return the packages of modeling files that this process has executed, with their folders."""
    named = ((name, module) for name, module in sys.modules.items() if name.startswith(EXECUTED) and "." not in name)
    return {name: module.__path__[0] for name, module in named}


def _executed(package: str, name: str, folder: Path, hint: str) -> Any:
    """Return a class of the modeling files of a folder, "file.Class"."""
    file, _, cls = name.rpartition(".")
    if "--" in name or not file or not (folder / f"{file.replace('.', '/')}.py").is_file():
        raise UnknownCode(f"`{name}` in `auto_map` is no class of a file of {folder}", hint)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        return getattr(importlib.import_module(f"{package}.{file}"), cls)
    except Exception as error:  # code of any model
        message = f"{file}.py of {folder} cannot be executed: {type(error).__name__}: {_first_line(error)}"
        raise UnknownCode(message, "correct the modeling files") from error
    finally:
        sys.dont_write_bytecode = before


def build(config: Any, experts: str = "eager", attention: str = "sdpa") -> nn.Module:
    """Return a model of transformers with a config, on the default device, without loading anything.

    experts, attention: how they are computed, if it lets one choose. Raises UnknownCode.
    """
    return build_class(class_of(config), config, experts, attention)


def build_class(cls: type[nn.Module], config: Any, experts: str = "eager", attention: str = "sdpa") -> nn.Module:
    """Return a model of a class of transformers, as `build`."""
    for part in (config, getattr(config, "text_config", config)):
        part.return_dict, part.dtype = True, torch.get_default_dtype()
        for name in ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits"):
            if hasattr(part, name):
                setattr(part, name, False)
    register()
    choices = {"_attn_implementation": attention, "_experts_implementation": experts}
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
        """The part of the model with its layers and without its head, or the model itself."""
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model
        return next((part for part in (decoder, self.model.base_model) if any(_lists(part))), self.model)

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
        if not isinstance(found, nn.Linear):
            raise UnknownCode(f"{self.title} has no head that is a matrix alone", "use another model")
        return found

    @property
    def tied(self) -> bool:
        return self.head.weight is self.embedding.weight

    @cached_property
    def layers_path(self) -> str:
        """Name of the list of layers, in the whole model."""
        inside = set(_lists(self.trunk)) or {m for m in self.model.modules() if isinstance(m, nn.ModuleList)}
        lists = {
            name: sum(p.numel() for p in module.parameters())
            for name, module in self.model.named_modules()
            if module in inside
        }
        if not lists:
            raise UnknownCode(f"{self.title} has no list of layers", "use another model")
        return max(lists, key=lists.__getitem__)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.get_submodule(self.layers_path)

    @cached_property
    def around(self) -> list[nn.Module]:
        """The modules that contain the layers, the embedding or the head, without these."""
        inner = (self.layers, self.embedding, self.head)
        return [m for m in self.model.modules() if m not in inner and any(each in set(m.modules()) for each in inner)]

    @cached_property
    def outside(self) -> list[nn.Module]:
        """The largest modules that contain none of them."""
        inner = {self.layers, self.embedding, self.head, *self.around}
        return [child for module in self.around for child in module.children() if child not in inner]

    @cached_property
    def paths(self) -> dict[nn.Module, str]:
        """Module → its path in the model."""
        return {module: name for name, module in self.model.named_modules()}

    @cached_property
    def places(self) -> dict[nn.Module, str]:
        """Module → its place in a plan: the path in the trunk, outside the trunk the path in the whole model; below
        `ends` if it would begin with the name of one of the parts that every model has."""
        paths, trunk = self.paths, self.paths[self.trunk]
        inside = (module for module in self.trunk.modules() if trunk)
        found = {**paths, **{module: paths[module].removeprefix(trunk).lstrip(".") for module in inside}}
        taken = (EMBEDDING, HEAD, LAYERS)
        found = {module: f"ends.{path}" if path.split(".")[0] in taken else path for module, path in found.items()}
        layers = paths[self.layers]
        found |= {module: LAYERS + paths[module].removeprefix(layers) for module in self.layers.modules()}
        embedding = paths[self.embedding]
        found |= {module: EMBEDDING + paths[module].removeprefix(embedding) for module in self.embedding.modules()}
        return {**found, self.head: HEAD}

    @cached_property
    def names(self) -> dict[str, str]:
        """Name of each parameter and saved buffer in the code → its name in a plan."""
        saved = self.model.state_dict().keys()
        # A parameter with several names is saved under one that is not tied to another.
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        aliases: dict[Any, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if parameter not in aliases or aliases[parameter] in tied:
                aliases[parameter] = name
        buffers = [name for name, _ in self.model.named_buffers() if name in saved]
        found = {}
        for name in (*aliases.values(), *buffers):
            path, _, last = name.rpartition(".")
            found[name] = f"{self.places[self.model.get_submodule(path)]}.{last}".lstrip(".")
        ends = {self.head.weight: HEAD, self.embedding.weight: EMBEDDING}
        found |= {aliases[parameter]: f"{module}.weight" for parameter, module in ends.items()}
        if self.head.bias is not None:
            found[aliases[self.head.bias]] = f"{HEAD}.bias"
        if len(set(found.values())) < len(found):
            raise UnknownCode(f"two parameters of {self.title} would have one name", "use another model")
        return found

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Names of the arguments of the model, with those that it passes on to its trunk."""
        own = inspect.signature(self.model.forward).parameters
        passes = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in own.values())
        return frozenset({*own, *(inspect.signature(self.trunk.forward).parameters if passes else ())})

    @torch.no_grad()
    def fill_buffers(self, root: nn.Module, formats: Mapping[tuple[nn.Module, str], torch.dtype]) -> None:
        """Compute the buffers that no file has, such as frequencies of rotary positions, as transformers does where it
        loads weights: it leaves tensors alone that are marked `_is_hf_initialized`. A module may fill buffers of
        modules inside it.

        root: the model, or this rank's part of it. formats: of buffers whose format may have changed.
        """
        for tensor in (*root.parameters(), *root.buffers()):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        for module in root.modules():
            for name in module._non_persistent_buffers_set:
                buffer = module.get_buffer(name)
                setattr(module, name, torch.zeros_like(buffer, dtype=formats.get((module, name))))
        for module in self.model.modules():
            if any(each._non_persistent_buffers_set for each in module.modules()):
                self.model._init_weights(module)

    def hidden(self, ids_BS: Tensor, positions_BS: Tensor | None = None, **more: Any) -> Tensor:
        """Return the head's input [B, S, D]. positions_BS: None: counted from 0. more: further arguments."""
        return self.run(positions_BS, input_ids=ids_BS, **more)

    def run(self, positions_BS: Tensor | None, **given: Any) -> Tensor:
        """Return the head's input [B, S, D] for arguments of the model.

        The model ends where it calls its head, whatever it computes before the head.
        """
        if positions_BS is not None and "position_ids" in self.arguments:
            given["position_ids"] = positions_BS
        call = self.head.register_forward_pre_hook(_end)
        try:
            self.model(**{"use_cache": False, **given})
        except _HeadReached as reached:
            return reached.hidden_BSD
        finally:
            call.remove()
        raise UnknownCode(f"{self.title} does not call its head", "use another model")


def _lists(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the lists of modules in a part of a model, without models inside it, such as a vision tower."""
    for child in part.children():
        if isinstance(child, nn.ModuleList) and len(child):
            yield child
        if not hasattr(child, "post_init"):
            yield from _lists(child)


class _HeadReached(Exception):
    def __init__(self, hidden_BSD: Tensor) -> None:
        super().__init__()
        self.hidden_BSD = hidden_BSD


def _end(head: nn.Module, given: tuple[Any, ...]) -> None:
    raise _HeadReached(given[0])
