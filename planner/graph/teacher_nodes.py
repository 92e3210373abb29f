"""`setup.teacher_model`, `setup.teacher_weights`, `setup.read_teacher`: a teacher that computes beside the model of the
run."""

from typing import Any

from xtrain.planner.attention_kernels import attention_kernels
from xtrain.planner.canonical import portable
from xtrain.planner.graph.builder import Builder
from xtrain.planner.graph.spread_nodes import SPREADING
from xtrain.planner.mesh.mesh import AXES
from xtrain.planner.resolved import Resolved
from xtrain.planner.units import bytes_text, count_text, plural


def add_teacher_model(graph: Builder, run: Resolved, model: str) -> str:
    """What builds it, behind the node `model`; the id of its node, empty where no teacher is live."""
    own, learns_from = run.teacher, run.spec.loss.learns_from
    if own is None or learns_from is None:
        return ""
    arch = own.architecture
    cuts = Builder()
    last = model
    for part in SPREADING:
        last = part(cuts, own, last)
    own.stack.shard(cuts, own, last)
    owner = run.pipeline.owner(len(run.pipeline.spans) - 1)
    args: dict[str, Any] = {
        "architecture": arch.to_json(),
        "attention": attention_kernels(own),
        "format": own.formats.compute,
        "owner": owner,
        "cuts": [{"op": node.op, "args": node.args} for node in cuts.nodes],
    }
    does = f"beside the model, {learns_from.folder}: {arch.title}, {plural(arch.layers, 'block')} of width {arch.dim}, "
    does += f"{count_text(own.inventory.total)} parameters in {own.formats.compute}, neither trained nor in checkpoints"
    does += f", on pp {owner}, which has the head" if run.size("pp") > 1 else ""
    does += "".join(f"; {node.does}" for node in cuts.nodes)
    if run.size("tp") > own.size("tp"):
        does += f"; whole on each rank of tp={run.size('tp')}, which does not divide it"
    axes = run.wide(*(axis for axis in AXES if axis != "pp"))
    return graph.add("setup", "setup.teacher_model", does, args=args, axes=axes, after=((model, "model"),))


def add_teacher_weights(graph: Builder, run: Resolved, teacher: str, model: str) -> None:
    """What gives it its values, behind its own node `teacher`, and behind `model`, with which that of the run has its
    own."""
    own, learns_from = run.teacher, run.spec.loss.learns_from
    if own is None or learns_from is None or own.weights is None:
        return
    offload, bytes = own.spec.parallel.fsdp.offload, own.state_bytes(own.inventory.tensors)
    does = f"give memory to the teacher, {bytes_text(bytes)} a rank; it computes each microbatch before the head does"
    after = ((teacher, "teacher"), (model, "model"))
    last = graph.add("setup", "setup.teacher_weights", does, args={"offload": offload}, after=after)
    size = bytes_text(sum(tensor.bytes for tensor in own.weights.tensors.values()))
    does = f"read weights of {learns_from.folder}: {plural(len(own.weights.files), 'file')} with {size}, each rank its "
    does += "own pieces"
    args = {"folder": portable(learns_from.folder), "digest": own.weights.digest}
    graph.add("setup", "setup.read_teacher", does, args=args, axes=run.wide(*AXES), after=((last, "teacher"),))
