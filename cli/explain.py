"""`xtrain explain`: what a diagnostic's code means, an example that causes it, and what to write instead."""

import argparse
import json
import sys

EPILOG = """\
examples:
  xtrain explain X203
  xtrain explain            (lists all codes)
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the `xtrain` command."""
    parser = subparsers.add_parser(
        "explain",
        help="explain the code of a diagnostic",
        description="Print the page of a diagnostic's code, or list all codes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("code", nargs="?", metavar="CODE", help="a code, such as X203")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0 there is such a code, 2 there is none."""
    from attrs import asdict

    from ..dsl.codes import CODES, near

    if arguments.code is None:
        if arguments.json:
            print(json.dumps([asdict(code) for code in CODES.values()], ensure_ascii=False))
        else:
            print("\n".join(f"{code.code}  {code.title}" for code in CODES.values()))
        return 0
    meant = near(arguments.code)
    if meant is None or meant != arguments.code.strip().upper():
        hint = f"did you mean {meant}?" if meant else "`xtrain explain` lists them all"
        print(f"xtrain explain: there is no code {arguments.code}; {hint}", file=sys.stderr)
        return 2
    page = CODES[meant]
    print(json.dumps(asdict(page), ensure_ascii=False) if arguments.json else page.page())
    return 0
