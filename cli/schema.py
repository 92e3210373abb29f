"""`xtrain schema`: the language's schema for programs, and specs in the form it describes."""

import argparse
import json
import sys

from xtrain.cli.verb import add_sets

EPILOG = """\
examples:
  xtrain schema > xtrain.schema.json
  xtrain schema specs/quickstart.xtrain | jq .model
  xtrain schema specs/quickstart.xtrain --set optimizer.lr=1e-4 | jq .optimizer.lr
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the `xtrain` command."""
    parser = subparsers.add_parser(
        "schema",
        help="print the JSON Schema of a spec, or a spec as JSON",
        description="Print the JSON Schema (draft 2020-12) of a spec as a JSON object; with SPEC, print that object: "
        "includes, constants and defaults resolved.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spec", nargs="?", metavar="SPEC", help="a spec (*.xtrain) to print as JSON")
    add_sets(parser)
    parser.add_argument("--json", action="store_true", help="the only format; accepted for scripts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain schema`. Exit status: 0 done, 2 invalid spec."""
    if arguments.spec is None:
        if arguments.sets:
            print("xtrain schema: --set changes a spec; give one", file=sys.stderr)
            return 2
        from xtrain.dsl.reference.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return 0
    from xtrain.dsl.diagnostics.diagnostic import shows_color
    from xtrain.dsl.load import load_spec
    from xtrain.dsl.spec_text import spec_json

    loaded = load_spec(arguments.spec, arguments.sets)
    sys.stderr.write(loaded.diagnostics.render(color=shows_color(sys.stderr)))
    if loaded.spec is None:
        return 2
    print(json.dumps(spec_json(loaded.spec), indent=2, ensure_ascii=False))
    return 0
