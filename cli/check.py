"""`xtrain check`: find everything that is wrong with specs, without planning or running them."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .arguments import add_sets

if TYPE_CHECKING:
    from ..dsl.diagnostics import Diagnostics

EPILOG = """\
examples:
  xtrain check specs/quickstart.xtrain
  xtrain check specs/*.xtrain --set optimizer.lr=1e-4
  xtrain check specs/quickstart.xtrain --json | jq -r .message
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the `xtrain` command."""
    parser = subparsers.add_parser(
        "check",
        help="find all mistakes in specs",
        description="Check specs and report all that is wrong with them, in the order of the text.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("specs", nargs="+", metavar="SPEC", help="a spec (*.xtrain)")
    add_sets(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object a diagnostic, a line each")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0 nothing is wrong (there may be warnings), 2 there are errors."""
    from ..dsl.render import shows_color

    wrong = False
    for path in arguments.specs:
        diagnostics = diagnose(path, arguments.sets)
        wrong |= diagnostics.has_errors
        if arguments.json:
            for diagnostic in diagnostics:
                print(json.dumps(diagnostic.to_json(), ensure_ascii=False))
        else:
            sys.stderr.write(diagnostics.render(color=shows_color(sys.stderr)))
            summary = _summary(path, diagnostics)
            print(summary, file=sys.stderr if diagnostics.has_errors else sys.stdout, flush=True)
    return 2 if wrong else 0


def diagnose(path: str, sets: Sequence[str]) -> "Diagnostics":
    """Everything there is to say about the spec at `path`."""
    from ..planner.load import check_from_spec

    return check_from_spec(path, sets)


def _summary(path: str, diagnostics: "Diagnostics") -> str:
    counts = [(len(diagnostics.errors), "error"), (len(diagnostics.warnings), "warning")]
    found = ", ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count)
    return f"{path}: {found or 'ok'}"
