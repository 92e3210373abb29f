"""`setup.reference.NAME`: the log-probabilities that a reference model gives the labels of a dataset."""

from typing import Any, Final

from xtrain.dsl.schema.losses import ADAPTER_OFF, INITIAL, ReferredLoss
from xtrain.planner.canonical import portable
from xtrain.planner.data.data_rules import evaluated
from xtrain.planner.data.loss_rules import is_measured
from xtrain.planner.graph.builder import Builder
from xtrain.planner.mesh.mesh import AXES
from xtrain.planner.model.inventory import forward_flops
from xtrain.planner.model.reference import kept_tensors, reference_files
from xtrain.planner.model.tasks import task_of
from xtrain.planner.plan import Estimates
from xtrain.planner.resolved import Resolved
from xtrain.planner.units import BYTES, bytes_text, flops_text, plural, seconds_text
from xtrain.planner.weights.files import LOADED

OP: Final = "setup.reference"
KEPT: Final = "setup.rollout_reference"
SOME_ROWS: Final = 1000  # whose forward is said to take so many seconds


def add_references(
    graph: Builder, run: Resolved, estimates: Estimates, model: str, collate: str
) -> tuple[tuple[str, str], ...]:
    """Add a node for each dataset that is trained on, or whose evaluations measure the loss; their ids, and what is
    taken from them. model, collate: the nodes behind which the model has its first values, and rows can be read."""
    loss = run.spec.loss
    if not isinstance(loss, ReferredLoss) or not loss.computed:
        return ()
    if run.spec.rollout is not None:
        return (_kept(graph, run, loss.reference, model),)
    files = reference_files(run.spec)
    form = "fp64" if run.formats.compute == "fp64" else "fp32"
    whose = {INITIAL: "by the weights that the run begins with", ADAPTER_OFF: "by the model under the adapter"}
    args: dict[str, Any] = {"reference": loss.reference, "format": form}
    if files is None:
        by = whose[loss.reference]
    else:
        args |= {"reference": portable(files.folder), "digest": files.digest}
        size = bytes_text(sum(tensor.bytes for tensor in files.tensors.values()))
        formats = ", ".join(LOADED[each] for each in files.formats if each in LOADED)
        by = f"by the model in {files.folder} ({plural(len(files.files), 'file')} with {size} of {formats}), which "
        by += "takes the place of that of the run meanwhile"
    cost = _cost(run, estimates)
    found: list[tuple[str, str]] = []
    # One that is trained on may also be evaluated by a command.
    wanted = [name for name in dict.fromkeys((*run.training, *evaluated(run.spec))) if is_measured(run.spec, name)]
    held_out = [name for name in wanted if run.spec.datasets[name].holdout.value > 0]
    for name in dict.fromkeys((*run.training, *held_out)):
        parts = ["training"] * (name in run.training) + ["hold-out"] * (name in held_out)
        task = task_of(run.spec, name)
        own = {"task": task} if task is not None and loss.reference == INITIAL else {}
        of = {"training": f"of {name}", "hold-out": f"of what {name} holds out"}[parts[0]]
        of += " and of what it holds out" if len(parts) > 1 else ""
        does = f"log-probabilities of the labels {of} {by}: read from the cache, or computed once, {cost}, and kept "
        does += f"there, {BYTES[form]} bytes a token"
        after = ((model, "model"), (collate, "microbatches"))
        id = graph.add(
            "setup",
            OP,
            does,
            id=f"{OP}.{name}",
            args={"dataset": name, **args, **own, **({"parts": parts} if parts != ["training"] else {})},
            axes=run.wide(*AXES),
            after=after,
        )
        found.append((id, "log-probabilities"))
        if loss.mismatched:
            does = (
                f"the same of the labels {of} behind the prompts of other documents of their row: from the cache, or "
            )
            does += f"computed once, {cost}"
            again = graph.add(
                "setup",
                OP,
                does,
                id=f"{OP}.{name}.mismatched",
                args={"dataset": name, **args, **own, "parts": parts, "mismatched": True},
                axes=run.wide(*AXES),
                after=((id, "log-probabilities"),),
            )
            found.append((again, "log-probabilities"))
    return tuple(found)


def _kept(graph: Builder, run: Resolved, reference: str, model: str) -> tuple[str, str]:
    """The node that keeps what a reference of completions differs by from the model."""
    most = max(run.state_bytes(kept_tensors(run, own)) for own in run.parameters_by_pp)
    whose = {INITIAL: "the weights that the run begins with", ADAPTER_OFF: "the model under the adapter"}[reference]
    does = f"the reference of completions is {whose}: {bytes_text(most)} that training changes are kept on a rank"
    args = {"reference": reference, "bytes": most}
    id = graph.add("setup", KEPT, does, args=args, axes=run.wide(*AXES), after=((model, "model"),))
    return id, "weights of the reference"


def _cost(run: Resolved, estimates: Estimates) -> str:
    """Of a forward of each row."""
    sequence = run.batch.sequence
    flops = int(forward_flops(run.architecture, sequence) * sequence)
    text = f"a forward of {flops_text(flops)} a row"
    if estimates.times is None:
        return text
    seconds = estimates.times.step * SOME_ROWS * flops / estimates.flops_per_step
    return f"{text}, about {seconds_text(seconds)} for {SOME_ROWS:,}"
