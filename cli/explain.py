"""`xtrain explain`: the meaning of a diagnostic code, an example that causes it, and the fix."""

import argparse
import json

from xtrain.cli.verb import Refused

HELP = "explain the code of a diagnostic"
DESCRIPTION = "Print the page of a diagnostic's code, or list all codes."
EPILOG = """\
examples:
  xtrain explain X203
  xtrain explain            (lists all codes)
  xtrain explain --json | jq -r '.[] | select(.wrong) | .code'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("code", nargs="?", metavar="CODE", help="a code, such as X203")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain explain`. Exit status: 0 done, 2 unknown code."""
    return explain(arguments.code, as_json=arguments.json)


def explain(code: str | None, *, as_json: bool = False) -> int:
    """Print the page of a code, or the list of all; return the exit status."""
    from attrs import asdict

    from xtrain.dsl.diagnostics.codes import CODES, near

    if code is None:
        if as_json:
            print(json.dumps([asdict(page) for page in CODES.values()], ensure_ascii=False))
        else:
            print("\n".join(f"{page.code}  {page.title}" for page in CODES.values()))
        return 0
    meant = near(code)
    if meant is None or meant != code.strip().upper():
        hint = f"did you mean {meant}?" if meant else "`xtrain explain` lists all codes"
        raise Refused(2, f"xtrain explain: there is no code {code}; {hint}")
    page = CODES[meant]
    print(json.dumps(asdict(page), ensure_ascii=False) if as_json else page.page())
    return 0
