"""Lines printed by `xtrain run` during a sweep and by `xtrain sweep` for a folder."""

import sys
from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any

from attrs import define

from xtrain.records.event import Event
from xtrain.records.lines import line_of
from xtrain.records.sweep_events import (
    SweepEndEvent,
    TrialAskedEvent,
    TrialDecidedEvent,
    TrialFailedEvent,
    TrialMeasuredEvent,
    TrialStartedEvent,
)

if TYPE_CHECKING:
    from xtrain.planner.sweep.sweep_plan import SweepPlan


@define(eq=False)
class SweepLines:
    """Prints the events of a sweep: `json` as they are written, `none` not at all, otherwise a line each."""

    plan: "SweepPlan"
    ui: str

    def show(self, event: Event) -> None:
        if self.ui == "json":
            sys.stdout.write(line_of(event).decode())
        elif self.ui != "none" and (text := self._text(event)):
            print(text)
        sys.stdout.flush()

    def _text(self, event: Event) -> str:
        match event:
            case TrialAskedEvent(trial=number, same_as=int(same)):
                return f"trial {number:03d}  equal to {same:03d}, which is run for it"
            case TrialAskedEvent(trial=number, reason=reason) if reason:
                return f"trial {number:03d}  has no plan: {reason}"
            case TrialAskedEvent(trial=number, point=point):
                return f"trial {number:03d}  {', '.join(f'{name}={value}' for name, value in point.items())}"
            case TrialStartedEvent(trial=number, rung=None):
                return f"trial {number:03d}  trains to its end"
            case TrialStartedEvent(trial=number, rung=int(rung)):
                return f"trial {number:03d}  trains to {self.plan.rungs[rung]}"
            case TrialMeasuredEvent(trial=number, value=value, trained=steps):
                return f"trial {number:03d}  {self.plan.objective} {value_text(value)} after {steps:,} steps"
            case TrialDecidedEvent(trial=number, goes_on=goes_on, place=place, of=of):
                return f"trial {number:03d}  {'goes on' if goes_on else 'is stopped'}: place {place} of {of}"
            case TrialFailedEvent(trial=number, exit_code=code):
                return f"trial {number:03d}  has failed, exit code {code}; logs in {self.plan.folder}/logs"
            case SweepEndEvent(status=status, best=best):
                end = "every trial has ended" if status == "done" else "stopped; the same command goes on"
                return (
                    end
                    if best is None
                    else f"{end}; the best is trial {best:03d}: xtrain sweep best {quote(self.plan.folder)}"
                )
        return ""


def value_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def table_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with columns as wide as their widest cell."""
    names = list(rows[0]) if rows else []
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join(lines) + "\n" if names else ""


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
