"""Reports of runs and sweeps as HTML: the page of `xtrain report`, and the parts that a notebook shows."""

from collections.abc import Sequence
from pathlib import Path

from xtrain.plan.serialise import PlanError, load_plan
from xtrain.planner.review.page import render
from xtrain.text.printing import whole_pages
from xtrain.tui.report.content import report_of
from xtrain.tui.report.page import page


def report_page(directories: Sequence[Path], sweep: Path | None = None) -> str:
    """Return the page of some runs, with the pages of their plans. sweep: folder of a sweep that comes first. Raises
    OSError if the file of the sweep cannot be read."""
    texts = {directory: _plan_texts(directory) for directory in directories}
    return page(report_of(directories, sweep=sweep, texts=texts))


def _plan_texts(directory: Path) -> list[tuple[str, str]]:
    """Return the page of a run's plan, uncut; empty if this version cannot read the plan."""
    try:
        with whole_pages():
            return [("Plan", render(load_plan(directory / "plan.json")))]
    except (OSError, ValueError, PlanError):
        return []
