"""The nodes of one optimizer step, in the order in which they run."""

from typing import Any

from .builder import Builder
from .mesh import AXES
from .resolved import Resolved
from .sharding import folded_axes
from .units import count_text, flops_text, plural


def add_step(graph: Builder, run: Resolved, after: str, flops_per_step: int) -> str:
    """Add the chain; the id of its last node."""
    spec, batch = run.spec, run.batch
    everyone = run.wide(*AXES)
    last = after

    def then(op: str, does: str, args: dict[str, Any] | None = None, axes: tuple[str, ...] = (), id: str = "") -> None:
        nonlocal last
        last = graph.add("step", op, does, id=id, args=args, axes=axes, after=(last,))

    readers = run.pipeline.readers
    rows = plural(batch.rows // run.layout.mesh.data_ranks, "row")
    does = f"take {rows} a data rank from the loader"
    if len(readers) < run.size("pp"):
        does += f", on pp {' and '.join(map(str, readers))}, which hold the ends of the model"
    then("step.fetch", does, {"readers": readers}, run.wide("replicate", "fsdp"))
    if len(readers) < run.size("pp"):
        does = f"the lengths of documents go from pp {readers[0]} to the stages that read no rows"
        then("step.share_outline", does, {"source": readers[0]}, ("pp",))
    agree = "one all-reduce" if everyone else "count"
    then("step.agree", f"{agree}: valid tokens of the step, stop requests, clock", axes=everyone)
    then("step.zero_gradients", "release the gradients of the step before")
    share = flops_per_step / run.layout.mesh.world_size
    does = f"{plural(batch.accumulate, 'microbatch')}, loss summed and divided by the tokens of the whole step"
    op = "step.forward_backward"
    if run.size("pp") > 1:
        op, does = "step.pipeline", f"{does}; {_bubble(run)}"
    then(op, f"{does}; {flops_text(share)} a rank", {"accumulate": batch.accumulate}, everyone, "step.forward_backward")
    _add_syncs(run, then)
    clip = spec.optimizer.clip
    if clip is None:
        then("step.gradient_norm", "global gradient norm, for the record; nothing is clipped", axes=everyone)
    else:
        then("step.clip", f"global gradient norm, scaled down to {clip:g}", {"max_norm": clip}, everyone)
    then("step.check_finite", "stop if loss or gradient norm is not a number, before it reaches the weights")
    then("step.schedule", "learning rate of this step, a closed form of its number")
    then("step.optimizer", f"{spec.optimizer.kind} updates the parameters a rank owns")
    if (speed := run.architecture.router_bias_speed) > 0:
        does = f"move each expert's bias by {speed:g} towards an even load, from the counts of all ranks"
        then("step.router_bias", does, {"speed": speed}, everyone)
    then("step.measure", "add the step to what the next log line speaks of")
    return last


def _add_syncs(run: Resolved, then: Any) -> None:
    """Sums of gradients that FSDP does not make."""
    tp, parallel = run.size("tp"), run.spec.parallel
    if tp > 1 and not run.dense_fsdp:
        does = f"sum gradients of norms and other weights that tp={tp} does not cut"
        then("step.tensor_grad_sync", does, {"axes": ["tp"]}, ("tp",))
    if run.size("pp") > 1 and run.architecture.tie_embeddings:
        table = count_text(run.architecture.vocab * run.architecture.dim)
        does = f"sum the gradients of the embedding, {table} parameters, and of its copy, the head on the last stage"
        then("step.tied_grad_sync", does, {"axes": ["pp"]}, ("pp",))
    unfolded = run.wide(*(axis for axis in ("ring", "ulysses") if axis not in folded_axes(parallel)))
    if unfolded:
        does = f"sum gradients over {run.product(unfolded)}, which fsdp does not cover"
        then("step.context_grad_sync", does, {"axes": list(unfolded)}, unfolded)


def _bubble(run: Resolved) -> str:
    """What a pipeline leaves idle, of the time of a step: (p - 1) / (v · m + p - 1) for p ranks, m microbatches and v
    stages on a rank (Narayanan et al., arXiv 2104.04473); zero-bubble schedules fill most of it."""
    size, schedule = run.size("pp"), run.spec.parallel.pp.schedule
    if schedule in ("zero_bubble", "zbv"):
        return f"{schedule} fills the bubble with weight gradients"
    turns = run.staging.stages_per_rank * run.batch.accumulate
    return f"bubble {(size - 1) / (turns + size - 1):.0%}"
