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
