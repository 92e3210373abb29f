"""`xtrain calibrate RUNS`: step times of plans, predicted from measured runs."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import RUN_HELP, Refused, found_at

if TYPE_CHECKING:
    from xtrain.plan.calibration import Calibration

HELP = "predict step times from measured runs"
DESCRIPTION = (
    "Fit efficiencies per kind of operation and of link to the step times of runs. "
    "Plans whose `cluster` names the written file predict their times from these runs, with a range and a label: "
    "exact, interpolated or extrapolated."
)
EPILOG = """\
example:
  xtrain calibrate runs/layouts --out calibration.json
  xtrain plan other.xtrain --set 'cluster.calibration="calibration.json"'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUNS", help=f"a folder with runs, or {RUN_HELP}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the calibration, for `cluster.calibration`")
    parser.add_argument("--json", action="store_true", help="print the calibration as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain calibrate`. Exit status: 0 calibrated, 2 the runs allow none, 3 it cannot be written."""
    from attrs import asdict

    from xtrain.dsl.diagnostics.diagnostic import printable
    from xtrain.plan.calibration import Calibration, CalibrationError
    from xtrain.runtime.base.files import write
    from xtrain.runtime.jobs.calibrate import Untimed, timed_runs

    runs = []
    for directory, found in timed_runs(map(found_at, arguments.runs)):
        if isinstance(found, Untimed):
            print(printable(f"warning: {directory} is left out: {found}"), file=sys.stderr)
        else:
            runs.append(found)
    try:
        calibration = Calibration.of(runs)
    except CalibrationError as problem:
        raise Refused(2, f"error: {problem}") from None
    if arguments.out is not None:
        try:
            write(arguments.out, calibration.text())
        except OSError as error:
            raise Refused(3, f"error: {arguments.out} cannot be written: {error.strerror}") from None
    if arguments.json:
        print(json.dumps(asdict(calibration), indent=2))
    else:
        sys.stdout.writelines(f"{printable(line)}\n" for line in _lines(calibration))
    return 0


def _lines(calibration: "Calibration") -> Iterator[str]:
    import math

    from xtrain.plan.calibration import COVERED
    from xtrain.text.units import plural, seconds_text

    runs = calibration.runs
    for title, values in (("machine", {run.timing.machine for run in runs}), ("torch", {run.torch for run in runs})):
        yield f"  {title:<8} {', '.join(sorted(values))}"
    yield f"  {'dates':<8} {' to '.join(sorted({min(run.date for run in runs), max(run.date for run in runs)}))}"
    yield ""
    yield f"  {'kind':<14} {'efficiency':>10}   {COVERED:.0%} interval"
    for kind, efficiency, low, high in calibration.efficiencies():
        yield f"  {kind:<14} {efficiency:>10.1%}   {low:.1%} to {high:.1%}"
    yield ""
    yield f"  {'a step':>9}  {'by the others':>13}  {'records':>7}  run"
    inside = 0
    for run, error in zip(runs, calibration.left_out_errors(), strict=True):
        inside += abs(error) <= calibration.error
        by_others = run.seconds / math.exp(error)
        yield f"  {seconds_text(run.seconds):>9}  {seconds_text(by_others):>13}  {run.samples:>7}  {run.source}"
    yield ""
    yield (
        f"  range of a prediction: {math.expm1(-calibration.error):+.0%} to {math.expm1(calibration.error):+.0%}; "
        f"it holds {inside} of {plural(len(runs), 'run')}, each predicted from the others"
    )
