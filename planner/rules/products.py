"""Rules on fp16, on products in fp8, and on quantization-aware training."""

from typing import Final

from attrs import evolve

from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.dsl.schema.precision import RECIPES, Products
from xtrain.dsl.spec import Spec
from xtrain.plan.architecture import Architecture
from xtrain.plan.findings import Findings, checks
from xtrain.plan.hardware import FP8
from xtrain.plan.mesh import Layout, device_kind
from xtrain.plan.parameters import idle_patterns, scaled_matrices, unfit_matrices
from xtrain.plan.pipeline import ZERO_BUBBLE

FP8_RULE: Final = "precision.fp8"
FP8_CODE: Final = "X443"
FP8_PATH: Final = "precision.compute"


@checks("precision.fp16", reads="precision.compute precision.params step serve")
def check_fp16(spec: Spec, found: Findings) -> None:
    """Report what does not go with a scale of the loss."""
    rule = "precision.fp16"
    if spec.precision.loss_scale is None:
        return
    if (params := spec.precision.params) != "fp32":
        message = f"compute is fp16, whose gradients are added up and unscaled in fp32, and params is {params}"
        found.fail(rule, FP8_CODE, "precision.params", message, "use params fp32")
    elif spec.step is not None:
        message = "compute is fp16, and a step of your own divides the loss by itself, without its scale"
        found.fail(rule, FP8_CODE, FP8_PATH, message, "use compute bf16, or remove `step`")
    elif spec.serve is not None:
        message = "compute is fp16, and clients of a server skip no steps whose gradients overflow"
        found.fail(rule, FP8_CODE, FP8_PATH, message, "use compute bf16")
    else:
        found.passed(rule, "gradients are computed with a scale of the loss")


@checks(
    "precision.fp8",
    reads="precision.* model.* adapter adapter.* task parallel.tp.size parallel.pp.size parallel.pp.schedule "
    "activation.tile_mlp cluster.preset launch.device",
)
def check_fp8(spec: Spec, arch: Architecture, layout: Layout, found: Findings) -> None:
    """Report models and devices that do not support fp8."""
    fp8, tp = spec.precision.scaled, layout.size("tp")
    if fp8 is None or found.failed:
        return
    for path, message, hint in (*_of_device(spec), *_of_settings(spec, arch)):
        found.fail(FP8_RULE, FP8_CODE, path, message, hint)
        return
    matrices = scaled_matrices(arch, tp, fp8)
    if matrices:
        found.passed(FP8_RULE, f"{sum(map(len, matrices.values())):,} matrices are multiplied in fp8")
        return
    uneven = unfit_matrices(arch, tp, fp8)
    message = "fp8 has nothing to multiply: `skip` leaves out all matrices of blocks"
    hint = "use compute bf16"
    if uneven:
        name, width = next(iter(uneven.items()))
        each = " on a rank" if tp > 1 else ""
        by = fp8.chosen.multiple
        message = (
            f"fp8 has nothing to multiply: kernels need widths divisible by {by}, and {name} is {width} wide{each}"
        )
        hint = f"use widths divisible by {by}, or compute bf16"
    found.fail(FP8_RULE, FP8_CODE, FP8_PATH, message, hint)


def _of_device(spec: Spec) -> list[tuple[str, str, str]]:
    """Return faults of the device."""
    fp8, sheet, kind = spec.precision.fp8, spec.cluster.data_sheet(), device_kind(spec)
    if sheet is not None and kind != "cpu" and FP8 not in sheet.flops:
        others = [name for name, each in CLUSTERS.items() if each.sheet is not None and FP8 in each.sheet.flops]
        message = f"compute is fp8, which devices of cluster {spec.cluster.preset} do not support"
        return [(FP8_PATH, message, f"use compute bf16, or a cluster with fp8: {', '.join(others)}")]
    recipe = fp8.chosen
    if sheet is not None and kind != "cpu" and sheet.capability < recipe.capability[0]:
        message = f"recipe {fp8.recipe} needs CUDA devices of compute capability {recipe.needs}, and cluster "
        message += f"{spec.cluster.preset} has {sheet.capability}"
        known = ((name, each.sheet) for name, each in CLUSTERS.items())
        others = [name for name, each in known if each is not None and each.capability >= recipe.capability[0]]
        hint = f"use recipe {RECIPES.default().kind}, or cluster {' or '.join(others)}"
        return [("precision.fp8.recipe", message, hint)]
    if kind == "cuda" and fp8.rest == "fp64":
        message = "rest is fp64, and products in fp8 on cuda give bf16 or fp32"
        return [("precision.fp8.rest", message, "use rest bf16; fp64 is for tests on a CPU")]
    return []


def _of_settings(spec: Spec, arch: Architecture) -> list[tuple[str, str, str]]:
    """Return settings that conflict with fp8, and patterns that match nothing."""
    fp8, instead = spec.precision.fp8, "use compute bf16"
    if spec.precision.rounded is not None:
        message = "compute is fp8, and `qat` rounds the matrices of the same products"
        return [(FP8_PATH, message, f"{instead}, or remove `qat`")]
    if faults := _in_common(spec, arch, fp8, "precision.fp8", ("compute is fp8", "a product in fp8"), instead):
        return faults
    if fp8.chosen.scales_over_tokens and spec.activation.tile_mlp != 1:
        message = f"recipe {fp8.recipe} has scales of all tokens, and tile_mlp multiplies some at a time"
        free = next(name for name, each in RECIPES.items() if not each().scales_over_tokens)
        return [("precision.fp8.recipe", message, f"use recipe {free}, or tile_mlp 1")]
    return []


def _in_common(
    spec: Spec, arch: Architecture, products: Products, block: str, words: tuple[str, str], instead: str
) -> list[tuple[str, str, str]]:
    """Return settings that conflict with fp8 and with rounded matrices, and patterns that match nothing. words: for the
    setting and for such a product. instead: a remedy."""
    (setting, product), path = words, FP8_PATH if block == "precision.fp8" else f"{block}.weights"
    if patterns := idle_patterns(arch, products):
        owners = ", ".join(scaled_matrices(arch, 1, evolve(products, skip=())))
        return [(f"{block}.skip", f"`{patterns[0]}` matches no matrix of a block", f"name some of {owners}")]
    if spec.parallel.pp.size != 1 and spec.parallel.pp.schedule in ZERO_BUBBLE:
        message = f"schedule {spec.parallel.pp.schedule} computes gradients of weights later, and {product} gives "
        return [("parallel.pp.schedule", f"{message}both together", f"use schedule interleaved_1f1b, or {instead[4:]}")]
    if arch.adapter is not None:
        message = f"{setting}, and an adapter is added to products that are not"
        return [(path, message, f"{instead}, or remove `adapter`")]
    if spec.precision.base.stores:
        message = f"{setting}, and base {spec.precision.base.kind} computes matrices for each product"
        return [(path, message, f"{instead}, or remove `base`")]
    return []


QAT_RULE: Final = "precision.qat"


@checks(
    "precision.qat",
    reads="precision.* model.* adapter adapter.* task parallel.tp.size parallel.pp.size parallel.pp.schedule "
    "compile.mode activation.mode activation.every activation.tile_mlp",
)
def check_qat(spec: Spec, arch: Architecture, layout: Layout, found: Findings) -> None:
    """Report models that quantization-aware training does not support."""
    qat, tp = spec.precision.rounded, layout.size("tp")
    if qat is None or found.failed:
        return
    words = (f"qat rounds weights to {qat.weights}", "a product of rounded matrices")
    path, message, hint, matrices = QAT_RULE, "", "", scaled_matrices(arch, 1, qat)
    inputs = f"{QAT_RULE}.activations"
    if faults := _in_common(spec, arch, qat, QAT_RULE, words, "remove `qat`"):
        ((path, message, hint),) = faults
    elif qat.activations not in ("none", qat.weights) and not (qat.inputs_in_integers and not qat.floats):
        message = f"inputs are rounded to {qat.activations}, and weights to {qat.weights}"
        path, hint = inputs, "round both to the same floats, or both to integers"
    elif qat.scales_over_tokens and spec.activation.tile_mlp != 1:
        message = f"a scale of {qat.activations} is of all tokens, and tile_mlp multiplies some at a time"
        path, hint = inputs, "use mxfp4 for weights and activations, or tile_mlp 1"
    elif not matrices:
        unfit = unfit_matrices(arch, 1, qat)
        message, hint = "qat has nothing to round: `skip` leaves out all matrices of blocks", "remove `qat`"
        if unfit:
            name, width = next(iter(unfit.items()))
            message = f"qat has nothing to round: rows of {name} have {width} numbers, not divisible by {qat.group}"
            path, hint = f"{QAT_RULE}.group", "use a smaller group, or group row"
    elif (on_ranks := unfit_matrices(arch, tp, qat)).keys() & matrices:
        name = next(each for each in on_ranks if each in matrices)
        message = f"tp {tp} cuts groups of {qat.group}: of {name} a rank has rows of {on_ranks[name]} numbers"
        path, hint = f"{QAT_RULE}.group", "use a smaller group, group row, or a smaller tp"
    elif spec.compile.mode != "none" and not _recomputes(spec, arch):
        # AOTAutograd keeps the rounded copy of each matrix of a block that is not recomputed as a whole.
        message = "compiled blocks keep their rounded matrices for the backward unless all are recomputed as a whole"
        hint = "use `activation selective` for all blocks without experts and tiles, or compile nothing"
        path = "compile.mode"
    if message:
        found.fail(QAT_RULE, FP8_CODE, path, message, hint)
    else:
        found.passed(QAT_RULE, f"{sum(map(len, matrices.values())):,} matrices are rounded to {qat.weights}")


def _recomputes(spec: Spec, arch: Architecture) -> bool:
    """Return True if each block is compiled and recomputed as a whole."""
    chosen = spec.activation
    return chosen.mode != "none" and chosen.every == 1 and chosen.tile_mlp == 1 and not arch.is_moe
