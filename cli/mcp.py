"""`xtrain mcp`: tools for assistants, over standard input and output."""

import argparse
from pathlib import Path

from xtrain.cli.verb import Refused

HELP = "serve an assistant: check, plan, diff, docs, runs, metrics; run what a person approved"
DESCRIPTION = (
    "Serve the Model Context Protocol over standard input and output until the client ends it. Tools take specs and "
    "runs below the working folder and execute no code of a spec. `run` starts only plans that a person has approved."
)
EPILOG = """\
examples:
  xtrain mcp                               (what a client runs, in the folder of the project)
  xtrain mcp --signers allowed_signers     only signed approvals count
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "--signers", type=Path, metavar="FILE", help="allowed signers of approvals, as of ssh-keygen -Y verify"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the server. Exit status: 0 when the client closes it, 2 if its package is not installed or there is no file
    of signers."""
    if arguments.signers is not None and not arguments.signers.is_file():
        raise Refused(2, f"xtrain mcp: there is no file {arguments.signers}; write one line `NAME KEY` for each signer")
    try:
        from xtrain.api.assistant import make_server
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "mcp":
            raise
        raise Refused(2, 'xtrain mcp: mcp is not installed; install it with `pip install "xtrain[mcp]"`') from None
    signers = None if arguments.signers is None else arguments.signers.resolve()
    make_server(Path.cwd(), signers).run("stdio")
    return 0
