"""`xtrain plan`: compile a spec into a plan, and print, draw or save it. Nothing is executed."""

import argparse
import sys
from bisect import bisect_left
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from xtrain.cli.plan_views import (
    FORMATS,
    add_alternatives,
    json_text,
    show_alternatives,
    show_sweep,
    view,
)
from xtrain.cli.verb import Refused, add_sets, counted, ranks, report
from xtrain.text.printing import drawn_on

if TYPE_CHECKING:
    from xtrain.plan.plan import Plan
    from xtrain.planner.compile import Compiled

HELP = "show what a spec would do, without running it"
DESCRIPTION = "Compile SPEC and print its plan: memory, time, mesh, graph, traffic, timeline, checks."
EPILOG = """\
examples:
  xtrain plan specs/two_ranks_cpu.xtrain
  xtrain plan specs/llama_8b_64gpu.xtrain --world 128 --set optimizer.lr=1e-4
  xtrain plan specs/llama_8b_64gpu.xtrain --part memory --part communication
  xtrain plan specs/llama_405b_16k.xtrain --rank 137
  xtrain plan specs/llama_405b_16k.xtrain --why parallel.tp
  xtrain plan specs/llama_405b_16k.xtrain --show 'setup.parallel.*'
  xtrain plan specs/llama_8b_64gpu.xtrain --compare tp=2 tp=4,pp=2 activation=full
  xtrain plan specs/llama_8b_64gpu.xtrain --fit
  xtrain plan specs/sweep_cpu.xtrain
  xtrain plan specs/two_ranks_cpu.xtrain --trace
  xtrain plan specs/two_ranks_cpu.xtrain --format dot | dot -Tsvg > plan.svg
  xtrain plan specs/two_ranks_cpu.xtrain --out plan.json && xtrain run plan.json
  xtrain plan specs/llama_405b_16k.xtrain --json | jq .memory.per_rank[0]
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("spec", metavar="SPEC", help="a spec (*.xtrain), or a saved plan (*.json)")
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: as in the spec)")
    add_sets(parser)
    parser.add_argument(
        "--trace", action="store_true", help=("also trace a step of one rank of each kind on meta tensors")
    )
    parser.add_argument(
        "--law", type=Path, metavar="FILE", help=("also predict the loss, with a law from `xtrain fit-law`")
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the plan as JSON, for `xtrain run FILE`")
    _add_views(parser)
    add_alternatives(parser)


def _add_views(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the view; the default is one page."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--format", choices=FORMATS, default="text", help="output format (default: text)")
    form.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    what = parser.add_argument_group("views", "instead of the page").add_mutually_exclusive_group()
    what.add_argument("--full", action="store_true", help="the page without any cuts")
    what.add_argument("--part", action="append", default=[], metavar="NAME", help="one part of the page in full")
    what.add_argument("--rank", type=int, metavar="N", help="everything about one rank")
    what.add_argument("--show", metavar="ID", help="a node of the graph: its id, its beginning, or a pattern with *")
    what.add_argument("--why", metavar="SETTING", help="explain a setting: where it was set, and what depends on it")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain plan`. Exit status: 0 there is a plan, 2 invalid spec or command line, 3 the plan cannot be saved or
    traced."""
    from xtrain.dsl.load import load_spec
    from xtrain.planner.load import is_saved, plan_from_loaded, plan_from_path

    if (shown := show_alternatives(arguments)) is not None:
        return shown
    if is_saved(arguments.spec):
        compiled = plan_from_path(arguments.spec, arguments.sets, arguments.world, counted)
    else:
        loaded = load_spec(arguments.spec, arguments.sets)
        if (shown := show_sweep(arguments, loaded)) is not None:
            return shown
        compiled = plan_from_loaded(loaded, arguments.world, counted)
    if compiled.plan is None:
        compiled.report_to(sys.stderr)
        if arguments.format == "json":
            print(json_text(compiled.diagnostics))
        return 2
    _warn(compiled, arguments)
    plan = compiled.plan
    if arguments.trace and plan.serves:
        raise Refused(2, "error: --trace traces a training step, but this is a server spec")
    if arguments.trace:
        plan = _traced(plan)
    text = view(plan, arguments)
    if arguments.law is not None:
        text = _predicted(text, plan, arguments)
    if arguments.out is not None:
        _save(plan, arguments)
    sys.stdout.write(text)
    if arguments.out is not None and arguments.format == "text":
        print(f"Saved to {arguments.out}; run it with: xtrain run {quote(str(arguments.out))}")
    return 0


def _warn(compiled: "Compiled", arguments: argparse.Namespace) -> None:
    """Print the spec's diagnostics to stderr, except those shown on the page that follows."""
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics

    page = (
        arguments.format == "text"
        and arguments.rank is None
        and not (arguments.show or arguments.why)
        and (not arguments.part or "checks" in ",".join(arguments.part).split(","))
    )
    shown = sorted(check.evidence for check in compiled.plan.checks) if page and compiled.plan else []
    rest = Diagnostics()
    for diagnostic in compiled.diagnostics:
        place = bisect_left(shown, diagnostic.message)
        if not any(text.startswith(diagnostic.message) for text in shown[place : place + 1]):
            rest.add(diagnostic)
    report(rest)


def _traced(plan: "Plan") -> "Plan":
    """Return the plan with a trace per kind of rank, and checks of the closed forms against it. Raises Refused."""
    from xtrain.planner.review.costs import ranks_to_trace, with_trace
    from xtrain.runtime.base.errors import EnvironmentFault
    from xtrain.runtime.base.ops import PlanMismatch
    from xtrain.runtime.inspect.trace import trace_plan

    ranks = ranks_to_trace(plan)

    def tell(number: int, count: int) -> None:
        if sys.stderr.isatty():
            print(f"\rtracing rank {ranks[number - 1]:,}, {number} of {count} … ", end="", file=sys.stderr, flush=True)

    try:
        found = trace_plan(plan, ranks, tell)
    except (PlanMismatch, EnvironmentFault) as problem:
        raise Refused(3, f"error: the plan cannot be traced: {problem}") from None
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=drawn_on(sys.stderr), flush=True)
    return with_trace(plan, found)


def _predicted(text: str, plan: "Plan", arguments: argparse.Namespace) -> str:
    """Return the text with the law's prediction. Raises Refused."""
    from xtrain.cli.plan_views import with_prediction
    from xtrain.records.law import LawError, ScalingLaw

    if arguments.format not in ("text", "json") or plan.serves:
        raise Refused(2, "error: --law predicts the loss of a training run, as text or JSON")
    try:
        return with_prediction(text, plan, ScalingLaw.read(arguments.law), arguments.format)
    except LawError as problem:
        raise Refused(2, f"error: {problem}") from None


def _save(plan: "Plan", arguments: argparse.Namespace) -> None:
    """Save the plan. Raises Refused."""
    from xtrain.plan.serialise import dumps, signed
    from xtrain.planner.load import is_saved

    if not is_saved(arguments.spec):
        plan = signed(plan, arguments.sets, arguments.world)
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(dumps(plan), encoding="utf-8")
    except OSError as error:
        raise Refused(3, f"error: {arguments.out} cannot be written: {error.strerror}") from None
