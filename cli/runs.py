"""`xtrain runs [ROOT]`: the runs in a folder, with their jobs."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtrain.cli.verb import RUN_HELP, Refused, found_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xtrain.runtime.jobs.submitted import QueueState, SubmittedJob
    from xtrain.tui.model.find import FoundRun


HELP = "list runs: their progress and the state of their jobs"
DESCRIPTION = (
    "List the runs below ROOT, newest first: running, finished, failed, stopped or lost, their progress, "
    "and the state of jobs submitted by `xtrain launch`."
)
EPILOG = """\
Commands take the first column as a name: `xtrain watch @2`, and `quickstart@2` of what `xtrain runs quickstart` lists.

example: xtrain runs quickstart --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "root",
        metavar="ROOT",
        nargs="?",
        help=f"a folder with runs, an experiment, or {RUN_HELP} (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object per run")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain runs`. Exit status: 0 there are runs, 3 there are none."""
    from xtrain.tui.model.find import runs_below

    root = (Path("runs") if arguments.root is None else found_at(arguments.root, 3)).absolute()
    found = {each.directory: each for each in runs_below(root)}
    waiting = [each for each in _submitted(root) if each not in found]
    directories = [*waiting, *found]
    rows = [
        _row(directory, found.get(directory), root, job, state)
        for directory, (job, state) in zip(directories, jobs_of(directories), strict=True)
    ]
    if not rows:
        raise Refused(3, f"there is no run at {arguments.root or 'runs'} or below it; `xtrain run SPEC` starts one")
    if arguments.json:
        print("\n".join(json.dumps(row) for row in rows))
        return 0
    _print(rows, len(waiting))
    return 0


def _submitted(root: Path) -> list[Path]:
    """Return the directories of runs with a job, started or not; the newest job first."""
    from xtrain.runtime.jobs.submitted import FOLDER, JOB_FILE

    patterns = (f"{FOLDER}/*/{JOB_FILE}", f"*/{FOLDER}/*/{JOB_FILE}")
    files = sorted((each for pattern in patterns for each in root.glob(pattern)), key=lambda each: each.stat().st_mtime)
    return [each.parent.parent.parent / each.parent.name for each in reversed(files)]


def _row(
    directory: Path, run: "FoundRun | None", root: Path, job: "SubmittedJob | None", state: "QueueState | str | None"
) -> dict[str, Any]:
    """Return the table row of a run. job: None if the run has no job. state: a text if the queue cannot be queried."""
    known = None if isinstance(state, str) else state
    return {
        "run": directory.name if directory == root else str(directory.relative_to(root)),
        "directory": str(directory),
        "status": _status(run, known),
        "step": run.step if run else None,
        "loss": run.loss if run else None,
        "time": run.time if run else None,
        "job": None if job is None else f"{job.kind} {job.id}",
        "state": None if state is None else str(state),
    }


def jobs_of(directories: "Sequence[Path]") -> "list[tuple[SubmittedJob | None, QueueState | str | None]]":
    """Return the job of each run and its launcher's report. Jobs with equal launcher settings are queried together."""
    from xtrain.dsl.diagnostics.diagnostic import printable
    from xtrain.runtime.base.errors import EnvironmentFault
    from xtrain.runtime.jobs.submitted import job_states, read_job

    jobs = [read_job(each) for each in directories]
    states: dict[tuple[str, str], QueueState | str] = {}
    by_launcher: dict[str, list[SubmittedJob]] = {}
    for each in (each for each in jobs if each is not None):
        by_launcher.setdefault(json.dumps(each.launcher), []).append(each)
    for asked in by_launcher.values():
        try:
            found: list[QueueState] | list[str] = job_states(asked)
        except EnvironmentFault as fault:
            found = [printable(f"unknown: {' '.join(str(fault).split())}")] * len(asked)
        states |= {(each.kind, each.id): state for each, state in zip(asked, found, strict=True)}
    return [(each, None if each is None else states[each.kind, each.id]) for each in jobs]


def _status(run: "FoundRun | None", state: "QueueState | None") -> str:
    """Return `running`, `finished`, `failed`, `stopped` or `lost`, with its job's state if the job waits, has not
    started or is over. state: None if it has no job, or the queue cannot be queried."""
    waits, over = (state is None or state.waits), (state is not None and state.over)
    if run is None:
        return "waiting" if waits else "never begun" if over else "not begun"
    if state is None:
        return run.state
    word = run.ended or ("lost" if over or waits else "running")
    return f"{word}, waiting" if waits else word


def _print(rows: list[dict[str, Any]], waiting: int) -> None:
    """Print the table. waiting: number of first rows whose runs have not begun."""
    from xtrain.text.units import duration

    now, table = time.time(), [("", "run", "status", "step", "loss", "last record", "job", "state")]
    for place, row in enumerate(rows, 1 - waiting):
        ago = "" if row["time"] is None else f"{duration(max(0.0, now - row['time']))} ago"
        step = "" if row["step"] is None else f"{row['step']:,}"
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        name = f"@{place}" if place > 0 else ""
        job, state = row["job"] or "", row["state"] or ""
        table.append((name, row["run"], row["status"], step, loss, ago, job, state))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
