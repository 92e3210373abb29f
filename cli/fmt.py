"""`xtrain fmt`: format specs in the standard style."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from xtrain.cli.verb import colored, report
from xtrain.text.printing import drawn_on

HELP = "format specs"
DESCRIPTION = "Format specs. Comments and line breaks stay; a spec with syntax errors is left unchanged."
EPILOG = (
    "examples:\n  xtrain fmt specs/                       every *.xtrain below a folder\n  xtrain fmt --check "
    "specs/ *.xtrain      lists the files to change, and exits with 1 if there are any\n  xtrain fmt --diff "
    "specs/quickstart.xtrain\n  xtrain fmt - < specs/quickstart.xtrain\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a spec, or a folder of specs; - for standard input and output",
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; list files that would change, exit with 1 if any"
    )
    parser.add_argument("--diff", action="store_true", help="change nothing; print the changes")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain fmt`. Exit status: 0 done, 1 a file would change (`--check`), 2 a file cannot be formatted, 3 a file
    cannot be written.

    70: a formatter bug. Formatting would have changed the meaning of a spec, so the file was left unchanged.
    """
    status = 0
    for file in arguments.files:
        found = list(_specs(file))
        if not found:
            print(f"xtrain fmt: there is no *.xtrain below {file}", file=sys.stderr)
            status = max(status, 2)
        for path in found:
            status = max(status, _format(path, check=arguments.check, diff=arguments.diff))
    return status


def _specs(file: str) -> Iterator[str]:
    """Yield the file itself, or the specs below a folder, hidden folders excluded."""
    try:
        is_folder = file != "-" and Path(file).is_dir()
    except OSError:  # the name is too long; reading the file reports it
        is_folder = False
    if not is_folder:
        yield file
        return
    for path in sorted(Path(file).rglob("*.xtrain")):
        hidden = any(part.startswith(".") for part in path.relative_to(file).parts)
        if path.is_file() and not hidden:
            yield str(path)


def _format(file: str, *, check: bool, diff: bool) -> int:
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SpecErrors
    from xtrain.dsl.evaluation.statements import read_source
    from xtrain.dsl.syntax.format import FormatFault, format_source

    diagnostics = Diagnostics()
    data = sys.stdin.buffer.read() if file == "-" else None
    source = read_source("<stdin>" if file == "-" else file, diagnostics, data=data)
    if source is None:
        report(diagnostics)
        return 2
    try:
        after = format_source(source)
    except SpecErrors as errors:
        report(errors.diagnostics)
        return 2
    except FormatFault:
        print((
            f"xtrain fmt: {source.path} is left unchanged: formatting would change its meaning, which is a bug of "
            "the formatter; please report it with the spec"
        ), file=sys.stderr)  # fmt: skip
        return 70
    before = (data if data is not None else Path(file).read_bytes()).decode("utf-8")
    changed = before != after
    if diff and changed:
        from xtrain.cli.rewrite import difference

        sys.stdout.write(difference(before, after, source.path, color=colored()))
    elif check and changed:
        print(source.path)
    elif file == "-" and not (check or diff):
        (sys.stdout if sys.stdout.isatty() else drawn_on(sys.stdout)).write(after)  # the file already has this text
    elif changed and not (check or diff):
        return _write(file, after)
    return 1 if check and changed else 0


def _write(file: str, text: str) -> int:
    from xtrain.cli.rewrite import write

    try:
        write(file, text.encode())
    except OSError as error:
        print(f"xtrain fmt: {file} cannot be written: {error.strerror}", file=sys.stderr)
        return 3
    print(f"{file}: formatted")
    return 0
