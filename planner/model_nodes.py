"""The nodes that make a model and cut it up: build → tp → ep → expert_fsdp → fsdp → root_fsdp → pp → weights."""

from attrs import asdict

from .builder import Builder
from .estimates import BYTES, block_tensors
from .resolved import Resolved, attention_kernels
from .sharding import shard_axes
from .stages import stage_layers, stages_of_rank
from .units import bytes_text, count_text, plural


def add_model(graph: Builder, run: Resolved) -> str:
    """Add the chain; the id of its last node, after which the model holds its initial weights."""
    last = _build(graph, run)
    for part in (_tensor_parallel, _expert_parallel, _expert_fsdp, _fsdp, _root_fsdp, _pipeline):
        last = part(graph, run, last)
    args = {"seed": run.spec.experiment.seed, "init_std": run.architecture.init_std}
    does = f"draw weights, normal with deviation {run.architecture.init_std:g}, each from its name and the seed"
    return graph.add("setup", "setup.weights", does, args=args, after=((last, "model"),))


def _build(graph: Builder, run: Resolved) -> str:
    arch, spec = run.architecture, run.spec
    args = {
        "architecture": asdict(arch),
        "attention": attention_kernels(spec.model.attention),
        "params": run.formats.params,
        "z_loss": spec.loss.z_loss,
        "chunk_bytes": int(spec.loss.chunk.value),
    }
    size = f"{count_text(run.inventory.total)} parameters"
    if arch.is_moe:
        size += f", {count_text(run.inventory.active)} active"
    blocks = plural(arch.layers, "block")
    does = f"{arch.family}: {blocks} of width {arch.dim}, {size}, {run.formats.params}, on the meta device"
    return graph.add("setup", "setup.build_model", does, args=args, after=("setup.bootstrap",))


def _tensor_parallel(graph: Builder, run: Resolved, last: str) -> str:
    size, tp = run.size("tp"), run.spec.parallel.tp
    if size == 1:
        return last
    arch = run.architecture
    # Projections of attention and of a dense feed-forward layer in every block, the embedding, the head.
    matches = arch.layers * (4 if arch.is_moe else 7) + 2
    args = {"size": size, "sequence": tp.sequence, "loss": tp.loss, "matches": matches}
    extras = [name for name, on in (("sequence between blocks", tp.sequence), ("loss over vocabulary", tp.loss)) if on]
    does = f"split {plural(matches, 'matrix')} over tp={size}: {arch.heads // size} of {arch.heads} heads a rank"
    if extras:
        does += f"; {' and '.join(extras)} sharded"
    return graph.add("setup", "setup.parallel.tp", does, args=args, axes=("tp",), after=((last, "model"),))


def _expert_parallel(graph: Builder, run: Resolved, last: str) -> str:
    size, arch = run.layout.ep, run.architecture
    if size == 1:
        return last
    does = f"keep {arch.experts // size} of {arch.experts} experts a rank, tokens travel over ep={size}"
    args = {"size": size, "matches": arch.layers}
    return graph.add("setup", "setup.parallel.ep", does, args=args, axes=("ep",), after=((last, "model"),))


def _expert_fsdp(graph: Builder, run: Resolved, last: str) -> str:
    arch, cuts = run.architecture, run.cuts
    axes = run.wide("ep_replicate", "ep_fsdp")
    if not arch.is_moe or not (axes or run.formats.compute != run.formats.params):
        return last
    experts = [t for t in block_tensors(run.inventory) if t.expert]
    before, after = sum(map(cuts.gathered, experts)), sum(map(cuts.largest, experts))
    args = {
        "pattern": "layers.*.mlp.experts",
        "matches": arch.layers,
        "dimension": cuts.expert_dimension,
        "compute": run.formats.compute,
        "reduce": run.formats.reduce,
        "reshard": run.spec.parallel.fsdp.reshard,
        "replicate": run.size("replicate"),
        "fsdp": cuts.ep_fsdp,
    }
    does = f"shard experts of {plural(arch.layers, 'block')}" + _cut_text(run, axes, before, after)
    return graph.add("setup", "setup.parallel.expert_fsdp", does, args=args, axes=axes, after=((last, "model"),))


def _fsdp_axes(run: Resolved) -> tuple[str, ...]:
    return run.wide("replicate", *shard_axes(run.spec.parallel))


def _needs_fsdp(run: Resolved) -> bool:
    """One process that computes in the format it stores has nothing to gather, sum or convert."""
    return bool(_fsdp_axes(run)) or run.formats.compute != run.formats.params


def _fsdp(graph: Builder, run: Resolved, last: str) -> str:
    if not _needs_fsdp(run):
        return last
    layers, fsdp = run.architecture.layers, run.spec.parallel.fsdp
    dense = [t for t in block_tensors(run.inventory) if not t.expert]
    before, after = sum(map(run.cuts.gathered, dense)), sum(map(run.cuts.largest, dense))
    args = {
        "pattern": "layers.*",
        "matches": layers,
        "compute": run.formats.compute,
        "reduce": run.formats.reduce,
        "reshard": fsdp.reshard,
        "replicate": run.size("replicate"),
        "fsdp": run.cuts.fsdp,
    }
    axes = _fsdp_axes(run)
    does = f"shard {plural(layers, 'block')}" + _cut_text(run, axes, before, after)
    return graph.add("setup", "setup.parallel.fsdp", does, args=args, axes=axes, after=((last, "model"),))


def _cut_text(run: Resolved, axes: tuple[str, ...], before: int, after: int) -> str:
    """What cutting does to the blocks of one pipeline rank, `before` and `after` elements a block."""
    stages = run.spec.parallel.pp.stages_per_rank
    spans = stage_layers(run.architecture.layers, run.size("pp") * stages)
    held = max(
        sum(spans[stage][1] - spans[stage][0] + 1 for stage in stages_of_rank(rank, run.size("pp"), stages))
        for rank in range(run.size("pp"))
    )
    width = BYTES[run.formats.params]
    if not axes:
        return f": computed in {run.formats.compute}, kept in {run.formats.params}"
    cut = f" over {run.product(axes)}: {bytes_text(before * held * width)} → {bytes_text(after * held * width)} a rank"
    return f"{cut}, gradients summed in {run.formats.reduce}"


def _root_fsdp(graph: Builder, run: Resolved, last: str) -> str:
    if not _needs_fsdp(run):
        return last
    args = {"compute": run.formats.compute, "reduce": run.formats.reduce}
    axes = _fsdp_axes(run)
    size = run.architecture.vocab * run.architecture.dim * (1 if run.architecture.tie_embeddings else 2)
    does = f"the same for embedding, last norm and head: {count_text(size)} parameters, gathered once a microbatch"
    return graph.add("setup", "setup.parallel.root_fsdp", does, args=args, axes=axes, after=((last, "model"),))


def _pipeline(graph: Builder, run: Resolved, last: str) -> str:
    size, pp = run.size("pp"), run.spec.parallel.pp
    if size == 1:
        return last
    layers = stage_layers(run.architecture.layers, size * pp.stages_per_rank)
    args = {"size": size, "schedule": pp.schedule, "stages_per_rank": pp.stages_per_rank, "layers": layers}
    counts = [final - first + 1 for first, final in layers]
    each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    does = f"{plural(len(layers), 'stage')} of {each} layers over pp={size}, schedule {pp.schedule}"
    return graph.add("setup", "setup.parallel.pp", does, args=args, axes=("pp",), after=((last, "model"),))
