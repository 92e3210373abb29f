"""Tensor and expert parallelism of a model of transformers, confirmed by two ranks that compute a small model."""

import copy
import json
import multiprocessing
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.runtime.inspect.code_costs import counted
from xtrain.runtime.inspect.code_experts import take_all
from xtrain.runtime.inspect.small_model import POSITIONS, by_kernels, ids_of, kernel_of, same
from xtrain.runtime.nn.axes import Axes, TensorAxis
from xtrain.runtime.nn.code_tensor import cut_layer, local_parameters
from xtrain.runtime.nn.layers import Linear
from xtrain.runtime.nn.model_code import CodeModel, UnknownCode, executed_packages, open_package

LONGEST: Final = 300  # seconds of a measurement on two ranks
ROUNDING: Final = 1e-10  # of gradients in fp64, relative to the largest

# Styles of transformers' plans of tensor parallelism → cut, and whether the other side is whole on every rank.
STYLES: Final[dict[str, dict[str, Any]]] = {
    "colwise": {"cut": "column"},
    "rowwise": {"cut": "row"},
    "colwise_gather_output": {"cut": "column", "joins": True},
    "rowwise_split_input": {"cut": "row", "joins": True},
}
# Whole on every rank here: experts, which compute all tokens, and what has a whole result. Which whole parameters have
# summands of their gradients is measured.
WHOLE: Final = (
    "moe_tp_experts",
    "ep_dispatch_experts",
    "replicate",
    "replicated_with_grad_allreduce",
    "local_params",
    "grouped_gemm",
    "packed_colwise",
    "packed_rowwise",
)
# Plans by usual names, for models without one that is confirmed: with heads on ranks, and with whole heads.
INNER: Final = ("gate_proj", "up_proj", "fc1", "intermediate.dense", "w1", "w3", "lin1", "c_fc", "fc_in")
OUTER: Final = ("down_proj", "fc2", "output.dense", "w2", "lin2", "fc_out", "dense_4h_to_h")
QUERIES: Final = ("q_proj", "k_proj", "v_proj", "query", "key", "value")
JOINT: Final = ("qkv_proj", "query_key_value", "Wqkv", "gate_up_proj", "dense_h_to_4h")
OUT: Final = (
    "o_proj",
    "out_proj",
    "self_attn.dense",
    "attention.dense",
    "self_attention.dense",
    "attention.output.dense",
)


def plans_of(code: CodeModel) -> list[Mapping[str, str]]:
    """Return plans of tensor parallelism to try: pattern of names → style; the model's own first."""

    def styles(**names: Sequence[str]) -> dict[str, str]:
        return {f"*.{name}": style for style, each in names.items() for name in each}

    whole = styles(colwise_gather_output=(*QUERIES, *JOINT), rowwise_split_input=OUT)
    inner = styles(colwise=INNER, rowwise=OUTER)
    guesses = (
        {**inner, **styles(colwise=(*QUERIES, "sinks"), rowwise=OUT)},
        {**inner, **whole},
        styles(colwise_gather_output=(*QUERIES, *JOINT, *INNER), rowwise_split_input=(*OUTER, *OUT)),
    )
    own = getattr(code.model.config, "base_model_tp_plan", None)
    return [*([own] if own else []), *guesses]


def tensor_cuts(
    code: CodeModel, experts: Mapping[str, Any] | None, plan: Mapping[str, str]
) -> dict[int, dict[str, dict[str, Any]]] | None:
    """Return layer → parameter → how a plan of tensor parallelism cuts it, in the words of a description; None if the
    plan cuts nothing, or has other styles. experts: that xtrain computes."""
    base = {id(module): name for name, module in code.model.base_model.named_modules()}
    own_plan = plan is getattr(code.model.config, "base_model_tp_plan", None)
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for number, layer in enumerate(code.layers):
        found[number] = of_layer = {}
        for path, module in layer.named_modules():
            name = base.get(id(module), "")
            for own, parameter in module.named_parameters(recurse=False):
                style = _style(plan, f"{name}.{own}") or _style(plan, name) or "replicate"
                if experts is not None and path == experts["module"]:
                    way = {}
                elif style == "mla_kv_a_proj":
                    way = {"begin": counted(code.model.config, ("kv_lora_rank",), 0)} if own == "weight" else {}
                elif style in WHOLE or (style in STYLES and parameter.ndim == 3):
                    way = {}
                elif style in STYLES:
                    way = STYLES[style]
                else:
                    return None
                if "cut" in way and type(module) is not nn.Linear and parameter.ndim > 1:
                    if own_plan:
                        return None
                    way = {}
                if way.get("cut") == "row" and parameter.ndim == 1:
                    way = {}  # a bias is added to the sum
                of_layer[f"{path}.{own}".lstrip(".")] = way
    cut = [way for ways in found.values() for way in ways.values() if "cut" in way]
    return found if cut else None


def _style(plan: Mapping[str, str], name: str) -> str | None:
    """Return the style of the last pattern of a plan that a module or parameter fits."""
    return next((plan[pattern] for pattern in reversed([*plan]) if fnmatchcase(name, pattern)), None)


def confirmed_cuts(
    code: CodeModel,
    tiny: CodeModel,
    experts: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    *,
    kernels: bool,
) -> dict[int, dict[str, dict[str, Any]]] | None:
    """Return the cuts of the first plan that two ranks confirm on a small model; None without one. experts: that xtrain
    computes, of the model and of the small one."""
    for plan, small_plan in zip(plans_of(code), plans_of(tiny), strict=True):
        cuts, small_cuts = tensor_cuts(code, experts[0], plan), tensor_cuts(tiny, experts[1], small_plan)
        if cuts is None or small_cuts is None:
            continue
        partial_names = computes_cut(tiny, small_cuts, experts[1], kernels=kernels)
        if partial_names is not None and _same_in_modules(cuts, partial_names):
            return {
                number: {name: {**way, "partial": True} if name in partial_names else way for name, way in ways.items()}
                for number, ways in cuts.items()
            }
    return None


def _same_in_modules(cuts: Mapping[int, Mapping[str, Mapping[str, Any]]], partial_names: frozenset[str]) -> bool:
    """Return True if every module that has parameters with a summand of the gradient, or cut by output, has no others:
    a module's parameters are placed together."""
    for ways in cuts.values():
        kinds: dict[str, set[Any]] = {}
        for name, way in ways.items():
            kind = way.get("cut") or (name in partial_names)
            kinds.setdefault(name.rpartition(".")[0], set()).add(kind)
        if any(len(each) > 1 and each != {"row", False} for each in kinds.values()):
            return False
    return True


def computes_cut(
    code: CodeModel,
    cuts: Mapping[int, Mapping[str, Mapping[str, Any]]],
    experts: Mapping[str, Any] | None,
    *,
    kernels: bool,
) -> frozenset[str] | None:
    """Return names of whole parameters in a layer, of whose gradients each rank has a summand, if two tensor-parallel
    ranks compute the hidden states and gradients of a small model; None if they do not. experts: that xtrain computes,
    each rank of half of the tokens."""
    code = CodeModel(copy.deepcopy(code.model).double())  # rounding of gradients is no difference
    found = _on_two_ranks(partial(_cut_rank, code, _factors(code), cuts, experts, kernels))
    return None if found is None else frozenset(found)


def computes_spread(code: CodeModel, experts: Mapping[str, Any], *, kernels: bool) -> bool:
    """Return True if two ranks, each with a row of its own and half of the experts, compute the hidden states and
    gradients of a small model."""
    if experts["count"] % 2:
        return False
    code = CodeModel(copy.deepcopy(code.model).double())
    return _on_two_ranks(partial(_expert_rank, code, _factors(code), experts, kernels)) is not None


def _row(code: CodeModel, number: int) -> Tensor:
    return ids_of(code, POSITIONS).roll(11 * number, 1)


def _factors(code: CodeModel) -> Tensor:
    """Return the factors of hidden states [1, S, D] in a sum, whose gradients are compared."""
    torch.manual_seed(0)
    return torch.randn(1, POSITIONS, code.head.in_features, dtype=torch.float64)


def _with_gradients(code: CodeModel, weights_BSD: Tensor, rows: int) -> CodeModel:
    """Return a copy of a model with the gradients of rows, each by itself."""
    whole = CodeModel(copy.deepcopy(code.model))
    for number in range(rows):
        (whole.hidden(_row(code, number)) * weights_BSD).sum().backward()
    return whole


def _on_two_ranks(compare: Callable[[int], list[str]]) -> list[str] | None:
    """Return the result of a function of the rank on two processes, which are connected by gloo; None if it raises an
    error on one of them, or cannot be sent to them. Raises UnknownCode if it was not computed."""
    # Of a fork of this process, whose autograd has threads where torch is built for CUDA, no backward returns.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.rank_imports"])
    try:  # as bytes: multiprocessing sends a file descriptor for each tensor, and no more than 256
        content = pickle.dumps(compare)
    except (pickle.PicklingError, AttributeError, TypeError):  # functions that a model has made
        return None
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(n, folder, content, executed_packages())) for n in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(LONGEST)
        slow = all(rank.is_alive() for rank in ranks)
        for rank in ranks:
            rank.kill()
            rank.join()
        if slow:
            message = f"two ranks did not finish a small model of its kind within {LONGEST} s"
            raise UnknownCode(message, "try again when the machine is less busy")
        files = [path for n in range(2) if (path := Path(folder) / f"{n}.json").exists()]
        found = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        if None in found:
            return None
        if len(found) < len(ranks):
            codes = " and ".join(str(rank.exitcode) for rank in ranks)
            message = f"two ranks did not compute a small model of its kind: they ended with the exit codes {codes}"
            raise UnknownCode(message, "try again with more free memory")
        return found[0]


def _rank(rank: int, folder: str, content: bytes, packages: Mapping[str, str]) -> None:
    """Write the result of a rank, or null if it raises an error; its processes then lose their connection."""
    sys.dont_write_bytecode = True
    for package, path in packages.items():
        open_package(package, path)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    compare, found = pickle.loads(content), None
    with suppress(Exception):
        found = compare(rank)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if found is not None:
        dist.destroy_process_group()


def _computed(mine: CodeModel, axes: Axes, row: Tensor, weights_BSD: Tensor, *, kernels: bool) -> Tensor:
    """Return the hidden states of a row after their backward."""
    with (
        by_kernels(mine, kernel_of((POSITIONS,))) if kernels else nullcontext(),
        local_parameters((), axes),
    ):
        hidden_BSD = mine.hidden(row)
        (hidden_BSD * weights_BSD).sum().backward()
    return hidden_BSD.detach()


DIMENSIONS: Final = {"column": 0, "row": 1}


def _cut_rank(
    code: CodeModel,
    weights_BSD: Tensor,
    cuts: Any,
    experts: Mapping[str, Any] | None,
    kernels: bool,
    rank: int,
) -> list[str]:
    """Compute a small model with this rank's pieces, and compare with the whole; return the names in layers of whole
    parameters whose gradients are sums over ranks. Raises AssertionError."""
    assert dist.group.WORLD is not None
    whole = _with_gradients(code, weights_BSD, 1)
    axes = Axes(tensor=TensorAxis(dist.group.WORLD, sequence=False, loss=True))
    mine = CodeModel(copy.deepcopy(code.model))
    stacks = {id(each) for module in take_all(mine, experts, axes) for each in module.parameters()}
    for number, layer in enumerate(mine.layers):
        for name, way in cuts[number].items():
            owner, _, own = name.rpartition(".")
            module = layer.get_submodule(owner)
            if "cut" in way:
                value = module.get_parameter(own).detach().chunk(2, DIMENSIONS[way["cut"]])
                setattr(module, own, nn.Parameter(value[rank].clone()))
            if type(module) is nn.Linear:
                module.__class__ = Linear
        cut_layer(layer, [{"name": name, **way} for name, way in cuts[number].items()], axes)
    hidden_BSD = _computed(mine, axes, _row(code, 0), weights_BSD, kernels=kernels)
    with torch.no_grad():
        assert same(hidden_BSD, whole.hidden(_row(code, 0)))
    wanted, summed, floor = dict(whole.layers.named_parameters()), set[str](), _floor(whole)
    for name, parameter in mine.layers.named_parameters():
        number, _, own = name.partition(".")
        way, other = cuts[int(number)][own], wanted[name].grad
        if other is not None and "cut" in way:
            other = other.chunk(2, DIMENSIONS[way["cut"]])[rank]
        if "cut" in way or id(parameter) in stacks or other is None:
            _compare(name, parameter.grad, other, floor, summed=id(parameter) in stacks)
        elif parameter.grad is None or not _alike(parameter.grad, other, floor):
            summed.add(own)
    both: list[Any] = [None, None]
    dist.all_gather_object(both, sorted(summed))
    summed = {name for each in both for name in each}
    for name, parameter in mine.layers.named_parameters():
        if (own := name.partition(".")[2]) in summed:
            _compare(name, parameter.grad, wanted[name].grad, floor, summed=True)
    return sorted(summed)


def _floor(whole: CodeModel) -> float:
    """Return the largest difference of gradients that is rounding, as of a bias of keys, whose gradient is 0."""
    return ROUNDING * max(float(each.grad.abs().max()) for each in whole.layers.parameters() if each.grad is not None)


def _alike(gradient: Tensor, wanted: Tensor, floor: float) -> bool:
    return same(gradient, wanted) or float((gradient - wanted).abs().max()) <= floor


def _compare(name: str, gradient: Tensor | None, wanted: Tensor | None, floor: float, *, summed: bool) -> None:
    """Compare a gradient with the whole model's. summed: each rank has a summand of it."""
    if gradient is None or wanted is None:
        assert gradient is wanted, name
        return
    if summed:
        dist.all_reduce(gradient)
    assert _alike(gradient, wanted, floor), name


def _expert_rank(
    code: CodeModel, weights_BSD: Tensor, experts: Mapping[str, Any], kernels: bool, rank: int
) -> list[str]:
    """Compute a row of a small model with this rank's experts, and compare with the whole. Raises AssertionError."""
    whole, axes = _with_gradients(code, weights_BSD, 2), Axes(experts=dist.group.WORLD)
    mine, stacks = CodeModel(copy.deepcopy(code.model)), set[int]()
    for module in take_all(mine, experts, axes):
        for name, parameter in list(module.named_parameters(recurse=False)):
            piece = nn.Parameter(parameter.detach().chunk(2)[rank].clone())
            setattr(module, name, piece)
            stacks.add(id(piece))
    hidden_BSD = _computed(mine, axes, _row(code, rank), weights_BSD, kernels=kernels)
    wanted, floor = dict(whole.layers.named_parameters()), _floor(whole)
    for name, parameter in mine.layers.named_parameters():
        other, own = wanted[name].grad, id(parameter) in stacks
        other = other.chunk(2)[rank] if own and other is not None else other
        _compare(name, parameter.grad, other, floor, summed=not own)
    with torch.no_grad():
        assert same(hidden_BSD, whole.hidden(_row(code, rank)))
    return []
