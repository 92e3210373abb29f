"""The nodes that spread a model's state over ranks: expert_fsdp → fsdp → root_fsdp → prefetch →
pipeline."""

from typing import Any

from xtrain.planner.architecture import expert_module
from xtrain.planner.graph.builder import Builder
from xtrain.planner.mesh.stages import end_names
from xtrain.planner.model.inventory import block_tensors
from xtrain.planner.resolved import Resolved
from xtrain.planner.units import BYTES, bytes_text, count_text, plural


def add_fsdp(graph: Builder, run: Resolved, last: str) -> str:
    """Add the nodes that make units of FSDP, for stacks that use them; the id of the last node."""
    for part in (_expert_fsdp, _fsdp, _root_fsdp, _prefetch):
        last = part(graph, run, last)
    return last


def _expert_fsdp(graph: Builder, run: Resolved, last: str) -> str:
    if not run.expert_fsdp:
        return last
    layers = run.architecture.expert_layers
    axes = run.wide("ep_replicate", "ep_fsdp")
    args = {
        "pattern": f"layers.*.{expert_module(run.architecture)}",
        "matches": run.matches(layers),
        "dimension": run.cuts.expert_dimension,
        **_policy(run, run.reshard),
    }
    does = f"shard experts of {plural(len(layers), 'block')}" + _cut_text(run, axes, experts=True)
    return graph.add("setup", "setup.parallel.expert_fsdp", does, args=args, axes=axes, after=((last, "model"),))


def _policy(run: Resolved, reshard: bool) -> dict[str, Any]:
    formats, offload = run.formats, run.spec.parallel.fsdp.offload
    return {"compute": formats.compute, "reduce": formats.reduce, "reshard": reshard, "offload": offload}


def _dense_axes(run: Resolved) -> tuple[str, ...]:
    return run.summed_axes


def _fsdp(graph: Builder, run: Resolved, last: str) -> str:
    if not run.dense_fsdp:
        return last
    axes, layers = _dense_axes(run), run.architecture.layers
    args = {"pattern": "layers.*", "matches": run.pipeline.blocks(), **_policy(run, run.reshard)}
    does = f"shard {plural(layers, 'block')}" + _cut_text(run, axes, experts=False)
    if not axes and run.expert_fsdp:
        does = f"make units of {plural(layers, 'block')}, in which the experts sum their gradients once a step"
    return graph.add("setup", "setup.parallel.fsdp", does, args=args, axes=axes, after=((last, "model"),))


def _cut_text(run: Resolved, axes: tuple[str, ...], *, experts: bool) -> str:
    """What cutting does to the blocks of one pipeline rank, of those with the most: to their experts, or the rest."""
    host = ", in host memory" if run.spec.parallel.fsdp.offload else ""
    if not axes:
        if run.formats.compute == run.formats.params:
            return host.replace(",", ":", 1)
        return f": computed in {run.formats.compute}, kept in {run.formats.params}{host}"
    cuts, width, sizes = run.cuts, BYTES[run.formats.params], {}
    for kind in run.architecture.kinds:
        tensors = [t for t in block_tensors(run.inventory, kind.first) if t.expert == experts]
        sizes |= dict.fromkeys(kind.layers, (cuts.gathered(tensors), cuts.largest(tensors)))
    elements = [[sizes[layer] for layer in run.pipeline.layers(pp)] for pp in range(run.size("pp"))]
    most = max(tuple(map(sum, zip(*each, strict=True))) for each in elements)
    whole, piece = (bytes_text(each * width) for each in most)
    return f" over {run.product(axes)}: {whole} → {piece} a rank{host}, gradients summed in {run.formats.reduce}"


def _root_fsdp(graph: Builder, run: Resolved, last: str) -> str:
    if not run.dense_fsdp:
        return last
    # The head's backward follows its forward, and the embedding's forward comes first: nothing is gained by letting go.
    args = _policy(run, reshard=False)
    ends = {t.name: t for t in run.inventory.tensors if not t.name.startswith("layers.")}
    largest = max(
        run.cuts.gathered(ends[name] for name in end_names(run.architecture, run.pipeline, pp))
        for pp in range(run.size("pp"))
    )
    does = f"the same for embedding, last norm and head: {count_text(largest)} parameters, gathered once a microbatch"
    if run.size("pp") > 1:
        does = f"the same for the ends of the model, up to {count_text(largest)} parameters, gathered once a step"
    axes = _dense_axes(run)
    return graph.add("setup", "setup.parallel.root_fsdp", does, args=args, axes=axes, after=((last, "model"),))


def _prefetch(graph: Builder, run: Resolved, last: str) -> str:
    """The order in which units are gathered in a forward; in a backward it is the other way round, as FSDP finds out by
    itself."""
    if not run.prefetch:
        return last
    arch = run.architecture  # further modules are not part of every forward
    experts = [each for each in arch.expert_layers if each < arch.blocks] if run.expert_fsdp else []
    counts = (map(len, run.pipeline.owners), run.matches(range(arch.blocks)), run.matches(experts))
    units = [sum(each) for each in zip(*counts, strict=True)]
    apart = run.spec.activation.mode != "none" and run.expert_fsdp
    does = "ask for the parameters of the next unit before one computes its forward: the ends of the model, then its "
    does += "blocks, each before its experts" if run.expert_fsdp else "blocks"
    does += "; experts ask for none, as blocks are computed again" if apart else ""
    does += "; backwards the other way round"
    return graph.add("setup", "setup.parallel.prefetch", does, args={"units": units}, after=((last, "model"),))


def add_pipeline(graph: Builder, run: Resolved, last: str) -> str:
    """Add the node that connects stages, where there are several; the id of the last node."""
    size, pp, pipeline = run.size("pp"), run.spec.parallel.pp, run.pipeline
    if size == 1:
        return last
    args = {"size": size, "schedule": pp.schedule, "stages_per_rank": run.staging.stages_per_rank}
    counts = [final - first + 1 for first, final in pipeline.spans]
    shown = " + ".join(map(str, counts))
    if len(counts) > 8:
        shown = f"{min(counts)} to {max(counts)}" if min(counts) != max(counts) else f"{counts[0]}"
    does = f"{plural(len(counts), 'stage')} of {shown} layers over pp={size}, schedule {pp.schedule}"
    return graph.add("setup", "setup.parallel.pp", does, args=args, axes=("pp",), after=((last, "model"),))
