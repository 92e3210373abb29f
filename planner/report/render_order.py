"""The part of the page about what is done: setup in the order in which it is applied, the step as a chain."""

from xtrain.dsl.schema.log import OP as TRACKER
from xtrain.planner.plan import Node, Plan
from xtrain.planner.report.text import Detail, Page
from xtrain.planner.units import plural

# Nodes that change nothing in the model; the other parts speak of what they do.
ELSEWHERE = ("setup.bootstrap", "setup.mesh", "setup.tokenizer", "setup.data", "setup.loader", "setup.scheduler")
ELSEWHERE += (
    "setup.watch",
    "setup.observe",
    "setup.alerts",
    "setup.schedule_cache",
    "setup.resume",
    "setup.checkpoint",
)
MOST, SHORT = 14, 5  # rows that stay until other tables are down to so many: an order has no unimportant part


def show_order(page: Page, plan: Plan, detail: Detail) -> None:
    """What prepares the model, first to last, with the number of modules each rule was found to mean.

    In full, every node of the set-up.
    """
    setup = plan.of_kind("setup")
    nodes = [node for node in setup if detail.full or not (node.op in ELSEWHERE or node.op.startswith(TRACKER))]
    page.heading("ORDER", "how the model is built, first to last; modules that each rule applies to")
    rows = []
    for node in nodes:
        found = matches(node)
        count = "" if found is None else plural(found, "module")
        rows.append((node.id.removeprefix("setup."), count, node.does))
    most = detail.most(24) if detail.full or detail.rows < SHORT else max(detail.most(24), MOST)
    left_out = len(rows) - most
    rows = rows[:most]
    names, counts = (max(len(row[column]) for row in rows) for column in (0, 1))
    page.described(
        [(f"{name.ljust(names)}  {count.rjust(counts)}", does) for name, count, does in rows],
        wraps=detail.wraps,
    )
    page.more(left_out, "order")


def matches(node: Node) -> int | None:
    """How many modules on all pipeline coordinates the rules of a node mean; None if it has no rules."""
    counts = [sum(rule["matches"]) for rule in (node.args, *node.args.get("rules", ())) if "matches" in rule]
    return sum(counts) if counts else None


def show_step(page: Page, plan: Plan, detail: Detail) -> None:
    """The step in the order in which every rank runs it: a line below the set-up, or in full what each node does."""
    nodes = plan.of_kind("step")
    if detail.full:
        page.heading("STEP", f"{plural(len(nodes), 'node')} in this order, on every rank")
        page.described([(f"{number:>2} {node.id}", node.does) for number, node in enumerate(nodes, 1)])
    else:
        page.described([("a step", " → ".join(node.id.removeprefix("step.") for node in nodes))])
