"""The part of the page about data: where documents come from, and what becomes of them on the way to a model."""

from .plan import Plan
from .text import Detail, Page
from .units import plural


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
        role = "trained on" if args["dataset"] == loader["dataset"] else "evaluated"
        held = f", {100 * args['holdout']:.3g}% held out" if args["holdout"] else ""
        files = f"{args['kind']} {', '.join(args['patterns'])}" if args["patterns"] else "Python's standard library"
        rows.append((args["dataset"], f"{role}{held}: {files}"))
    if len(sources) > most:
        rows.append(("…", f"and {len(sources) - most} more: --part data"))
    rows.append(("chain", chain_text(plan)))
    rows.append(("order", "that of the seed, on any number of ranks; a run resumes at its step, rows a step kept"))
    rows.append(("unknown", "documents, rows, how full they are, epochs: until the data has been tokenized"))
    page.described(rows, wraps=True)
    if detail.full:
        page.described([(node.id, node.does) for node in plan.nodes if node in sources or node.kind == "collate"])


def chain_text(plan: Plan) -> str:
    """`(rows) to_tensor (rows of token tensors) flatten …`: links, and between them what they hand over."""
    given = {edge.after: edge.data for edge in plan.edges if edge.data}
    parts = [f"{given.get(n.id, 'rows')} → [{n.id.removeprefix('collate.')}]" for n in plan.of_kind("collate")]
    return " → ".join([*parts, given.get("setup.loader", "microbatches")])
