"""`summary.md` of a profile: what its summaries say, to be read without any tool."""

from collections.abc import Sequence

from xtrain.runtime.profiling.summary import Summary
from xtrain.runtime.profiling.tables import table

COLUMNS = ("matmul", "attention", "other", "copies", "exposed", "idle")
NOTES = """\
Each instant is counted once. `exposed` is communication that nothing else ran beside, `communication` all of it, hidden
or not; `idle` is time in which no operation ran: Python, waiting for data, waiting for other ranks.
"""


def summary_text(summaries: Sequence[Summary], *, node: str, world: int, note: str = "") -> str:
    """The page, of one summary a rank, in their order. note: a sentence about how the profile ended."""
    head = summaries[0]
    steps = head.last - head.first + 1
    what = f"step {head.first:,}" if steps == 1 else f"steps {head.first:,} to {head.last:,}"
    lines = [f"# Profile of {what}", ""]
    lines += [f"`{node}`, {len(summaries)} of {world:,} ranks; time of the {head.device.upper()}. {note}".rstrip(), ""]
    rows = [
        (
            f"{each.rank}",
            _milliseconds(each.seconds / steps),
            *(f"{each.shares[name]:.1%}" for name in COLUMNS),
            f"{each.communication:.1%}",
        )
        for each in summaries
    ]
    lines += [*table(("rank", "ms a step", *COLUMNS, "communication"), rows, texts=0), "", NOTES]
    nodes = sorted(head.nodes.items(), key=lambda item: -item[1])
    rows = [(f"`{name}`", _milliseconds(took / steps), f"{took / head.seconds:.1%}") for name, took in nodes]
    lines += [f"## Nodes of the plan, rank {head.rank}", ""]
    lines += [*table(("node", "ms a step", "share"), rows, texts=1), ""]
    rows = [
        (
            f"`{_short(each.name)}`",
            each.kind,
            f"{each.calls / steps:,.4g}",
            _milliseconds(each.seconds / steps),
            f"{each.seconds / head.seconds:.1%}",
        )
        for each in head.operators
    ]
    lines += [f"## Operators, rank {head.rank}", ""]
    lines += [*table(("operator", "kind", "calls a step", "ms a step", "share"), rows, texts=2), ""]
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3f}"


def _short(name: str) -> str:
    """Names of kernels may be pages long."""
    name = name.replace("|", "¦").replace("`", "'")
    return name if len(name) <= 80 else f"{name[:79]}…"
