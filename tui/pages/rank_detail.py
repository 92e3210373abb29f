"""One rank in full: where it runs, what it is in, its numbers against those of the median rank and of the plan."""

from collections.abc import Iterator

from xtrain.records.metrics import RankMetrics
from xtrain.tui.model.ranks import OneRank
from xtrain.tui.pages.rank_facts import RankFacts
from xtrain.tui.pages.rank_figures import COMMUNICATION, DATA, PROGRESS, STEP, WORK, expected, seconds_ago
from xtrain.tui.pages.rank_states import WORDS
from xtrain.tui.pages.sheet import Row, fit, joined, left, right, row, rule, wrapped
from xtrain.tui.words import brief, size

LABEL = 9
# Nodes that take less than this share of a rank's step say nothing of why it is slow.
SMALL = 0.001


def rank_rows(rank: OneRank, facts: RankFacts, width: int) -> list[Row]:
    """Return everything known about a rank, in as many rows as needed."""
    state = int(facts.states.of[rank.rank])
    rows = [rule(f"rank {rank.rank:,}", width, WORDS[state])]
    for label, text, style in (
        *_where(rank, facts),
        *_now(rank, facts),
        *_figures(rank, facts),
        *_stuck(rank, facts),
    ):
        for line_number, line in enumerate(wrapped(text, max(1, width - LABEL))):
            rows.append(row((left("" if line_number else label, LABEL), "dim"), (line, style)))
    rows += _nodes(rank, facts, width)
    return [fit(each, width) for each in rows]


def _where(rank: OneRank, facts: RankFacts) -> Iterator[tuple[str, str, str]]:
    places = [f"{name} {rank.coordinates[name]}" for name in facts.real if name in rank.coordinates]
    if facts.experts:
        expert = [
            f"{axis.name} {rank.rank // axis.stride % axis.size}"
            for axis in facts.expert_axes
            if axis.size > 1 and axis.name not in facts.real
        ]
        places += [f"({', '.join(expert)})"] if expert else []
    if places:
        yield "place", joined(places), ""
    host = [f"host {rank.beat.host}", f"process {rank.beat.pid}"] if rank.beat else []
    if host or rank.machine is not None:
        machine = f"machine {rank.machine}" if rank.machine is not None else ""
        yield "runs on", joined([*host, machine]), ""


def _now(rank: OneRank, facts: RankFacts) -> Iterator[tuple[str, str, str]]:
    beat = rank.beat
    if beat is not None:
        step = f"step {beat.step:,}" if beat.step else "set-up"
        yield "last" if facts.over else "now", f"{step}, {beat.node or 'no node yet'}, {beat.marks:,} marks", ""
    if beat is not None and not facts.over:
        old = PROGRESS.of(rank) or 0.0
        if old >= 2 or beat.place:
            at = f", at {beat.place}" if beat.place else ""
            lasting = ", which may take long" if beat.lasting else ""
            yield "still", f"for {seconds_ago(old)}{lasting}{at}", "warn" if old >= 10 and not beat.lasting else ""
        if rank.seconds_silent >= 2:
            yield "silent", f"no heartbeat for {seconds_ago(rank.seconds_silent)}", "warn"
        if beat.debugger:
            yield "debugger", "a Python debugger has stopped it", "warn"


def _figures(rank: OneRank, facts: RankFacts) -> Iterator[tuple[str, str, str]]:
    for figure, label in ((STEP, "step"), (WORK, "own work"), (DATA, "data"), (COMMUNICATION, "comm")):
        value, median = figure.of(rank), facts.figure(figure).median
        if value is None:
            continue
        against = "" if len(facts.ranks) == 1 or median is None else f", median {figure.words(median)}"
        more = f", {signed(value / median - 1)}" if against and median and figure in (STEP, WORK) else ""
        more += " (newest records)" if figure is WORK else ""
        slow = figure is WORK and rank.rank in facts.states.slow
        yield label, f"{figure.words(value)}{against}{more}", "warn" if slow else ""
    if rank.memory_bytes is not None:
        plan = expected(rank, facts.memory)
        share = f", {rank.memory_bytes / plan:.0%} of the planned {size(plan)}" if plan else ""
        yield "memory", f"{size(rank.memory_bytes)}{share}", "bad" if plan and rank.memory_bytes > plan else ""
    if now := _memory_now(rank.last):
        yield "", ", ".join(now), ""
    if rank.step is not None:
        yield "reported", f"all this after step {rank.step:,}", ""


def _memory_now(last: RankMetrics | None) -> list[str]:
    """Return the memory figures in the rank's newest line."""
    if last is None:
        return []
    memory = ((last.allocated_bytes, "allocated"), (last.reserved_bytes, "reserved"), (last.resident_bytes, "resident"))
    now = [f"{size(value)} {name}" for value, name in memory if value is not None]
    return [*now, *([f"{last.retries:,} allocation retries"] if last.retries else [])]


def signed(share: float) -> str:
    """Return `+31%`, `-4%`, `0%`."""
    return f"{share:+.0%}" if abs(share) >= 0.005 else "0%"


def _stuck(rank: OneRank, facts: RankFacts) -> Iterator[tuple[str, str, str]]:
    if (said := facts.states.failed.get(rank.rank)) is not None:
        yield "failed", said, "bad"
    if (blame := facts.states.blamed.get(rank.rank)) is not None:
        since = f" for {seconds_ago(blame.seconds)}" if blame.seconds is not None else ""
        at = f" at {blame.place}" if blame.place else ""
        yield "blamed", f"{blame.state or 'stuck'} in {blame.node}{at}{since}", "bad"


def _nodes(rank: OneRank, facts: RankFacts, width: int) -> Iterator[Row]:
    """Yield the nodes of a step, longest first: this rank next to the median rank."""
    whole = sum(rank.node_seconds.values())
    shown = sorted(rank.node_seconds.items(), key=lambda pair: -pair[1])
    shown = [(node, seconds) for node, seconds in shown if seconds >= SMALL * whole]
    if not shown:
        return
    alone = len(facts.ranks) == 1
    yield rule("nodes of a step" if alone else "nodes of a step, against the median rank", width)
    name = min(max(len(node) for node, _ in shown), max(10, width - 26))
    for node, seconds in shown:
        spans = [left(node, name), " ", right(brief(seconds), 8)]
        times = facts.times.get(node)
        if times is not None and not alone:
            more = seconds / times.median - 1 if times.median else 0.0
            sure = abs(more) >= 0.1 and abs(seconds - times.median) >= 0.02 * whole
            spans += [f" {right(brief(times.median), 8)}"]
            yield row(*spans, (f" {right(signed(more), 6)}", "warn" if sure and more > 0 else "dim"))
        else:
            yield row(*spans)
