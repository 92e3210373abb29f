"""Reports of runs and sweeps as HTML: the page of `xtrain report`, and the parts that a notebook shows."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from xtrain.plan.serialise import PlanError, load_plan
from xtrain.planner.review.page import render
from xtrain.regular_files import read_regular
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.store.certificates import certificate_path, check_certificate
from xtrain.text.printing import whole_pages
from xtrain.tui.report.content import report_of
from xtrain.tui.report.page import page

_MOST_BYTES: Final = 1 << 20


def report_page(directories: Sequence[Path], sweep: Path | None = None) -> str:
    """Return the page of some runs, with the pages of their plans. sweep: folder of a sweep that comes first. Raises
    OSError if the file of the sweep cannot be read."""
    texts = {directory: _plan_texts(directory) for directory in directories}
    return page(report_of(directories, sweep=sweep, texts=texts))


def _plan_texts(directory: Path) -> list[tuple[str, str]]:
    """Return the page of a run's plan, uncut, and of its certificate if there is one; empty if this version cannot read
    the plan."""
    try:
        plan = load_plan(directory / "plan.json")
        with whole_pages():
            texts = [("Plan", render(plan))]
    except (OSError, ValueError, PlanError):
        return []
    if (file := certificate_path(plan)).exists():
        try:
            check_certificate(plan, None)
            state, text = "valid", ""
        except EnvironmentFault as problem:
            state, text = "not valid here", f"{problem}\n\n"
        with suppress(OSError):  # of a file that was written elsewhere there is no page
            text += read_regular(file.with_suffix(".txt"), _MOST_BYTES).decode(errors="replace")
        texts.append((f"Certificate: {state}", text))
    return texts
