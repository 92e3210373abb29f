"""`xtrain merge RUN --to FOLDER`: merge an adapter into its model and write the result."""

import argparse

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


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the `xtrain` command."""
    from xtrain.cli.export import add_arguments, add_task

    parser = subparsers.add_parser(
        "merge",
        help="add a trained adapter to its model",
        description=(
            "Add the adapter of a checkpoint to its model, and write the result as a folder that transformers reads."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    add_task(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain merge`. The help lists the exit statuses."""
    from xtrain.cli.export import write

    return write("merge", arguments, merges=True)
