"""`xtrain merge RUN --to FOLDER`: merge an adapter into its model and write the result."""

import argparse

HELP = "add a trained adapter to its model"
DESCRIPTION = "Add the adapter of a checkpoint to its model, and write the result as a folder that transformers reads."
EPILOG = """\
The folder is that of `xtrain export`, of a model without adapter. Sums are taken in fp32 and rounded once, to the
number format of the file; how much of each change that keeps is printed, and merge.json has it for every matrix. The
model is read from where the run has read it, must have the content that the adapter was trained on, and is never in
memory as a whole.

examples:
  xtrain merge runs/chat/<run> --to models/chat
  xtrain merge runs/chat/<run> --to models/chat-fp32 --checkpoint best --dtype fp32

exit codes: 0 written, 2 the command line is wrong, 3 no checkpoint, a damaged one, another model, no room, or FOLDER is
there already
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    from xtrain.cli.export import add_export, add_task

    add_export(parser)
    add_task(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain merge`. The help lists the exit statuses."""
    from xtrain.cli.export import write

    return write("merge", arguments, merges=True)
