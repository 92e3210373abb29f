"""The nodes that turn documents into microbatches: tokenizer → data → collate chain → loader."""

from typing import Any, Final

from xtrain.dsl.schema.collators import RowLink, row_link
from xtrain.dsl.schema.data import Dataset
from xtrain.dsl.schema.packings import PACKINGS
from xtrain.dsl.schema.tokenizers import tokenizer_kind
from xtrain.planner.canonical import portable
from xtrain.planner.data.chain import node_ids, resolve_chain
from xtrain.planner.data.data_rules import evaluated
from xtrain.planner.data.loss_rules import is_measured
from xtrain.planner.data.source_args import form_text, source_args
from xtrain.planner.graph.builder import Builder
from xtrain.planner.graph.reference_nodes import add_references
from xtrain.planner.graph.rollout_nodes import add_prompts
from xtrain.planner.model.tasks import task_of
from xtrain.planner.plan import Estimates
from xtrain.planner.resolved import Resolved
from xtrain.planner.schedule.arithmetic import microbatches_text
from xtrain.planner.units import bytes_text, count_text, plural

WIDE_BYTES: Final = 4  # of a number that a teacher has stored


def add_tokenizer(graph: Builder, run: Resolved) -> str:
    """Its id."""
    source = run.spec.tokenizer.source
    kind = tokenizer_kind(source)
    args = {"source": kind.place(source)}
    return graph.add("setup", "setup.tokenizer", kind.does(source), args=args, after=("setup.bootstrap",))


def add_data(graph: Builder, run: Resolved, estimates: Estimates, model: str) -> str:
    """Add the chain; the id of the loader. model: the node behind which the model has its first values."""
    tokenizer = add_tokenizer(graph, run)
    wanted = [*run.training, *(name for name in evaluated(run.spec) if name not in run.training)]
    documents = [_dataset(graph, run, run.spec.datasets[name], tokenizer) for name in wanted]
    documents = [_taught(graph, run, name, id) for name, id in zip(wanted, documents, strict=True)]
    last = _chain(graph, run, tuple((id, "rows") for id in documents))
    references = add_references(graph, run, estimates, model, last)
    batch = run.batch
    args = {
        "datasets": list(run.training),
        "micro": batch.micro,
        "accumulate": batch.accumulate,
        "rows": batch.rows,
        "sequence": batch.sequence,
        "seed": run.spec.experiment.seed,
        "steps": batch.steps,
        "epochs": batch.epochs,
        "prefetch": run.spec.batch.prefetch,
        "workers": run.spec.batch.workers if run.spec.batch.prefetch else 0,
    }
    if tasks := sorted(run.spec.tasks):
        args["task_of"] = [tasks.index(task_of(run.spec, name) or "") for name in run.training]
    rollout = run.spec.rollout
    if rollout is not None:
        args["prompts"] = True
        if rollout.updates > 1:
            args["again"] = {"steps": rollout.steps, "turns": rollout.updates}
    if batch.ramp:
        args["ramp"] = {"rows": batch.first_rows, "steps": batch.ramp}
        if batch.ramp_tokens:
            args["ramp"]["tokens"] = True
    dealt = ""
    if row_link(run.spec.collate).packing.balances:
        args["balance"] = True
        dealt = ", dealt so that attention costs them alike"
    each = plural(batch.rows // run.layout.mesh.data_ranks, "row")
    tokens = f"{batch.tokens_per_step:,} tokens"
    drawn = "shuffle rows by seed"
    if len(run.training) > 1:
        by = "shares" if run.phases[0].passes is None else "epochs"
        drawn = f"draw rows of {plural(len(run.training), 'dataset')} by their {by}, each shuffled by seed"
    does = f"{drawn}; {plural(batch.rows, 'row')} a step = {tokens}, {each} a data rank{dealt}"
    if tasks:
        does += "; those of a task side by side in a microbatch"
    if rollout is not None and rollout.updates > 1:
        does += f"; those of {plural(rollout.steps, 'step')} come {plural(rollout.updates, 'time')}"
    if batch.ramp:
        sizes = batch.row_sizes
        does += f"; {sizes.first:,} in the first step, growing evenly by {plural(sizes.grows_by, 'row')} "
        does += f"over {plural(batch.ramp, 'step')}"
    axes = run.wide("replicate", "fsdp")
    after = (*references, (last, "microbatches"))
    loader = graph.add("setup", "setup.loader", does, args=args, axes=axes, after=after)
    add_prompts(graph, run, loader)
    return loader


def _dataset(graph: Builder, run: Resolved, dataset: Dataset, tokenizer: str) -> str:
    seed = run.spec.experiment.seed
    link = row_link(run.spec.collate).settled(dataset.has_answers)
    args: dict[str, Any] = {
        "dataset": dataset.name,
        **source_args(dataset, seed, run.spec.loss),
        "holdout": dataset.holdout.fraction,
        "oversized": dataset.long_documents if dataset.choices is None else "truncate_front",
        "bad_records": dataset.bad_records,
        "seed": seed,
        "sequence": run.batch.sequence,
        "align": run.align,
        **_packing(link),
    }
    verb = "read token ids of" if dataset.source.records == "tokens" else "tokenize"
    form = form_text(args["reads"])
    does = f"{verb} {dataset.source.does()} once{f', {form}' if form else ''}"
    laid = "each document into a row" if link.packing.single else "documents into rows"
    does += f", lay {laid} of {run.batch.sequence:,}"
    if dataset.choices is not None:
        does += ", each choice with its question; the front of what is longer than a row is cut off"
    if dataset.has_pairs:
        long = {"skip": "left out", "truncate": "cut, both sides to the same length", "error": "an error"}
        does += f", both sides of a pair in one; a pair longer than a row is {long[dataset.long_documents]}"
    if group := link.grouped:
        does += f", best fit within {group:,}"
    if dataset.holdout.fraction:
        does += f", hold out {dataset.holdout}"
    return graph.add(
        "setup", "setup.data", does, id=f"setup.data.{dataset.name}", args=args, after=((tokenizer, "tokenizer"),)
    )


def _taught(graph: Builder, run: Resolved, name: str, id: str) -> str:
    """What a teacher holds probable beside the tokens of a dataset that is trained on, or that is measured by it."""
    teacher = run.spec.loss.learns_from
    if teacher is None or teacher.live or not (name in run.training or is_measured(run.spec, name)):
        return id
    args = {
        "dataset": name,
        "folder": portable(teacher.folder),
        "top": teacher.top,
        "temperature": teacher.temperature,
        "precision": run.formats.compute,
        "sequence": run.batch.sequence,
    }
    size = sum(each.width * WIDE_BYTES for each in run.spec.loss.wide.values())
    does = f"read what `xtrain data teach` has stored of {teacher.folder}: of each token the {teacher.top} most "
    does += f"probable ones, and all others as one; {bytes_text(size)} a token of the dataset on disk"
    return graph.add("setup", "setup.teacher", does, id=f"setup.teacher.{name}", args=args, after=((id, "prepared"),))


def _packing(link: RowLink) -> dict[str, Any]:
    """What is told of a packing other than the usual one."""
    if link.grouped is not None:
        return {"method": link.packing.kind, "group": link.grouped}
    return {} if link.packing is PACKINGS.default else {"method": link.packing.kind}


def _chain(graph: Builder, run: Resolved, after: tuple[tuple[str, str], ...]) -> str:
    batch = run.batch
    last = ""
    links = resolve_chain(run.spec, run.size("ring"), run.size("ulysses"))
    for link, id in zip(links, node_ids(links), strict=True):
        args, axes = link.args(run), link.axes(run)
        last = graph.add("collate", link.op, link.does(run), id=id, args=args, axes=axes, after=after)
        after = ((last, link.gives),)
    rows = f"{plural(batch.micro, 'row')}, {count_text(batch.micro * batch.sequence)} tokens"
    return graph.add(
        "collate",
        "collate.microbatches",
        f"{microbatches_text(batch)} of {rows} on each data rank",
        args={"micro": batch.micro, "accumulate": batch.accumulate},
        after=after,
    )
