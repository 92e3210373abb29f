"""`xtrain plan`: compile a spec into the plan of its run, and print or save it. Nothing is executed."""

import argparse
import json
import sys
from pathlib import Path

from .arguments import add_sets

EPILOG = """\
examples:
  xtrain plan specs/two_ranks_cpu.xtrain
  xtrain plan specs/llama_8b_64gpu.xtrain --world 128 --set optimizer.lr=1e-4
  xtrain plan specs/two_ranks_cpu.xtrain --out plan.json && xtrain run plan.json
  xtrain plan specs/llama_405b_16k.xtrain --json | jq .memory.per_rank[0]
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the `xtrain` command."""
    parser = subparsers.add_parser(
        "plan",
        help="show what a spec would do, before anything is done",
        description="Compile SPEC and print its plan: mesh, memory, graph, step, timeline, checks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spec", metavar="SPEC", help="a spec (*.xtrain), or a saved plan (*.json)")
    parser.add_argument("--world", type=_ranks, metavar="N", help="number of ranks; default: what the spec asks for")
    add_sets(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the plan as JSON, for `xtrain run FILE`")
    parser.set_defaults(run=run)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of ranks; use 1 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0 there is a plan, 2 the spec is wrong, 3 the plan cannot be saved."""
    from ..planner.load import plan_from_path
    from ..planner.render import render
    from ..planner.serialise import dumps
    from ..planner.text import shows_color

    compiled = plan_from_path(arguments.spec, arguments.sets, arguments.world)
    compiled.report_to(sys.stderr)
    plan = compiled.plan
    if plan is None:
        if arguments.json:
            print(json.dumps({"diagnostics": [diagnostic.to_json() for diagnostic in compiled.diagnostics]}))
        return 2
    if arguments.out is not None:
        try:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(dumps(plan), encoding="utf-8")
        except OSError as error:
            print(f"error: {arguments.out} cannot be written: {error.strerror}", file=sys.stderr)
            return 3
    sys.stdout.write(dumps(plan) if arguments.json else render(plan, color=shows_color(sys.stdout)))
    if arguments.out is not None and not arguments.json:
        print(f"Saved to {arguments.out}; run it with: xtrain run {arguments.out}")
    return 0
