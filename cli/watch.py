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
  xtrain watch --web                             in a browser, on this machine

exit codes: 0 closed, or the run has ended (plain, json); 1 the dashboard failed; 2 the command line is wrong or there
is no terminal; 3 no such run, or --web cannot serve; 4 the run is gone and has not said how it ended (plain, json)
"""
VIEWS = ("tui", "plain", "json")
PORT = 8765


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
    parser.add_argument(
        "--web",
        type=_address,
        nargs="?",
        const=("127.0.0.1", PORT),
        metavar="HOST:PORT",
        help=f"serve the dashboard to browsers that have the printed token (default: 127.0.0.1:{PORT})",
    )


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"`{text}` is not an address; write HOST:PORT, such as 127.0.0.1:{PORT}")
    return host.strip("[]"), int(port)


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
    if arguments.web is not None:
        return _serve(directory, others, arguments)
    if arguments.ui != "tui":
        return _follow(directory, arguments.ui)
    if reason := why_not():
        raise Refused(
            2, f"xtrain watch: a dashboard cannot be drawn here: {reason}; --ui plain and --ui json write lines instead"
        )
    from xtrain.tui.board.opening import open_board

    first = "compare" if others and not arguments.screen else arguments.screen
    return open_board(directory, compared=others, first=first)


def _serve(directory: Path, others: list[Path], arguments: argparse.Namespace) -> int:
    import secrets

    if arguments.ui != "tui":
        raise Refused(2, f"xtrain watch: --web serves the dashboard, and --ui {arguments.ui} writes lines; give one")
    try:
        from xtrain.tui.board.web import serve_board
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(("textual_serve", "aiohttp")):
            raise
        raise Refused(3, "xtrain watch: --web needs textual-serve: pip install 'xtrain[web]'") from None
    host, port = arguments.web
    if host not in ("127.0.0.1", "localhost", "::1"):
        warning = f"warning: {host} may be reached by others, and the connection is not encrypted"
        print(f"{warning}; whoever reads the token can stop the run", file=sys.stderr)
    first = "compare" if others and not arguments.screen else arguments.screen
    try:
        serve_board(directory, host=host, port=port, token=secrets.token_urlsafe(24), compared=others, first=first)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Refused(3, f"xtrain watch: {host}:{port} cannot be used: {reason}; choose another HOST:PORT") from None
    return 0


def _follow(directory: Path, ui: str) -> int:
    from xtrain.tui.lines.view import choose_ui, follow
    from xtrain.tui.model.rank_reader import RunWatcher

    watchman = RunWatcher(directory)
    chosen = choose_ui(ui, sys.stdout)
    out = drawn_on(sys.stdout, chosen)
    state = follow(directory, ui=chosen, finished=threading.Event(), why_over=watchman.why_over, out=out)
    return 4 if state.end is None else 0
