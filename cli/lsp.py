"""`xtrain lsp`: the language server, started by an editor and connected over standard input and output."""

import argparse
import sys

EPILOG = """\
examples:
  xtrain lsp                 (what an editor runs; docs/editors.md has the settings of VS Code, Neovim and Helix)
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the `xtrain` command."""
    parser = subparsers.add_parser(
        "lsp",
        help="serve an editor: diagnostics while typing, completion, hover, rename",
        description="Run the language server over standard input and output until the editor ends it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stdio", action="store_true", help="the only supported mode; some editors pass it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the language server. Exit status: 0 when the editor closes it, 2 if its packages are not installed."""
    try:
        from xtrain.lsp.server import make_server
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        print('xtrain lsp: pygls is not installed; install it with `pip install "xtrain[lsp]"`', file=sys.stderr)
        return 2
    make_server().start_io()
    return 0
