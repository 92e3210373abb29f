"""The `xtrain` command: one small file a verb, imported only when it is called."""

import argparse
import sys
from importlib import import_module

VERBS = (
    "init", "check", "fmt", "lsp", "plan", "diff", "doctor", "run", "launch", "runs", "sweep", "serve", "find-lr",
    "fit-law", "watch", "control", "data", "checkpoint", "generate", "export", "merge", "docs", "schema",
    "explain", "completion",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Only the verb that was asked for is imported; for help and for a wrong verb, all of them.
    asked = next((a for a in arguments if not a.startswith("-")), None)
    parser = make_parser((asked,) if asked in VERBS else VERBS)
    parsed = parser.parse_args(arguments)
    if parsed.version:
        from .. import __version__

        print(f"xtrain {__version__}")
        return 0
    if parsed.verb is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return parsed.run(parsed)
    except BrokenPipeError:
        return 0  # the reader of a pipe has seen enough
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.filename is None:
            raise
        print(f"xtrain {parsed.verb}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def make_parser(verbs: tuple[str, ...] = VERBS) -> argparse.ArgumentParser:
    """The parser of the command with these verbs."""
    parser = argparse.ArgumentParser(
        prog="xtrain",
        description="Declare a training experiment, review its execution plan, run exactly that plan.",
        epilog="example: xtrain plan specs/quickstart.xtrain && xtrain run specs/quickstart.xtrain",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb")
    for verb in verbs:
        import_module(f"{__package__}.{verb.replace('-', '_')}").add_parser(subparsers)
    return parser


def entry() -> None:
    sys.exit(main())
