"""Arguments that several verbs take alike."""

import argparse


def add_sets(parser: argparse.ArgumentParser) -> None:
    """`--set PATH=VALUE`, collected under `sets`."""
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="replace a setting or param; may be repeated",
    )


def ranks(text: str) -> int:
    """A number of ranks, as the type of `--world`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of ranks; use 1 or more")
    return int(text)
