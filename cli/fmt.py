"""`xtrain fmt`: write specs in the one style."""

import argparse
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..dsl.diagnostics import Diagnostics

EPILOG = """\
examples:
  xtrain fmt specs/*.xtrain
  xtrain fmt --check --diff specs/quickstart.xtrain
  xtrain fmt - < specs/quickstart.xtrain
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the `xtrain` command."""
    parser = subparsers.add_parser(
        "fmt",
        help="format specs",
        description="Rewrite specs in the one style. Comments and line breaks stay; a spec with syntax errors is left.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a spec; - reads standard input and writes to output")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file would change")
    parser.add_argument("--diff", action="store_true", help="change nothing; print what would change")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0 done, 1 a file would change (`--check`), 2 a file cannot be formatted, 3 or not be written."""
    status = 0
    for file in arguments.files:
        status = max(status, _format(file, check=arguments.check, diff=arguments.diff))
    return status


def _format(file: str, *, check: bool, diff: bool) -> int:
    from ..dsl.diagnostics import Diagnostics, SpecErrors
    from ..dsl.format import format_source
    from ..dsl.reading import read_source

    diagnostics = Diagnostics()
    data = sys.stdin.buffer.read() if file == "-" else None
    source = read_source("<stdin>" if file == "-" else file, diagnostics, data=data)
    if source is None:
        return _refuse(diagnostics)
    try:
        after = format_source(source)
    except SpecErrors as errors:
        return _refuse(errors.diagnostics)
    before = (data if data is not None else Path(file).read_bytes()).decode("utf-8")
    changed = before != after
    if diff and changed:
        sys.stdout.writelines(_diff(before, after, source.path))
    elif check and changed:
        print(f"{source.path} is not formatted; run `xtrain fmt {file}`", file=sys.stderr)
    elif file == "-" and not (check or diff):
        sys.stdout.write(after)
    if file != "-" and changed and not (check or diff):
        try:
            Path(file).write_text(after, encoding="utf-8", newline="\n")
        except OSError as error:
            print(f"xtrain fmt: {file} cannot be written: {error.strerror}", file=sys.stderr)
            return 3
    return 1 if check and changed else 0


def _refuse(diagnostics: "Diagnostics") -> int:
    from ..dsl.render import shows_color

    sys.stderr.write(diagnostics.render(color=shows_color(sys.stderr)))
    return 2


def _diff(before: str, after: str, path: str) -> list[str]:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"{path} (as it is)", f"{path} (formatted)"
    )
    return [line if line.endswith("\n") else f"{line}\n\\ no new line at the end\n" for line in lines]
