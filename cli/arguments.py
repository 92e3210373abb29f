"""Arguments shared by several verbs."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

RUN_HELP = "a run, a lineage or root of runs (the newest run in it), or a run id or its beginning"


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
    parser.add_argument(
        "--node", type=_index, metavar="I", help="which of several machines this is, from 0; under srun it is known"
    )
    parser.add_argument("--meet", metavar="HOST:PORT", help="where the machines meet: a free port of the first one")


def _index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"`{text}` is not the number of a machine; use 0 or more")
    return int(text)


def run_named(text: str | Path) -> Path | None:
    """Return the run directory for a path, lineage, root of runs or run id, as `xtrain watch` accepts them; None if
    there is none.

    Prints the chosen run to stderr unless `text` is its path.
    """
    from xtrain.dsl.diagnostics.source import printable
    from xtrain.tui.model.find import NoRun, run_at

    try:
        found = run_at(str(text))
    except NoRun as error:
        print(printable(f"{error}; `xtrain runs` lists runs"), file=sys.stderr)
        return None
    if found != Path(text):
        print(printable(f"run {found}"), file=sys.stderr)
    return found
