"""Description of a model that transformers' own code computes.

`python -m xtrain.runtime.inspect.model_code CONFIG RESULT` reads a `config.json` and writes JSON.

A child process of the planner, which has no torch, runs it. It builds the model on the meta device, and lists
parameters, buffers, distinct layers, and what each layer computes and keeps. What decides whether a loss is right is
measured on a small random model of the same config: whether logits are a product of the head, and whether documents of
a row stay apart if their positions begin at 0.
"""

import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from xtrain.blocks.memory_simulator import Handling, backward, forward
from xtrain.blocks.op_trace import OpTrace, TracedTensor
from xtrain.runtime.nn.model_code import CodeModel, UnknownCode, build, class_of, code_digest, config_of
from xtrain.runtime.nn.recompute import SAVED

aten = torch.ops.aten
LENGTHS: Final = (64, 128, 192, 256)  # positions of traces; the last one is a check
FORMATS: Final = (torch.float32, torch.bfloat16)
SMALL: Final = 2**23  # the largest number of parameters of a small model
WORDS: Final = {operator: word for word, operators in SAVED.items() for operator in operators}
TOLERANCE: Final = 1e-4
POSITIONS: Final = 32  # of measured rows


# What layers compute --------------------------------------------------------------------------------------------------


@define(eq=False)
class _Recorder(TorchDispatchMode):
    """Operations of a layer in order. The storages that it makes are numbered.

    parameters: storage → name; sizes: name → bytes. given: the layer's input, storage 0. ops: operator, numbers of
    inputs, number → (bytes, is floating point) of new storages, FLOPs, parameters, and the numbers of the storages that
    autograd keeps. shared: bytes of the storages from outside that it is given or that autograd keeps.
    """

    parameters: Mapping[int, str]
    sizes: Mapping[str, int]
    given: Tensor
    numbers: dict[int, int] = field(factory=dict)
    alive: list[Any] = field(factory=list)
    ops: list[dict[str, Any]] = field(factory=list)
    kept: list[int] = field(factory=list)
    shared: dict[int, int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__init__()
        self.numbers[_storage(self.given)] = 0
        self.alive.append(self.given.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _grouped(args) if func is aten._grouped_mm.default else func(*args, **kwargs)
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        new = {}
        # A view of a tensor from outside is no new tensor.
        known = {*self.numbers, *self.parameters, *self.shared, *map(_storage, inputs)}
        for output in outputs:
            if (key := _storage(output)) not in known and key not in self.numbers:
                self.numbers[key] = len(self.numbers)
                self.alive.append(output.untyped_storage())
                new[self.numbers[key]] = (output.untyped_storage().nbytes(), output.is_floating_point())
        flops = flop_registry.get(func.overloadpacket)
        count = int(flops(*args, **kwargs, out_val=result)) if flops is not None else 0
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            count = sdpa_flop_count(*(each.shape for each in args[:3]))
        used = [name for each in inputs if (name := self.parameters.get(_storage(each)))]
        if new:
            numbers = [self.numbers[key] for each in inputs if (key := _storage(each)) in self.numbers]
            before, self.kept = self.kept, []
            self.ops.append(
                {
                    "name": str(func.overloadpacket),
                    "word": WORDS.get(func, ""),
                    "inputs": list(dict.fromkeys(numbers)),
                    "new": new,
                    "flops": count,
                    "parameters": list(dict.fromkeys(used)),
                    "keeps": before,
                }
            )
        return result

    def simulated(self) -> OpTrace:
        """Return the operations as the memory simulator takes them."""
        size = self.given.untyped_storage().nbytes()
        trace = OpTrace(TracedTensor(size, size))
        tensors = {0: trace.input}
        for op in self.ops:
            (number, (bytes_, floats)), *others = op["new"].items()
            output = trace.op(
                *(tensors[each] for each in op["inputs"] if each in tensors),
                makes=bytes_,
                keeps=[tensors[each] for each in op["keeps"] if each in tensors],
                keeps_output=number in op["keeps"],
                extra=[each for other, (each, _) in others if other in op["keeps"]],
                weights=sum(self.sizes[name] for name in op["parameters"]),
                parameters=op["parameters"],
            )
            output.gradient = output.gradient if floats else 0
            tensors[number] = output
            tensors |= {other: TracedTensor(0, 0, output) for other, _ in others}
        return trace

    def keep(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key in self.parameters:
            return tensor
        number = self.numbers.get(key)
        if number is None:
            self.shared[key] = tensor.untyped_storage().nbytes()
            self.alive.append(tensor.untyped_storage())
        elif self.ops and number in self.ops[-1]["new"]:
            self.ops[-1]["keeps"].append(number)
        else:
            self.kept.append(number)
        return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _grouped(args: Sequence[Any]) -> Tensor:
    """Return the result of a grouped product, whose own meta function takes bf16 alone."""
    left, right = args[:2]
    return left.new_empty(left.shape[0], right.shape[-1])


@contextmanager
def _captured(layers: Sequence[nn.Module]) -> Iterator[list[tuple[nn.Module, Any, Any]]]:
    """Yield the calls of layers. The first of each class computes; the others return its results."""
    calls: list[tuple[nn.Module, Any, Any]] = []
    before = [layer.forward for layer in layers]
    results: dict[type[nn.Module], Any] = {}

    def forward_of(layer: nn.Module) -> Any:
        own = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append((layer, args, kwargs))
            if type(layer) not in results:
                results[type(layer)] = own(*args, **kwargs)
            return results[type(layer)]

        return forward

    for layer in layers:
        layer.forward = forward_of(layer)  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.forward = own  # type: ignore[method-assign]


@contextmanager
def _numbers_in(format: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(format)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def traces(
    config: Any, layers: Sequence[int], lengths: Sequence[int], format: torch.dtype
) -> dict[tuple[int, int], _Recorder]:
    """Record forwards of a row: (layer, positions) → its operations in a number format."""
    found = {}
    with FakeTensorMode(), _numbers_in(format):
        code = CodeModel(build(config, experts="grouped_mm"))  # the others look at values
        code.model.eval()
        for positions in lengths:
            x = torch.empty(1, positions, code.embedding.embedding_dim)
            more = {"position_ids": torch.arange(positions)[None]} if "position_ids" in code.arguments else {}
            with _captured(list(code.layers)) as calls, _Grouped():
                code.trunk(inputs_embeds=x, use_cache=False, **more)
            for layer in layers:
                args, kwargs = next((args, kwargs) for each, args, kwargs in calls if each is code.layers[layer])
                found[layer, positions] = _recorded(code.layers[layer], args, kwargs)
    return found


def _shared(found: Mapping[tuple[int, int], _Recorder]) -> list[float]:
    """Return the bytes of tensors that all layers use, such as cosines of positions and masks, as a polynomial."""
    sums = {}
    for length in LENGTHS:
        kept: dict[int, int] = {}
        for (_, positions), trace in found.items():
            kept |= trace.shared if positions == length else {}
        sums[length] = sum(kept.values())
    return _polynomial(sums) or _through(sums)


def _name_of(format: torch.dtype) -> str:
    return str(format).removeprefix("torch.")


def _recorded(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Recorder:
    given = torch.empty_like(args[0] if args else kwargs["hidden_states"]).requires_grad_()
    args, kwargs = ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})
    names = {_storage(parameter): name for name, parameter in module.named_parameters()}
    sizes = {name: parameter.nbytes for name, parameter in module.named_parameters()}
    with (
        _Recorder(names, sizes, given) as recorder,
        torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda t: t),
    ):
        module(*args, **kwargs)
    # A recomputed layer keeps all that it was given, masks among them.
    others = (each for each in tree_leaves((args, dict(kwargs))) if isinstance(each, Tensor) and each is not given)
    recorder.shared |= {_storage(each): each.untyped_storage().nbytes() for each in others}
    recorder.alive += [each.untyped_storage() for each in tree_leaves((args, dict(kwargs))) if isinstance(each, Tensor)]
    return recorder


def _polynomial(values: Mapping[int, float]) -> list[float] | None:
    """Return [c0, c1, c2] with value(S) = c0 + c1 · S + c2 · S² at all lengths; None if there are none."""
    (a, b, c, d) = LENGTHS
    matrix = torch.tensor([[1, s, s * s] for s in (a, b, c)], dtype=torch.float64)
    found = torch.linalg.solve(matrix, torch.tensor([values[s] for s in (a, b, c)], dtype=torch.float64))
    found = (found * 4096).round() / 4096  # sizes are whole, or whole parts of a chunk
    wanted, there = values[d], float(found @ torch.tensor([1, d, d * d], dtype=torch.float64))
    return found.tolist() if abs(there - wanted) <= TOLERANCE * max(1.0, abs(wanted)) else None


def _costs(recorded: Mapping[int, _Recorder]) -> list[dict[str, Any]]:
    """Return the operations of a layer with sizes as polynomials of the positions, from traces at all lengths.

    A layer whose operations depend on the length becomes one operation with the sums.
    """
    first_trace = recorded[LENGTHS[0]]
    names = {tuple((op["name"], *op["parameters"]) for op in trace.ops) for trace in recorded.values()}
    if len(names) == 1:
        joined = (_joined([recorded[s].ops[place] for s in LENGTHS]) for place in range(len(first_trace.ops)))
        found = [each for each in joined if each is not None]
        if len(found) == len(first_trace.ops):
            return found
    return [_summed(recorded)]


def _joined(ops: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    flops = _polynomial({s: op["flops"] for s, op in zip(LENGTHS, ops, strict=True)})
    new: list[list[Any]] = []
    for number, (_, floats) in ops[0]["new"].items():
        size = _polynomial({s: op["new"][number][0] for s, op in zip(LENGTHS, ops, strict=True)})
        if size is None:
            return None
        new.append([number, *size] if floats else [number, *size, "index"])
    if flops is None:
        return None
    same = {name: ops[0][name] for name in ("word", "inputs", "parameters", "keeps")}
    return {**same, "flops": flops, "new": new}


def _summed(recorded: Mapping[int, _Recorder]) -> dict[str, Any]:
    """Return the operations of a layer as one: FLOPs, the bytes that it keeps, and further bytes at the peaks of the
    forward and the backward."""
    sums: dict[str, dict[int, float]] = {name: {} for name in ("flops", "kept", "out", "forward", "backward")}
    for s, trace in recorded.items():
        sizes = {number: size for op in trace.ops for number, (size, _) in op["new"].items()}
        last = max(trace.ops[-1]["new"])
        kept = {number for op in trace.ops for number in op["keeps"]} - {0, last}
        sums["flops"][s] = sum(op["flops"] for op in trace.ops)
        sums["out"][s] = sizes[last]
        sums["kept"][s] = sum(sizes.get(number, 0) for number in kept)
        whole = trace.simulated()
        one = OpTrace(TracedTensor(sizes[last], sizes[last]))
        weights = sum(op.weights for op in whole.ops)
        kept_bytes = int(sums["kept"][s])
        one.op(
            one.input, makes=sizes[last], keeps=(one.input,), keeps_output=True, extra=(kept_bytes,), weights=weights
        )
        sums["forward"][s], sums["backward"][s] = (
            max(0, mine - other) for mine, other in zip(_peaks(whole), _peaks(one), strict=True)
        )
    found = {name: _polynomial(each) or _through(each) for name, each in sums.items()}
    parameters = list(dict.fromkeys(name for op in recorded[LENGTHS[0]].ops for name in op["parameters"]))
    return {
        "word": "", "inputs": [0], "parameters": parameters, "keeps": [0, 1, 2], "flops": found["flops"],
        "new": [[2, *found["out"]], [1, *found["kept"], "index"]], "scratch": [found["forward"], found["backward"]],
    }  # fmt: skip


def _peaks(trace: OpTrace) -> tuple[int, int]:
    """Return the peaks of forward and backward."""
    there = forward(trace, None, None)
    back = backward(trace, None, None, Handling(sums="own", again=False), behind=None, ahead=None)
    return there.peak, back.peak


def _through(values: Mapping[int, float]) -> list[float]:
    """Return the line through the two longest lengths, for sizes that grow in steps."""
    c, d = LENGTHS[-2:]
    slope = (values[d] - values[c]) / (d - c)
    return [values[d] - slope * d, slope, 0.0]


# What decides whether losses are right --------------------------------------------------------------------------------

# Sizes of a small model, by the names that configs give them.
SIZES: Final = {
    64: "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size",
    4: "num_hidden_layers n_layer num_layers n_layers decoder_layers num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts "
    "linear_num_value_heads swa_num_attention_heads",
    2: "num_experts_per_tok num_key_value_heads num_kv_heads moe_topk moe_k top_k num_experts_per_token moe_top_k "
    "linear_num_key_heads multi_query_group_num swa_num_key_value_heads index_n_heads",
    96: "intermediate_size ffn_dim n_inner ffn_hidden_size decoder_ffn_dim d_ff dense_intermediate_size "
    "feed_forward_dim intermediate_size_mlp",
    32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank expert_ffn_hidden_size "
    "shared_intermediate_size",
    16: "head_dim kv_lora_rank qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim d_kv "
    "global_head_dim swa_head_dim index_head_dim attention_head_dim kv_channels sliding_window chunk_size "
    "mamba_chunk_size mamba_d_head mamba_head_dim index_topk attention_chunk_size",
    8: "qk_rope_head_dim mamba_d_state state_size ssm_state_size rope_head_dim mamba_n_heads mamba_num_heads "
    "rotary_dim",
    320: "vocab_size vocab_size_per_layer_input",
    256: "max_position_embeddings n_positions n_ctx max_seq_len",
    1: "first_k_dense_replace n_group topk_group mamba_n_groups n_groups",
}  # fmt: skip
LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
LEFT_OUT: Final = object()
WAYS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"head_dim": LEFT_OUT},
    {"num_key_value_heads": 4},
    {"head_dim": LEFT_OUT, "num_key_value_heads": 4},
    {"rotary_dim": LEFT_OUT},
    {"head_dim": 8, "num_key_value_heads": 4},
    {"sliding_window": LEFT_OUT},
    {"num_hidden_layers": 8},
)


def small(content: Mapping[str, Any], model: nn.Module) -> CodeModel | None:
    """Return a small random model of the same kind, the model itself if it is small; None if none can be built.

    model: on the meta device.
    """
    if sum(p.numel() for p in model.parameters()) <= SMALL:
        return _filled(content)
    sizes = {name: size for size, names in SIZES.items() for name in names.split()}
    given = {name: content[name] for name in sizes if isinstance(content.get(name), int)}
    smaller: dict[str, Any] = {name: min(sizes[name], value) for name, value in given.items()}
    before = next((content[name] for name in LAYER_COUNTS if name in content), 0)
    layers = next((smaller[name] for name in LAYER_COUNTS if name in smaller), before)
    for name, value in content.items():
        if name.endswith("_token_id") and value is not None:
            smaller[name] = [2] if isinstance(value, list) else min(value, 2)
        elif isinstance(value, list) and len(value) == before:  # a value for each layer
            smaller[name] = value[:layers]
    for way in WAYS:
        keys = {**content, **smaller, **{name: value for name, value in way.items() if name in content}}
        for rest in (
            keys,
            {name: value for name, value in keys.items() if "layer" not in name or name in LAYER_COUNTS},
        ):
            try:
                code = _filled({name: value for name, value in rest.items() if value is not LEFT_OUT})
                code.hidden(_ids(code, 8))
            except Exception:  # sizes that do not fit each other fail in many ways
                continue
            return code
    return None


def _filled(content: Mapping[str, Any]) -> CodeModel:
    with torch.device("meta"):
        count = sum(p.numel() for p in build(config_of(content)).parameters())
    if count > SMALL:
        raise UnknownCode(f"{count:,} parameters are not few", "use another model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        code = CodeModel(build(config_of(content)))
        for parameter in code.model.parameters():  # zeros that its class draws would hide what they multiply
            if parameter.is_floating_point():
                nn.init.normal_(parameter, 0.3 if parameter.ndim == 1 else 0.1)
    code.model.eval()
    return code


def _ids(code: CodeModel, count: int) -> Tensor:
    """Return a row of `count` ids of the vocabulary, without the first three, which may have a meaning."""
    vocab = code.embedding.num_embeddings
    return (torch.arange(count)[None] * 37 + 11) % min(250, vocab - 3) + 3


@torch.no_grad()
def measured_logits(code: CodeModel) -> dict[str, Any] | None:
    """Return how logits follow from the head's product: {}, {"scale": x} or {"cap": x}; None if in no such way."""
    ids_BS = _ids(code, POSITIONS)
    hidden_BSD = code.hidden(ids_BS)
    product, logits = code.head(hidden_BSD), code.model(input_ids=ids_BS, use_cache=False).logits
    if product.shape != logits.shape:
        return None

    def same(theirs: Tensor) -> bool:
        return bool(torch.allclose(theirs, logits, rtol=TOLERANCE, atol=TOLERANCE * float(logits.abs().max())))

    if same(product):
        return {}
    if code.head.bias is not None:
        return None
    cap = getattr(code.model.config, "final_logit_softcapping", None)
    if cap and same(torch.tanh(product / cap) * cap):
        return {"cap": float(cap)}
    scale = float((product * logits).sum() / (product * product).sum())
    if not same(product * scale):
        return None
    for value in code.model.config.to_dict().values():  # the exact number, not the measured one
        for exact in (value, 1 / value if value else value) if isinstance(value, int | float) and value else ():
            if abs(exact - scale) <= TOLERANCE * abs(scale):
                return {"scale": float(exact)}
    return None


@torch.no_grad()
def keeps_documents_apart(code: CodeModel) -> bool:
    """Return True if positions that begin at 0 again are enough to keep the documents of a row apart."""
    lengths = (9, 13, 1, 5, 4)
    ids_BS = _ids(code, sum(lengths))
    try:
        alone = torch.cat([code.hidden(part) for part in ids_BS.split(lengths, 1)], 1)
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        packed = code.hidden(ids_BS, places)
    except Exception:
        return False
    return bool(torch.allclose(packed, alone, rtol=TOLERANCE, atol=TOLERANCE * float(alone.abs().max())))


@torch.no_grad()
def sees_later(code: CodeModel) -> bool:
    """Return True if a position's hidden state depends on later tokens: the model is no causal language model."""
    ids_BS = _ids(code, POSITIONS)
    other_BS = torch.cat((ids_BS[:, :16], ids_BS[:, 16:].flip(1)), 1)
    one, other = (code.hidden(each)[:, :16] for each in (ids_BS, other_BS))
    return not torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * float(one.abs().max()))


# The description ------------------------------------------------------------------------------------------------------


def _signature(layer: nn.Module) -> Any:
    """Return what distinguishes a layer from others: classes, shapes and plain attributes, without its number."""

    def plain(module: nn.Module) -> Any:
        values = {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str | None)}
        return sorted((n, str(v)) for n, v in values.items() if n not in ("layer_idx", "layer_id", "layer_number"))

    modules = [(name, type(module).__name__, plain(module)) for name, module in layer.named_modules()]
    tensors = [(name, tuple(t.shape)) for name, t in (*layer.named_parameters(), *layer.named_buffers())]
    return json.dumps([modules, tensors])


def _parameters(layer: nn.Module, experts: int, chosen: int) -> Iterator[dict[str, Any]]:
    """Yield the parameters of a layer. experts: in a layer; chosen: for each token."""
    for path, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            found = {"name": f"{path}.{name}".lstrip("."), "shape": list(parameter.shape)}
            if type(module) is nn.Linear and name == "weight":
                found["linear"] = True
            if parameter.ndim == 3 and parameter.shape[0] == experts and chosen < experts:
                found["chosen"] = [chosen, experts]
            yield found


class _Grouped(TorchDispatchMode):
    """Grouped products in any number format."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _grouped(args) if func is aten._grouped_mm.default else func(*args, **(kwargs or {}))


class _Views(TorchDispatchMode):
    """Copies are the tensors themselves, so that results remain views of parameters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.clone.default, aten._to_copy.default):
            return args[0]
        return func(*args, **(kwargs or {}))


def stored_parts(code: CodeModel) -> dict[str, list[dict[str, Any]]]:
    """Return parameter or saved buffer → the tensors of files that it is written to, as keys of `StoredPart`.

    transformers' own conversion is run on tensors without values; each of its results is a view of a parameter, whose
    strides say which part. Raises UnknownCode for other conversions.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = code.model.state_dict()
    owners: dict[int, str] = {}
    whole: dict[str, Tensor] = {}
    for theirs in code.names:
        whole[theirs] = torch.empty(state[theirs].shape, device="meta")
        owners[_storage(whole[theirs])] = theirs
    with _Views():
        written = revert_weight_conversion(code.model, dict(whole))
    found: dict[str, list[dict[str, Any]]] = {ours: [] for ours in code.names.values()}
    for name, tensor in written.items():
        theirs = owners.get(_storage(tensor))
        part = None if theirs is None else _part(tensor, whole[theirs])
        if theirs is None or part is None:
            message = f"transformers stores `{name}` of {code.title} in a form that is not part of one parameter"
            raise UnknownCode(message, "use another model")
        found[code.names[theirs]].append({"name": name, "shape": list(tensor.shape), **part})
    return found


def _part(view: Tensor, whole: Tensor) -> dict[str, Any] | None:
    """Return the part of a parameter that a view of it is; None if `StoredPart` has no such parts."""
    if view.shape == whole.shape and view.stride() == whole.stride():
        return {}
    part: dict[str, Any] = {}
    offset = view.storage_offset()
    if view.ndim < whole.ndim:
        part["expert"], offset = divmod(int(offset), int(whole.stride(0)))
        whole = whole[0]
    if view.ndim != whole.ndim or view.ndim not in (1, 2, 3):
        return None
    if view.ndim > 1 and view.stride()[-2:] == whole.stride()[-2:][::-1]:
        part["transposed"], view = True, view.transpose(-1, -2)
    if view.stride() != whole.stride() or view.shape[:-2] != whole.shape[:-2]:
        return None
    axis = -2 if view.ndim > 1 else -1
    if view.ndim > 1 and view.shape[-1] != whole.shape[-1]:
        return None
    if view.shape[axis] != whole.shape[axis]:
        first, rest = divmod(int(offset), int(whole.stride(axis)))
        if rest:
            return None
        part["rows"] = [first, first + view.shape[axis]]
    return part


EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
CHOSEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k", "moe_top_k")


def _number(config: Any, names: Sequence[str], default: int = 1) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), default)


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
        if other != name and not (code.tied and name.endswith(".weight") and parameter is code.head.weight):
            raise UnknownCode(f"`{other}` and `{name}` of {code.title} are one parameter", "use another model")
    if code.embedding.embedding_dim != code.head.in_features:
        raise UnknownCode(f"the embedding of {code.title} is narrower than its layers", "use another model")
    if code.tied and code.head.bias is not None:
        raise UnknownCode(f"the head of {code.title} has a bias, and the weight of the embedding", "use another model")
    groups: dict[str, list[int]] = {}
    for number, layer in enumerate(code.layers):
        groups.setdefault(_signature(layer), []).append(number)
    firsts = [layers[0] for layers in groups.values()]
    costs, shared = {}, {}
    for format in FORMATS:
        found = traces(config, firsts, LENGTHS, format)
        costs[format] = {layer: _costs({s: found[layer, s] for s in LENGTHS}) for layer in firsts}
        shared[_name_of(format)] = _shared(found)
    saved = set(code.model.state_dict())
    experts, chosen = _number(config, EXPERTS), _number(config, CHOSEN)
    kinds = []
    for layers in groups.values():
        module = code.layers[layers[0]]
        prefix = f"{code.layers_path}.{layers[0]}."
        buffers = {name: list(b.shape) for name, b in module.named_buffers() if f"{prefix}{name}" in saved}
        kinds.append(
            {
                "layers": layers,
                "parameters": list(_parameters(module, experts, chosen)),
                "buffers": buffers,
                "costs": {_name_of(format): costs[format][layers[0]] for format in FORMATS},
            }
        )
    if (longest := _longest(code)) is not None and longest < POSITIONS:
        message = f"{code.title} has a table of {longest} positions, and {POSITIONS} are needed to measure it"
        raise UnknownCode(message, "use another model")
    tiny = small(config.to_dict(), code.model)
    if tiny is None:
        raise UnknownCode(
            f"no small model of {code.title} could be built to measure what it computes", "use another model"
        )
    if sees_later(tiny):
        raise UnknownCode(
            f"{code.title} with this config sees later tokens: it predicts no next token", "use another model"
        )
    logits = measured_logits(tiny)
    if logits is None:
        raise UnknownCode(f"the logits of {code.title} are no product of its head", "use another model")
    ends = {theirs: ours for theirs, ours in code.names.items() if not ours.startswith("layers.")}
    shapes = {**dict(code.model.named_parameters()), **dict(code.model.named_buffers())}
    if saved_ends := ends.keys() & dict(code.model.named_buffers()).keys():
        raise UnknownCode(f"{code.title} saves `{min(saved_ends)}`, which is not trained", "use another model")
    for theirs in ends:
        owner = code.model.get_submodule(theirs.rpartition(".")[0])
        if code.layers in set(owner.modules()):
            message = f"`{theirs}` of {code.title} is a parameter of the module around its layers"
            raise UnknownCode(message, "use another model")
    return {
        "class": cls.__name__,
        "digest": code_digest(cls),
        "source": inspect.getfile(cls),
        "dim": code.head.in_features,
        "vocab": code.head.out_features,
        "tie_embeddings": code.tied,
        "layers": len(code.layers),
        "heads": (heads := _number(config, ("num_attention_heads", "num_heads"))),
        "kv_heads": _number(config, ("num_key_value_heads",), heads),
        "head_dim": _number(config, ("head_dim",), max(1, code.head.in_features // heads)),
        "ffn": _number(config, ("intermediate_size", "ffn_dim", "n_inner"), 0),
        "init_std": float(getattr(config, "initializer_range", None) or 0.02),
        "ends": [{"name": ours, "shape": list(shapes[theirs].shape)} for theirs, ours in ends.items()],
        "kinds": kinds,
        "shared": shared,
        "longest": _longest(code),
        "logits": logits,
        "packs": keeps_documents_apart(tiny),
        "stored": stored_parts(code),
    }


def main(path: str, result_path: str) -> int:
    """Write the description of the model whose config is in a file, or what prevents it."""
    try:
        result = describe(json.loads(Path(path).read_text(encoding="utf-8")))
    except UnknownCode as problem:
        result = {"problem": str(problem), "hint": problem.hint}
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        result = {"problem": f"the code of the model cannot be inspected: {text}", "hint": "use another model"}
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
