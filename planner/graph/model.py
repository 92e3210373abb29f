"""Nodes that build a model and prepare its modules: loss, axes, freeze, quantize, float8, qat, activation, compile."""

import math
from collections.abc import Mapping
from typing import Any, Final

from xtrain.contracts.stacks import stack_of
from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.dsl.schema.losses import ADVANTAGES, OLD, Loss
from xtrain.dsl.schema.precision import ROW
from xtrain.plan.canonical import portable
from xtrain.plan.graph import INITIAL, ORDER, Builder, Rule, Rules, learns, resumes, rounds, stays
from xtrain.plan.hardware import FLASH, HIGHEST, QUERIES
from xtrain.plan.kernels import attention_kernels, compiles_loss, compiles_parts, pointwise_kernels, resolve_save
from xtrain.plan.mesh import AXES, device_kind
from xtrain.plan.parameters import matrix_numbers, quantised_bytes, unfit_matrices
from xtrain.plan.resolved import Resolved
from xtrain.plan.weight_layout import draws_head, stored_rows
from xtrain.planner.derive.modules import modules_of
from xtrain.planner.graph.parallel import (
    BLOCKS,
    OFFLOAD,
    SPREADING,
    add_pipeline,
    add_teacher_model,
    add_teacher_weights,
)
from xtrain.planner.graph.saving import UNDER_ADAPTER, add_base, add_pretrained
from xtrain.text.units import BYTES, bytes_text, count_text, plural

_INIT_STD: Final = learns("model.init_std", INITIAL)
MOST_MODULES: Final = 8  # modules named in a node's description


def add_model(graph: Builder, resolved: Resolved, after: str) -> str:
    """Add the nodes that build the model; return the id of the last one, after which it holds its initial weights."""
    last = _temperature(graph, resolved, _loss(graph, resolved, _build(graph, resolved, after)))
    for part in (
        _further,
        _tasks,
        *SPREADING,
        _freeze,
        _quantise,
        _float8,
        _rounded,
        _activation,
        _routing_replay,
        _tile_mlp,
        _async_tensor_parallel,
        _compile,
    ):
        last = part(graph, resolved, last)
    last = add_pipeline(graph, resolved, stack_of(resolved.spec).shard(graph, resolved, last))
    teacher = add_teacher_model(graph, resolved, last)
    last = add_base(graph, resolved, add_pretrained(graph, resolved, _weights(graph, resolved, last)))
    last = _embedding_noise(graph, resolved, _dropout(graph, resolved, _adapter(graph, resolved, last)))
    add_teacher_weights(graph, resolved, teacher, last)
    return stack_of(resolved.spec).wrap(graph, resolved, last)


def _adapter_rules(args: Mapping[str, Any]) -> Rules:
    path = f"task.{args['task']}.adapter" if "task" in args else "adapter"
    drawn = {name: learns(f"{path}.{name}", INITIAL) for name in args}
    return {**drawn, **dict.fromkeys(("kind", "seed", "task"))}


@resumes("setup.decompose", "matrices")
@resumes("setup.adapter", by=_adapter_rules)
def _adapter(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the initial values of adapters, after the initial values of the model under them."""
    adapter = resolved.architecture.adapter
    if adapter is None or resolved.spec.serve is not None:  # a server draws them when clients request them
        return last
    if isinstance(adapter, TaskAdapters):
        for task, each in adapter.tasks.items():
            if task in resolved.adapter_files:
                last = _read_adapter(graph, resolved, last, task)
                continue
            args = {"kind": each.kind, "seed": resolved.spec.experiment.seed, "task": task, **each.args()}
            does = f"task {task}: {each.does()}"
            id, after = f"setup.adapter.{task}", ((last, "model"),)
            last = graph.add("setup", "setup.adapter", does, id=id, args=args, after=after)
        return last
    if resolved.adapter_files:
        return _read_adapter(graph, resolved, last)
    if adapter.decomposes:
        args: dict[str, Any] = {
            "matrices": len({tensor.adapter for tensor in resolved.inventory.tensors if tensor.begun})
        }
        does = f"{adapter.does()}; a resumed run reads its own checkpoint instead"
        return graph.add(
            "setup", "setup.decompose", does, args=args, axes=resolved.wide(*AXES), after=((last, "model"),)
        )
    args = {"kind": adapter.kind, "seed": resolved.spec.experiment.seed, **adapter.args()}
    return graph.add("setup", "setup.adapter", adapter.does(), args=args, after=((last, "model"),))


def _adapter_file_rules(args: Mapping[str, Any]) -> Rules:
    path = f"task.{args['task']}.adapter.from" if "task" in args else "adapter.from"
    folder = Rule(path, "none", "it is only read at the start of a run")
    return {"digest": learns(path, INITIAL), "folder": folder, "task": None}


@resumes("setup.read_adapter", by=_adapter_file_rules)
def _read_adapter(graph: Builder, resolved: Resolved, last: str, task: str = "") -> str:
    """Add the node that reads an adapter saved by PEFT. task: its task, if there are several."""
    files = resolved.adapter_files[task]
    does = f"task {task}: " if task else ""
    does += f"read the adapter of {files.folder}: {plural(len(files.files.tensors), 'tensor')}, each rank its own "
    does += "shards; a resumed run reads its own checkpoint instead"
    args: dict[str, Any] = {"folder": portable(files.folder), "digest": files.digest}
    if task:
        args["task"] = task
    id = f"setup.adapter.{task}" if task else "setup.read_adapter"
    return graph.add("setup", "setup.read_adapter", does, id=id, args=args, after=((last, "model"),))


@resumes("setup.dropout", "seed matrices", share=learns("adapter.dropout", "another share is dropped from here on"))
def _dropout(graph: Builder, resolved: Resolved, last: str) -> str:
    adapter = resolved.architecture.adapter
    if adapter is None or not adapter.drops:
        return last
    matrices, share = len({tensor.adapter for tensor in resolved.inventory.tensors} - {""}), adapter.drops
    does = f"drop {share:.3g} of the inputs of the adapters of {plural(matrices, 'matrix')}, and divide the rest by "
    does += f"{1 - share:.3g}; drawn from the seed, the row's number in the run, position, matrix and feature"
    args = {"seed": resolved.spec.experiment.seed, "share": share, "matrices": matrices}
    return graph.add("setup", "setup.dropout", does, args=args, after=((last, "model"),))


@resumes(
    "setup.embedding_noise",
    "seed",
    switch=True,
    most=learns("batch.neftune", "noise of another size is added from here on"),
)
def _embedding_noise(graph: Builder, resolved: Resolved, last: str) -> str:
    noise = resolved.spec.batch.neftune
    if not noise:
        return last
    most = noise / math.sqrt(resolved.batch.sequence * resolved.architecture.dim)
    does = f"add uniform noise to the embeddings in training, at most ±{most:.3g} = {noise:g} / "
    does += f"√({resolved.batch.sequence:,} · {resolved.architecture.dim:,}); drawn from the seed, the row's number in "
    does += "the run, position and feature"
    args = {"seed": resolved.spec.experiment.seed, "most": most}
    return graph.add("setup", "setup.embedding_noise", does, args=args, after=((last, "model"),))


@resumes(
    "setup.weights", "seed", offload=OFFLOAD, init_std=_INIT_STD, scales=learns("parametrization.base_width", INITIAL)
)
@resumes(
    "setup.read_weights",
    switch=True,
    digest=learns("model.weights", UNDER_ADAPTER),
    **dict.fromkeys(
        ("folder", "repo", "revision"), Rule("model.folder", "none", "it is only read at the start of a run")
    ),
)
def _weights(graph: Builder, resolved: Resolved, last: str) -> str:
    args: dict[str, Any] = {"offload": resolved.spec.parallel.fsdp.offload}
    files = resolved.weights
    if files is None:
        args = {"seed": resolved.spec.experiment.seed, "init_std": resolved.architecture.init_std, **args}
        does = (
            f"initialize weights: normal with standard deviation {resolved.architecture.init_std:g}, each from its "
            "name and the seed"
        )
        if (code := resolved.architecture.own.get("code")) is not None:
            does = f"initialize weights as {code['class']} does, each layer from its name and the seed"
        if resolved.spec.parametrization is not None:
            from xtrain.plan.parametrization import scales_of

            scales = scales_of(resolved.spec.parametrization, resolved.architecture)
            args["scales"] = {role: each.std for role, each in scales.items() if each.std != 1}
            factors = ", ".join(f"{role} × {factor:.3g}" for role, factor in args["scales"].items())
            does += f"; by its role: {factors}" if factors else ""
        return graph.add("setup", "setup.weights", does, args=args, after=((last, "model"),))
    last = graph.add("setup", "setup.weights", "allocate all parameters", args=args, after=((last, "model"),))
    size = bytes_text(files.bytes)
    folder = resolved.spec.model.folder
    assert folder is not None
    does = f"read weights of {folder}: {plural(len(files.files), 'file')} with {size} of {files.words}, each "
    does += "rank its own shards"
    if resolved.cuts.base is not None:
        does += " and, whole, each matrix of which it has a quantized shard"
    does += "; a resumed run reads its own checkpoint instead"
    # The plan does not depend on the location of a machine's cache, in which ranks find the snapshot again.
    where = {"repo": folder.repo, "revision": folder.revision} if folder.repo else {"folder": folder.path}
    args = {**where, "digest": files.digest}
    if (new := resolved.architecture.vocab - stored_rows(resolved.architecture, files)) > 0:
        does += f"; {plural(new, 'row')} of embedding and head missing there start as the mean of the others"
        args["grows"] = True
    return _head(graph, resolved, graph.add("setup", "setup.read_weights", does, args=args, after=((last, "model"),)))


@resumes("setup.head", "seed", init_std=_INIT_STD)
def _head(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the initial values of a reward head on the weights of a language model."""
    arch, files = resolved.architecture, resolved.weights
    if files is None or not draws_head(arch, files):
        return last
    does = (
        f"initialize the reward head, {arch.dim:,} numbers, normal with standard deviation {arch.init_std:g}, from "
        "the seed"
    )
    args = {"seed": resolved.spec.experiment.seed, "init_std": arch.init_std}
    return graph.add("setup", "setup.head", does, args=args, after=((last, "model"),))


@resumes(
    "setup.build_model",
    "architecture params stages owners rows",
    attention=rounds("model.attention", "another kernel computes attention"),
    pointwise=rounds("compile.mode", "other kernels compute norms, rotations and SwiGLU"),
    code=rounds("model.code", "another version of transformers' code computes the model"),
    z_loss=learns("loss.z_loss", "the loss uses the new weight from here on"),
    chunk_bytes=rounds("loss.chunk", ORDER),
)
def _build(graph: Builder, resolved: Resolved, after: str) -> str:
    arch, spec, pipeline = resolved.architecture, resolved.spec, resolved.pipeline
    args: dict[str, Any] = {
        "architecture": arch.to_json(),
        "attention": attention_kernels(resolved),
        "pointwise": pointwise_kernels(resolved),
        "params": resolved.formats.params,
        **_logits(spec.loss),
        "stages": [list(span) for span in pipeline.spans],
        "owners": [list(stages) for stages in pipeline.owners],
    }
    if (code := arch.own.get("code")) is not None:
        args["code"] = code["digest"]
    if arch.is_moe:
        args["rows"] = resolved.batch.rows
    size = f"{count_text(resolved.inventory.total)} parameters"
    if arch.is_moe:
        size += f", {count_text(resolved.inventory.active)} active"
    does = f"{arch.title}: {plural(arch.blocks, 'block')} of width {arch.dim}, {size}"
    if arch.mtp:
        does += f", {plural(arch.mtp, 'module')} after them to predict further tokens"
    if args["attention"]["cpu"] == "blocks" and device_kind(spec) != "cuda":
        slower = ", unless fp32 products are computed as `highest`" if HIGHEST in args["attention"] else ""
        does += f"; on a CPU attention computes {QUERIES} queries of a row at a time{slower}"
    if args["attention"]["cuda"] == "cudnn" and device_kind(spec) != "cpu":
        does += "; on CUDA attention of rows of one document is cuDNN's, of others flex with a block mask"
    if (flash := FLASH.get(args["attention"]["cuda"])) is not None:
        does += f"; attention is {flash.title}'s, of all documents in one call"
    if args["pointwise"]["cpu"] == "fused" and device_kind(spec) != "cuda":
        does += "; on a CPU norms, rotations and SwiGLU are one pass each"
    if resolved.size("pp") > 1:
        does += f"; a rank builds its {_range_text(pipeline.blocks())}"
    does += ", with a reward head" if not arch.has_logits else ""
    does += f", {resolved.formats.params}, on the meta device"
    return graph.add("setup", "setup.build_model", does, args=args, after=((after, "meshes"),))


def _logits(loss: Loss) -> dict[str, Any]:
    """Return the arguments of the loss on logits; empty for a reward head."""
    if not loss.of_logits:
        return {}
    return {"z_loss": loss.z_loss, "chunk_bytes": int(loss.chunk.value)}


@resumes("setup.loss", by=dict.fromkeys)  # the loss is compared as a whole
def _loss(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the loss if it is not the model's own cross-entropy."""
    chosen = resolved.spec.loss
    if chosen.plain:
        return last
    args = {"kind": chosen.kind, **chosen.args()}
    return graph.add("setup", "setup.loss", chosen.does(), args=args, after=((last, "model"),))


@resumes("setup.temperature", "temperature")
def _temperature(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the temperature, so that losses use the distribution that completions are drawn from."""
    rollout = resolved.spec.rollout
    if rollout is None or rollout.temperature == 1 or not {ADVANTAGES, OLD}.intersection(resolved.spec.loss.columns):
        return last
    args = {"temperature": rollout.temperature}
    does = f"training losses use logits / {rollout.temperature:g}, the distribution that completions are drawn from"
    return graph.add("setup", "setup.temperature", does, args=args, after=((last, "model"),))


@resumes("setup.mtp", "modules", weight=learns("model.mtp_weight", "further tokens count by it from here on"))
def _further(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the node of modules that predict further tokens."""
    mtp, weight = resolved.architecture.mtp, resolved.spec.model.mtp_weight
    if not mtp:
        return last
    which = "the token after the next one" if mtp == 1 else f"the tokens 2 to {mtp + 1} ahead"
    does = f"{plural(mtp, 'module')} after the last block, with the embedding and the head of the model, "
    does += f"predict{'s' if mtp == 1 else ''} {which} in training; the mean of the cross-entropies counts {weight:g}; "
    does += "not used in evaluation, generation and exports"
    return graph.add("setup", "setup.mtp", does, args={"modules": mtp, "weight": weight}, after=((last, "model"),))


def _range_text(counts: list[int]) -> str:
    """Return a number of blocks as text: `1 block`, or `7 to 8 blocks` if ranks differ."""
    low, high = min(counts), max(counts)
    return plural(low, "block") if low == high else f"{low} to {high} blocks"


@resumes("setup.tasks", tasks=learns("task", "adapters are trained on other datasets"))
def _tasks(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the assignment of rows to adapters."""
    tasks = resolved.spec.tasks
    if not tasks or resolved.spec.serve is not None:  # clients name the adapter of their rows
        return last
    each = "; ".join(f"{name} on {', '.join(task.reads)}" for name, task in tasks.items())
    args = {"tasks": {name: list(task.reads) for name, task in tasks.items()}}
    does = f"rows use the adapter of their task: {each}"
    return graph.add("setup", "setup.tasks", does, args=args, after=((last, "model"),))


@resumes("setup.freeze", "parameters format")
def _freeze(graph: Builder, resolved: Resolved, last: str) -> str:
    inventory = resolved.inventory
    if inventory.trained == inventory.total:
        return last
    names = [each.name for each in modules_of(inventory, trained=False)]
    shown = ", ".join(names[:MOST_MODULES])
    shown += f" and {len(names) - MOST_MODULES} more" if len(names) > MOST_MODULES else ""
    frozen = inventory.total - inventory.trained
    does = f"freeze {count_text(frozen)} parameters (no gradients, no optimizer state): {shown}"
    if resolved.formats.frozen != resolved.formats.params:
        does += f"; kept in {resolved.formats.frozen}"
    args = {"parameters": frozen, "format": resolved.formats.frozen}
    return graph.add("setup", "setup.freeze", does, args=args, after=((last, "model"),))


@resumes("setup.quantise", "base matrices")
def _quantise(graph: Builder, resolved: Resolved, last: str) -> str:
    base = resolved.cuts.base
    if base is None:
        return last
    own = [each for each in resolved.inventory.tensors if each.quantised]
    size, numbers = sum(quantised_bytes(base, each.shape) for each in own), sum(each.size for each in own)
    before = bytes_text(BYTES[resolved.formats.frozen] * numbers)
    does = f"store {plural(len(own), 'matrix')} (frozen, {count_text(numbers)} numbers) as {base.words()}: "
    does += (
        f"{bytes_text(size)} instead of {before}; dequantized to {resolved.formats.compute} for each product, and "
        "again "
    )
    does += "in the backward"
    args = {"base": base.args(), "matrices": len(own)}
    return graph.add("setup", "setup.quantise", does, args=args, after=((last, "model"),))


@resumes("setup.float8", "recipe matrices")
def _float8(graph: Builder, resolved: Resolved, last: str) -> str:
    fp8, matrices = resolved.formats.fp8, resolved.scaled_matrices
    if fp8 is None:
        return last
    recipe, count = fp8.chosen, sum(map(len, matrices.values()))
    args = {"recipe": fp8.recipe, "matrices": {name: list(layers) for name, layers in matrices.items()}}
    does = (
        f"multiply {plural(count, 'matrix')} of blocks, {count_text(matrix_numbers(resolved.architecture, matrices))} "
    )
    does += f"numbers, in fp8: {recipe.about}; everything else in {fp8.rest}"
    others = [
        f"`{name}`, {width} wide"
        for name, width in unfit_matrices(resolved.architecture, resolved.size("tp"), fp8).items()
    ]
    others = ["experts"] * resolved.architecture.is_moe + others
    does += f", as are {' and '.join(others)}" if others else ""
    axes = resolved.wide(*(("ring", "ulysses") if recipe.scales_over_tokens else ()), "tp")
    axes = axes if recipe.shares_scales else ()
    does += f"; ranks of {' · '.join(axes)} share scales" if axes else ""
    kind = device_kind(resolved.spec)
    does += {"cpu": "; emulated on a CPU", "auto": "; CUDA kernels on a GPU, emulated on a CPU"}.get(kind, "")
    return graph.add("setup", "setup.float8", does, args=args, axes=axes, after=((last, "model"),))


@resumes("setup.qat", "weights group activations matrices")
def _rounded(graph: Builder, resolved: Resolved, last: str) -> str:
    qat, matrices, arch = resolved.formats.qat, resolved.scaled_matrices, resolved.architecture
    if qat is None:
        return last
    count, numbers = sum(map(len, matrices.values())), count_text(matrix_numbers(arch, matrices))
    does = f"round {plural(count, 'matrix')} of blocks, {numbers} numbers, for each product: {qat.words()}; gradients "
    does += "pass through, parameters are not rounded"
    others = [f"`{name}`, rows of {width}" for name, width in unfit_matrices(arch, 1, qat).items()]
    others = ["experts"] * arch.is_moe + others
    does += f"; not rounded: {', '.join(others)}" if others else ""
    context = ("ring", "ulysses") if qat.scales_over_tokens else ()
    shares = qat.weights == "nvfp4" or qat.group == ROW or qat.inputs_in_integers
    axes = resolved.wide(*context, "tp") if shares else ()
    does += f"; ranks of {' · '.join(axes)} share scales" if axes else ""
    args = {"weights": qat.weights, "group": qat.group, "activations": qat.activations}
    args["matrices"] = {name: list(layers) for name, layers in matrices.items()}
    return graph.add("setup", "setup.qat", does, args=args, axes=axes, after=((last, "model"),))


@resumes(
    "setup.activation",
    "pattern matches",
    switch=True,
    **dict.fromkeys(("mode", "every", "save"), rounds("activation", "the same operations, some of them recomputed")),
)
def _activation(graph: Builder, resolved: Resolved, last: str) -> str:
    chosen = resolved.spec.activation
    if chosen.mode == "none":
        return last
    save = list(resolve_save(resolved)) if chosen.mode == "selective" else []
    args = {"mode": chosen.mode, "every": chosen.every, "save": save, "pattern": BLOCKS, "matches": resolved.recomputed}
    saved = f"keep results of {', '.join(save)}" if save else "keep only block inputs"
    saved += " outside compiled layers" if save and compiles_parts(resolved) else ""
    again = sum((layer + 1) % chosen.every == 0 for kind in resolved.kinds if kind.runs_back for layer in kind.layers)
    does = f"recompute {again} of {plural(resolved.architecture.layers, 'block')} in the backward: {saved}"
    return graph.add("setup", "setup.activation", does, args=args, after=((last, "model"),))


@resumes("setup.routing_replay", "matches")
def _routing_replay(graph: Builder, resolved: Resolved, last: str) -> str:
    if resolved.spec.activation.mode == "none" or resolved.layout.ep == 1:
        return last
    every = resolved.spec.activation.every
    matches = resolved.matches([layer for layer in resolved.architecture.expert_layers if (layer + 1) % every == 0])
    if not any(matches):  # only blocks without experts are recomputed
        return last
    args = {"matches": matches}
    blocks = plural(sum(matches), "block")
    does = f"route tokens in the backward of {blocks} to the same experts as in the forward"
    return graph.add("setup", "setup.routing_replay", does, args=args, after=((last, "model"),))


@resumes(
    "setup.tile_mlp",
    "pattern matches",
    switch=True,
    positions=rounds("activation.tile_mlp", "gradients of feed-forward matrices are summed piece by piece"),
)
def _tile_mlp(graph: Builder, resolved: Resolved, last: str) -> str:
    tile, layers = resolved.tile, resolved.tiled
    if tile is None or not layers:
        return last
    pieces = -(-resolved.positions // tile)
    does = f"compute the feed-forward layers of {plural(len(layers), 'block')} in {pieces} pieces of {tile:,} "
    does += "positions; recompute each in the backward"
    args = {"positions": tile, "pattern": BLOCKS, "matches": resolved.matches(layers)}
    return graph.add("setup", "setup.tile_mlp", does, args=args, after=((last, "model"),))


# torch's names. CUDA graphs are excluded, because FSDP gives a block's weights different memory each time.
COMPILE_MODES: Final = {"default": "default", "max_autotune": "max-autotune-no-cudagraphs"}


@resumes("setup.async_tp")
def _async_tensor_parallel(graph: Builder, resolved: Resolved, last: str) -> str:
    if not resolved.async_tp:
        return last
    does = "let torch.compile overlap tp communication with matrix products, piece by piece"
    return graph.add("setup", "setup.async_tp", does, axes=("tp",), after=((last, "model"),))


@resumes(
    "setup.compile",
    "pattern matches",
    lengths=stays("batch.pad_to"),
    switch=True,
    **dict.fromkeys(("mode", "cuda"), rounds("compile.mode", "compiled blocks round differently")),
)
def _compile(graph: Builder, resolved: Resolved, last: str) -> str:
    mode = resolved.spec.compile.mode
    if mode == "none":
        return last
    args: dict[str, Any] = {"mode": COMPILE_MODES[mode], "pattern": BLOCKS, "matches": resolved.pipeline.blocks()}
    does = (
        f"torch.compile of {plural(resolved.architecture.layers, 'block')}, each separately; compiled in the first step"
    )
    if (pad_to := resolved.spec.batch.pad_to) and (lengths := -(-resolved.batch.sequence // pad_to)) > 1:
        args["lengths"] = lengths
        does += f", and again for each of the {lengths} lengths of rows"
    also = {"loss": compiles_loss(resolved), "experts": resolved.architecture.is_moe}
    words = [word for word, on in also.items() if on and device_kind(resolved.spec) != "cpu"]
    if words:
        args["cuda"] = words
        texts = {"loss": "the cross-entropy of a piece of logits", "experts": "the activation and the sum of experts"}
        does += f"; on cuda also {' and '.join(texts[word] for word in words)}"
    return graph.add("setup", "setup.compile", does, args=args, after=((last, "model"),))
