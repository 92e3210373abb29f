"""Costs of layers of transformers: operations and saved tensors, from traces at several lengths.

Sizes become polynomials [c0, c1, c2] of the positions S of a row, in bytes, for one row.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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
from xtrain.plan.architecture import pairs_within
from xtrain.runtime.inspect.code_operators import ATTENTION, EXPERTS_OF_CODE, attend_traced, experts_traced
from xtrain.runtime.nn.code_attention import attending
from xtrain.runtime.nn.code_experts import ExpertForm
from xtrain.runtime.nn.model_code import CodeModel, build
from xtrain.runtime.nn.recompute import SAVED

aten = torch.ops.aten
LENGTHS: Final = (64, 128, 192, 256)  # positions of traces; the last one is a check
TOLERANCE: Final = 1e-4
WORDS: Final = {operator: word for word, operators in SAVED.items() for operator in operators}


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
        self.numbers[storage(self.given)] = 0
        self.alive.append(self.given.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        new = {}
        # A view of a tensor from outside is no new tensor.
        known = (self.numbers, self.parameters, self.shared, set(map(storage, inputs)))
        for output in outputs:
            if not any((key := storage(output)) in each for each in known):
                self.numbers[key] = len(self.numbers)
                self.alive.append(output.untyped_storage())
                new[self.numbers[key]] = (output.untyped_storage().nbytes(), output.is_floating_point())
        flops = flop_registry.get(func.overloadpacket)
        count = int(flops(*args, **kwargs, out_val=result)) if flops is not None else 0
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            count = sdpa_flop_count(*(each.shape for each in args[:3]))
        used = [name for each in inputs if (name := self.parameters.get(storage(each)))]
        more = {}
        if func is ATTENTION:
            more["attention"] = attention = _attention_of(args, used)
            pairs = pairs_within(args[0].shape[2], attention["window"])
            count = 4 * pairs * attention["heads"] * attention["head_dim"]
        if func is EXPERTS_OF_CODE:
            more["experts"] = True
        if new:
            numbers = [self.numbers[key] for each in inputs if (key := storage(each)) in self.numbers]
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
                    **more,
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
        key = storage(tensor)
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


def _attention_of(args: Sequence[Any], parameters: Sequence[str]) -> dict[str, Any]:
    """Return the settings of an attention operation, from its arguments and the parameters among them."""
    q_BHSA, k_BKSA, _, sink_H, window, scale, cap = args
    return {
        "heads": q_BHSA.shape[1], "kv_heads": k_BKSA.shape[1], "head_dim": q_BHSA.shape[3],
        "window": window or None, "scale": scale, "cap": cap or None,
        "sinks": None if sink_H is None else parameters[-1],
    }  # fmt: skip


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _grouped(args: Sequence[Any]) -> Tensor:
    """Return the result of a grouped product, whose own meta function takes bf16 alone."""
    left, right = args[:2]
    return left.new_empty(left.shape[0], right.shape[-1])


class _WithoutValues(TorchDispatchMode):
    """Operations that need values, on tensors without values: every expert gets as many tokens as the others.

    tokens: of a row. experts: in a layer. chosen: for each token.
    """

    def __init__(self, tokens: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.experts, self.each = experts, tokens * chosen // experts
        self.indices: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._grouped_mm.default:
            return _grouped(args)
        if func is aten.nonzero.default:
            (mask,) = args
            count = mask.numel() if mask.numel() == self.experts else max(1, mask.numel() // self.experts)
            self.indices.append(mask.new_empty(count, mask.ndim, dtype=torch.long))
            return self.indices[-1]
        if func is aten._local_scalar_dense.default and not args[0].is_floating_point():
            counts = args[0].dtype != torch.bool and storage(args[0]) not in map(storage, self.indices)
            return self.each if counts else 0
        return func(*args, **(kwargs or {}))


@contextmanager
def _recording(layers: Sequence[nn.Module], chosen: Sequence[int]) -> Iterator[dict[int, _Recorder]]:
    """Yield chosen layer → its operations in its first call. Other layers return the result of one of their class."""
    found: dict[int, _Recorder] = {}
    before = [layer.forward for layer in layers]
    results: dict[type[nn.Module], Any] = {}

    def forward_of(number: int, layer: nn.Module) -> Any:
        own = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if number in chosen and number not in found:
                layer.forward, replaced = own, layer.forward  # type: ignore[method-assign]
                found[number], results[type(layer)] = recorded(layer, args, kwargs)
                layer.forward = replaced  # type: ignore[method-assign]
            elif type(layer) not in results:
                results[type(layer)] = own(*args, **kwargs)
            return results[type(layer)]

        return forward

    for number, layer in enumerate(layers):
        layer.forward = forward_of(number, layer)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.forward = own  # type: ignore[method-assign]


@contextmanager
def numbers_in(format: torch.dtype) -> Iterator[None]:
    """Make new tensors of a number format within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(format)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
CHOSEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k", "moe_top_k")


def _value(config: Any, name: str) -> Any:
    """Return a value of a config; None without it, and if it differs between layers, where transformers raises."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def counted(config: Any, names: Sequence[str], default: int = 1) -> int:
    """Return the first of some numbers of a config that it has."""
    own = [config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))]
    values = (_value(each, name) for each in own for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), default)


def _on_host(model: nn.Module) -> None:
    """Replace tensors of a model on the meta device by tensors of the mode, which are on the host."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    other = torch.empty(tensor.shape, dtype=tensor.dtype)
                    made[id(tensor)] = nn.Parameter(other) if isinstance(tensor, nn.Parameter) else other
                tensors[name] = None if tensor is None else made[id(tensor)]


def traces(
    config: Any, layers: Sequence[int], lengths: Sequence[int], format: torch.dtype, attention: str, *, ours: bool
) -> dict[tuple[int, int], _Recorder]:
    """Record forwards of a row: (layer, positions) → its operations in a number format. attention: implementation.
    ours: xtrain computes experts."""
    found = {}
    with torch.device("meta"), numbers_in(format):
        code = CodeModel(build(config, experts="grouped_mm", attention=attention))  # other experts look at values
    code.model.eval()
    for module in code.layers.modules() if ours else ():
        if ExpertForm.of(module) is not None:
            module.forward = partial(experts_traced, module)  # type: ignore[method-assign]
    with FakeTensorMode(), attending(attend_traced):
        _on_host(code.model)
        for positions in lengths:
            ids, places = torch.empty(1, positions, dtype=torch.long), torch.arange(positions)[None]
            experts, chosen = counted(config, EXPERTS), counted(config, CHOSEN)
            without = _WithoutValues(positions, experts, chosen)
            with without, _recording(list(code.layers), layers) as recorders:
                code.hidden(ids, places)
            found |= {(layer, positions): recorders[layer] for layer in layers}
    return found


def shared_bytes(found: Mapping[tuple[int, int], _Recorder]) -> list[float]:
    """Return the bytes of tensors that all layers use, such as cosines of positions and masks, as a polynomial."""
    sums = {}
    for length in LENGTHS:
        kept: dict[int, int] = {}
        for (_, positions), trace in found.items():
            kept |= trace.shared if positions == length else {}
        sums[length] = sum(kept.values())
    return _polynomial(sums) or _through(sums)


def recorded(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Recorder, Any]:
    """Return the operations of a module's forward of one row, and its result."""
    given = torch.empty_like(args[0] if args else kwargs["hidden_states"]).requires_grad_()
    args, kwargs = ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})
    names = {storage(parameter): name for name, parameter in module.named_parameters()}
    sizes = {name: parameter.nbytes for name, parameter in module.named_parameters()}
    with (
        _Recorder(names, sizes, given) as recorder,
        torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda t: t),
    ):
        result = module(*args, **kwargs)
    # A recomputed layer keeps all that it was given, masks among them.
    others = (each for each in tree_leaves((args, dict(kwargs))) if isinstance(each, Tensor) and each is not given)
    recorder.shared |= {storage(each): each.untyped_storage().nbytes() for each in others}
    recorder.alive += [each.untyped_storage() for each in tree_leaves((args, dict(kwargs))) if isinstance(each, Tensor)]
    return recorder, result


def _polynomial(values: Mapping[int, float]) -> list[float] | None:
    """Return [c0, c1, c2] with value(S) = c0 + c1 · S + c2 · S² at all lengths; None if there are none."""
    (a, b, c, d) = LENGTHS
    matrix = torch.tensor([[1, s, s * s] for s in (a, b, c)], dtype=torch.float64)
    found = torch.linalg.solve(matrix, torch.tensor([values[s] for s in (a, b, c)], dtype=torch.float64))
    found = (found * 4096).round() / 4096  # sizes are whole, or whole parts of a chunk
    wanted, there = values[d], float(found @ torch.tensor([1, d, d * d], dtype=torch.float64))
    return found.tolist() if abs(there - wanted) <= TOLERANCE * max(1.0, abs(wanted)) else None


def costs_of(recorded: Mapping[int, _Recorder]) -> list[dict[str, Any]]:
    """Return the operations of a layer with sizes as polynomials of the positions, from traces at all lengths.

    A layer whose operations depend on the length becomes one operation with the sums, followed by its experts.
    """
    first_trace = recorded[LENGTHS[0]]
    names = {tuple((op["name"], *op["parameters"]) for op in trace.ops) for trace in recorded.values()}
    if len(names) == 1:
        joined = (_joined([recorded[s].ops[place] for s in LENGTHS]) for place in range(len(first_trace.ops)))
        found = [each for each in joined if each is not None]
        if len(found) == len(first_trace.ops):
            return found
    summed = _summed(recorded)
    _, *size = summed["new"][0]
    names = [op["parameters"] for op in first_trace.ops if "experts" in op]
    further = {"word": "", "inputs": [2], "keeps": [], "flops": [0, 0, 0], "new": [[3, *size]], "experts": True}
    return [summed, *({**further, "parameters": each} for each in names)]


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
    same = {
        name: ops[0][name]
        for name in ("word", "inputs", "parameters", "keeps", "attention", "experts")
        if name in ops[0]
    }
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
    own = (op for op in recorded[LENGTHS[0]].ops if "experts" not in op)
    parameters = list(dict.fromkeys(name for op in own for name in op["parameters"]))
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
