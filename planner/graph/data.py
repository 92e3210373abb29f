"""Nodes that turn documents into microbatches: tokenizer, data, references, collate chain, loader."""

from typing import Any, Final

from xtrain.contracts.data import PlannedLink
from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.data import Dataset
from xtrain.dsl.schema.data_components import PACKINGS, RowLink, row_link, tokenizer_kind
from xtrain.dsl.schema.losses import ADAPTER_OFF, INITIAL, ReferredLoss
from xtrain.plan.arithmetic import microbatches_text
from xtrain.plan.canonical import portable
from xtrain.plan.data import form_text, node_ids, resolve_chain, source_args
from xtrain.plan.estimates import Estimates
from xtrain.plan.graph import Builder, learns, resumes, rounds, stays
from xtrain.plan.groups import task_of
from xtrain.plan.mesh import AXES
from xtrain.plan.parameters import forward_flops
from xtrain.plan.resolved import Resolved
from xtrain.planner.data.rules import evaluated
from xtrain.planner.data.training import is_measured
from xtrain.planner.derive.model import kept_tensors, reference_files
from xtrain.planner.graph.parallel import TEACHER
from xtrain.planner.graph.rollouts import add_prompts
from xtrain.text.units import BYTES, bytes_text, count_text, flops_text, plural, seconds_text

OP: Final = "setup.reference"
KEPT: Final = "setup.rollout_reference"
SOME_ROWS: Final = 1000  # number of rows whose forward time is shown


@resumes(OP, "dataset reference digest format task parts mismatched")
def add_references(
    graph: Builder, resolved: Resolved, estimates: Estimates, model: str, collate: str
) -> tuple[tuple[str, str], ...]:
    """Add a node for each dataset that is trained on, or whose evaluations measure the loss; return (id, value taken
    from it). model, collate: nodes after which the model has its first values, and rows can be read."""
    loss = resolved.spec.loss
    if not isinstance(loss, ReferredLoss) or not loss.computed:
        return ()
    if resolved.spec.rollout is not None:
        return (_kept(graph, resolved, loss.reference, model),)
    files = reference_files(resolved.spec)
    form = "fp64" if resolved.formats.compute == "fp64" else "fp32"
    whose = {INITIAL: "under the initial weights of the run", ADAPTER_OFF: "with the adapter off"}
    args: dict[str, Any] = {"reference": loss.reference, "format": form}
    if files is None:
        by = whose[loss.reference]
    else:
        args |= {"reference": portable(files.folder), "digest": files.digest}
        size = bytes_text(files.bytes)
        by = f"under the model in {files.folder} ({plural(len(files.files), 'file')} with {size} of {files.words}), "
        by += "which replaces the run's model meanwhile"
    cost = _cost(resolved, estimates)
    found: list[tuple[str, str]] = []
    # A training dataset may also be evaluated by a command.
    wanted = [
        name
        for name in dict.fromkeys((*resolved.training, *evaluated(resolved.spec)))
        if is_measured(resolved.spec, name)
    ]
    held_out = [name for name in wanted if resolved.spec.datasets[name].holdout.value > 0]
    for name in dict.fromkeys((*resolved.training, *held_out)):
        parts = ["training"] * (name in resolved.training) + ["hold-out"] * (name in held_out)
        task = task_of(resolved.spec, name)
        own = {"task": task} if task is not None and loss.reference == INITIAL else {}
        of = {"training": f"of {name}", "hold-out": f"of held-out rows of {name}"}[parts[0]]
        of += " and its held-out rows" if len(parts) > 1 else ""
        does = f"log-probabilities of the labels {of} {by}: from the cache, else computed once ({cost}) and cached, "
        does += f"{BYTES[form]} bytes a token"
        after = ((model, "model"), (collate, "microbatches"))
        id = graph.add(
            "setup",
            OP,
            does,
            id=f"{OP}.{name}",
            args={"dataset": name, **args, **own, **({"parts": parts} if parts != ["training"] else {})},
            axes=resolved.wide(*AXES),
            after=after,
        )
        found.append((id, "log-probabilities"))
        if loss.mismatched:
            does = (
                f"the same for the labels {of} after the prompts of other documents of their row: from the cache, else "
            )
            does += f"computed once ({cost})"
            again = graph.add(
                "setup",
                OP,
                does,
                id=f"{OP}.{name}.mismatched",
                args={"dataset": name, **args, **own, "parts": parts, "mismatched": True},
                axes=resolved.wide(*AXES),
                after=((id, "log-probabilities"),),
            )
            found.append((again, "log-probabilities"))
    return tuple(found)


@resumes(KEPT, "reference bytes")
def _kept(graph: Builder, resolved: Resolved, reference: str, model: str) -> tuple[str, str]:
    """Return the node that stores the reference's difference from the model, for completions."""
    most = max(resolved.state_bytes(kept_tensors(resolved, own)) for own in resolved.parameters_by_pp)
    whose = {INITIAL: "the initial weights of the run", ADAPTER_OFF: "the model with the adapter off"}[reference]
    does = f"reference of completions: {whose}; a rank keeps a copy of {bytes_text(most)} that training changes"
    args = {"reference": reference, "bytes": most}
    id = graph.add("setup", KEPT, does, args=args, axes=resolved.wide(*AXES), after=((model, "model"),))
    return id, "weights of the reference"


def _cost(resolved: Resolved, estimates: Estimates) -> str:
    """Return text on the cost of a forward of each row."""
    sequence = resolved.batch.sequence
    flops = int(forward_flops(resolved.architecture, sequence) * sequence)
    text = f"a forward of {flops_text(flops)} a row"
    if estimates.times is None:
        return text
    seconds = estimates.times.step * SOME_ROWS * flops / estimates.flops_per_step
    return f"{text}, about {seconds_text(seconds)} for {SOME_ROWS:,}"


WIDE_BYTES: Final = 4  # bytes of a number stored for a teacher


@resumes("setup.tokenizer", "source")
def add_tokenizer(graph: Builder, resolved: Resolved) -> str:
    """Add the tokenizer's node; return its id."""
    source = resolved.spec.tokenizer.source
    kind = tokenizer_kind(source)
    args = {"source": kind.place(source)}
    return graph.add("setup", "setup.tokenizer", kind.does(source), args=args, after=("setup.bootstrap",))


@resumes(
    "setup.loader",
    "datasets micro accumulate rows sequence seed steps epochs balance ramp task_of prompts",
    prefetch=stays("batch.prefetch", "rows are read earlier or later"),
    workers=stays("batch.workers", "others read"),
    again=learns("rollout.updates", "prompts are repeated this often from here on"),
)
def add_data(graph: Builder, resolved: Resolved, estimates: Estimates, model: str) -> str:
    """Add the chain; return the id of the loader. model: the node after which the model has its first values."""
    tokenizer = add_tokenizer(graph, resolved)
    wanted = [*resolved.training, *(name for name in evaluated(resolved.spec) if name not in resolved.training)]
    documents = [_dataset(graph, resolved, resolved.spec.datasets[name], tokenizer) for name in wanted]
    documents = [_taught(graph, resolved, name, id) for name, id in zip(wanted, documents, strict=True)]
    last = _chain(graph, resolved, tuple((id, "rows") for id in documents))
    references = add_references(graph, resolved, estimates, model, last)
    batch = resolved.batch
    args = {
        "datasets": list(resolved.training),
        "micro": batch.micro,
        "accumulate": batch.accumulate,
        "rows": batch.rows,
        "sequence": batch.sequence,
        "seed": resolved.spec.experiment.seed,
        "steps": batch.steps,
        "epochs": batch.epochs,
        "prefetch": resolved.spec.batch.prefetch,
        "workers": resolved.spec.batch.workers if resolved.spec.batch.prefetch else 0,
    }
    if tasks := sorted(resolved.spec.tasks):
        args["task_of"] = [tasks.index(task_of(resolved.spec, name) or "") for name in resolved.training]
    rollout = resolved.spec.rollout
    if rollout is not None:
        args["prompts"] = True
        if rollout.updates > 1:
            args["again"] = {"steps": rollout.steps, "turns": rollout.updates}
    if batch.ramp:
        args["ramp"] = {"rows": batch.first_rows, "steps": batch.ramp}
        if batch.ramp_tokens:
            args["ramp"]["tokens"] = True
    dealt = ""
    if row_link(resolved.spec.collate).packing.balances:
        args["balance"] = True
        dealt = ", balanced by attention cost"
    each = plural(batch.rows // resolved.layout.mesh.data_ranks, "row")
    tokens = f"{batch.tokens_per_step:,} tokens"
    drawn = "shuffle rows by seed"
    if len(resolved.training) > 1:
        by = "shares" if resolved.phases[0].passes is None else "epochs"
        drawn = f"draw rows of {plural(len(resolved.training), 'dataset')} by their {by}, each shuffled by seed"
    does = f"{drawn}; {plural(batch.rows, 'row')} a step = {tokens}, {each} a data rank{dealt}"
    if tasks:
        does += "; rows of a task are adjacent in a microbatch"
    if rollout is not None and rollout.updates > 1:
        does += f"; the rows of {plural(rollout.steps, 'step')} are used {plural(rollout.updates, 'time')}"
    if batch.ramp:
        sizes = batch.row_sizes
        does += f"; {sizes.first:,} in the first step, growing evenly by {plural(sizes.grows_by, 'row')} "
        does += f"over {plural(batch.ramp, 'step')}"
    axes = resolved.wide("replicate", "fsdp")
    after = (*references, (last, "microbatches"))
    loader = graph.add("setup", "setup.loader", does, args=args, axes=axes, after=after)
    add_prompts(graph, resolved, loader)
    return loader


@resumes(
    "setup.data",
    "dataset kind patterns options reads holdout oversized bad_records seed sequence align method group without "
    "deduplicate decontaminate min_tokens",
)
def _dataset(graph: Builder, resolved: Resolved, dataset: Dataset, tokenizer: str) -> str:
    seed = resolved.spec.experiment.seed
    link = row_link(resolved.spec.collate).settled(dataset.has_answers)
    args: dict[str, Any] = {
        "dataset": dataset.name,
        **source_args(dataset, seed, resolved.spec.loss),
        "holdout": dataset.holdout.fraction,
        "oversized": dataset.long_documents if dataset.choices is None else "truncate_front",
        "bad_records": dataset.bad_records,
        "seed": seed,
        "sequence": resolved.batch.sequence,
        "align": resolved.align,
        **_packing(link),
    }
    if dataset.deduplicate != "none":
        args["deduplicate"] = dataset.deduplicate
    if dataset.decontaminate:
        args["decontaminate"] = list(dataset.decontaminate)
    if dataset.min_tokens:
        args["min_tokens"] = dataset.min_tokens
    if dataset.without:
        args["without"] = sorted(set(dataset.without))
    verb = "read token ids of" if dataset.source.records == "tokens" else "tokenize"
    form = form_text(args["reads"])
    does = f"{verb} {dataset.source.does()} once{f', {form}' if form else ''}"
    if dataset.min_tokens:
        does += f", leave out documents with fewer than {plural(dataset.min_tokens, 'token')}"
    if dataset.deduplicate == "exact":
        does += ", leave out documents that repeat an earlier one"
    elif dataset.deduplicate != "none":
        does += f", leave out documents that resemble an earlier one by {dataset.deduplicate:.0%} (MinHash)"
    if dataset.decontaminate:
        does += f", leave out documents that share 13 words with {', '.join(dataset.decontaminate)}"
    laid = "put each document into a row" if link.packing.single else "pack documents into rows"
    does += f", {laid} of {resolved.batch.sequence:,}"
    if dataset.choices is not None:
        does += ", each choice after its question; longer ones lose their front"
    if dataset.has_pairs:
        long = {"skip": "left out", "truncate": "truncated, both answers to the same length", "error": "an error"}
        does += f", both answers of a pair in one row; a pair longer than a row is {long[dataset.long_documents]}"
    if group := link.grouped:
        does += f", best fit within {group:,}"
    if dataset.holdout.fraction:
        does += f", hold out {dataset.holdout}"
    if dataset.without:
        does += f", remove {plural(len(args['without']), 'document')} from the packed rows"
    return graph.add(
        "setup", "setup.data", does, id=f"setup.data.{dataset.name}", args=args, after=((tokenizer, "tokenizer"),)
    )


@resumes(
    "setup.teacher",
    "dataset precision sequence",
    folder=learns("loss.teacher", TEACHER),
    top=learns("loss.top", TEACHER),
    temperature=learns("loss.temperature", TEACHER),
)
def _taught(graph: Builder, resolved: Resolved, name: str, id: str) -> str:
    """Add the teacher's probabilities for a dataset that is trained on or measured with them; return the node's id."""
    teacher = resolved.spec.loss.learns_from
    if teacher is None or teacher.live or not (name in resolved.training or is_measured(resolved.spec, name)):
        return id
    args = {
        "dataset": name,
        "folder": portable(teacher.folder),
        "top": teacher.top,
        "temperature": teacher.temperature,
        "precision": resolved.formats.compute,
        "sequence": resolved.batch.sequence,
    }
    size = sum(each.width * WIDE_BYTES for each in resolved.spec.loss.wide.values())
    does = f"read the probabilities of {teacher.folder} that `xtrain data teach` stored: for each token the "
    does += f"{teacher.top} most probable ones, and the rest as one; {bytes_text(size)} a token of the dataset on disk"
    return graph.add("setup", "setup.teacher", does, id=f"setup.teacher.{name}", args=args, after=((id, "prepared"),))


def _packing(link: RowLink) -> dict[str, Any]:
    """Return the arguments of a packing that is not the default."""
    if link.grouped is not None:
        return {"method": link.packing.kind, "group": link.grouped}
    return {} if link.packing is PACKINGS.default else {"method": link.packing.kind}


@resumes("collate.to_tensor collate.flatten collate.shift_tokens")
@resumes("collate.pack", "method group capacity align unit columns computed values wide later")
@resumes("collate.user", "module function digest arguments variables takes gives")
@resumes("collate.shard", "ring ulysses")
@resumes(
    "collate.microbatches",
    "micro accumulate together",
    pad_to=rounds("batch.pad_to", "rows of other lengths are computed in other pieces"),
)
def _chain(graph: Builder, resolved: Resolved, after: tuple[tuple[str, str], ...]) -> str:
    batch = resolved.batch
    last = ""
    links = resolve_chain(resolved.spec, resolved.size("ring"), resolved.size("ulysses"))
    for each, id in zip(links, node_ids(links), strict=True):
        link = planned(each, PlannedLink)
        args, axes = link.args(resolved), link.axes(resolved)
        last = graph.add("collate", link.op, link.does(resolved), id=id, args=args, axes=axes, after=after)
        after = ((last, link.gives),)
    rows = f"{plural(batch.micro, 'row')}, {count_text(batch.micro * batch.sequence)} tokens"
    args: dict[str, Any] = {"micro": batch.micro, "accumulate": batch.accumulate}
    does = f"{microbatches_text(batch)} of {rows} on each data rank"
    if pad_to := resolved.spec.batch.pad_to:
        # Stages of a pipeline exchange tensors of one shape during a step.
        args |= {"pad_to": pad_to, **({"together": True} if resolved.size("pp") > 1 else {})}
        does += f" at most; rows end at the next multiple of {pad_to:,} after the longest document of their "
        does += "step on this data rank" if "together" in args else "microbatch"
    return graph.add("collate", "collate.microbatches", does, args=args, after=after)
