"""`xtrain plan` of a spec with `sweep`: the plan of the sweep."""

import argparse
import json
import sys

from xtrain.cli.counting import counted
from xtrain.cli.plan_views import is_given
from xtrain.cli.safe_output import drawn_on


def show_sweep(arguments: argparse.Namespace) -> int | None:
    """Print the sweep's plan; return the exit status, or None if the spec has no sweep or a view of a single plan is
    requested."""
    from xtrain.planner.load import is_saved

    views = ("part", "rank", "show", "why", "trace", "law")
    if is_saved(arguments.spec) or arguments.format not in ("text", "json"):
        return None
    if any(is_given(getattr(arguments, name)) for name in views):
        return None
    from xtrain.planner.sweep.compile_sweep import compile_sweep

    compiled = compile_sweep(arguments.spec, arguments.sets, arguments.world, counted, _progress)
    if compiled is None:
        return None
    from xtrain.cli.plan_views import json_text
    from xtrain.dsl.diagnostics.diagnostic import shows_color
    from xtrain.planner.report.render_sweep import render_sweep

    sys.stderr.write(compiled.diagnostics.render(color=shows_color(sys.stderr)))
    if compiled.plan is None:
        if arguments.format == "json":
            print(json_text(compiled.diagnostics))
        return 2
    if arguments.out is not None:
        print("error: --out saves the plan of one run; those of trials lie in their run directories", file=sys.stderr)
        return 2
    if arguments.format == "json":
        print(json.dumps(compiled.plan.to_json(), indent=2))
    else:
        sys.stdout.write(render_sweep(compiled.plan, color=shows_color(sys.stdout), full=arguments.full))
    return 0


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        end = "\r\x1b[K" if done == of else ""
        out = drawn_on(sys.stderr)
        print(f"\rcompiling trial {done:,} of {of:,} … {end}", end="", file=out, flush=True)
