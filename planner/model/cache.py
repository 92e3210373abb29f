"""Bytes of the key-value cache of texts that are generated (`runtime/models/cache.py`)."""

from collections.abc import Set
from typing import TYPE_CHECKING

from xtrain.planner.architecture import name_in_block
from xtrain.planner.units import BYTES

if TYPE_CHECKING:
    from xtrain.planner.resolved import Resolved, TrainedKind


def cache_bytes(run: "Resolved", prompts: int, positions: int) -> int:
    """On the rank with the most: what every layer keeps of every prompt, of all positions or those of its window.

    Ranks of context and data parallel all have the whole of it; those of tensor parallel their own heads.
    """
    arch, tp, pipeline = run.architecture, run.size("tp"), run.pipeline
    of_layer: dict[int, int] = {}
    for kind in run.kinds:
        plain = plain_parameters(run, kind)
        numbers = sum(each.cached(arch, tp, positions, plain) for each in kind.block.layers())
        of_layer |= dict.fromkeys(kind.layers, numbers)
    spans = [[pipeline.spans[stage] for stage in own] for own in pipeline.owners]
    most = max(sum(of_layer[layer] for first, last in own for layer in range(first, last + 1)) for own in spans)
    return prompts * most * BYTES[run.formats.compute]


def plain_parameters(run: "Resolved", kind: "TrainedKind") -> Set[str]:
    """Those of its block that are stored in a number format, that no adapter is added to, and that are not
    multiplied in fp8, as `Layer.cached` wants them."""
    # Where it is needed: the language loads this file with the actions, and no plan.
    from xtrain.planner.model.inventory import block_tensors

    tensors = block_tensors(run.inventory, kind.first)
    adapted = {each.adapter for each in tensors}
    scaled = {f"{module}.weight" for module in kind.fp8}
    plain = (name_in_block(each.name) for each in tensors if not each.quantised and each.name not in adapted)
    return {name for name in plain if name not in scaled}
