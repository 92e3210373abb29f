"""The part of the page about data: where documents come from, and what becomes of them on the way to a model."""

from typing import Any

from xtrain.dsl.schema.sources import SOURCES
from xtrain.planner.data.source_args import form_text
from xtrain.planner.graph.reference_nodes import OP as REFERENCE
from xtrain.planner.plan import Plan
from xtrain.planner.report.text import Detail, Page
from xtrain.planner.schedule.horizon import known_arithmetic, waits
from xtrain.planner.units import plural


def show_data(page: Page, plan: Plan, detail: Detail) -> None:
    """Sources, the collate chain with what each link hands to the next, and what resuming rests on."""
    loader = plan.node("setup.loader").args
    tokenizer = plan.node("setup.tokenizer").args["source"]
    page.heading(
        "DATA", f"tokenizer {tokenizer}, {plural(loader['rows'], 'row')} of {loader['sequence']:,} tokens a step"
    )
    sources = [node for node in plan.nodes if node.op == "setup.data"]
    most = detail.most(6)
    rows = []
    for node in sources[:most]:
        args = node.args
        role = "trained on" if args["dataset"] in loader["datasets"] else "evaluated"
        holdout = f", {100 * args['holdout']:.3g}% held out" if args["holdout"] else ""
        rows.append((args["dataset"], f"{role}{holdout}: {source_text(args)}"))
    if len(sources) > most:
        rows.append(("…", f"and {len(sources) - most} more: --part data"))
    rows.append(("chain", chain_text(plan)))
    computed = [node for node in plan.nodes if node.op == REFERENCE]
    rows += [("reference", node.does) for node in computed[:most]]
    if len(computed) > most:
        rows.append(("…", f"and {len(computed) - most} more: --part data"))
    place = "its position in the data" if len(loader["datasets"]) == 1 else "its position in each dataset"
    rows.append(("order", f"determined by the seed, on any number of ranks; a run resumes at {place}"))
    if mix := mix_of_epoch(plan):
        rows.append(("epoch", mix))
    if detail.full or loader["workers"] or not loader["prefetch"]:
        rows.append(("reading", reading_text(loader)))
    if plan.counted is None:
        rows.append(("unknown", "documents, rows, how full they are, and epochs, until the data has been tokenized"))
    else:
        rows.append(("counted", epoch_text(plan)))
    page.described(rows, wraps=True)
    if detail.full:
        page.described([(node.id, node.does) for node in plan.nodes if node in sources or node.kind == "collate"])


def mix_of_epoch(plan: Plan) -> str:
    """What an epoch of several datasets is, if the plan speaks of any; empty if not."""
    phases, datasets = plan.timeline.phases, plan.node("setup.loader").args["datasets"]
    if (weights := phases[0].passes) is not None:
        each = ", ".join(f"{name} {_times(epochs)}" for name, epochs in weights.items() if epochs > 0)
        return f"all rows of {each}"
    if len(datasets) > 1 and (plan.timeline.epochs is not None or waits(plan)):
        return f"as many rows as {', '.join(datasets)} have together, drawn by their shares"
    return ""


def _times(epochs: float) -> str:
    return {1.0: "once", 2.0: "twice"}.get(epochs, f"{epochs:g} times")


def epoch_text(plan: Plan) -> str:
    """`85 rows, 11 steps an epoch, counted in the token store 1a2b…`, of a plan whose data has been counted."""
    assert plan.counted is not None
    batch, counted = known_arithmetic(plan), plan.counted
    several = len(counted.rows) > 1
    rows = " + ".join(
        f"{count:,} rows of {name}" if several else plural(count, "row") for name, count in counted.rows.items()
    )
    stores = plural(len(set(counted.stores.values())), "token store")
    where = stores if several else f"the token store {next(iter(counted.stores.values()))}"
    return f"{rows}, {plural(batch.steps_in(1.0) or 0, 'step')} an epoch, counted in {where}"


def source_text(args: dict[str, Any]) -> str:
    """Where the documents of a `setup.data` node come from, and their form where they are no plain text."""
    source = SOURCES.of_kind(args["kind"])
    found = args["kind"] if source is None else source.shown(args)
    form = form_text(args["reads"])
    return f"{found}; {form}" if form else found


def reading_text(loader: dict[str, Any]) -> str:
    """How rows are read while a step computes."""
    by = plural(loader["workers"], "process") if loader["workers"] else "a thread"
    if not loader["prefetch"]:
        return f"by {by} of each rank when a step asks for them: nothing is read ahead"
    return f"by {by} of each rank, {plural(loader['prefetch'], 'step')} ahead"


def chain_text(plan: Plan) -> str:
    """`(rows) to_tensor (rows of token tensors) flatten …`: links, and between them what they hand over."""
    given = {edge.after: edge.data for edge in plan.edges if edge.data}
    parts = [f"{given.get(n.id, 'rows')} → [{n.id.removeprefix('collate.')}]" for n in plan.of_kind("collate")]
    return " → ".join([*parts, given.get("setup.loader", "microbatches")])
