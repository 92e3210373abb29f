"""Shared parts of verbs: arguments, counted data, the user's own code, and refusals."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics
    from xtrain.plan.plan import Counted, Plan


RUN_HELP = "a run: its name, the beginning of it or its path; an experiment (its newest run); @2 (the second newest); ."


def add_sets(parser: argparse.ArgumentParser) -> None:
    """Add `--set PATH=VALUE`, collected under `sets`."""
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="replace a setting or param; may be repeated",
    )


def number_of(what: str) -> Callable[[str], int]:
    """Return the type of an argument that is a number of things: 1 or more."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"`{text}` is not a number of {what}; use 1 or more")
        return int(text)

    return read


ranks = number_of("ranks")
"""The type of `--world`."""


def above_zero(what: str) -> Callable[[str], float]:
    """Return the type of an argument that is a number above 0."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not 0 < found < float("inf"):
            raise argparse.ArgumentTypeError(f"`{text}` is not {what}; use a number above 0")
        return found

    return read


def add_node(parser: argparse.ArgumentParser) -> None:
    """Add `--node I --meet HOST:PORT`, this machine's place among several."""
    parser.add_argument("--node", type=_index, metavar="I", help="number of this machine, from 0; known under srun")
    parser.add_argument("--meet", metavar="HOST:PORT", help="where the machines meet: a free port of the first one")


def _index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"`{text}` is not the number of a machine; use 0 or more")
    return int(text)


def run_named(text: str | Path, code: int = 2) -> Path:
    """Return the directory of the run that a text names; print it to stderr unless `text` is its path. Raises Refused
    with the exit code."""
    from xtrain.dsl.diagnostics.diagnostic import printable
    from xtrain.tui.model.find import NoRun, run_at

    try:
        found = run_at(str(text))
    except NoRun as error:
        raise Refused(code, printable(f"{error}; `xtrain runs` lists runs")) from None
    if found != Path(text):
        print(printable(f"run {found}"), file=sys.stderr)
    return found


def found_at(text: str | Path, code: int = 2) -> Path:
    """Return an existing path, or else the folder of the experiment, or the directory of the run, that a text names.
    `.` in a project is its folder of runs. Raises Refused with the exit code."""
    from xtrain.tui.model.find import ROOT

    path = Path(text)
    if str(path) == "." and not (path / "plan.json").is_file() and (path / ROOT).is_dir():
        return Path(ROOT)
    if path.exists():
        return path
    return Path(ROOT) / path if (Path(ROOT) / path).is_dir() else run_named(text, code)


def spec_or_run(text: str) -> Path:
    """Return the path of a spec or saved plan, or the directory of the run that a text names. Raises Refused (2)."""
    path = Path(text)
    return path if path.is_file() or path.suffix in (".xtrain", ".json") else run_named(text)


def colored() -> bool:
    """Return True if standard output shows colors."""
    from xtrain.dsl.diagnostics.diagnostic import shows_color

    return shows_color(sys.stdout)


def report(diagnostics: "Diagnostics") -> None:
    """Print diagnostics to standard error."""
    from xtrain.dsl.diagnostics.diagnostic import shows_color

    sys.stderr.write(diagnostics.render(color=shows_color(sys.stderr)))


def counted(plan: "Plan") -> "Counted | None":
    """Return the counted rows of the plan's data; None if they are not in the cache. Imports its modules on call,
    because only plans that wait for data need them."""
    from xtrain.runtime.feed.prepared import counted_rows

    return counted_rows(plan)


def end_by_exception() -> None:
    """Let SIGTERM raise SystemExit, so that temporary files are removed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def say_own_code(plan: "Plan", path: "str | Path") -> None:
    """Warn of user modules and commands that the plan executes; print nothing if there are none. path: of the plan."""
    from xtrain.dsl.diagnostics.diagnostic import printable
    from xtrain.plan.data import code_of

    if found := code_of(plan):
        said = f"warning: {path} runs code of its author: {', '.join(found)}; if you do not trust it, stop here"
        print(printable(said), file=sys.stderr, flush=True)


def add_certificate(parser: argparse.ArgumentParser) -> None:
    """Add `--require-certificate [FILE]`."""
    parser.add_argument(
        "--require-certificate",
        nargs="?",
        const="",
        metavar="FILE",
        help="start only a plan with a valid certificate of `xtrain prove` (default: the file that `prove` writes)",
    )


def demand_certificate(plan: "Plan", asked: str | None) -> None:
    """Check the certificate of a plan if the plan or the command line demands it. asked: its file; empty: the usual
    one; None: not demanded here. Raises EnvironmentFault (X740)."""
    if asked is None and plan.launch.get("certificate") != "required":
        return
    from xtrain.runtime.store.certificates import check_certificate

    check_certificate(plan, Path(asked) if asked else None)


class Refused(Exception):
    """A refused command. code: the exit code. The message is for people; `shown`: it was shown already."""

    def __init__(self, code: int, message: str, *, shown: bool = False) -> None:
        super().__init__(message)
        self.code, self.shown = code, shown

    def show(self) -> int:
        """Print the message unless it was shown; return the exit code."""
        if not self.shown:
            print(self, file=sys.stderr, flush=True)
            self.shown = True
        return self.code


@contextmanager
def refusals() -> Iterator[None]:
    """Convert faults of the machine, the data, a saved plan or an earlier run into Refused."""
    try:
        yield
    except Exception as error:
        from xtrain.dsl.diagnostics.diagnostic import printable
        from xtrain.plan.serialise import PlanError
        from xtrain.runtime.base.errors import DataError, EnvironmentFault

        if not isinstance(error, EnvironmentFault | DataError | PlanError):
            raise
        lines = f"error[{error.code}]: {error}".split("\n")
        raise Refused(3, "\n".join(map(printable, lines))) from None
