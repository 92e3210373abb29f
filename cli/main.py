"""The `xtrain` command: one file per verb, imported only when it is called."""

import argparse
import codecs
import errno
import gc
import io
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from xtrain.cli.verb import Refused, refusals
from xtrain.regular_files import reason_of
from xtrain.text.printing import harmless, safe_output

GROUPS = {
    "write a spec": (
        *("init", "import", "fetch", "check", "fmt", "lsp", "mcp", "docs", "explain", "schema", "completion"),
    ),
    "look before you run": ("plan", "diff", "review", "solve", "prove", "data", "doctor", "approve"),
    "train": ("run", "launch", "sweep", "serve", "find-lr", "coord-check", "replay", "forget"),
    "watch": ("runs", "watch", "report", "control", "seen", "blame", "bisect", "fit-law", "calibrate"),
    "use what was trained": ("checkpoint", "generate", "export", "merge", "push"),
}
# Verb → words of other programs for it.
OTHERS = {
    "run": "train start resume fit", "runs": "list ls ps status", "check": "validate lint",
    "control": "stop eval evaluate",
    "generate": "sample chat infer inference", "fetch": "download", "fmt": "format", "launch": "submit", "init": "new",
    "watch": "dashboard", "plan": "show", "diff": "compare", "prove": "certify verify", "push": "upload publish",
}  # fmt: skip
VERBS: tuple[str, ...] = tuple(verb for verbs in GROUPS.values() for verb in verbs)
# Verbs that end soon: a plan takes about an eighth less processor time without searches for cyclic garbage. A trace
# runs the program, whose tensors are in cycles.
SHORT = ("check", "plan")
LONG_OPTION = "--trace"
# Errors of the file or disk that receives a command's output.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    _settle_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    # Import only the requested verb; for help and for an unknown verb, import all.
    asked = next((a for a in arguments if not a.startswith("-")), None)
    parser = make_parser((asked,) if asked is not None and asked in VERBS else VERBS)
    parsed = parser.parse_args(arguments)
    if parsed.version:
        from xtrain.version import __version__, commit

        print(" · ".join(filter(None, (f"xtrain {__version__}", f"commit {found}" if (found := commit()) else ""))))
        return 0
    if parsed.verb is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        Path.cwd()
    except OSError as error:
        print(f"xtrain: the working folder no longer exists ({error.strerror}); change to another", file=sys.stderr)
        return 3
    try:
        with safe_output():
            try:
                with refusals():
                    code = parsed.run(parsed)
            except Refused as refused:
                code = refused.show()
        if not sys.stdout.closed:  # how the language server exits
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_output()
        return 0  # the reader of a pipe has closed it
    except KeyboardInterrupt:
        return 130
    except (OSError, OverflowError) as error:
        from xtrain.runtime.base.limits import limit_fault

        if (fault := limit_fault(error)) is not None:
            _tell(f"error[{fault.code}]: {fault}")
            return 3
        if isinstance(error, OverflowError):
            raise
        if error.filename is not None:
            _tell(f"xtrain {parsed.verb}: {error.filename}: {reason_of(error)}")
            return 2
        if error.errno not in UNWRITABLE:
            raise
        _drop_output()
        _tell(f"xtrain {parsed.verb}: the output cannot be written: {error.strerror}")
        return 3


def _settle_streams() -> None:
    """Replace closed streams by /dev/null, and let the others write every text in any encoding."""
    codecs.register_error("xtrain", _escaped)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  until the process ends
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="xtrain")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Return JSON escapes of characters that an encoding lacks, so that JSON remains valid."""
    import json

    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _drop_output(stream: TextIO | None = None) -> None:
    """Redirect `stream` (None: stdout) to /dev/null: flushing buffered output at exit would fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def _tell(message: str) -> None:
    """Print an error message. If stderr is unwritable, the exit code alone reports the error."""
    try:
        print(harmless(message), file=sys.stderr, flush=True)
    except OSError:
        _drop_output(sys.stderr)


def _columns() -> int:
    """Return the width of the terminal. argparse asks for each argument, and loads `shutil` for it."""
    with suppress(KeyError, ValueError):
        if (columns := int(os.environ["COLUMNS"])) > 0:
            return columns
    with suppress(AttributeError, ValueError, OSError):
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80  # type: ignore[union-attr]
    return 80


class HelpText(argparse.HelpFormatter):
    """Help in which every line is wrapped at words: prose is filled, and examples keep their lines and columns."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"width": _columns() - 2, **settings})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        from textwrap import wrap

        lines: list[str] = []
        prose: list[str] = []
        for line in [*text.strip("\n").split("\n"), ""]:
            label = re.match(r"[a-z ]+:(?: |$)", line)  # as `examples:` and `exit codes: 0 done, …`
            if prose and (label or not line or line.startswith(" ")):
                lines += wrap(" ".join(prose), width, break_long_words=False, break_on_hyphens=False)
                prose = []
            if line and not line.startswith(" "):
                prose.append(line)
            else:
                lines += self._example(line, width)
        return "\n".join(indent + line for line in lines[:-1])

    def _example(self, line: str, width: int) -> list[str]:
        """Wrap an indented line; a second column, after two spaces, keeps its place or goes below the first."""
        from textwrap import wrap

        if len(line) <= width:
            return [line]
        columns = re.fullmatch(r"( +\S.*?)(  +)(\S.*)", line)
        first, rest, start = (columns[1], columns[3], columns.end(2)) if columns else (line, "", 0)
        hanging = " " * (start if 0 < start <= width // 2 else len(line) - len(line.lstrip()) + 4)
        wrapped = wrap(first, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
        if not rest:
            return wrapped
        below = wrap(rest, width - len(hanging), break_long_words=False, break_on_hyphens=False)
        if len(hanging) == start and len(wrapped) == 1:
            wrapped[0] += columns[2] + below.pop(0) if columns else ""
        return wrapped + [hanging + line for line in below]

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction) or not set(action.choices) <= set(VERBS):
            return super()._format_action(action)
        listed = {one.dest: super(HelpText, self)._format_action(one) for one in action._choices_actions}
        return "\n" + "\n".join(
            f"{title}:\n{''.join(listed[verb] for verb in verbs)}"
            for title, verbs in GROUPS.items()
            if verbs[0] in listed
        )


class Parser(argparse.ArgumentParser):
    """Parser whose errors suggest the probable verb, choice or option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": HelpText, **settings})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            others = OTHERS.items() if action.dest == "verb" else ()
            other = next((verb for verb, words in others if value in words.split()), None)
            hint = f"use `{other}`" if other else _did_you_mean(str(value), known)
            hint = hint or f"choose from {', '.join(known)}"
            raise argparse.ArgumentError(action, f"invalid choice: {str(value)!r}; {hint}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        parsed, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            name = word.partition("=")[0]
            hint = _did_you_mean(name, self._option_string_actions) if name.startswith("--") else None
            if hint:
                self.error(f"unrecognized arguments: {word}; {hint}")
        return parsed, unknown


def _did_you_mean(word: str, known: Iterable[str]) -> str | None:
    from xtrain.dsl.diagnostics.suggest import did_you_mean

    return did_you_mean(word, known)


def make_parser(verbs: tuple[str, ...] = VERBS) -> argparse.ArgumentParser:
    """Return the parser of the command with these verbs."""
    parser = Parser(
        prog="xtrain",
        description="Declare a training experiment, review its execution plan, run exactly that plan.",
        epilog="example: xtrain plan specs/quickstart.xtrain && xtrain run specs/quickstart.xtrain",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    # Without `prog` argparse formats the usage, for which it loads `shutil`.
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", prog="xtrain")
    for verb in verbs:
        module = import_module(f"{__package__}.{verb.replace('-', '_')}")
        of_verb = subparsers.add_parser(verb, help=module.HELP, description=module.DESCRIPTION, epilog=module.EPILOG)
        of_verb.set_defaults(run=module.run)
        module.add_arguments(of_verb)
    return parser


def entry() -> None:
    """Run the command line of this process, and end it."""
    ends_soon = next((a for a in sys.argv[1:] if not a.startswith("-")), None) in SHORT and LONG_OPTION not in sys.argv
    if ends_soon:
        gc.disable()
    code = main()
    if ends_soon:
        gc.freeze()  # Python searches three times more as it ends
    sys.exit(code)
