"""Rules for `precision { base }`: there is something to store, and no block of codes is cut."""

from typing import Final

from xtrain.dsl.schema.bases import BLOCKS, Base
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture, BlockParameter, name_in_block
from xtrain.planner.findings import Findings
from xtrain.planner.mesh.layout import Layout
from xtrain.planner.model.base import matrices_of, quantised_names
from xtrain.planner.model.frozen import frozen_names

RULE: Final = "model.base"
PATH: Final = "precision.base.kind"


def check_base(spec: Spec, arch: Architecture, layout: Layout, found: Findings) -> None:
    """There must be something to store, and tensor parallelism must not cut a block."""
    base = spec.precision.base
    if not base.stores or found.failed:
        return
    if base.block not in BLOCKS:
        nearest = min(BLOCKS, key=lambda each: abs(each - base.block))
        found.fail(
            RULE, "X438", "precision.base.block", f"block {base.block} is no power of two", f"use block {nearest}"
        )
        return
    names = quantised_names(arch, base, frozen_names(arch, spec.model.frozen))
    if not names:
        message = f"base {base.kind} has nothing to store: no matrix of a block is frozen"
        hint = 'declare an `adapter`, freeze some, as by `frozen = ["layers"]` in `model`, or leave `base` out'
        found.fail(RULE, "X438", PATH, message, hint)
        return
    tp = layout.size("tp")
    for kind in arch.kinds:
        found_in = {name_in_block(name) for name in names if int(name.split(".")[1]) in kind.layers}
        own = (each for each in matrices_of(arch, kind) if each.name in found_in)
        for each in own:
            if problem := _cut(each, tp, base.block):
                extents = (
                    each.shape[-1] // tp if each.cut == "row" else each.shape[-1] for each in matrices_of(arch, kind)
                )
                found.fail(RULE, "X438", PATH, problem, _remedy(base, list(extents), tp))
                return
    found.passed(RULE, f"{len(names):,} matrices are stored as {base.words()}")


def _cut(matrix: BlockParameter, tp: int, block: int) -> str:
    """Why some block of a matrix would not be on one rank, or not of one expert's row; empty if none."""
    width, shape = matrix.shape[-1], " × ".join(map(str, matrix.shape))
    if matrix.expert and width % block:
        return f"rows of {matrix.name} ({shape}) are {width} wide, which is no multiple of block {block}"
    if tp > 1 and matrix.cut is not None:
        own = width // tp if matrix.cut == "row" else width
        if own % block:
            return f"tp {tp} cuts blocks of {block}: of {matrix.name} ({shape}) a rank has rows of {own} numbers"
    return ""


def _remedy(base: Base, widths: list[int], tp: int) -> str:
    """What to write: the largest block that divides all widths."""
    fitting = [block for block in BLOCKS if block < base.block and all(width % block == 0 for width in widths)]
    if fitting:
        return f"write `base {base.kind} {{ block = {fitting[-1]} }}`"
    return "use a smaller tp, or leave `base` out" if tp > 1 else "leave `base` out"
