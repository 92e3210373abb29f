"""`setup.horizon`: the data is counted, so that epochs are steps, and rules that had to wait for that are checked.

A resume with another batch does the same for lengths in tokens, which count from the checkpoint.
"""

from xtrain.dsl.diagnostics.diagnostic import Diagnostic
from xtrain.planner.plan import Plan, Timeline
from xtrain.planner.rules.counted_rules import Unreadable, check_counted
from xtrain.planner.schedule.arithmetic import Counts
from xtrain.records.start_events import HorizonEvent, HorizonStretch, HorizonTick
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.input.feed import Feed
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.collective_errors import CollectiveErrors
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Progress, Rank


class SpecRefused(EnvironmentFault):
    """With the data that there is the spec cannot be run; says why, mistake by mistake."""

    agreed = True

    def __init__(self, errors: list[Diagnostic]) -> None:
        first, *others = errors
        lines = [_said(first), *(f"{each.code}: {_said(each)}" for each in others)]
        super().__init__(first.code, "\n".join(lines))


@op("setup.horizon")
def see_horizon(plan: Plan, feed: Feed, rank: Rank, records: Records, progress: Progress) -> None:
    """Say how many steps the run has and when what lies in it happens; then check what waited for that.

    Raises SpecRefused on all ranks alike.
    """
    batch = feed.batch
    assert batch is not None and batch.epoch_rows is not None
    records.event(_horizon_event(feed.timeline, progress.step, float(batch.epoch_rows)))
    if feed.steps < batch.done_steps:
        return  # there is nothing left to check: that nothing can be trained is said when training begins
    counts = Counts(
        epoch_rows=batch.epoch_rows, done_steps=batch.done_steps, done_rows=batch.done_rows, past=batch.past
    )
    found = CollectiveErrors.of(rank).first(lambda: _found(plan, counts))
    for each in found:
        if each.severity == "warning":
            records.warn(_said(each), step=progress.step, code=each.code)
    if errors := [each for each in found if each.severity == "error"]:
        raise SpecRefused(errors)


def _found(plan: Plan, counts: Counts) -> list[Diagnostic]:
    try:
        return [*check_counted(plan, counts)]
    except Unreadable as problem:
        message = f"rules that depend on the data could not be checked, because the spec cannot be read: {problem}"
        return [Diagnostic(severity="warning", code="W705", message=message, span=None)]


def _said(found: Diagnostic) -> str:
    """`tiny.xtrain:7:20: warmup 50 steps is longer …; use …`."""
    place, hint = f"{found.span}: " if found.span else "", f"; {found.hint}" if found.hint else ""
    return f"{place}{found.message}{hint}"


def _horizon_event(timeline: Timeline, step: int, epoch_rows: float) -> HorizonEvent:
    """What is known now: of ticks and phases those that were counted in epochs or shares of them."""
    ticks = [tick for tick in timeline.ticks if tick.epochs is not None or tick.fraction is not None]
    return HorizonEvent(
        step=step,
        epoch_rows=epoch_rows,
        steps=timeline.steps,
        stop_at=timeline.stop_at,
        stop_after=timeline.stop_after,
        phases={phase.name: phase.first for phase in timeline.phases},
        ticks=[
            HorizonTick([*tick.nodes], tick.steps, None if tick.tokens is None else float(tick.tokens))
            for tick in ticks
        ],
        stretches=[HorizonStretch(each.first, each.tokens, each.tokens_before) for each in timeline.stretches],
    )
