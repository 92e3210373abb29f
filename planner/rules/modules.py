"""Rules on modules: recomputation, attention kernels, tiles and quantized bases."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.latent_attention import LatentAttentionLayer
from xtrain.blocks.user_layer import UserFunction
from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.data_components import row_link
from xtrain.dsl.schema.precision import BLOCKS, Base
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.plan.architecture import HEAD, Architecture, BlockParameter, name_in_block
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.findings import Findings, checks
from xtrain.plan.hardware import (
    BLOCK_MASKS,
    CUDNN_ON,
    EXACT,
    FLASH,
    NARROWEST,
    WIDEST_CUDNN,
    FlashAttention,
    has_cudnn,
)
from xtrain.plan.mesh import Layout, device_kind
from xtrain.plan.parameters import frozen_names, quantised_names
from xtrain.plan.parameters import product_matrices as matrices_of
from xtrain.plan.resolved import exchanges, resolve_formats, resolve_tile, sums_positions


def check_modules(spec: Spec, architecture: Architecture, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Report settings without effect on the model, kernels that do not support the mesh, and actions that do not
    support the model."""
    _check_activation(spec, architecture, layout, found)
    _check_tiles(spec, architecture, layout, batch, found)
    _check_attention(spec, architecture, layout, found)
    _check_mixers(architecture, layout, found)
    _check_overlap(spec, layout, found)
    _check_deterministic(spec, found)
    _check_invariant(spec, architecture, layout, found)
    _check_actions(spec, architecture, found)


@checks("model.mixers", reads="model.* {context}")
def _check_mixers(architecture: Architecture, layout: Layout, found: Findings) -> None:
    """Check that layers that carry states get all positions of a document, but for those whose heads ranks of cp
    share."""
    layers = [layer for kind in architecture.kinds for layer in kind.block.layers()]
    whole = {layer.name for layer in layers if layer.keeps_state and not layer.attends}
    ranks = 1 if "cp" in layout.unsettled else layout.size("ring") * layout.size("ulysses")
    if whole and ranks > 1:
        message = f"the layer `{min(whole)}` carries its state from one position of a document to the next, and with "
        message += f"cp {ranks} ranks have parts of documents"
        found.fail("model.mixers", "X449", "parallel.cp.size", message, "leave cp out; fsdp, tp and pp can be used")


@checks(
    "mesh.tp.overlap",
    reads="parallel.tp.size parallel.tp.overlap parallel.tp.sequence compile.mode launch.device cluster.preset",
)
def _check_overlap(spec: Spec, layout: Layout, found: Findings) -> None:
    """Check the needs of overlapped products: torch.compile makes them, from collectives over positions, for CUDA."""
    tp, path, rule = spec.parallel.tp, "parallel.tp.overlap", "mesh.tp.overlap"
    if not tp.overlap or layout.size("tp") == 1:
        return
    if device_kind(spec) == "cpu":
        message, hint = "overlap uses memory that CUDA devices share, and the device is cpu", "use overlap false"
    elif spec.compile.mode == "none":
        message, hint = (
            "overlap needs torch.compile, and nothing is compiled",
            "add `compile {}`, or use overlap false",
        )
    elif not tp.sequence:
        message = "overlap multiplies what is gathered and scattered along the sequence, and tp.sequence is false"
        hint = "use sequence true, or overlap false"
    elif device_kind(spec) == "cuda":
        found.passed(rule, "compiled blocks multiply while pieces travel")
        return
    else:
        found.unknown(rule, "launch.device is auto: on a machine without cuda the run ends with an error")
        return
    found.fail(rule, "X446", path, message, hint)


# Path of a setting → (feature that a model of transformers' code does not support, whether a spec uses it).
_CODE: Final[dict[str, tuple[str, Callable[[Spec, Layout], bool]]]] = {
    "parallel.stack": ("this stack", lambda spec, layout: spec.parallel.execution.wraps()),
    "compile.mode": ("compilation", lambda spec, layout: spec.compile.mode != "none"),
    "model.vocab": ("`vocab = tokenizer`", lambda spec, layout: spec.model.vocab == "tokenizer"),
    "model.weights": (
        "an adapter on random weights",
        lambda spec, layout: spec.is_adapted and spec.model.weights == "none",
    ),
    "batch.neftune": ("noise on embeddings", lambda spec, layout: bool(spec.batch.neftune)),
    "rollout.replay_routing": (
        "replayed routing",
        lambda spec, layout: spec.rollout is not None and spec.rollout.replay_routing,
    ),
    "precision.compute": ("products in fp8", lambda spec, layout: spec.precision.scaled is not None),
    "precision.qat": ("rounded matrices", lambda spec, layout: spec.precision.rounded is not None),
}


@checks(
    "model.code",
    reads="model.* parallel.* activation.mode compile.mode adapter task precision.* rollout rollout.replay_routing "
    "serve collate batch.sequence batch.neftune loss",
)
def check_code(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> None:
    """Report settings that a model of transformers' code does not support."""
    if (code := architecture.own.get("code")) is None:
        return
    rule, what = "model.code", code["class"]
    for path, (feature, used) in _CODE.items():
        if used(spec, layout):
            message = f"{what} is computed by transformers' code, which does not support {feature}"
            hint = "leave it out, or use a model type that xtrain has a family for, without `code`"
            found.fail(rule, "X530", path, message, hint)
    for path, why, hint in (*_layout_faults(spec, code, layout), *_row_faults(spec, architecture, code)):
        message = f"{what} is computed by transformers' code, and {why}"
        found.fail(rule, "X530", path, message, hint)
    if code["longest"] is not None and spec.batch.sequence > code["longest"]:
        message = f"rows have {spec.batch.sequence:,} positions, and {what} has a table of {code['longest']:,}"
        found.fail(rule, "X530", "batch.sequence", message, f"use {code['longest']} or fewer")
    if architecture.head_matrices and any(each["name"] == f"{HEAD}.bias" for each in code["ends"]):
        message, hint = f"the head of {what} has a bias, and takes no adapter", "leave `lm_head` out of the targets"
        found.fail(rule, "X530", "adapter.targets", message, hint)
    if not code["packs"] and spec.serve is None and not row_link(spec.collate).packing.single:
        message = f"{what} mixes the documents of a row, as a small model of it shows"
        hint = "give each document a row of its own: `collate { … -> pack(single) -> … }`"
        found.fail(rule, "X530", "collate", message, hint)
    elif code["packs"]:
        found.passed(rule, f"{what} of transformers {code['versions']['transformers']} keeps documents of a row apart")
    else:
        found.passed(rule, f"{what} of transformers {code['versions']['transformers']} gets one document a row")


def _layout_faults(spec: Spec, code: Mapping[str, Any], layout: Layout) -> Iterator[tuple[str, str, str]]:
    """Yield the path of each layout that the code of a model cannot be distributed by, the reason, and what to do."""
    if layout.size("tp") > 1 and not code["tensor"]:
        why = "no plan of tensor parallelism gives a small model of it the same results on two ranks"
        yield "parallel.tp.size", why, "leave tp out"
    elif layout.size("tp") > 1 and spec.parallel.tp.sequence:
        hint = f"write `tp {layout.size('tp')} {{ sequence = false }}`"
        yield "parallel.tp.sequence", "its layers take all positions of a row", hint
    if layout.ep > 1 and not code["spread_experts"]:
        why = "a small model of it has no experts that compute the same on two ranks"
        yield "parallel.ep.size", why, "leave ep out"
    elif layout.ep > 1 and spec.activation.mode != "none" and not code["experts"]["repeats"]:
        why = "its routers cannot choose the experts of the forward again, which the backward sends tokens to"
        yield "activation.mode", why, "use activation none, or leave ep out"
    if layout.size("pp") > 1 and not code["stages"]:
        why = "a small model of it shows that its layers cannot be split into stages"
        yield "parallel.pp.size", why, "leave pp out"
    if "cp" not in layout.unsettled and layout.size("ring") * layout.size("ulysses") > 1 and not code["spread"]:
        yield "parallel.cp.size", "more than attention by xtrain's kernels mixes its positions", "leave cp out"


def _row_faults(spec: Spec, arch: Architecture, code: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the path of each setting that needs rows which the code of a model does not take, the reason, and what to
    do."""
    if spec.rollout is not None and not code["packs"]:
        why = "its layers mix the completions of a prompt, which are one row of a rollout"
        yield "rollout", why, "use a model whose layers keep documents apart"
    if spec.serve is not None and code["caches"] != "kernels":
        why = "its layers need more than keys and values of earlier positions, which are all that a server keeps"
        yield "serve", why, "use a model that only attention by xtrain's kernels mixes the positions of"
    gathered = {matrix.name for kind in arch.kinds for matrix in getattr(kind.block, "matrices", ()) if matrix.task}
    gathered = {name for name in gathered if re.sub(r"\d+", "", name).removesuffix(".weight") in code["gathered"]}
    if gathered:
        why = f"`{min(gathered)}` takes tokens of several rows, whose tasks cannot be told apart there"
        yield "adapter.targets" if spec.serve else "task", why, "leave it out of the targets"


@checks(
    "precision.batch_invariant",
    reads="precision.batch_invariant precision.compute precision.qat.weights precision.qat.activations precision.base "
    "compile.mode model.* {context} parallel.tp.size launch.device serve",
)
def _check_invariant(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> None:
    """Check that everything has kernels whose results do not depend on the batch."""
    if not spec.precision.batch_invariant:
        return
    rule, path = "precision.batch_invariant", "precision.batch_invariant"
    problems = list(_variant(spec, architecture, layout))
    for setting, why, hint in problems:
        found.fail(rule, "X448", setting, f"batch_invariant needs kernels of fixed shapes, and {why}", hint)
    if not problems:
        found.passed(rule, f"every part has kernels of fixed shapes, as {path} needs")


def _variant(spec: Spec, architecture: Architecture, layout: Layout) -> Iterator[tuple[str, str, str]]:
    """Yield the setting, the reason and the remedy of each part whose numbers depend on the batch."""
    other = "use a model whose positions only attention with keys and values mixes"
    layers = [layer for kind in architecture.kinds for layer in kind.block.layers()]
    if "code" in architecture.own:
        yield "model.kind", "transformers' code has kernels of its own", "use a family that xtrain computes"
    elif any(layer.keeps_state for layer in layers):
        yield "model.kind", "a layer with states is computed in pieces in training and step by step in sampling", other
    elif any(isinstance(layer, LatentAttentionLayer) for layer in layers):
        yield "model.kind", "latent attention multiplies in another order in sampling", other
    elif any(isinstance(layer, UserFunction) for layer in layers):
        yield "model.kind", "a layer of your own may compute anything", "use the layers of the family"
    if spec.compile.mode != "none":
        yield "compile.mode", "compiled kernels are made for the number of rows", "remove `compile`"
    if spec.precision.scaled is not None:
        yield "precision.compute", "scales of fp8 are of whole batches", "use bf16"
    if (rounded := spec.precision.rounded) is not None and rounded.scales_over_tokens:
        yield "precision.qat.activations", "a scale of nvfp4 is of a whole batch", "use activations none, or mxfp4"
    if spec.precision.base.stores:
        yield "precision.base.kind", "quantized matrices are decoded in pieces by the number of rows", "remove `base`"
    if spec.model.attention != "auto":
        yield "model.attention", f"attention {spec.model.attention} has none", "use attention auto"
    if "cp" not in layout.unsettled and layout.size("ring") * layout.size("ulysses") > 1:
        yield "parallel.cp.size", "ranks of cp add keys of a document in another order than one rank", "leave cp out"
    if layout.size("tp") > 2:
        yield "parallel.tp.size", "sums over more than two ranks are added in an order of the position", "use tp 2"
    if spec.serve is not None:
        yield "serve", "a server keeps keys and values in pages", "remove it"


@checks("compile.deterministic", reads="compile.mode precision.deterministic")
def _check_deterministic(spec: Spec, found: Findings) -> None:
    """Check that kernels are not chosen by their measured time, which may differ between runs."""
    if not spec.precision.deterministic or spec.compile.mode != "max_autotune":
        return
    message = "compile max_autotune chooses kernels by measured time, and precision.deterministic needs fixed ones"
    found.fail("compile.deterministic", "X448", "compile.mode", message, "use mode default, or deterministic false")


@checks("model.every.*", reads="every.{} every.{}.* {model} precision.base precision.base.*")
@checks("model.on.*", reads="on.{} on.{}.* {model} precision.base precision.base.*")
def _check_actions(spec: Spec, architecture: Architecture, found: Findings) -> None:
    """Report actions of ticks and events that the model does not support."""
    for path, action in spec.actions:
        kind, number, *_ = path.split(".")
        event = spec.events[int(number)].event if kind == "on" else ""
        faults = planned(action, PlannedAction).faults(event, architecture, spec)
        for name, (code, message, hint) in faults.items():
            found.fail(f"model.{path}", code, f"{path}.{name}".rstrip("."), message, hint)


@checks("activation.every", reads="activation.mode activation.every model.layers model.mtp")
@checks(
    "activation.save",
    reads="activation.mode activation.save parallel.ep.size parallel.tp.size parallel.tp.sequence {context}",
)
def _check_activation(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> None:
    chosen, layers = spec.activation, architecture.layers
    if chosen.mode == "none":
        return
    if chosen.every > layers:
        message = f"every {chosen.every} selects none of {layers} layers"
        found.fail("activation.every", "X418", "activation.every", message, f"use every {layers} or less")
    else:
        found.passed("activation.every", f"{layers // chosen.every} of {layers} layers are recomputed")
    if isinstance(chosen.save, Auto):
        return
    if chosen.mode == "full":
        message = "full recomputation keeps only the input of a block, so save has no effect"
        hint = "use save auto, or write `activation selective`"
        found.fail("activation.save", "X418", "activation.save", message, hint)
    elif not chosen.save:
        message = "selective recomputation that keeps nothing is full recomputation"
        hint = "use save [matmul], or write `activation full`"
        found.fail("activation.save", "X418", "activation.save", message, hint)
    elif absent := _absent(spec, layout, chosen.save):
        (word, needs), *_ = absent.items()
        others = ", ".join(each for each in chosen.save if each not in absent) or "matmul"
        message = f"save names {word}, and without {needs} there is none"
        found.fail("activation.save", "X418", "activation.save", message, f"use save [{others}]")
    else:
        found.passed("activation.save", f"{', '.join(chosen.save)} are kept")


def _absent(spec: Spec, layout: Layout, save: Sequence[str]) -> dict[str, str]:
    """Return the words of `save` whose operation no block has, each with what it needs."""
    found: dict[str, str] = {}
    if "all_to_all" in save and "cp" not in layout.unsettled and not exchanges(spec, layout):
        found["all_to_all"] = "ep or ulysses"
    if "reduce_scatter" in save and not sums_positions(spec, layout):
        found["reduce_scatter"] = "tp { sequence = true }"
    return found


@checks("activation.tile_mlp", reads="activation.tile_mlp model.* batch.micro batch.sequence {context}")
def _check_tiles(spec: Spec, architecture: Architecture, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Check that there are feed-forward layers to tile, and no more pieces than positions."""
    pieces, path = spec.activation.tile_mlp, "activation.tile_mlp"
    if pieces == 1:
        return
    positions = batch.micro * batch.sequence // (layout.size("ring") * layout.size("ulysses"))
    if not any(kind.block.tiles for kind in architecture.kinds):
        instead = "all blocks have experts instead" if architecture.is_moe else "no layer of a block can be cut"
        message = f"tile_mlp cuts feed-forward layers into pieces, and {instead}"
        found.fail(path, "X418", path, message, "use tile_mlp 1")
    elif isinstance(pieces, int) and pieces > positions and "cp" not in layout.unsettled:
        message = f"tile_mlp {pieces} is more than the {positions:,} positions of a microbatch that a rank has"
        found.fail(path, "X418", path, message, f"use tile_mlp auto, or {positions} or less")
    elif resolve_tile(spec.activation, architecture.dim, positions) is None:
        message = f"tile_mlp changes nothing, because the {positions:,} positions of a microbatch are one piece"
        found.warn(f"idle.{path}", "W401", path, message, "leave it out")
    else:
        found.passed(path, "feed-forward layers are computed in pieces of the positions")


def _without_flash(flash: FlashAttention, spec: Spec, arch: Architecture) -> str:
    """Return why a release of FlashAttention does not compute the attention of a model; empty: it does."""
    sheet, compute = spec.cluster.data_sheet(), resolve_formats(spec.precision, spec.parallel).compute
    layers = [layer for kind in arch.kinds for layer in kind.block.layers() if isinstance(layer, AttentionLayer)]
    scores = [(layer.cap, layer.sinks) for layer in layers]
    if (code := arch.own.get("code")) is not None:
        scores += [(each["cap"], sinks) for each, sinks in code["scores"]]
    if sheet is not None and sheet.capability not in flash.on:
        on = " and ".join(map(str, flash.on))
        has = f"cluster {spec.cluster.preset} has {sheet.capability}"
        return f"{flash.title} is made for compute capability {on}, and {has}"
    if compute not in ("bf16", "fp16"):
        return f"{flash.title} has kernels of bf16 and fp16, and attention is computed in {compute}"
    for width in sorted({arch.head_dim, *(layer.own(arch).head_dim for layer in layers)}):
        if width % 8 or width > flash.widest:
            kernels = f"kernels for heads of up to {flash.widest} in steps of 8"
            return f"{flash.title} has {kernels}, and these are {width} wide"
    if any(cap is not None or sinks for cap, sinks in scores):
        return f"torch passes neither sinks nor a cap of scores to {flash.title}, and this model has them"
    return ""


def _not_in_blocks(spec: Spec) -> str:
    compute = resolve_formats(spec.precision, spec.parallel).compute
    if device_kind(spec) == "cuda":
        return "the device is cuda"
    if compute not in EXACT:
        return f"computation is in {compute}"
    return "" if spec.compile.mode == "none" else "the model is compiled"


@checks("model.attention", reads="model.attention launch.device cluster.preset")
@checks(
    "model.attention_heads",
    reads="model.attention model.family model.dim model.heads model.head_dim launch.device cluster.preset precision.*",
)
@checks("mesh.ring.attention", reads="model.* {context}")
def _check_attention(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> None:
    """Check the attention kernel: a ring has its own, which works document by document and block by block; flex, cudnn
    and FlashAttention are made for cuda, blocks for a CPU."""
    kernel, ring = spec.model.attention, layout.size("ring")
    sheet, compute = spec.cluster.data_sheet(), resolve_formats(spec.precision, spec.parallel).compute
    if kernel in (*BLOCK_MASKS, *FLASH) and device_kind(spec) == "cpu":
        message = f"attention {kernel} has no backward on cpu, and launch.device is cpu"
        found.fail("model.attention", "X419", "model.attention", message, "use attention auto, or device cuda")
    elif kernel == "cudnn" and not has_cudnn(compute, architecture.head_dim):
        message = f"cudnn has kernels of bf16 for heads of {NARROWEST} to {WIDEST_CUDNN} in steps of 8, and these are "
        message += f"{architecture.head_dim} wide, computed in {compute}"
        found.fail("model.attention_heads", "X419", "model.attention", message, "use attention auto, or compute bf16")
    elif kernel == "cudnn" and sheet is not None and sheet.capability not in CUDNN_ON:
        message = f"cudnn is made for compute capability {' and '.join(map(str, CUDNN_ON))}, and cluster "
        message += f"{spec.cluster.preset} has {sheet.capability}"
        found.fail("model.attention", "X419", "model.attention", message, "use attention auto")
    elif kernel in FLASH and (reason := _without_flash(FLASH[kernel], spec, architecture)):
        found.fail("model.attention_heads", "X419", "model.attention", reason, "use attention auto")
    elif kernel == "flex" and architecture.head_dim < NARROWEST:
        message = f"flex has no kernel for heads of less than {NARROWEST}, and these are {architecture.head_dim} wide"
        hint = "use attention auto, or documents, or wider heads"
        found.fail("model.attention_heads", "X419", "model.attention", message, hint)
    elif kernel == "blocks" and (reason := _not_in_blocks(spec)):
        message = f"attention blocks is made for plain products on cpu in fp32 and fp64, and {reason}"
        found.fail("model.attention", "X419", "model.attention", message, "use attention auto")
    if "cp" in layout.unsettled or ring == 1:
        return
    if any(layer.whole_rows for kind in architecture.kinds for layer in kind.block.layers()):
        message = "an indexer chooses among all positions of a document, and ranks of a ring have blocks of them"
        hint = "use ring 1, and ulysses for all ranks of cp"
        found.fail("mesh.ring.attention", "X419", "parallel.cp.ring", message, hint)
    if kernel in ("auto", "documents"):
        return
    message = f"attention {kernel} needs whole rows, and with ring {ring} they are split"
    found.fail("mesh.ring.attention", "X419", "model.attention", message, "use attention auto, or ring 1")


BASE_RULE: Final = "model.base"
BASE_PATH: Final = "precision.base.kind"


@checks(
    "model.base", reads="precision.base precision.base.* model.* adapter adapter.* tokenizer.source parallel.tp.size"
)
def check_base(spec: Spec, arch: Architecture, layout: Layout, found: Findings) -> None:
    """Check that there is something to store, and that tensor parallelism does not cut a block."""
    base = spec.precision.base
    if not base.stores or found.failed:
        return
    if base.block not in BLOCKS:
        nearest = min(BLOCKS, key=lambda each: abs(each - base.block))
        found.fail(
            BASE_RULE,
            "X438",
            "precision.base.block",
            f"block {base.block} is not a power of two",
            f"use block {nearest}",
        )
        return
    names = quantised_names(arch, base, frozen_names(arch, spec.model.frozen))
    if not names:
        message = f"base {base.kind} has nothing to store: no matrix of a block is frozen"
        hint = 'declare an `adapter`, freeze some, as by `frozen = ["layers"]` in `model`, or leave `base` out'
        found.fail(BASE_RULE, "X438", BASE_PATH, message, hint)
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
                found.fail(BASE_RULE, "X438", BASE_PATH, problem, _remedy(base, list(extents), tp))
                return
    found.passed(BASE_RULE, f"{len(names):,} matrices are stored as {base.words()}")


def _cut(matrix: BlockParameter, tp: int, block: int) -> str:
    """Return the reason why a block of a matrix would be split between ranks, or between rows of an expert; empty if
    none is."""
    width, shape = matrix.shape[-1], " × ".join(map(str, matrix.shape))
    if matrix.expert and width % block:
        return f"rows of {matrix.name} ({shape}) are {width} wide, which is not divisible by block {block}"
    if tp > 1 and matrix.cut is not None:
        own = width // tp if matrix.cut == "row" else width
        if own % block:
            return f"tp {tp} cuts blocks of {block}: of {matrix.name} ({shape}) a rank has rows of {own} numbers"
    return ""


def _remedy(base: Base, widths: list[int], tp: int) -> str:
    """Return the remedy: the largest block that divides all widths."""
    fitting = [block for block in BLOCKS if block < base.block and all(width % block == 0 for width in widths)]
    if fitting:
        return f"write `base {base.kind} {{ block = {fitting[-1]} }}`"
    return "use a smaller tp, or leave `base` out" if tp > 1 else "leave `base` out"
