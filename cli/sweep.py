"""`xtrain sweep show|best|stop`: inspect or stop a sweep in its folder, running or finished."""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtrain.cli.run_sweep import table_text, value_text
from xtrain.cli.verb import Refused, found_at

if TYPE_CHECKING:
    from xtrain.records.sweep import SweepState


HELP = "show, export or stop a sweep"
DESCRIPTION = "Inspect or stop a sweep of `xtrain run`."
EPILOG = "example: xtrain sweep show quickstart-sweep-1a2b3c4d --csv trials.csv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="what to do", metavar="WHAT", dest="what", required=True)
    show = verbs.add_parser("show", help="list trials, the best first")
    show.add_argument("folder", type=Path, metavar="FOLDER", help="a sweep by its name below runs, or its folder")
    show.add_argument("--json", action="store_true", help="print the trials as JSON")
    show.add_argument("--csv", type=Path, metavar="FILE", help="write the trials as CSV")
    show.add_argument("--parquet", type=Path, metavar="FILE", help="write the trials as Parquet (needs pyarrow)")
    best = verbs.add_parser("best", help="the best trial, its settings and its run directory")
    best.add_argument("folder", type=Path, metavar="FOLDER", help="a sweep by its name below runs, or its folder")
    best.add_argument("--json", action="store_true", help="print it as JSON")
    stop = verbs.add_parser("stop", help="let running trials save and stop; `xtrain run` resumes them")
    stop.add_argument("folder", type=Path, metavar="FOLDER", help="a sweep by its name below runs, or its folder")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain sweep`. Exit status: 0 done, 1 there is no best trial yet, 2 there is no sweep, 3 a file cannot be
    written."""
    from xtrain.records.sweep import SWEEP_FILE, SweepState

    folder = found_at(arguments.folder)
    arguments.folder = folder.parent if (folder.parent / SWEEP_FILE).is_file() else folder
    if not (arguments.folder / SWEEP_FILE).is_file():
        raise Refused(2, f"error: {arguments.folder} is not a sweep: it has no {SWEEP_FILE}")
    if arguments.what == "stop":
        return _stop(arguments.folder)
    state = SweepState.read(arguments.folder)
    return _best(state, arguments) if arguments.what == "best" else _show(state, arguments)


def _show(state: "SweepState", arguments: argparse.Namespace) -> int:
    rows = sorted(state.table(), key=lambda row: (row["value"] is None, row["value"] or 0.0, row["trial"]))
    path = None
    try:
        for path, write in ((arguments.csv, _write_csv), (arguments.parquet, _write_parquet)):
            if path is not None:
                write(rows, path)
    except OSError as error:
        raise Refused(3, f"error: {path} cannot be written: {error.strerror or error}") from None
    except ModuleNotFoundError:
        raise Refused(3, "error: Parquet needs pyarrow: pip install 'xtrain[data]'") from None
    if arguments.json:
        print(json.dumps(rows, indent=2))
    elif arguments.csv is None and arguments.parquet is None:
        sys.stdout.write(table_text(_with_jobs(rows, arguments.folder)))
    return 0


def _with_jobs(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the rows with the job of each trial and its launcher's report."""
    from xtrain.cli.runs import jobs_of

    found = jobs_of([folder.absolute() / row["run"] for row in rows])
    if not any(job for job, _ in found):
        return rows
    texts = [None if job is None else f"{job.kind} {job.id} {state}" for job, state in found]
    return [{**row, "job": text} for row, text in zip(rows, texts, strict=True)]


def _write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a Parquet file; columns of mixed types become texts."""
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in (rows[0] if rows else [])}
    for name, values in columns.items():
        if any(isinstance(each, str) for each in values):
            columns[name] = [None if each is None else str(each) for each in values]
    with path.open("wb") as file:
        pyarrow.parquet.write_table(pyarrow.table(columns), file)


def _best(state: "SweepState", arguments: argparse.Namespace) -> int:
    best = state.best()
    if best is None:
        raise Refused(1, "error: no trial has finished training yet")
    directory = arguments.folder / best.name
    if arguments.json:
        row = next(row for row in state.table() if row["trial"] == best.number)
        print(json.dumps({**row, "directory": str(directory)}, indent=2))
        return 0
    print(f"trial {best.number:03d}: {value_text(best.value)} after {best.trained:,} steps, in {directory}")
    print("".join(f"  --set {name}={value}\n" for name, value in best.point.items()), end="")
    return 0


def _stop(folder: Path) -> int:
    from xtrain.records.sweep import STOP_FILE
    from xtrain.runtime.base.locks import LAUNCHER_LOCK
    from xtrain.runtime.jobs.runs import is_live

    if not is_live(folder, LAUNCHER_LOCK):
        return _stop_jobs(folder)
    (folder / STOP_FILE).touch()
    print("asked to stop: its trials save a checkpoint and end")
    return 0


def _stop_jobs(folder: Path) -> int:
    """Stop the jobs of a driver that no longer runs."""
    from xtrain.runtime.jobs.trials import stop_jobs
    from xtrain.text.units import plural

    count = stop_jobs(folder.absolute())
    if not count:
        raise Refused(2, f"error: no process drives the sweep in {folder}")
    print(f"no process drives the sweep; {plural(count, 'job')} of its trials are asked to save and stop")
    return 0
