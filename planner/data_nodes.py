"""The nodes that turn documents into microbatches: tokenizer → data → collate chain → loader."""

from typing import Any

from ..dsl.schema.data import Dataset, Pack, PythonStdlib, Shard, Text
from .builder import Builder
from .data_rules import LINKS, evaluated, packed_together, packing, portable
from .resolved import Resolved, resolve_chain
from .units import count_text, plural

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
    wanted = [run.training.name, *(name for name in evaluated(run.spec) if name != run.training.name)]
    documents = [_dataset(graph, run, run.spec.datasets[name], tokenizer) for name in wanted]
    last = _chain(graph, run, tuple((id, "rows") for id in documents))
    batch = run.batch
    args = {
        "dataset": run.training.name,
        "micro": batch.micro,
        "accumulate": batch.accumulate,
        "rows": batch.rows,
        "sequence": batch.sequence,
        "seed": run.spec.experiment.seed,
        "steps": batch.steps,
        "epochs": batch.epochs,
    }
    dealt = ""
    if packing(run.spec).method == "best_fit":
        args["balance"] = True
        dealt = ", dealt so that attention costs them alike"
    each = plural(batch.rows // run.layout.mesh.data_ranks, "row")
    tokens = f"{batch.tokens_per_step:,} tokens"
    does = f"shuffle rows by seed; {plural(batch.rows, 'row')} a step = {tokens}, {each} a data rank{dealt}"
    axes = run.wide("replicate", "fsdp")
    return graph.add("setup", "setup.loader", does, args=args, axes=axes, after=((last, "microbatches"),))


def _dataset(graph: Builder, run: Resolved, dataset: Dataset, tokenizer: str) -> str:
    source = dataset.source
    patterns: list[str] = []
    if isinstance(source, PythonStdlib):
        kind, origin = "python_stdlib", "Python's standard library"
    else:
        kind = "text" if isinstance(source, Text) else "jsonl"
        patterns = [portable(pattern) for pattern in source.patterns]
        origin = ", ".join(patterns)
    args: dict[str, Any] = {
        "dataset": dataset.name,
        "kind": kind,
        "patterns": patterns,
        "text_field": dataset.text,
        "holdout": dataset.holdout.fraction,
        "oversized": dataset.oversized,
        "bad_records": dataset.bad_records,
        "seed": run.spec.experiment.seed,
        "sequence": run.batch.sequence,
        "align": run.align,
        **_packing(run),
    }
    does = f"tokenize {origin} once, lay documents into rows of {run.batch.sequence:,}"
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
    for link in resolve_chain(run.spec, run.size("ring"), run.size("ulysses")):
        name, _, gives = LINKS[type(link)]
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
        last = graph.add("collate", f"collate.{name}", does, args=args, axes=axes, after=after)
        after = ((last, gives),)
    rows = f"{plural(batch.micro, 'row')}, {count_text(batch.micro * batch.sequence)} tokens"
    return graph.add(
        "collate",
        "collate.microbatches",
        f"{plural(batch.accumulate, 'microbatch')} of {rows} on each data rank",
        args={"micro": batch.micro, "accumulate": batch.accumulate},
        after=after,
    )
