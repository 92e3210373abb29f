"""`xtrain watch [RUN]`: the dashboard of a run, during the run or later."""

import argparse
import sys
import threading
from pathlib import Path

from xtrain.cli.verb import RUN_HELP, Refused
from xtrain.records.names import EVENTS_FILE, METRICS_FILE
from xtrain.text.printing import drawn_on

HELP = "watch a run in a dashboard, during or after training"
DESCRIPTION = "Open the dashboard of a run: its numbers next to its plan, ranks, events, and other runs."
EPILOG = """\
RUN is the name of a run below runs/, the beginning of one, or its path; an experiment or a folder means its newest
run, @2 the second newest run, quickstart@2 of an experiment, and . the run that the working folder has or lies in.
Without RUN it is the newest below runs/. `xtrain runs` lists names.
The dashboard only reads files: closing it never touches training. Its keys are shown with ?.

examples:
  xtrain watch
  xtrain watch runs/quickstart --screen ranks
  xtrain watch runs/quickstart/<run> --compare runs/quickstart/<other>
  xtrain watch --ui plain | tee run.log

exit codes: 0 closed, or the run has ended (plain, json); 1 the dashboard failed; 2 the command line is wrong or there
is no terminal; 3 no such run; 4 the run is gone and has not said how it ended (plain, json)
"""
VIEWS = ("tui", "plain", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    from xtrain.tui.board.terminal import SCREENS

    parser.add_argument("path", metavar="RUN", nargs="?", help=f"{RUN_HELP} (default: @1)")
    parser.add_argument(
        "--screen", choices=tuple(SCREENS), default="", metavar="SCREEN", help=f"first screen: {', '.join(SCREENS)}"
    )
    parser.add_argument(
        "--compare", metavar="RUN", nargs="+", action="extend", default=[], help="runs for the screen `compare`"
    )
    parser.add_argument(
        "--ui", choices=VIEWS, default="tui", help="plain and json write lines instead, as `xtrain run` does"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain watch`. The help lists the exit statuses."""
    from xtrain.tui.board.terminal import why_not
    from xtrain.tui.model.find import ROOT, NoRun, run_at

    try:
        directory, *others = map(run_at, (arguments.path, *arguments.compare))
    except NoRun as error:
        from xtrain.runtime.jobs.submitted import not_begun

        why = not_begun(Path(arguments.path or ROOT))
        hint = "`xtrain run SPEC` starts one, and `xtrain runs` lists waiting jobs"
        raise Refused(3, f"xtrain watch: {why or f'{error}; {hint}'}") from None
    for name in (EVENTS_FILE, METRICS_FILE):
        if (directory / name).exists() and not (directory / name).is_file():
            raise Refused(3, f"xtrain watch: {directory / name} is not a regular file, so it is not read")
    if arguments.ui != "tui":
        return _follow(directory, arguments.ui)
    if reason := why_not():
        raise Refused(
            2, f"xtrain watch: a dashboard cannot be drawn here: {reason}; --ui plain and --ui json write lines instead"
        )
    from xtrain.tui.board.opening import open_board

    first = "compare" if others and not arguments.screen else arguments.screen
    return open_board(directory, compared=others, first=first)


def _follow(directory: Path, ui: str) -> int:
    from xtrain.tui.lines.view import choose_ui, follow
    from xtrain.tui.model.rank_reader import RunWatcher

    watchman = RunWatcher(directory)
    chosen = choose_ui(ui, sys.stdout)
    out = drawn_on(sys.stdout, chosen)
    state = follow(directory, ui=chosen, finished=threading.Event(), why_over=watchman.why_over, out=out)
    return 4 if state.end is None else 0
