"""Rules for `precision { compute = fp8 }`: there is something to multiply, devices can, and scales mean something."""

from typing import Final

from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.dsl.schema.fp8 import RECIPES
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture
from xtrain.planner.findings import Findings
from xtrain.planner.mesh.cluster import device_kind
from xtrain.planner.mesh.hardware_specs import FP8
from xtrain.planner.mesh.layout import Layout
from xtrain.planner.mesh.pipeline import ZERO_BUBBLE
from xtrain.planner.model.fp8 import fp8_matrices, idle_patterns, uneven_matrices

RULE: Final = "precision.fp8"
CODE: Final = "X443"
PATH: Final = "precision.compute"


def check_fp8(spec: Spec, arch: Architecture, layout: Layout, found: Findings) -> None:
    """Report what fp8 cannot be computed for, or on."""
    fp8, tp = spec.precision.scaled, layout.size("tp")
    if fp8 is None or found.failed:
        return
    for path, message, hint in (*_of_device(spec), *_of_settings(spec, arch)):
        found.fail(RULE, CODE, path, message, hint)
        return
    matrices = fp8_matrices(arch, tp, fp8)
    if matrices:
        found.passed(RULE, f"{sum(map(len, matrices.values())):,} matrices are multiplied in fp8")
        return
    uneven = uneven_matrices(arch, tp, fp8)
    message = "fp8 has nothing to multiply: `skip` leaves out all matrices of blocks"
    hint = "use compute bf16"
    if uneven:
        name, width = next(iter(uneven.items()))
        each = " on a rank" if tp > 1 else ""
        message = f"fp8 has nothing to multiply: kernels take multiples of 16, and {name} is {width} wide{each}"
        hint = "use widths of the model that are multiples of 16, or compute bf16"
    found.fail(RULE, CODE, PATH, message, hint)


def _of_device(spec: Spec) -> list[tuple[str, str, str]]:
    """What the device has not."""
    fp8, sheet, kind = spec.precision.fp8, spec.cluster.sheet, device_kind(spec)
    if sheet is not None and kind != "cpu" and FP8 not in sheet.flops:
        others = [name for name, each in CLUSTERS.items() if each.sheet is not None and FP8 in each.sheet.flops]
        message = f"compute is fp8, and devices of cluster {spec.cluster.preset} have no products of it"
        return [(PATH, message, f"use compute bf16, or a cluster that has: {', '.join(others)}")]
    if kind == "cuda" and fp8.rest == "fp64":
        message = "rest is fp64, and products in fp8 on cuda give bf16 or fp32"
        return [("precision.fp8.rest", message, "use rest bf16; fp64 is for tests on a CPU")]
    return []


def _of_settings(spec: Spec, arch: Architecture) -> list[tuple[str, str, str]]:
    """What it cannot stand beside, and patterns that mean nothing."""
    fp8, beside = spec.precision.fp8, "use compute bf16"
    if patterns := idle_patterns(arch, fp8):
        owners = ", ".join(fp8_matrices(arch, 1, type(fp8)()))
        return [("precision.fp8.skip", f"`{patterns[0]}` means no matrix of a block", f"name some of {owners}")]
    if spec.parallel.pp.size != 1 and spec.parallel.pp.schedule in ZERO_BUBBLE:
        message = f"schedule {spec.parallel.pp.schedule} takes gradients of weights later, and a product in fp8 gives "
        return [("parallel.pp.schedule", message + "both together", "use schedule interleaved_1f1b, or compute bf16")]
    if arch.adapter is not None:
        message = "compute is fp8, and an adapter is added to products that are not"
        return [(PATH, message, f"{beside}, or remove `adapter`")]
    if spec.precision.base.stores:
        message = f"compute is fp8, and base {spec.precision.base.kind} computes matrices for each product"
        return [(PATH, message, f"{beside}, or remove `base`")]
    if fp8.chosen.scales_over_tokens and spec.activation.tile_mlp != 1:
        message = f"recipe {fp8.recipe} has scales of all tokens, and tile_mlp multiplies some at a time"
        free = next(name for name, each in RECIPES.items() if not each().scales_over_tokens)
        return [("precision.fp8.recipe", message, f"use recipe {free}, or tile_mlp 1")]
    return []
