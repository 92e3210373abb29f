"""`xtrain plan --compare` and `--fit`: the same step in other layouts."""

import argparse
import json
import sys
from typing import Any

from xtrain.cli.plan_views import is_given


def add_alternatives(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `xtrain plan`."""
    group = parser.add_argument_group("alternatives", "the same rows on the same ranks, laid out in other ways")
    group.add_argument(
        "--compare",
        nargs="+",
        action="extend",
        metavar="SETTINGS",
        help="plan SPEC with each of these too, such as tp=2 tp=4,pp=2",
    )
    group.add_argument("--fit", action="store_true", help="try every layout of the ranks and list the five fastest")


def wants_alternatives(arguments: argparse.Namespace) -> bool:
    return bool(arguments.compare) or arguments.fit


def show_alternatives(arguments: argparse.Namespace) -> int:
    """Show the alternatives. Exit status: 0 some layout can run, 2 none can, or the command line is invalid."""
    problem = _problem(arguments)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return _fit(arguments) if arguments.fit else _compare(arguments)


def _problem(arguments: argparse.Namespace) -> str:
    chosen = "--fit" if arguments.fit else "--compare"
    if arguments.fit and arguments.compare:
        return "--fit and --compare are two questions; ask one"
    if arguments.spec.endswith(".json"):
        return f"{chosen} plans a spec in other ways; {arguments.spec} is a finished plan"
    if arguments.format not in ("text", "json"):
        return f"{chosen} prints a table; leave out --format {arguments.format}"
    others = ("full", "part", "rank", "show", "why", "out", "trace")
    given = [name for name in others if is_given(getattr(arguments, name))]
    return f"{chosen} prints a table of plans; leave out --{given[0]}" if given else ""


def _of_server(chosen: str) -> int:
    print(f"error: {chosen} compares steps of training, and the spec is that of a server", file=sys.stderr)
    return 2


def _compare(arguments: argparse.Namespace) -> int:
    from xtrain.dsl.diagnostics.diagnostic import shows_color
    from xtrain.planner.compare.alternatives import compare
    from xtrain.planner.report.render_alternatives import figures, render_alternatives

    found = compare(arguments.spec, arguments.compare, arguments.sets, arguments.world)
    if any(each.plan is not None and each.plan.serves for each in found):
        return _of_server("--compare")
    if arguments.format == "json":
        content: list[dict[str, Any]] = [
            {
                "name": each.name,
                "sets": list(each.sets),
                "plan_id": each.plan.id if each.plan else None,
                "world_size": each.plan.mesh.world_size if each.plan else None,
                **(figures(each.plan.estimates, each.plan.cluster) if each.plan else {}),
                "errors": [error.to_json() for error in each.diagnostics.errors],
            }
            for each in found
        ]
        print(json.dumps({"alternatives": content}, indent=2))
    else:
        sys.stdout.write(render_alternatives(found, color=shows_color(sys.stdout)))
    return 0 if any(each.plan for each in found) else 2


def _fit(arguments: argparse.Namespace) -> int:
    from xtrain.dsl.diagnostics.diagnostic import shows_color
    from xtrain.dsl.load import load_spec
    from xtrain.planner.compare.fit import Unsearchable, any_layout, search
    from xtrain.planner.compile import compile_plan
    from xtrain.planner.report.render_alternatives import figures, render_fit

    loaded = load_spec(arguments.spec, arguments.sets)
    if loaded.spec is None:
        sys.stderr.write(loaded.diagnostics.render(color=shows_color(sys.stderr)))
        return 2
    if loaded.spec.serve is not None:
        return _of_server("--fit")
    compiled = compile_plan(any_layout(loaded.spec), world=arguments.world)
    if compiled.plan is None:
        compiled.report_to(sys.stderr)
        return 2
    try:
        fit = search(loaded.spec, compiled.plan)
    except Unsearchable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if arguments.format == "json":
        content = {
            "world_size": fit.world,
            "rows": fit.rows,
            "best": [
                {"name": each.name, "sets": list(each.sets), **figures(each.estimates, fit.cluster)}
                for each in fit.best
                if each.estimates
            ],
            "rejected": [{"name": each.name, "code": each.code, "reason": each.rejected} for each in fit.rejected],
        }
        print(json.dumps(content, indent=2))
    else:
        sys.stdout.write(render_fit(fit, arguments.spec, color=shows_color(sys.stdout)))
    return 0 if fit.best else 2
