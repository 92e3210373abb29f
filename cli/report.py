"""`xtrain report RUN…`: one HTML page of runs, servers and sweeps, to read without xtrain and to share."""

import argparse
import sys
from pathlib import Path

from xtrain.cli.verb import RUN_HELP, Refused

HELP = "write a page of runs with plots, to share"
DESCRIPTION = (
    "Write one HTML page of runs: curves of all metrics, measured values next to planned ones, settings in which the "
    "runs differ, alerts and failures, evaluations, samples, environment, and the plan."
)
EPILOG = """\
The page needs no other file and no network. A sweep is given by its folder; the best trial follows its trials.

examples:
  xtrain report                                  the newest run below runs/, to report.html
  xtrain report quickstart --html quickstart.html
  xtrain report 1a2b3c4d 5e6f7a8b --html -       two runs next to each other, to standard output
  xtrain report runs/sizes-sweep-1a2b3c4d        a sweep

exit codes: 0 written; 2 the file cannot be written; 3 no such run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("runs", metavar="RUN", nargs="*", help=f"{RUN_HELP}, or the folder of a sweep (default: runs)")
    parser.add_argument(
        "--html",
        metavar="FILE",
        default="report.html",
        help="file of the page, - for standard output (default: report.html)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain report`. The help lists the exit statuses."""
    from xtrain.api.reports import report_page
    from xtrain.records.sweep import SWEEP_FILE, SweepState
    from xtrain.tui.curves.canvas import MOST_LINES
    from xtrain.tui.model.find import ROOT, NoRun, run_at

    file = None if arguments.html == "-" else Path(arguments.html)
    _refuse_others(file)
    sweeps = [Path(given) for given in arguments.runs if (Path(given) / SWEEP_FILE).is_file()]
    if sweeps and len(arguments.runs) > 1:
        raise Refused(2, f"xtrain report: {sweeps[0]} is a sweep, which has a page of its own; name it alone")
    try:
        if sweeps:
            best = SweepState.read(sweeps[0]).best()
            directories = [] if best is None else [sweeps[0] / best.name]
        else:
            directories = list(dict.fromkeys(run_at(given).absolute() for given in arguments.runs or [ROOT]))
    except NoRun as error:
        raise Refused(3, f"xtrain report: {error}; `xtrain runs` lists runs") from None
    if len(directories) > MOST_LINES:
        raise Refused(2, f"xtrain report: {len(directories)} runs; a page can compare at most {MOST_LINES}")
    text = report_page(directories, sweeps[0] if sweeps else None)
    if file is None:
        sys.stdout.write(text)
        return 0
    file.write_text(text, encoding="utf-8")
    print(f"report  {file}  {', '.join(map(str, sweeps or directories))}")
    return 0


def _refuse_others(file: Path | None) -> None:
    """Refuse to replace a file that is not a report."""
    from xtrain.tui.report.page import MARK

    if file is None or not file.exists():
        return
    start = b""
    if file.is_file():
        with file.open("rb") as existing:
            start = existing.read(len(MARK))
    if start != MARK.encode():
        raise Refused(
            2, f"xtrain report: {file} exists and is not a report, so it is not replaced; choose another --html"
        )
