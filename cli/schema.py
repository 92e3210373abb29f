"""`xtrain schema`: the language's schema for programs, and specs in the form it describes."""

import argparse
import json

from xtrain.cli.verb import Refused, add_sets, report

HELP = "print the JSON Schema of a spec, or a spec as JSON"
DESCRIPTION = (
    "Print the JSON Schema (draft 2020-12) of a spec as a JSON object; with SPEC, print that object: "
    "includes, constants and defaults resolved."
)
EPILOG = """\
examples:
  xtrain schema > xtrain.schema.json
  xtrain schema specs/quickstart.xtrain | jq .model
  xtrain schema specs/quickstart.xtrain --set optimizer.lr=1e-4 | jq .optimizer.lr
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("spec", nargs="?", metavar="SPEC", help="a spec (*.xtrain) to print as JSON")
    add_sets(parser)
    parser.add_argument("--json", action="store_true", help="the only format; accepted for scripts")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain schema`. Exit status: 0 done, 2 invalid spec."""
    if arguments.spec is None:
        if arguments.sets:
            raise Refused(2, "xtrain schema: --set changes a spec; give one")
        from xtrain.dsl.reference.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return 0
    from xtrain.dsl.load import load_spec
    from xtrain.dsl.schema.model import executing_nothing
    from xtrain.dsl.spec_text import spec_json

    with executing_nothing():
        loaded = load_spec(arguments.spec, arguments.sets)
    report(loaded.diagnostics)
    if loaded.spec is None:
        return 2
    print(json.dumps(spec_json(loaded.spec), indent=2, ensure_ascii=False))
    return 0
