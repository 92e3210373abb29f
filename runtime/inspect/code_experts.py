"""Experts of a model of transformers: what they are, and whether xtrain computes them as transformers does."""

import copy
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from xtrain.runtime.inspect.code_costs import CHOSEN, counted, storage
from xtrain.runtime.inspect.small_model import POSITIONS, ids_of, same
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.code_experts import CodeExperts, ExpertForm, gate_of, hook_logits, repeating, take_experts
from xtrain.runtime.nn.model_code import CodeModel
from xtrain.runtime.nn.recompute import runs_of


def experts_of(code: CodeModel) -> dict[str, Any] | None:
    """Return the experts of layers: the path in a layer, their number and width, how many a token takes, names of the
    stacks, what the computation of hidden values keeps, where the router's logits are, and the coefficient of its loss;
    None if no layer has such experts, or if layers have different ones."""
    found: dict[tuple[str, ExpertForm], Any] = {}
    for layer in code.layers:
        own = [(path, module) for path, module in layer.named_modules() if ExpertForm.of(module) is not None]
        if len(own) > 1:
            return None
        found |= {(path, form): module for path, module in own if (form := ExpertForm.of(module)) is not None}
    if len(found) != 1:
        return None
    (((path, form), module),), config = found.items(), code.model.config
    return {
        "module": path,
        "count": form.experts,
        "chosen": counted(config, CHOSEN),
        "width": form.width,
        "matrices": list(form.matrices),
        "kept": _kept_by_gate(module),
        "router": _router(code),
        "coefficient": float(getattr(config, "router_aux_loss_coef", None) or 0.0),
    }


def _kept_by_gate(module: Any) -> float:
    """Return what the backward of hidden values keeps, without the products that they are computed from, relative to
    their own size."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    given = first.new_empty(4, first.shape[2 if module.is_transposed else 1]).requires_grad_()
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[storage(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = gate_of(module)(given)
    sizes = [
        each.untyped_storage().nbytes() for key, each in kept.items() if key not in (storage(given), storage(hidden))
    ]
    return sum(sizes) / hidden.nbytes


def _router(code: CodeModel) -> dict[str, Any] | None:
    """Return the module in a layer whose results transformers records as a router's logits, and their place among the
    results; None without one, or with several."""
    recorded = (
        getattr(code.model, "_can_record_outputs", None) or getattr(code.trunk, "_can_record_outputs", None) or {}
    )
    recorder = recorded.get("router_logits")
    if recorder is None or not hasattr(recorder, "target_class"):
        return None
    paths = {
        path for layer in code.layers for path, module in layer.named_modules() if type(module) is recorder.target_class
    }
    return {"module": paths.pop(), "index": recorder.index} if len(paths) == 1 else None


@torch.no_grad()
def measured_experts(code: CodeModel, experts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a small model shows of its experts: `router` if the router gives all tokens logits of all experts,
    else None; and `repeats`, whether its layers can choose the experts of an earlier run.

    None if xtrain's products do not give the hidden states, if a layer does not send all tokens to its experts in one
    call, or if a token takes another number of them than the config says.
    """
    ids_BS, calls, routed = ids_of(code, POSITIONS), list[tuple[Any, Tensor]](), list[tuple[int, ...]]()
    code = CodeModel(copy.deepcopy(code.model).double())
    wanted = code.hidden(ids_BS)

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        chosen = (*args, *kwargs.values())[1]
        calls.append((module, chosen.reshape(-1, chosen.shape[-1])))

    modules = take_all(code, experts, Axes())
    for module in modules:
        module.per_token = experts["chosen"]
        module.register_forward_pre_hook(look, with_kwargs=True)
    router = experts["router"]
    for layer in code.layers:
        for path, module in layer.named_modules():
            if router is not None and path == router["module"]:
                hook_logits(module, router["index"], lambda logits_TE: routed.append(logits_TE.shape))
    try:
        if not same(code.hidden(ids_BS), wanted):
            return None
    except Exception:  # experts that are called in another way
        return None
    shapes = {tuple(chosen.shape) for _, chosen in calls}
    if shapes != {(POSITIONS, experts["chosen"])} or [module for module, _ in calls] != modules:
        return None
    fits = {prod(shape) for shape in routed} == {POSITIONS * experts["count"]} and len(routed) == len(modules)
    return {"router": router if fits else None, "repeats": _repeats(code, modules, calls)}


def _repeats(code: CodeModel, modules: Sequence[CodeExperts], calls: list[tuple[Any, Tensor]]) -> bool:
    """Return True if layers choose the experts of an earlier run, whatever their inputs. calls: experts and the chosen
    ones, to which each run adds."""
    own, choices, ids_BS = [chosen for _, chosen in calls], list[Tensor](), ids_of(code, POSITIONS)
    run, again = runs_of(choices)
    with run, repeating(modules):
        code.hidden(ids_BS)
    choices[:] = [(each + 1) % modules[0].experts for each in choices]
    calls.clear()
    torch.manual_seed(0)
    noise = code.embedding.register_forward_hook(lambda _, __, x_BSD: x_BSD + torch.randn_like(x_BSD) * x_BSD.std())
    with again, repeating(modules):
        code.hidden(ids_BS)
    noise.remove()
    # Some layers choose by ids alone.
    return all(
        torch.equal(chosen, before) or any(torch.equal(chosen, each.view_as(chosen)) for each in choices)
        for before, (_, chosen) in zip(own, calls, strict=True)
    )


def take_all(code: CodeModel, experts: Mapping[str, Any] | None, axes: Axes) -> list[CodeExperts]:
    """Let xtrain compute the experts of all layers; return their modules."""
    if experts is None:
        return []
    modules = (dict(layer.named_modules()).get(experts["module"]) for layer in code.layers)
    return [take_experts(module, axes) for module in modules if module is not None and ExpertForm.of(module)]
