"""`xtrain check`: report all errors in specs without planning or running them; `--fix` applies safe fixes."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import add_sets, colored, report

if TYPE_CHECKING:
    from xtrain.dsl.autofix import FixedTexts
    from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics

HELP = "find all mistakes in specs, and fix those with a certain fix"
DESCRIPTION = "Check specs and report all mistakes, in text order."
EPILOG = """\
examples:
  xtrain check specs/quickstart.xtrain
  xtrain check specs/*.xtrain --set optimizer.lr=1e-4
  xtrain check specs/quickstart.xtrain --fix --diff     (shows what --fix would write)
  xtrain check specs/quickstart.xtrain --json | jq -r .message
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("specs", nargs="+", metavar="SPEC", help="a spec (*.xtrain)")
    add_sets(parser)
    parser.add_argument("--fix", action="store_true", help="write certain fixes into SPEC and the files it includes")
    parser.add_argument("--diff", action="store_true", help="with --fix: print the changes, and write nothing")
    parser.add_argument("--json", action="store_true", help="print diagnostics as JSON, one object per line")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain check`. Exit status: 0 no errors (perhaps warnings), 2 errors, 3 a file cannot be written."""
    if arguments.diff and not arguments.fix:
        print("xtrain check: --diff shows what --fix would write; give both", file=sys.stderr)
        return 2
    status = 0
    for path in arguments.specs:
        status = max(status, _fix(path, arguments) if arguments.fix else _check(path, arguments))
    return status


def _check(path: str, arguments: argparse.Namespace) -> int:
    from xtrain.dsl.schema.model import executing_nothing
    from xtrain.planner.load import check_from_spec

    with executing_nothing():
        diagnostics = check_from_spec(path, arguments.sets)
    _report(path, diagnostics, arguments)
    return 2 if diagnostics.has_errors else 0


def _fix(path: str, arguments: argparse.Namespace) -> int:
    from xtrain.dsl.autofix import apply_fixes
    from xtrain.dsl.schema.model import executing_nothing
    from xtrain.planner.load import check_from_spec

    with executing_nothing():
        fixed = apply_fixes(lambda texts: check_from_spec(path, arguments.sets, texts))
    if arguments.diff:
        _show_difference(fixed)
        if fixed.fixed:
            print(f"{path}: {_count(len(fixed.fixed), 'fix')} to write", file=sys.stderr)
        with executing_nothing():
            return 2 if check_from_spec(path, arguments.sets).has_errors else 0
    for file, text in fixed.texts.items():
        problem = _write(file, text)
        if problem:
            print(f"xtrain check: {file} cannot be written: {problem}", file=sys.stderr)
            return 3
    for diagnostic in fixed.fixed:
        _print(diagnostic, arguments.json)
    _report(path, fixed.diagnostics, arguments, fixed=len(fixed.fixed))
    return 2 if fixed.diagnostics.has_errors else 0


def _show_difference(fixed: "FixedTexts") -> None:
    from xtrain.cli.rewrite import difference

    color = colored()
    for file, text in fixed.texts.items():
        # A file's first fix was found in its text on disk.
        before = next(d.fix.span.source.text for d in fixed.fixed if d.fix and d.fix.span.source.path == file)
        sys.stdout.write(difference(before, text, file, color=color))


def _write(file: str, text: str) -> str | None:
    """Write a fixed file. Return the error message on failure."""
    from xtrain.cli.rewrite import like, write

    try:
        write(file, like(text, Path(file).read_bytes()))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _print(diagnostic: "Diagnostic", as_json: bool) -> None:
    """Print one line for a fix that was written."""
    assert diagnostic.fix is not None
    span, text = diagnostic.fix
    if as_json:
        print(json.dumps({**diagnostic.to_json(), "fixed": True}, ensure_ascii=False))
        return
    old, new = _shown(span.text), _shown(text)
    change = f"{old} is now {new}" if old and new else f"{new} is new" if new else f"{old} is gone"
    print(f"{span}: fixed[{diagnostic.code}]: {change}")


def _shown(text: str) -> str:
    """Return a piece of a spec, shortened for a sentence."""
    line = " ".join(text.split())
    return f"`{line if len(line) <= 40 else line[:36] + '…'}`" if line else ""


def _report(path: str, diagnostics: "Diagnostics", arguments: argparse.Namespace, *, fixed: int = 0) -> None:
    """Print the diagnostics, and for people a summary line with their counts."""
    if arguments.json:
        for diagnostic in diagnostics:
            print(json.dumps(diagnostic.to_json(), ensure_ascii=False))
        return
    report(diagnostics)
    counts = [(fixed, "fixed"), (len(diagnostics.errors), "error"), (len(diagnostics.warnings), "warning")]
    found = ", ".join(_count(count, word) for count, word in counts if count)
    summary = f"{path}: {found or 'ok'}"
    known = _fixable(diagnostics) if not arguments.fix else 0
    if known:
        summary += f"; `xtrain check --fix` corrects {'it' if known == len(diagnostics) == 1 else known}"
    print(summary, file=sys.stderr if diagnostics.has_errors else sys.stdout, flush=True)


def _fixable(diagnostics: "Diagnostics") -> int:
    """Return the number of diagnostics that `--fix` would try to fix."""
    if not any(diagnostic.fix for diagnostic in diagnostics):
        return 0  # most specs are valid; report that without importing the fixer
    from xtrain.dsl.autofix import fixable

    return fixable(diagnostics)


def _count(count: int, word: str) -> str:
    if word == "fixed":
        return f"{count} fixed"
    return f"{count} {word}{'es' if word == 'fix' else 's'}" if count > 1 else f"{count} {word}"
