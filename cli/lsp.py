"""`xtrain lsp`: the language server, started by an editor and connected over standard input and output."""

import argparse

from xtrain.cli.verb import Refused

HELP = "serve an editor: diagnostics while typing, completion, hover, rename"
DESCRIPTION = "Run the language server over standard input and output until the editor ends it."
EPILOG = """\
examples:
  xtrain lsp                 (what an editor runs; docs/editors.md has the settings of VS Code, Neovim and Helix)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--stdio", action="store_true", help="the only supported mode; some editors pass it")


def run(arguments: argparse.Namespace) -> int:
    """Run the language server. Exit status: 0 when the editor closes it, 2 if its packages are not installed."""
    try:
        from xtrain.lsp.server import make_server
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        raise Refused(2, 'xtrain lsp: pygls is not installed; install it with `pip install "xtrain[lsp]"`') from None
    make_server().start_io()
    return 0
