"""Measurements on a small model of transformers that decide which layouts compute what one rank computes."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.runtime.inspect.small_model import POSITIONS, by_kernels, ids_of, kernel_of, same, shows
from xtrain.runtime.nn.attention import by_document
from xtrain.runtime.nn.attention_blocks import Scores
from xtrain.runtime.nn.batch import DocumentLayout, KeyValueCache
from xtrain.runtime.nn.code_stage import CodeStage
from xtrain.runtime.nn.model_code import CodeModel


@torch.no_grad()
def attends_by_kernels(code: CodeModel) -> bool:
    """Return True if layers, and nothing else, compute attention through transformers' interface, and xtrain's kernels
    give the same."""
    ids_BS = ids_of(code, POSITIONS)
    wanted, used, inside = code.hidden(ids_BS), list[Scores](), list[int]()
    hooks = [layer.register_forward_pre_hook(lambda *_: inside.append(len(used))) for layer in code.layers]
    hooks += [layer.register_forward_hook(lambda *_: inside.append(len(used))) for layer in code.layers]
    try:
        with by_kernels(code, kernel_of((POSITIONS,), used)):
            found = code.hidden(ids_BS)
    except Exception:  # a layer asks for what no kernel computes, in ways of its own
        return False
    finally:
        for hook in hooks:
            hook.remove()
    calls = sum(end - begin for begin, end in zip(inside[::2], inside[1::2], strict=True))
    return bool(used) and calls == len(used) and same(found, wanted)


@torch.no_grad()
def spreads(code: CodeModel) -> bool:
    """Return True if only attention by xtrain's kernels mixes positions, so that ranks can have any positions of a row:
    positions in another order give the same hidden states in that order."""
    ids_BS, order = ids_of(code, POSITIONS), torch.randperm(POSITIONS, generator=torch.Generator().manual_seed(0))
    restore, kernel = order.argsort(), kernel_of((POSITIONS,))

    def attend(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, scores: Scores, sink_H: Tensor | None) -> Tensor:
        q, k, v = (x[:, :, restore] for x in (q_BHSA, k_BKSA, v_BKSA))
        return kernel(q, k, v, scores, sink_H)[:, :, order]

    try:
        wanted = code.hidden(ids_BS)
        with by_kernels(code, attend):
            found = code.hidden(ids_BS[:, order], order[None])
    except Exception:
        return False
    return same(found, wanted[:, order])


@torch.no_grad()
def caches(code: CodeModel) -> bool:
    """Return True if layers need nothing but keys and values of earlier positions: the hidden states of texts that are
    continued, of two lengths, equal the hidden states of the whole texts."""
    more, layers = 5, len(code.layers)
    longest, short = POSITIONS - more, POSITIONS // 2 - more  # both longer than the reaches of a small model
    missing = longest - short
    ids = [ids_of(code, longest + more), ids_of(code, short + more).flip(1)]
    places_BL = torch.arange(POSITIONS) - torch.tensor([[0], [missing]])
    cache = KeyValueCache(POSITIONS, seen_B11L=(places_BL >= 0)[:, None, None])
    ids_BL, places_BL = torch.cat((ids[0], F.pad(ids[1], (missing, 0), value=3))), places_BL.clamp(min=0)
    bounds = torch.tensor([0, longest, longest + missing, 2 * longest], dtype=torch.int32)
    packing = DocumentLayout.from_lengths(bounds, 2, longest, ids_BL.device)
    calls = itertools.count()

    def attend(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, scores: Scores, sink_H: Tensor | None) -> Tensor:
        layer = code.layers[next(calls) % layers]
        k_BKLA, v_BKLA = cache.extended(layer, k_BKSA, v_BKSA, window=scores.window)
        return by_document(q_BHSA, k_BKLA, v_BKLA, packing, scores, sink_H)

    try:
        with by_kernels(code, attend):
            found = [code.hidden(ids_BL[:, :longest], places_BL[:, :longest])[:, -1]]
            packing = DocumentLayout((), ids_BL[:, :1].int(), single=True, cached=cache)
            for cache.filled in range(longest, POSITIONS):
                now = slice(cache.filled, cache.filled + 1)
                found.append(code.hidden(ids_BL[:, now], places_BL[:, now])[:, -1])
        wanted = [code.hidden(each)[:, -more - 1 :] for each in ids]
    except Exception:
        return False
    return same(torch.stack(found, 1), torch.cat(wanted))


def _add(calls: list[str], path: str, *_: Any) -> None:
    calls.append(path)


@torch.no_grad()
def call_order(code: CodeModel) -> tuple[frozenset[str] | None, int | None]:
    """Return the places of modules outside the layers that have parameters and run before the layers, and the number of
    values that layers return, 0 for a tensor.

    None: such modules run between layers, modules around the layers have parameters, or the number differs.
    """
    calls: list[str] = []
    items = set()
    places, bias = code.places, code.head.bias
    having = {places[module]: module for module in code.outside if any(True for _ in module.parameters())}
    own = (each for module in code.around for each in module.parameters(recurse=False))
    if any(each is not bias for each in own) or len(list(code.embedding.parameters())) > 1:
        return None, None

    def returned(_: nn.Module, __: Any, result: Any) -> None:
        calls.append("")
        items.add(len(result) if isinstance(result, tuple) else 0)

    hooks = [layer.register_forward_hook(returned) for layer in code.layers]
    for path, module in having.items():
        called = partial(_add, calls, path)
        hooks += [part.register_forward_pre_hook(called) for part in module.modules()]
    code.hidden(ids_of(code, 8))
    for hook in hooks:
        hook.remove()
    begin, end = calls.index(""), len(calls) - calls[::-1].index("")
    before, behind = frozenset(calls[:begin]), frozenset(calls[end:])
    if (set(calls[begin:end]) != {""}) or before & behind:
        return None, None
    return before, items.pop() if len(items) == 1 else None


@torch.no_grad()
def is_cut(code: CodeModel, before: frozenset[str], items: int) -> bool:
    """Return True if two parts of the model, for each place between two layers, compute what the whole computes."""
    ids_BS, positions_BS = ids_of(code, POSITIONS), torch.arange(POSITIONS)[None]
    wanted, last = code.hidden(ids_BS), len(code.layers) - 1
    try:
        for cut in range(last):
            parts = [CodeModel(copy.deepcopy(code.model)) for _ in range(2)]
            begin = CodeStage(parts[0], 0, cut, items, before)
            end = CodeStage(parts[1], cut + 1, last, items, before)
            if not same(end(begin(ids_BS, positions_BS), positions_BS), wanted):
                return False
    except Exception:
        return False
    return last > 0


def layouts(
    tiny: CodeModel, kinds: Sequence[Mapping[str, Any]], attention: dict[str, int], *, kernels: bool
) -> dict[str, Any]:
    """Return what a layout may do with the model: whether its positions are `spread` over ranks, and whether its layers
    are cut into `stages`; and whether texts are generated with a cache of keys and values (`caches`). attention: its
    heads, corrected to the heads of the attention operations."""
    of_layers = [[op for op in kind["costs"]["float32"] if "attention" in op] for kind in kinds for _ in kind["layers"]]
    calls = [op["attention"] for ops in of_layers for op in ops]
    sizes = {tuple(call[name] for name in attention) for call in calls}
    others = [op for kind in kinds for op in kind["costs"]["float32"] if "attention" not in op]
    linear = not any(size[-1 - (size[-1] == "index")] for op in others for size in (op["flops"], *op["new"]))
    if even := len(sizes) == 1:
        attention.update(zip(attention, sizes.pop(), strict=True))
    scores = {(call["window"], call["scale"], call["cap"], call["sinks"] is not None) for call in calls}
    before, items = call_order(tiny)
    return {
        "scores": [
            [{"window": window, "scale": scale, "cap": cap}, sinks]
            for window, scale, cap, sinks in sorted(scores, key=str)
        ],
        "caches": "kernels" if kernels and all(len(ops) == 1 for ops in of_layers) and shows(caches, tiny) else "",
        "spread": kernels and linear and even and all(map(len, of_layers)) and shows(spreads, tiny),
        "stages": before is not None and items is not None and shows(is_cut, tiny, before, items),
        "before": sorted(before or ()),
        "items": items or 0,
    }
