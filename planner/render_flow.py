"""The part of the page about time: setup as a graph, the step as a list, what happens along the way."""

from .plan import Node, Plan, Tick
from .text import Page
from .units import plural

ROOT = "setup.bootstrap"


def show_setup(page: Page, plan: Plan) -> None:
    """Setup nodes as branches that leave the first node and meet in the last; the collate chain as one line."""
    page.heading("SETUP", "branches leave the first node and meet in the last")
    nodes = plan.of_kind("setup")
    starts = {edge.after for edge in plan.edges if edge.before == ROOT}
    chain = [node.id.removeprefix("collate.") for node in plan.of_kind("collate")]
    rows = []
    for node in nodes:
        if node.op == "setup.loader":
            rows.append(("│ collate", " → ".join(chain)))
        mark = "├ " if node.id in starts else "│ "
        if node.id == ROOT:
            mark = "┬ "
        elif node is nodes[-1]:
            mark = "╰ "
        rows.append((mark + node.id, node.does))
    _described(page, rows)


def show_step(page: Page, plan: Plan) -> None:
    page.heading("STEP", "in this order, on every rank")
    rows = [(f"{number:>2} {node.id}", node.does) for number, node in enumerate(plan.of_kind("step"), 1)]
    _described(page, rows)


def show_timeline(page: Page, plan: Plan) -> None:
    """Ticks and reactions, then what each of their nodes does."""
    page.heading("ALONG THE WAY")
    defaults = {entry.path for entry in plan.provenance if entry.origin == "default"}
    rows = []
    for tick in plan.timeline.ticks:
        names = [_name(plan.node(node)) for node in tick.nodes] + (["stop"] if tick.stop else [])
        by_default = names in (["log"], ["checkpoint"]) and f"every.{names[0]}" in defaults
        rows.append((f"every {_every(tick)}", " then ".join(names), _count(tick), "default" if by_default else ""))
    for reaction in plan.timeline.reactions:
        names = [_name(plan.node(node)) for node in reaction.nodes] + (["stop"] if reaction.stop else [])
        by_default = "default" if f"on.{reaction.event}" in defaults else ""
        if by_default and reaction.event == "finish" and len(names) > 1:
            by_default = "checkpoint by default"  # what else happens there was declared
        rows.append((f"on {reaction.event}", " then ".join(names), "", by_default))
    page.table(rows, align="<<>", styles=("cyan", "", "", "dim"))
    page.line()
    _described(page, [(node.id, node.does) for node in plan.of_kind("tick")])


def _described(page: Page, rows: list[tuple[str, str]]) -> None:
    """Names beside descriptions, which go on below themselves."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, does in rows:
        page.wrapped(does, first=f"  {name.ljust(width)}  ", rest=" " * (width + 4))


def _name(node: Node) -> str:
    """`eval web`, `log`."""
    action = node.op.removeprefix("tick.")
    return f"{action} {node.args['dataset']}" if action == "eval" else action


def _every(tick: Tick) -> str:
    if tick.steps is not None:
        return plural(tick.steps, "step")
    if tick.tokens is not None:
        return plural(tick.tokens, "token")
    return f"{tick.seconds:g} s"


def _count(tick: Tick) -> str:
    if tick.count is None:
        return "by the clock" if tick.seconds is not None else ""
    return "never" if tick.count == 0 else "once" if tick.count == 1 else f"{tick.count:,} times"
