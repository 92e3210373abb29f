"""The nodes that turn documents into microbatches: tokenizer → data → collate chain → loader."""

from typing import Any

from ...dsl.schema.data import Dataset, Pack, Shard, UserCall
from ..canonical import portable
from ..data.chain import node_ids, resolve_chain, typed
from ..data.data_rules import evaluated, packed_together, packing
from ..data.source_args import form_text, origin_text, source_args, user_args
from ..resolved import Resolved
from ..units import count_text, plural
from .builder import Builder

DOES = {
    "to_tensor": "token arrays become int64 tensors",
    "flatten": "rows become one list of samples",
    "shift_tokens": "each label is the next token of the same document",
}


def add_data(graph: Builder, run: Resolved) -> str:
    """Add the chain; the id of the loader."""
    source = run.spec.tokenizer.source
    bytewise = source == "bytes"
    does = "each byte of UTF-8 is a token" if bytewise else f"read tokenizer.json of {portable(source)}"
    args = {"source": source if bytewise else portable(source)}
    tokenizer = graph.add("setup", "setup.tokenizer", does, args=args, after=("setup.bootstrap",))
    wanted = [*run.training, *(name for name in evaluated(run.spec) if name not in run.training)]
    documents = [_dataset(graph, run, run.spec.datasets[name], tokenizer) for name in wanted]
    last = _chain(graph, run, tuple((id, "rows") for id in documents))
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
    dealt = ""
    if packing(run.spec).method == "best_fit":
        args["balance"] = True
        dealt = ", dealt so that attention costs them alike"
    each = plural(batch.rows // run.layout.mesh.data_ranks, "row")
    tokens = f"{batch.tokens_per_step:,} tokens"
    drawn = "shuffle rows by seed"
    if len(run.training) > 1:
        by = "shares" if run.phases[0].passes is None else "epochs"
        drawn = f"draw rows of {plural(len(run.training), 'dataset')} by their {by}, each shuffled by seed"
    does = f"{drawn}; {plural(batch.rows, 'row')} a step = {tokens}, {each} a data rank{dealt}"
    axes = run.wide("replicate", "fsdp")
    return graph.add("setup", "setup.loader", does, args=args, axes=axes, after=((last, "microbatches"),))


def _dataset(graph: Builder, run: Resolved, dataset: Dataset, tokenizer: str) -> str:
    seed = run.spec.experiment.seed
    args: dict[str, Any] = {
        "dataset": dataset.name,
        **source_args(dataset, seed),
        "holdout": dataset.holdout.fraction,
        "oversized": dataset.oversized,
        "bad_records": dataset.bad_records,
        "seed": seed,
        "sequence": run.batch.sequence,
        "align": run.align,
        **_packing(run),
    }
    verb = "read token ids of" if args["kind"] == "tokens" else "tokenize"
    form = form_text(args["reads"])
    does = f"{verb} {origin_text(dataset.source)} once{f', {form}' if form else ''}"
    does += f", lay documents into rows of {run.batch.sequence:,}"
    if group := packed_together(packing(run.spec)):
        does += f", best fit within {group:,}"
    if dataset.holdout.fraction:
        does += f", hold out {dataset.holdout}"
    return graph.add(
        "setup", "setup.data", does, id=f"setup.data.{dataset.name}", args=args, after=((tokenizer, "tokenizer"),)
    )


def _packing(run: Resolved) -> dict[str, Any]:
    """What is told of a packing that does not keep the order of documents."""
    link = packing(run.spec)
    group = packed_together(link)
    return {} if group is None else {"method": link.method, "group": group}


def _chain(graph: Builder, run: Resolved, after: tuple[tuple[str, str], ...]) -> str:
    batch = run.batch
    last = ""
    links = resolve_chain(run.spec, run.size("ring"), run.size("ulysses"))
    for link, id in zip(links, node_ids(links), strict=True):
        name, _, gives = typed(link)
        args: dict[str, Any] = {}
        does, axes = DOES.get(name, ""), ()
        if isinstance(link, Pack):
            args = {"method": link.method, "capacity": batch.sequence, "align": run.align, **_packing(run)}
            does = f"{link.method}: samples side by side in rows of {batch.sequence:,}, attention kept apart"
            if run.align > 1:
                does += f", each padded to a multiple of {run.align}"
        if isinstance(link, Shard):
            args = {"ring": run.size("ring"), "ulysses": run.size("ulysses")}
            axes = run.wide("ring", "ulysses")
            does = f"keep this rank's {batch.sequence // run.context:,} of {batch.sequence:,} positions of every row"
        op = f"collate.{name}"
        if isinstance(link, UserCall):
            op, args = "collate.user", {**user_args(link), "takes": link.takes, "gives": link.gives}
            does = link.does.removesuffix(".") or f"{link.function} of {link.module}, row by row"
        last = graph.add("collate", op, does, id=id, args=args, axes=axes, after=after)
        after = ((last, gives),)
    rows = f"{plural(batch.micro, 'row')}, {count_text(batch.micro * batch.sequence)} tokens"
    return graph.add(
        "collate",
        "collate.microbatches",
        f"{plural(batch.accumulate, 'microbatch')} of {rows} on each data rank",
        args={"micro": batch.micro, "accumulate": batch.accumulate},
        after=after,
    )
