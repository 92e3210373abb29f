"""`xtrain bisect RUN_A RUN_B`: where two runs that should agree part."""

import argparse
import json
import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve

from xtrain.cli.replay import replayed
from xtrain.cli.run_data import RunData, enter
from xtrain.cli.verb import RUN_HELP, Refused, add_sets, colored, ranks, run_named
from xtrain.text.page import Page
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.runtime.jobs.bisect import Parting, Trace

HELP = "find the first step, node and tensor in which two runs part"
DESCRIPTION = (
    "Compare two runs that should agree, step by step: losses, gradient norms and learning rates, and digests of "
    "gradients and parameters where both runs have recorded them (`every 100 steps digests`). If the digests do not "
    "show where they part, replay the steps after the last equal one in both runs, with digests of every step."
)
EPILOG = """\
The same command resumes replays that were interrupted; they are runs of their own, as by `xtrain replay`.

examples:
  xtrain bisect RUN_A RUN_B
  xtrain bisect RUN_A RUN_B --recorded          only compare what is recorded
  xtrain bisect RUN_A RUN_B --set parallel.tp=1 --set parallel.fsdp=2    replay both runs on one layout

exit codes: 0 all common steps are equal, 1 the runs part, 2 the command line or a setting is wrong, 3 no common records
or no checkpoint; else the exit code of a replay
"""
MOST_TENSORS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("run_a", metavar="RUN_A", help=RUN_HELP)
    parser.add_argument("run_b", metavar="RUN_B", help="another run")
    parser.add_argument("--recorded", action="store_true", help="compare only what is recorded; replay nothing")
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks of replays (default: as the runs)")
    add_sets(parser)
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain bisect`. The help lists the exit statuses."""
    from xtrain.runtime.jobs.bisect import Trace, common_steps, parting

    directories = [run_named(each, 3).absolute() for each in (arguments.run_a, arguments.run_b)]
    if directories[0].resolve() == directories[1].resolve():
        raise Refused(2, "xtrain bisect: both arguments are the same run; `xtrain replay` compares a run with itself")
    traces = [Trace.of(each) for each in directories]
    common = common_steps(*traces)
    if not common:
        raise Refused(3, "xtrain bisect: the runs have recorded no common step; `xtrain replay` records some")
    found = parting(*traces)
    notes: list[str] = []
    if found is not None and not found.traced and not arguments.recorded:
        again = _replayed(directories, found, arguments.sets, arguments.world, notes)
        closer = parting(*again)
        if closer is None:
            notes.append("the replays of both runs agree in all steps: the difference does not appear again")
        else:
            found = closer if closer.before is not None else evolve(closer, before=found.before)
    rows = None if found is None else _rows(directories, found.step)
    if arguments.json:
        print(json.dumps(_as_json(directories, common, found, rows, notes)))
    else:
        _show(directories, common, found, rows, notes)
    return int(found is not None)


def _replayed(
    directories: list[Path], found: "Parting", sets: list[str], world: int | None, notes: list[str]
) -> "list[Trace]":
    """Replay the steps up to a difference in both runs, with digests. Raises Refused."""
    from xtrain.runtime.jobs.bisect import Trace
    from xtrain.runtime.jobs.replay import ReplayWindow, compared

    traces = []
    for directory in directories:
        enter(directory)
        window = ReplayWindow.of(directory, (found.before or 0) + 1, found.step)
        replay, code = replayed(window, sets, world, "none", "tensors")
        if replay is None:
            raise Refused(code or 1, "xtrain bisect: a replay did not get to its end; the same command resumes it")
        if different := [
            each.step for each in compared(directory, replay, window.begin + 1, window.last) if each.differs
        ]:
            notes.append(f"{directory.name} does not repeat itself: its replay differs from its records in step "
                         f"{different[0]:,}")  # fmt: skip
        traces.append(Trace.of(replay))
    return traces


def _rows(directories: list[Path], step: int) -> str:
    """Say whether the rows of a step are the same in both runs."""
    from xtrain.runtime.base.errors import DataError, EnvironmentFault

    taken = []
    for directory in directories:
        enter(directory)
        try:
            taken.append([*RunData(directory).rows(step)])
        except (DataError, EnvironmentFault) as error:
            return f"not compared: {error}"
    for one, other in zip_longest(*taken):
        if one is None or other is None:
            return f"{len(taken[0])} rows and {len(taken[1])} rows"
        if one[1] != other[1]:
            return f"{one[0]} has other tokens than {other[0]}"
    return "equal"


def _as_json(
    directories: list[Path], common: list[int], found: "Parting | None", rows: str | None, notes: list[str]
) -> dict[str, Any]:
    said: dict[str, Any] = {"runs": [str(each) for each in directories], "compared": len(common), "notes": notes}
    return said if found is None else {**said, **asdict(found), "node": _node(directories[0], found), "rows": rows}


def _node(directory: Path, found: "Parting") -> str:
    from xtrain.runtime.observe.provenance import plan_in

    return found.node(plan_in(directory))


_SAYS = {"grad_norm": "gradient norm", "lr": "learning rate"}


def _show(
    directories: list[Path], common: list[int], found: "Parting | None", rows: str | None, notes: list[str]
) -> None:
    page = Page(color=colored())
    page.heading(" and ".join(each.name for each in directories))
    if found is None:
        page.line(f"  {plural(len(common), 'common step')}: equal bit for bit")
    else:
        page.line(f"  equal up to step {found.before:,}" if found.before is not None else "  no common step is equal")
        page.line(
            f"  step {found.step:,}: {_SAYS.get(found.quantity, found.quantity)}, node {_node(directories[0], found)}"
        )
        if found.values is not None:
            one, other = ("not finite" if each is None else f"{each!r}" for each in found.values)
            page.line(f"    {one} and {other}")
        for name in found.tensors[:MOST_TENSORS]:
            page.line(f"    {name}")
        if len(found.tensors) > MOST_TENSORS:
            page.line(f"    … {len(found.tensors) - MOST_TENSORS:,} more tensors; --json has them all")
        page.line(f"  rows of the step: {rows}")
        if not found.traced:
            page.line("  digests do not show the steps between: the runs may part there already")
    for note in notes:
        page.line(f"  note: {note}")
    sys.stdout.write(str(page).lstrip("\n"))
