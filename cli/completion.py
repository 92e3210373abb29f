"""`xtrain completion SHELL`: a completion script generated from the parsers of all verbs."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any, Final

HELP = "print a completion script for a shell"
DESCRIPTION = "Print a completion script for SHELL: verbs, options, their values, specs and settings."
EPILOG = """\
examples:
  xtrain completion bash > ~/.local/share/bash-completion/completions/xtrain
  xtrain completion zsh > ~/.zfunc/_xtrain                     (`fpath+=~/.zfunc` before compinit)
  xtrain completion fish > ~/.config/fish/completions/xtrain.fish
"""
SHELLS: Final = ("bash", "zsh", "fish")
# Metavar in the verb's help → completion: file patterns, folders, or any files.
PATTERNS: Final = {"SPEC": ("*.xtrain", "*.json"), "SPEC|RUN": ("*.xtrain",), "TEMPLATE": ("*.jinja",)}
FOLDERS: Final = ("FOLDER", "ROOT", "RUNS")
FILES: Final = ("FILE", "RUN", "PATH", "A", "B")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain completion`. Exit status: 0."""
    sys.stdout.write(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Return the script for a shell."""
    import shtab

    from xtrain.cli.main import make_parser

    parser = make_parser()
    words = _words()
    for action in _actions(parser):
        name = action.metavar if isinstance(action.metavar, str) else ""
        if name in words:
            action.choices = words[name]
        elif action.choices is None and (files := _files(name)) is not None:
            action.complete = files  # type: ignore[attr-defined]
    return shtab.complete(parser, shell=shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield every argument of a parser and of its verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
        else:
            yield action


def _words() -> dict[str, list[str]]:
    """Return a dict from metavar to its possible words. `--set` gets the settings of blocks without a name."""
    from xtrain.dsl.diagnostics.codes import CODES
    from xtrain.dsl.reference.reference import every_page
    from xtrain.dsl.schema.blocks import NAMED

    pages = list(every_page())
    fields = [field for page in pages for field in page.fields if field.group == "block" and not field.is_block]
    settings = [field.path for field in fields if field.path.partition(".")[0] not in NAMED and field.name != "NAME"]
    topics = [page.path for page in pages]
    return {
        "PATH=VALUE": list(dict.fromkeys(settings)),
        "SETTING": list(dict.fromkeys(settings)),
        "CODE": list(CODES),
        "TOPIC": list(dict.fromkeys([*topics, *settings])),
    }


def _files(name: str) -> Any:
    """Return the files that complete an argument of this name; None if it is not a file."""
    import shtab

    if name in PATTERNS:
        return shtab.glob(*PATTERNS[name])
    if name in FOLDERS:
        return shtab.DIRECTORY
    return shtab.FILE if name in FILES else None
