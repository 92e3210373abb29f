"""Description of a model that transformers' own code computes.

`python -m xtrain.runtime.inspect.model_code CONFIG RESULT [FOLDER]` reads a `config.json` and writes JSON; the modeling
files of a folder are executed if it is given.

A child process of the planner, which has no torch, runs it. It builds the model on the meta device, and lists
parameters, buffers, distinct layers, and what each layer computes and keeps. What decides whether a loss is right is
measured on a small random model of the same config: whether logits are a product of the head, and whether documents of
a row stay apart if their positions begin at 0.
"""

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.plan.architecture import HEAD
from xtrain.runtime.inspect.code_costs import CHOSEN, EXPERTS, LENGTHS, costs_of, counted, shared_bytes, storage, traces
from xtrain.runtime.inspect.code_experts import experts_of, measured_experts
from xtrain.runtime.inspect.code_layouts import attends_by_kernels, layouts
from xtrain.runtime.inspect.code_ranks import computes_spread, confirmed_cuts
from xtrain.runtime.inspect.small_model import (
    POSITIONS,
    gathered_matrices,
    idle_parameters,
    is_causal,
    keeps_documents_apart,
    layer_kind,
    measured_logits,
    of_layers,
    reward_class,
    shows,
    small,
    wrong_buffer,
)
from xtrain.runtime.nn.code_attention import NAME
from xtrain.runtime.nn.model_code import (
    CodeModel,
    UnknownCode,
    build,
    build_class,
    class_of,
    code_digest,
    config_of,
    execute_files,
    whole_class_of,
    whole_config_of,
)

aten = torch.ops.aten
FORMATS: Final = (torch.float32, torch.bfloat16)


def _signature(layer: nn.Module) -> Any:
    """Return what distinguishes a layer from others: classes, shapes and plain attributes, without its number."""

    def plain(module: nn.Module) -> Any:
        values = {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str | None)}
        return sorted((n, str(v)) for n, v in values.items() if n not in ("layer_idx", "layer_id", "layer_number"))

    modules = [(name, type(module).__name__, plain(module)) for name, module in layer.named_modules()]
    tensors = [(name, tuple(t.shape)) for name, t in (*layer.named_parameters(), *layer.named_buffers())]
    return json.dumps([modules, tensors])


def _parameters(layer: nn.Module, stacks: str | None, experts: int, chosen: int) -> Iterator[dict[str, Any]]:
    """Yield the parameters of a layer. stacks: module with the experts that xtrain computes. experts: in a layer;
    chosen: for each token."""
    for path, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            found = {"name": f"{path}.{name}".lstrip("."), "shape": list(parameter.shape)}
            if type(module) is nn.Linear and name == "weight":
                found["linear"] = True
            if path == stacks:
                found |= {"expert": True, "linear": parameter.ndim == 3, "turned": not module.is_transposed}
            elif parameter.ndim == 3 and parameter.shape[0] == experts and chosen < experts:
                found["chosen"] = [chosen, experts]
            yield found


def _name_of(format: torch.dtype) -> str:
    return str(format).removeprefix("torch.")


@define
class _Views(TorchDispatchMode):
    """Copies are the tensors themselves, so that results remain views of parameters. joined: storage of tensors joined
    along their first dimension → the pieces."""

    joined: dict[int, list[Tensor]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.clone.default, aten._to_copy.default):
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is aten.cat.default and (len(args) == 1 or args[1] == 0):
            self.joined[storage(result)] = [piece for each in args[0] for piece in self.pieces(each)]
        return result

    def pieces(self, tensor: Tensor) -> list[Tensor]:
        """Return the pieces that a tensor was joined from, or the tensor itself."""
        return self.joined.get(storage(tensor), [tensor])


def stored_parts(model: Any, names: Mapping[str, str]) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Return parameter or saved buffer → the tensors of files that it is written to, as keys of `StoredPart`; and the
    other tensors of the files.

    names: in the model → ours. transformers' own conversion is run on tensors without values; each of its results is a
    view of a parameter, whose strides say which part, or joined of such views. Raises UnknownCode for other
    conversions.
    """
    from transformers.core_model_loading import revert_weight_conversion

    title, state = type(model).__name__, model.state_dict()
    owners: dict[int, str] = {}
    whole: dict[str, Tensor] = {}
    aliases = {storage(state[theirs]): theirs for theirs in (*reversed(state), *names)}
    for theirs in aliases.values():
        whole[theirs] = torch.empty(state[theirs].shape, device="meta")
        owners[storage(whole[theirs])] = theirs
    try:
        with _Views() as views:
            written = revert_weight_conversion(model, dict(whole))
    except RuntimeError as error:  # of views that a tensor cannot have
        message = f"transformers stores tensors of {title} in a form that is not part of parameters"
        raise UnknownCode(message, "use another model") from error
    found: dict[str, list[dict[str, Any]]] = {ours: [] for ours in names.values()}
    others = []
    for name, tensor in written.items():
        pieces = views.pieces(tensor)
        theirs = [owners.get(storage(piece), "") for piece in pieces]
        if not any(each in names for each in theirs):
            others.append(name)
            continue
        top = 0
        for piece, owner in zip(pieces, theirs, strict=True):
            part = _part(piece, whole[owner]) if owner in names else None
            if part is None or (len(pieces) > 1 and piece.shape[1:] != tensor.shape[1:]):
                message = f"transformers stores `{name}` of {title} in a form that is not part of parameters"
                raise UnknownCode(message, "use another model")
            found[names[owner]].append(
                {"name": name, "shape": list(tensor.shape), **part, **({"top": top} if top else {})}
            )
            top += piece.shape[0] if len(pieces) > 1 else 0
    if missing := [ours for ours, parts in found.items() if not parts]:
        raise UnknownCode(f"transformers stores no `{missing[0]}` of {title}", "use another model")
    return found, others


def language_names(whole: Any, code: CodeModel) -> dict[str, str]:
    """Return parameter or saved buffer of a model with several parts → its name in a plan, for its language model,
    which is of the kind of `code`. Raises UnknownCode if it has another one."""
    title = type(whole).__name__
    paths = {module: path for path, module in whole.named_modules()}
    trunks = [path for module, path in paths.items() if type(module) is type(code.trunk)]
    head = whole.get_output_embeddings()
    if len(trunks) != 1 or head is None:
        message = f"the part of a {title} that is a {type(code.trunk).__name__} cannot be found"
        raise UnknownCode(message, "give a folder with the language model alone")
    own = code.paths[code.trunk]
    state, shapes, names = whole.state_dict(), code.model.state_dict(), {}
    for theirs, ours in code.names.items():
        inside = f"{trunks[0]}{theirs.removeprefix(own)}"
        name = f"{paths[head]}.{ours.rpartition('.')[2]}" if ours.startswith(f"{HEAD}.") else inside
        if name not in state or state[name].shape != shapes[theirs].shape:
            message = f"the language model of a {title} has no `{ours}` as {code.title} has"
            raise UnknownCode(message, "give a folder with the language model alone")
        names[name] = ours
    if code.tied != (storage(head.weight) == storage(whole.get_input_embeddings().weight)):
        raise UnknownCode(f"{title} and {code.title} tie other tensors", "use another model")
    return names


def _part(view: Tensor, whole: Tensor) -> dict[str, Any] | None:
    """Return the part of a parameter that a view of it is; None if `StoredPart` has no such parts."""
    if view.shape == whole.shape and view.stride() == whole.stride():
        return {}
    part: dict[str, Any] = {}
    offset = int(view.storage_offset())
    if view.ndim < whole.ndim:
        part["expert"], offset = divmod(offset, int(whole.stride(0)))
        whole = whole[0]
    if view.ndim != whole.ndim or view.ndim == 0:
        return None
    if view.ndim > 1 and view.stride()[-2:] == whole.stride()[-2:][::-1]:
        part["transposed"], view = True, view.transpose(-1, -2)
    if view.stride() != whole.stride():
        return None
    axis = next((n for n, (mine, all_) in enumerate(zip(view.shape, whole.shape, strict=True)) if mine != all_), None)
    if axis is None:
        return part
    if axis not in (0, view.ndim - 2) or view.shape[axis + 1 :] != whole.shape[axis + 1 :]:
        return None
    first, rest = divmod(offset, int(whole.stride(axis)))
    if rest or (part.get("transposed") and axis != view.ndim - 2):
        return None
    part["rows"] = [first, first + view.shape[axis]]
    return part


def _longest(code: CodeModel) -> int | None:
    """Return the most positions of a row if the code has a table of positions; None if it computes them."""
    most = getattr(code.model.config, "max_position_embeddings", None)
    tables = (*code.model.parameters(), *code.model.buffers())
    others = (each for each in tables if each.ndim == 2 and each is not code.embedding.weight)
    return most if isinstance(most, int) and any(most <= each.shape[0] <= most + 2 for each in others) else None


def describe(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of the model with the keys of a `config.json`. Raises UnknownCode."""
    config = config_of(content)
    with torch.device("meta"):
        code = CodeModel(build(config))
    cls = class_of(config)
    seen: dict[int, str] = {}
    for name, parameter in code.model.named_parameters(remove_duplicate=False):
        other = seen.setdefault(id(parameter), name)
        if other != name and parameter is not code.head.bias and not (code.tied and parameter is code.head.weight):
            raise UnknownCode(f"`{other}` and `{name}` of {code.title} are one parameter", "use another model")
    if code.embedding.embedding_dim != code.head.in_features:
        raise UnknownCode(f"the embedding of {code.title} is narrower than its layers", "use another model")
    if code.embedding.num_embeddings != code.head.out_features:
        rows = f"{code.embedding.num_embeddings:,} rows, and its head {code.head.out_features:,}"
        raise UnknownCode(f"the embedding of {code.title} has {rows}", "use another model")
    if (longest := _longest(code)) is not None and longest < POSITIONS:
        message = f"{code.title} has a table of {longest} positions, and {POSITIONS} are needed to measure it"
        raise UnknownCode(message, "use another model")
    ends = {theirs: ours for theirs, ours in code.names.items() if not ours.startswith("layers.")}
    shapes = code.model.state_dict()
    if saved_ends := ends.keys() & dict(code.model.named_buffers()).keys():
        raise UnknownCode(f"{code.title} saves `{min(saved_ends)}`, which is not trained", "use another model")
    whole = whole_class_of(content)
    model: Any = code.model
    names = code.names
    if whole is not None:
        with torch.device("meta"):
            model = build_class(whole, whole_config_of(content))
        names = language_names(model, code)
    stored, others = stored_parts(model, names)
    head = next(path for path, module in model.named_modules() if module is model.get_output_embeddings())
    tiny = small(config.to_dict(), code.model)
    if tiny is None:
        raise UnknownCode(
            f"no small model of {code.title} could be built to measure what it computes", "use another model"
        )
    if (buffer := wrong_buffer(tiny)) is not None:
        raise UnknownCode(
            f"`{buffer}` of {code.title} is in no file, and cannot be computed again", "use another model"
        )
    if not shows(is_causal, tiny):
        raise UnknownCode(
            f"{code.title} with this config sees later tokens: it predicts no next token", "use another model"
        )
    logits = measured_logits(tiny)
    if logits is None:
        raise UnknownCode(f"the logits of {code.title} are no product of its head", "use another model")
    kernels = shows(attends_by_kernels, tiny)
    routed, small_routed = experts_of(code), experts_of(tiny)
    shown = None if routed is None or small_routed is None else measured_experts(tiny, small_routed)
    routed, small_routed = (None, None) if routed is None or shown is None else ({**routed, **shown}, small_routed)
    stacks = None if routed is None else routed["module"]
    groups: dict[str, list[int]] = {}
    for number, layer in enumerate(code.layers):
        groups.setdefault(_signature(layer), []).append(number)
    firsts = [layers[0] for layers in groups.values()]
    costs, shared = {}, {}
    for format in FORMATS:
        found = traces(config, firsts, LENGTHS, format, NAME if kernels else "sdpa", ours=routed is not None)
        costs[format] = {layer: costs_of({s: found[layer, s] for s in LENGTHS}) for layer in firsts}
        shared[_name_of(format)] = shared_bytes(found)
    saved = set(code.model.state_dict())
    cuts = confirmed_cuts(code, tiny, (routed, small_routed), kernels=kernels)
    experts, chosen = counted(config, EXPERTS), counted(config, CHOSEN)
    kinds, idle = [], idle_parameters(tiny)
    idle_of = of_layers(idle, tiny)
    for layers in groups.values():
        module = code.layers[layers[0]]
        idle_here = idle_of.get(layer_kind(module), frozenset())
        prefix = f"{code.layers_path}.{layers[0]}."
        buffers = {name: list(b.shape) for name, b in module.named_buffers() if f"{prefix}{name}" in saved}
        kinds.append(
            {
                "layers": layers,
                "parameters": [
                    {
                        **each,
                        **(cuts or {}).get(layers[0], {}).get(each["name"], {}),
                        **({"idle": True} if each["name"] in idle_here else {}),
                    }
                    for each in _parameters(module, stacks, experts, chosen)
                ],
                "buffers": buffers,
                "costs": {_name_of(format): costs[format][layers[0]] for format in FORMATS},
            }
        )
    heads = counted(config, ("num_attention_heads", "num_heads"))
    attention = {
        "heads": heads,
        "kv_heads": counted(config, ("num_key_value_heads",), heads),
        "head_dim": counted(config, ("head_dim",), max(1, code.head.in_features // heads)),
    }
    layouts_of = layouts(tiny, kinds, attention, kernels=kernels)
    packs = shows(keeps_documents_apart, tiny, kernels=kernels)
    if not layouts_of["caches"] and packs and getattr(cls, "_supports_sdpa", False):
        layouts_of["caches"] = "own"  # transformers' attention, written out, gives NaN for rows that begin with padding
    return {
        "class": cls.__name__,
        "digest": code_digest(cls),
        "source": inspect.getfile(cls),
        "dim": code.head.in_features,
        "vocab": code.head.out_features,
        "tie_embeddings": code.tied,
        "layers": len(code.layers),
        **attention,
        "ffn": counted(config, ("intermediate_size", "ffn_dim", "n_inner"), 0),
        "init_std": float(getattr(config, "initializer_range", None) or 0.02),
        "ends": [
            {"name": ours, "shape": list(shapes[theirs].shape), **({"idle": True} if ours in idle else {})}
            for theirs, ours in ends.items()
        ],
        "kinds": kinds,
        "shared": shared,
        "longest": _longest(code),
        "logits": logits,
        "attention": kernels,
        "tensor": cuts is not None,
        "experts": routed,
        "spread_experts": small_routed is not None and computes_spread(tiny, small_routed, kernels=kernels),
        "packs": packs,
        **layouts_of,
        "gathered": gathered_matrices(tiny),
        "stored": stored,
        "others": others,
        **({"tied_head": head} if code.tied and head != HEAD else {}),
        "rewards": reward_class(tiny) if whole is None else "",
        "whole": "" if whole is None else whole.__name__,
        "text": None if whole is None else json.loads(config_of(content).to_json_string(use_diff=False)),
    }


def main(path: str, result_path: str, remote: str = "") -> int:
    """Write the description of the model whose config is in a file, or what prevents it. remote: folder whose modeling
    files compute it."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if remote:
            execute_files(content, Path(remote))
        result = describe(content)
        if remote:
            result["source"] = remote
    except UnknownCode as problem:
        result = {"problem": str(problem), "hint": problem.hint}
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        result = {"problem": f"the code of the model cannot be inspected: {text}", "hint": "use another model"}
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
