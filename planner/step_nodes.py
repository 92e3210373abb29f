"""The nodes of one optimizer step, in the order in which they run."""

from typing import Any

from .builder import Builder
from .mesh import AXES
from .resolved import Resolved
from .sharding import folded_axes
from .units import flops_text, plural


def add_step(graph: Builder, run: Resolved, after: str, flops_per_step: int) -> str:
    """Add the chain; the id of its last node."""
    spec, batch = run.spec, run.batch
    everyone = run.wide(*AXES)
    last = after

    def then(op: str, does: str, args: dict[str, Any] | None = None, axes: tuple[str, ...] = ()) -> None:
        nonlocal last
        last = graph.add("step", op, does, args=args, axes=axes, after=(last,))

    rows = plural(batch.rows // run.layout.mesh.data_ranks, "row")
    then("step.fetch", f"take {rows} a data rank from the loader", axes=run.wide("replicate", "fsdp"))
    agree = "one all-reduce" if everyone else "count"
    then("step.agree", f"{agree}: valid tokens of the step, stop requests, clock", axes=everyone)
    then("step.zero_gradients", "release the gradients of the step before")
    share = flops_per_step / run.layout.mesh.world_size
    then(
        "step.forward_backward",
        f"{plural(batch.accumulate, 'microbatch')}, loss summed and divided by the tokens of the whole step; "
        f"{flops_text(share)} a rank",
        {"accumulate": batch.accumulate},
        everyone,
    )
    unfolded = run.wide(*(axis for axis in ("ring", "ulysses") if axis not in folded_axes(spec.parallel)))
    if unfolded:
        does = f"sum gradients over {run.product(unfolded)}, which fsdp does not cover"
        then("step.context_grad_sync", does, {"axes": list(unfolded)}, unfolded)
    clip = spec.optimizer.clip
    if clip is None:
        then("step.gradient_norm", "global gradient norm, for the record; nothing is clipped", axes=everyone)
    else:
        then("step.clip", f"global gradient norm, scaled down to {clip:g}", {"max_norm": clip}, everyone)
    then("step.check_finite", "stop if loss or gradient norm is not a number, before it reaches the weights")
    then("step.schedule", "learning rate of this step, a closed form of its number")
    then("step.optimizer", f"{spec.optimizer.kind} updates the parameters a rank owns")
    then("step.measure", "add the step to what the next log line speaks of")
    return last
