"""`xtrain init NAME`: an annotated spec to start from."""

import argparse
import shlex
from pathlib import Path

from xtrain.cli.verb import Refused

HELP = "write an annotated spec to start from"
DESCRIPTION = "Write NAME.xtrain, a spec with comments on each choice. NAME is the experiment's name."
EPILOG = """\
examples:
  xtrain init tryout                        tryout.xtrain, for one process on a laptop
  xtrain init specs/big --template cluster
  xtrain init --list
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the experiment, optionally with a folder")
    parser.add_argument("--template", default="quickstart", metavar="T", help="the template (default: quickstart)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--list", action="store_true", help="list the templates")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain init`. Exit status: 0 written, 2 invalid name or template, or an existing file, 3 it cannot be
    written."""
    from xtrain.dsl.starter import name_problem, near_starter, starters

    known = starters()
    if arguments.list:
        wide = max(map(len, known))
        print("\n".join(f"{name.ljust(wide)}  {starter.about}" for name, starter in known.items()))
        return 0
    if arguments.name is None:
        raise Refused(2, "xtrain init: NAME is missing: write `xtrain init NAME`, or `xtrain init --list`")
    starter = known.get(arguments.template)
    if starter is None:
        meant = near_starter(arguments.template)
        hint = f"did you mean `{meant}`?" if meant else f"existing templates: {', '.join(known)}"
        raise Refused(2, f"xtrain init: there is no template `{arguments.template}`; {hint}")
    path = Path(arguments.name)
    name = path.name.removesuffix(".xtrain")
    problem = name_problem(name)
    if problem is not None:
        raise Refused(2, f"xtrain init: an experiment cannot be called `{name}`: {problem}")
    path = path.with_name(f"{name}.xtrain")
    if not str(path).isprintable():
        raise Refused(2, f"xtrain init: {str(path)!r} is not a path for a spec")
    return _write(path, starter.named(name, shlex.quote(str(path))), force=arguments.force)


def _write(path: Path, text: str, *, force: bool) -> int:
    from xtrain.cli.rewrite import write_new

    write_new(path, text, "init", force=force)
    shown = shlex.quote(str(path))
    print(f"Wrote {path}. Next:\n\n  xtrain plan {shown}    show the plan\n  xtrain run {shown}     run it")
    return 0
