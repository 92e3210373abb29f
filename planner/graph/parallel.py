"""Nodes that spread a model over ranks: tp, cp, ep, FSDP, prefetch and pipeline, and the nodes of a live teacher."""

from itertools import chain
from typing import Any, Final

from xtrain.contracts.stacks import stack_of
from xtrain.plan.architecture import EMBEDDING, HEAD, expert_module
from xtrain.plan.canonical import portable
from xtrain.plan.graph import ORDER, Builder, learns, resumes, rounds, stays
from xtrain.plan.kernels import attention_kernels
from xtrain.plan.mesh import AXES, tensor_rules
from xtrain.plan.parameters import block_tensors
from xtrain.plan.pipeline import end_names
from xtrain.plan.resolved import Resolved
from xtrain.text.units import BYTES, bytes_text, count_text, plural

BLOCKS: Final = "layers.*"


OFFLOAD: Final = rounds("parallel.fsdp.offload", "states live and are updated on another device")
TEACHER: Final = "the divergence is measured from it from here on"
_REDUCE: Final = rounds("parallel.fsdp.reduce", "gradients are summed in another format")


@resumes(
    "setup.parallel.tp",
    "size rules",
    sequence=rounds("parallel.tp.sequence", ORDER),
    loss=rounds("parallel.tp.loss", ORDER),
)
def _tensor_parallel(graph: Builder, resolved: Resolved, last: str) -> str:
    size, tp, arch = resolved.size("tp"), resolved.spec.parallel.tp, resolved.architecture
    if size == 1:
        return last
    rules = [
        {"pattern": pattern, "style": style, "matches": _owners(resolved, pattern)}
        for pattern, style in tensor_rules(arch)
    ]
    args = {"size": size, "sequence": tp.sequence, "loss": tp.loss, "rules": rules}
    extras = [name for name, on in (("sequence between blocks", tp.sequence), ("loss over vocabulary", tp.loss)) if on]
    matrices = sum(sum(rule["matches"]) for rule in rules)
    does = f"split {plural(matrices, 'matrix')} over tp={size}"
    if "code" not in arch.own:  # whose attention may have all heads on every rank
        does += f": {arch.heads // size} of {arch.heads} heads a rank"
    if extras:
        does += f"; {' and '.join(extras)} sharded"
    return graph.add("setup", "setup.parallel.tp", does, args=args, axes=("tp",), after=((last, "model"),))


def _owners(resolved: Resolved, pattern: str) -> list[int]:
    """Return the number of modules on each pipeline coordinate that a rule of tensor parallelism matches."""
    pipeline = resolved.pipeline
    if pattern.startswith(BLOCKS):
        owner = pattern.removeprefix(f"{BLOCKS}.")
        arch = resolved.architecture
        having = [kind for kind in arch.kinds if any(each.owner == owner for each in kind.block.parameters(arch))]
        return resolved.matches({layer for kind in having for layer in kind.layers})
    behind = resolved.architecture.embeds_behind
    found = []
    for pp in range(resolved.size("pp")):
        first, last = pipeline.holds_first(pp), pipeline.holds_last(pp)
        found.append(int({EMBEDDING: first or (last and behind), HEAD: last}[pattern.partition(".")[0]]))
    return found


@resumes("setup.parallel.cp", "ring ulysses matches")
def _context_parallel(graph: Builder, resolved: Resolved, last: str) -> str:
    if resolved.context == 1:
        return last
    ring, ulysses, arch = resolved.size("ring"), resolved.size("ulysses"), resolved.architecture
    attends = (kind.layers for kind in arch.kinds for layer in kind.block.layers() if layer.attends)
    args = {"ring": ring, "ulysses": ulysses, "matches": resolved.matches(chain.from_iterable(attends))}
    heads = arch.heads // resolved.size("tp")
    parts = []
    if ulysses > 1:
        parts.append(f"{heads // ulysses} of {heads} heads a rank (ulysses={ulysses})")
    if ring > 1:
        parts.append(f"keys and values rotate through {ring} ranks (ring={ring})")
    recurrent = _recurrent_text(resolved)
    parts += [recurrent] if recurrent else []
    does = f"attention over rows sharded over {resolved.context} ranks: {', '.join(parts)}"
    axes = resolved.wide("ring", "ulysses")
    return graph.add("setup", "setup.parallel.cp", does, args=args, axes=axes, after=((last, "model"),))


def _recurrent_text(resolved: Resolved) -> str:
    """Return how ranks of context parallelism share recurrent mixers; empty without such layers."""
    arch, batch, ring = resolved.architecture, resolved.batch, resolved.size("ring")
    if not any(layer.keeps_state for kind in arch.kinds for layer in kind.block.layers()):
        return ""
    from xtrain.blocks.recurrent import RecurrentLayer  # not for other models

    layers = [each for kind in arch.kinds for each in kind.block.layers() if isinstance(each, RecurrentLayer)]
    exchange, width = "positions are exchanged for heads of recurrent mixers", BYTES[resolved.formats.compute]
    positions, formats = batch.micro * batch.sequence, (width, max(width, BYTES["fp32"]))
    heads = min(layer.ring_heads(arch, resolved.size("tp"), resolved.size("ulysses")) for layer in layers)
    most = min(layer.most_documents(ring, heads, positions, *formats) for layer in layers)
    if ring == 1 or most < batch.micro:
        return exchange
    text = f"states of recurrent mixers pass through {ring} ranks"
    if heads % ring:
        share = resolved.size("tp") * resolved.size("ulysses")
        gathered = max(layer.document_bytes(ring, *formats) for layer in layers) // share
        return f"{text}, {bytes_text(gathered)} for each document of a microbatch"
    return f"{text}; {exchange} in microbatches with more than {plural(most, 'document')}"


@resumes("setup.parallel.ep", "size pattern matches meanwhile")
def _expert_parallel(graph: Builder, resolved: Resolved, last: str) -> str:
    size, arch = resolved.layout.ep, resolved.architecture
    if size == 1:
        return last
    does = f"place {arch.experts // size} of {arch.experts} experts on each rank; exchange tokens over ep={size}"
    args: dict[str, Any] = {"size": size, "pattern": f"{BLOCKS}.{expert_module(arch)}"}
    args["matches"] = resolved.matches(arch.expert_layers)
    if resolved.shared_meanwhile:
        args["meanwhile"] = "shared"
        does += ", overlapped with shared experts, in the forward and in the backward"
    return graph.add("setup", "setup.parallel.ep", does, args=args, axes=("ep",), after=((last, "model"),))


# Nodes that let several ranks compute one row.
SPREADING: Final = (_tensor_parallel, _context_parallel, _expert_parallel)


@resumes(
    "setup.parallel.fsdp setup.parallel.expert_fsdp",
    "pattern matches dimension compute",
    reduce=_REDUCE,
    offload=OFFLOAD,
    reshard=stays("parallel.fsdp.reshard", "memory and traffic change"),
)
def add_fsdp(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the nodes that form FSDP units, for stacks that use them; return the id of the last node."""
    for part in (_expert_fsdp, _fsdp, _root_fsdp, _prefetch):
        last = part(graph, resolved, last)
    return last


def _expert_fsdp(graph: Builder, resolved: Resolved, last: str) -> str:
    if not resolved.expert_fsdp:
        return last
    layers = resolved.architecture.expert_layers
    axes = resolved.wide("ep_replicate", "ep_fsdp")
    args = {
        "pattern": f"layers.*.{expert_module(resolved.architecture)}",
        "matches": resolved.matches(layers),
        "dimension": resolved.cuts.expert_dimension,
        **_policy(resolved, resolved.reshard),
    }
    does = f"shard experts of {plural(len(layers), 'block')}" + _cut_text(resolved, axes, experts=True)
    return graph.add("setup", "setup.parallel.expert_fsdp", does, args=args, axes=axes, after=((last, "model"),))


def _policy(resolved: Resolved, reshard: bool) -> dict[str, Any]:
    formats, offload = resolved.formats, resolved.spec.parallel.fsdp.offload
    return {"compute": formats.compute, "reduce": formats.reduce, "reshard": reshard, "offload": offload}


def _dense_axes(resolved: Resolved) -> tuple[str, ...]:
    return resolved.summed_axes


def _fsdp(graph: Builder, resolved: Resolved, last: str) -> str:
    if not resolved.dense_fsdp:
        return last
    axes, layers = _dense_axes(resolved), resolved.architecture.layers
    args = {"pattern": "layers.*", "matches": resolved.pipeline.blocks(), **_policy(resolved, resolved.reshard)}
    does = f"shard {plural(layers, 'block')}" + _cut_text(resolved, axes, experts=False)
    if not axes and resolved.expert_fsdp:
        does = f"make FSDP units of {plural(layers, 'block')}, in which experts sum their gradients once a step"
    return graph.add("setup", "setup.parallel.fsdp", does, args=args, axes=axes, after=((last, "model"),))


def _cut_text(resolved: Resolved, axes: tuple[str, ...], *, experts: bool) -> str:
    """Return text on cutting the blocks of the pipeline rank with the most: their experts, or the rest."""
    host = ", in host memory" if resolved.spec.parallel.fsdp.offload else ""
    if not axes:
        if resolved.formats.compute == resolved.formats.params:
            return host.replace(",", ":", 1)
        return f": computed in {resolved.formats.compute}, kept in {resolved.formats.params}{host}"
    cuts, width, sizes = resolved.cuts, BYTES[resolved.formats.params], {}
    for kind in resolved.architecture.kinds:
        tensors = [t for t in block_tensors(resolved.inventory, kind.first) if t.expert == experts]
        sizes |= dict.fromkeys(kind.layers, (cuts.gathered(tensors), cuts.largest(tensors)))
    elements = [[sizes[layer] for layer in resolved.pipeline.layers(pp)] for pp in range(resolved.size("pp"))]
    most = max(tuple(map(sum, zip(*each, strict=True))) for each in elements)
    whole, piece = (bytes_text(each * width) for each in most)
    return (
        f" over {resolved.product(axes)}: {whole} → {piece} a rank{host}, gradients summed in {resolved.formats.reduce}"
    )


@resumes("setup.parallel.root_fsdp", "pattern matches dimension compute reshard", reduce=_REDUCE, offload=OFFLOAD)
def _root_fsdp(graph: Builder, resolved: Resolved, last: str) -> str:
    if not resolved.dense_fsdp:
        return last
    # The head's backward directly follows its forward, and the embedding's forward comes first: freeing gains nothing.
    args = _policy(resolved, reshard=False)
    ends = {t.name: t for t in resolved.inventory.tensors if not t.name.startswith("layers.")}
    largest = max(
        resolved.cuts.gathered(ends[name] for name in end_names(resolved.architecture, resolved.pipeline, pp))
        for pp in range(resolved.size("pp"))
    )
    does = f"shard embedding, last norm and head: {count_text(largest)} parameters, gathered once a microbatch"
    does += ", before anything is computed" if resolved.cuts.fsdp > 1 else ""
    if resolved.size("pp") > 1:
        does = f"shard the ends of the model: up to {count_text(largest)} parameters, gathered once a step"
    axes = _dense_axes(resolved)
    return graph.add("setup", "setup.parallel.root_fsdp", does, args=args, axes=axes, after=((last, "model"),))


@resumes("setup.parallel.prefetch", "units")
def _prefetch(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the order in which a forward gathers units; FSDP derives the reverse order of a backward itself."""
    if not resolved.prefetch:
        return last
    arch = resolved.architecture  # modules that predict further tokens are not part of every forward
    experts = [each for each in arch.expert_layers if each < arch.blocks] if resolved.expert_fsdp else []
    counts = (map(len, resolved.pipeline.owners), resolved.matches(range(arch.blocks)), resolved.matches(experts))
    units = [sum(each) for each in zip(*counts, strict=True)]
    apart = resolved.spec.activation.mode != "none" and resolved.expert_fsdp
    does = "gather the next unit's parameters before the forward of a unit: the ends of the model, then its "
    does += "blocks, each before its experts" if resolved.expert_fsdp else "blocks"
    does += "; experts gather none ahead, because blocks are recomputed" if apart else ""
    does += "; reverse order in the backward"
    return graph.add("setup", "setup.parallel.prefetch", does, args={"units": units}, after=((last, "model"),))


@resumes(
    "setup.parallel.pp",
    "size stages_per_rank",
    schedule=rounds("parallel.pp.schedule", "microbatches are added up in another order"),
)
def add_pipeline(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the node that connects stages, if there are several; return the id of the last node."""
    size, pp, pipeline = resolved.size("pp"), resolved.spec.parallel.pp, resolved.pipeline
    if size == 1:
        return last
    args = {"size": size, "schedule": pp.schedule, "stages_per_rank": resolved.staging.stages_per_rank}
    counts = [final - first + 1 for first, final in pipeline.spans]
    shown = " + ".join(map(str, counts))
    if len(counts) > 8:
        shown = f"{min(counts)} to {max(counts)}" if min(counts) != max(counts) else f"{counts[0]}"
    does = f"{plural(len(counts), 'stage')} of {shown} layers over pp={size}, schedule {pp.schedule}"
    return graph.add("setup", "setup.parallel.pp", does, args=args, axes=("pp",), after=((last, "model"),))


@resumes("setup.teacher_model", "architecture attention format owner cuts")
def add_teacher_model(graph: Builder, resolved: Resolved, model: str) -> str:
    """Add the nodes that build a live teacher, after the node `model`; return the teacher's id, empty without one."""
    own, learns_from = resolved.teacher, resolved.spec.loss.learns_from
    if own is None or learns_from is None:
        return ""
    arch = own.architecture
    cuts = Builder()
    last = model
    for part in SPREADING:
        last = part(cuts, own, last)
    stack_of(own.spec).shard(cuts, own, last)
    owner = resolved.pipeline.owner(len(resolved.pipeline.spans) - 1)
    args: dict[str, Any] = {
        "architecture": arch.to_json(),
        "attention": attention_kernels(own),
        "format": own.formats.compute,
        "owner": owner,
        "cuts": [{"op": node.op, "args": node.args} for node in cuts.nodes],
    }
    does = f"build the teacher {learns_from.folder}: {arch.title}, {plural(arch.layers, 'block')} of width {arch.dim}, "
    does += f"{count_text(own.inventory.total)} parameters in {own.formats.compute}, frozen and not in checkpoints"
    does += f", on pp {owner}, which has the head" if resolved.size("pp") > 1 else ""
    does += "".join(f"; {node.does}" for node in cuts.nodes)
    if resolved.size("tp") > own.size("tp"):
        does += f"; unsharded on each rank of tp={resolved.size('tp')}, which does not divide it"
    axes = resolved.wide(*(axis for axis in AXES if axis != "pp"))
    return graph.add("setup", "setup.teacher_model", does, args=args, axes=axes, after=((model, "model"),))


@resumes("setup.teacher_weights", offload=OFFLOAD)
@resumes("setup.read_teacher", **dict.fromkeys(("folder", "digest"), learns("loss.teacher", TEACHER)))
def add_teacher_weights(graph: Builder, resolved: Resolved, teacher: str, model: str) -> None:
    """Add the nodes that load a live teacher, after its own node `teacher` and the loaded `model`."""
    own, learns_from = resolved.teacher, resolved.spec.loss.learns_from
    if own is None or learns_from is None or own.weights is None:
        return
    offload, bytes = own.spec.parallel.fsdp.offload, own.state_bytes(own.inventory.tensors)
    does = (
        f"allocate the teacher, {bytes_text(bytes)} a rank; its forward of a microbatch precedes the head of the model"
    )
    after = ((teacher, "teacher"), (model, "model"))
    last = graph.add("setup", "setup.teacher_weights", does, args={"offload": offload}, after=after)
    size = bytes_text(sum(tensor.bytes for tensor in own.weights.tensors.values()))
    does = f"read weights of {learns_from.folder}: {plural(len(own.weights.files), 'file')} with {size}, each rank its "
    does += "own shards"
    args = {"folder": portable(learns_from.folder), "digest": own.weights.digest}
    graph.add("setup", "setup.read_teacher", does, args=args, axes=resolved.wide(*AXES), after=((last, "teacher"),))
