"""The Plan screen's details: one node in full, and step time by node."""

import json
from collections.abc import Iterator
from typing import Any

from xtrain.tui.model.planned import PlannedNode
from xtrain.tui.pages.node_times import due
from xtrain.tui.pages.plan_facts import PlanFacts
from xtrain.tui.pages.plan_rows import SHARE, TIME, due_words, percent
from xtrain.tui.pages.sheet import Row, bar, fit, left, right, row, rule, wrapped
from xtrain.tui.words import brief, duration, number, plural, size

LABEL = 9


def node_rows(node: PlannedNode, facts: PlanFacts, width: int) -> list[Row]:
    """Return everything known about a node, in as many rows as needed."""
    rows = [rule(node.id, width, node.kind)]
    rows += [row((line, "")) for line in wrapped(node.does, width)]
    for label, text, style in _facts(node, facts):
        rows += _labelled(label, text, width, style)
    for label, text in _plan(node, facts):
        rows += _labelled(label, text, width)
    if node.args:
        rows.append(rule("arguments", width))
        for name, text in arguments(node.args):
            rows += [row((line, "")) for line in wrapped(f"{name} = {text}", width, "  ")]
    return [fit(each, width) for each in rows]


def _labelled(label: str, text: str, width: int, style: str = "") -> Iterator[Row]:
    label_width = max(LABEL, len(label) + 1)
    for number_of, line in enumerate(wrapped(text, max(1, width - label_width))):
        yield row((left("" if number_of else label, label_width), "dim"), (line, style))


def _facts(node: PlannedNode, facts: PlanFacts) -> Iterator[tuple[str, str, str]]:
    """Yield the recorded facts of a node: label, text, style."""
    if ranks := facts.now_in.get(node.id):
        which = "" if facts.ranks == 1 else f" on {len(ranks):,} of {plural(facts.ranks, 'rank')}"
        yield "now", f"under way{which}", "mark"
    if (step := facts.step.get(node.id)) is not None:
        text = f"{brief(step.slowest)} on rank {step.slowest_rank:,}"
        if step.ranks > 1:
            text += f", the slowest; {brief(step.median)} on the median of {step.ranks:,}"
        yield "takes", f"{text}; {percent(step.share)} of a step", ""
    took = facts.took(node.id)
    if took is not None and took.seconds is not None:
        after = f", after step {took.step:,}" if took.step is not None and node.id not in facts.setup else ""
        yield "took", f"{brief(took.seconds)}{after}", ""
    elif took is not None and took.began is not None and not facts.over:
        yield "since", duration(facts.now - took.began), "mark"


def _plan(node: PlannedNode, facts: PlanFacts) -> Iterator[tuple[str, str]]:
    """Yield the node's place in the plan."""
    if node.id in facts.arranged.ticks:
        every = [f"every {each}" for each in _periods(node, facts)]
        first = due_words(node.id, facts)[0]
        yield "due", first if len(every) == 1 else f"{first}; {', '.join(every)}"
    for when in facts.arranged.when.get(node.id, ()):
        yield "when", when
    if node.op != node.id:
        yield "op", node.op
    if node.axes:
        sizes = {axis.name: axis.size for axis in (*facts.plan.axes, *facts.plan.expert_axes)}
        yield "axes", ", ".join(f"{name} {sizes[name]}" if name in sizes else name for name in node.axes)
    for edge in facts.arranged.before.get(node.id, ()):
        yield "after", f"{edge.before}: {edge.data}" if edge.data else edge.before
    for edge in facts.arranged.after.get(node.id, ()):
        yield "before", f"{edge.after}: {edge.data}" if edge.data else edge.after
    yield from _traffic(node, facts)


def _periods(node: PlannedNode, facts: PlanFacts) -> Iterator[str]:
    for tick in facts.arranged.ticks.get(node.id, ()):
        times = "" if tick.count is None else f", {tick.count:,} times"
        yield due(tick, facts.plan, step=facts.ended, pace=None).every + times


def _traffic(node: PlannedNode, facts: PlanFacts) -> Iterator[tuple[str, str]]:
    """Yield the traffic of this node in a step, for one rank of the first pipeline coordinate that sends something."""
    for found in facts.plan.classes:
        own = [each for each in found.traffic if each.node == node.id]
        for each in own:
            time = "" if each.seconds is None else f", {brief(each.seconds)}"
            beside = "exposed" if each.exposed else "overlapped"
            of = f", on ranks with pp {found.pp}" if len(facts.plan.classes) > 1 else ""
            yield "planned", f"{each.count:,} {each.op} over {each.axis}, {size(each.bytes)}{time}, {beside}{of}"
        if own:
            return


def arguments(args: Any) -> Iterator[tuple[str, str]]:
    """Yield arguments by name, as JSON."""
    for name, value in args.items():
        yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def breakdown_rows(facts: PlanFacts, width: int, height: int) -> list[Row]:
    """Return step times by node, longest first, with waiting for data and communication highlighted, next to the plan;
    in at most `height` rows, the last of which counts the nodes left out."""
    cost = facts.cost
    over = max((each.ranks for each in facts.step.values()), default=0)
    rows = [rule("step time by node", width, f"mean of {over:,} ranks" if over > 1 else "")]
    if cost.actual is None and not facts.step:
        return [*rows, row(("no step has been logged yet", "dim"))][:height]
    rows += _against_plan(facts, width)
    named = [
        ("data wait", cost.data, cost.share(cost.data)),
        ("communication", cost.communication, cost.share(cost.communication)),
    ]
    nodes = sorted(facts.step.values(), key=lambda each: -each.mean)
    name_width = min(max([len(each.node) for each in nodes] + [13]), max(13, width - TIME - SHARE - 8))
    called = [
        _bar_row(name, seconds, share, name_width, width, "warn" if (share or 0) >= 0.3 else "")
        for name, seconds, share in named
        if seconds is not None
    ]
    room = height - len(rows) - len(called) - (1 if called else 0)
    listed = nodes if len(nodes) <= room else nodes[: max(0, room - 1)]
    rows += [_bar_row(each.node, each.mean, each.share, name_width, width, "") for each in listed]
    if len(listed) < len(nodes):
        rest = nodes[len(listed) :]
        rows.append(
            _bar_row(
                plural(len(rest), "more node"),
                sum(each.mean for each in rest),
                sum(each.share for each in rest),
                name_width,
                width,
                "dim",
            )
        )
    if called:
        rows.append(row(("of this on the rank with the most:", "dim")))
        rows += called
    return [fit(each, width) for each in rows[:height]]


def _against_plan(facts: PlanFacts, width: int) -> list[Row]:
    cost = facts.cost
    if cost.actual is None:
        return []
    text = f"{brief(cost.actual)} a step"
    if cost.planned is None or cost.over is None:
        return [row((line, "")) for line in wrapped(f"{text}; no planned time: the cluster is not known", width)]
    near = (
        "as planned" if abs(cost.over) < 0.005 else f"{abs(cost.over):.0%} {'longer' if cost.over > 0 else 'shorter'}"
    )
    planned = f"planned {brief(cost.planned)}"
    if cost.fast is not None and cost.slow is not None:
        planned += f", {brief(cost.fast)} to {brief(cost.slow)}"
    late = cost.slow is not None and cost.actual > cost.slow
    rows = [row((line, "warn" if late else "bold")) for line in wrapped(f"{text}, {near} ({planned})", width)]
    if cost.computing is not None and cost.exposed is not None:
        parts = f"planned: computing {brief(cost.computing)}, exposed communication {brief(cost.exposed)}"
        rows += [row((line, "dim")) for line in wrapped(parts, width)]
    return rows


def _bar_row(name: str, seconds: float | None, share: float | None, name_width: int, width: int, style: str) -> Row:
    bar_width = width - name_width - TIME - SHARE - 3
    spans = [(left(name, name_width), style), " ", (right(brief(seconds), TIME), style), " "]
    spans.append((right("–" if number(share) is None else percent(share or 0.0), SHARE), style))
    if bar_width >= 4:
        spans.append((f" {bar(share, bar_width)}", "bar"))
    return row(*spans)
