"""`xtrain fit-law RUNS`: fit a scaling law with intervals to finished runs."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import RUN_HELP, Refused, found_at

if TYPE_CHECKING:
    from xtrain.records.law import ScalingLaw
    from xtrain.runtime.jobs.law import RunLoss

HELP = "fit a scaling law to finished runs"
DESCRIPTION = (
    "Fit L(N, D) = E + A / N^alpha + B / D^beta to the last losses of finished runs, with N parameters "
    "used per token and D tokens, and print an interval for each coefficient."
)
EPILOG = """\
example:
  xtrain fit-law runs/sizes-sweep-1a2b3c4d --metric eval.web.loss --out law.json
  xtrain plan larger.xtrain --law law.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUNS", help=f"a folder with runs, or {RUN_HELP}")
    parser.add_argument(
        "--metric", metavar="METRIC", help=("eval.DATASET.loss (default: the metric that all runs measure)")
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the law, for `xtrain plan SPEC --law FILE`")
    parser.add_argument("--json", action="store_true", help="print the law as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain fit-law`. Exit status: 0 a law was fitted, 2 the runs allow none, 3 it cannot be written."""
    from xtrain.runtime.jobs.law import Unfittable, finished_runs, fit_law, measured_runs

    finished = finished_runs(map(found_at, arguments.runs))
    try:
        metric, runs = measured_runs(finished, arguments.metric)
        law = fit_law([each for _, each in runs], metric)
    except Unfittable as problem:
        raise Refused(2, f"error: {problem}") from None
    if arguments.out is not None:
        try:
            law.write(arguments.out)
        except OSError as error:
            raise Refused(3, f"error: {arguments.out} cannot be written: {error.strerror}") from None
    if arguments.json:
        print(json.dumps(_as_json(law), indent=2))
    else:
        sys.stdout.write("\n".join(_lines(law, runs)) + "\n")
    return 0


def _as_json(law: "ScalingLaw") -> dict:
    from xtrain.records.law import NAMES

    return {
        "metric": law.metric,
        "runs": law.runs,
        "error": law.error,
        "undetermined": list(law.undetermined()),
        **{name: {"value": getattr(law.fitted, name), "interval": list(law.interval(name))} for name in NAMES},
    }


def _lines(law: "ScalingLaw", runs: "Sequence[tuple[Path, RunLoss]]") -> Iterator[str]:
    from xtrain.records.law import FORM, NAMES, SHARE
    from xtrain.text.units import count_text

    yield f"{FORM}, {law.metric} of {law.runs} runs"
    yield ""
    unknown = law.undetermined()
    for name in NAMES:
        low, high = law.interval(name)
        if name in unknown:
            yield f"  {name:5}  not determined by these runs"
            continue
        yield f"  {name:5}  {getattr(law.fitted, name):<10.4g} {low:.4g} to {high:.4g}"
    yield ""
    yield (
        f"  in {SHARE:.0%} of samples; residuals {law.error:.2%}; {count_text(law.parameters[0])} to "
        f"{count_text(law.parameters[1])} parameters, {count_text(law.tokens[0])} to {count_text(law.tokens[1])} tokens"
    )
    yield ""
    yield f"  {'parameters':>10}  {'tokens':>7}  {'loss':>7}  {'law':>7}  run"
    for directory, each in runs:
        fitted = law.fitted.loss(each.parameters, each.tokens)
        size, tokens = count_text(each.parameters), count_text(each.tokens)
        yield f"  {size:>10}  {tokens:>7}  {each.loss:7.4f}  {fitted:7.4f}  {directory}"
