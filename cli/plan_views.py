"""Views of `xtrain plan`: the page, one rank or node, alternatives, sweeps, and the loss that a law predicts."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from xtrain.cli.verb import Refused, colored, counted, report
from xtrain.text.printing import drawn_on

if TYPE_CHECKING:
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics
    from xtrain.dsl.load import Loaded
    from xtrain.dsl.spec import Spec
    from xtrain.plan.plan import Plan
    from xtrain.records.law import ScalingLaw


FORMATS: Final = ("text", "json", "mermaid", "dot")


def view(plan: "Plan", arguments: argparse.Namespace) -> str:
    """Return the text to print. Raises Refused if the plan or the format does not have the view."""
    asked = [name for name in TEXTS if is_given(getattr(arguments, name))]
    if arguments.format != "text":
        if asked:
            raise Refused(2, f"error: --{asked[0]} prints text; leave out --format {arguments.format}")
        return _data(plan, arguments)
    return TEXTS[asked[0]](plan, arguments) if asked else _page(plan, arguments)


def is_given(value: object) -> bool:
    """Return True if an option is set; rank 0 counts as set."""
    return value is not None and value is not False and value != []


def _page(plan: "Plan", arguments: argparse.Namespace) -> str:
    from xtrain.planner.review.page import render
    from xtrain.planner.review.spare import uses_of_memory

    spec, world = _spec(plan, arguments) if plan.cluster.memory_bytes is not None else (None, None)
    spare = () if spec is None else uses_of_memory(plan, spec, world)
    return render(plan, color=colored(), full=arguments.full, spare=spare)


def _parts(plan: "Plan", arguments: argparse.Namespace) -> str:
    from xtrain.dsl.diagnostics.suggest import did_you_mean
    from xtrain.planner.review.page import PARTS, render

    names = [name for text in arguments.part for name in text.split(",")]
    for name in names:
        if name not in PARTS:
            hint = did_you_mean(name, PARTS) or f"existing parts: {', '.join(PARTS)}"
            raise Refused(2, f"error: the page has no part `{name}`; {hint}")
    return render(plan, color=colored(), parts=names)


def _rank(plan: "Plan", arguments: argparse.Namespace) -> str:
    from xtrain.planner.review.show import NoSuchRank, show_rank

    try:
        return show_rank(plan, arguments.rank, color=colored())
    except NoSuchRank as problem:
        raise Refused(2, f"error: {problem}") from None


def _node(plan: "Plan", arguments: argparse.Namespace) -> str:
    from xtrain.planner.review.show import NoSuchNode, show_nodes

    try:
        return show_nodes(plan, arguments.show, color=colored())
    except NoSuchNode as problem:
        raise Refused(2, f"error: {problem}") from None


def _why(plan: "Plan", arguments: argparse.Namespace) -> str:
    from xtrain.planner.review.why import NoSuchValue, show_why

    spec, world = _spec(plan, arguments)
    try:
        return show_why(plan, spec, arguments.why, world=world, color=colored())
    except NoSuchValue as problem:
        raise Refused(2, f"error: {problem}") from None


def _spec(plan: "Plan", arguments: argparse.Namespace) -> "tuple[Spec | None, int | None]":
    """Return the plan's spec and world size, from the spec file or from the text in a saved plan."""
    from xtrain.dsl.load import load_spec

    if not arguments.spec.endswith(".json"):
        return load_spec(arguments.spec, arguments.sets).spec, arguments.world
    loaded = load_spec(plan.spec, (), {plan.spec: plan.spec_text})
    return loaded.spec, plan.origin.world if plan.origin else plan.mesh.world_size


TEXTS: Final[dict[str, Callable[["Plan", argparse.Namespace], str]]] = {
    "full": _page,
    "part": _parts,
    "rank": _rank,
    "show": _node,
    "why": _why,
}


def _data(plan: "Plan", arguments: argparse.Namespace) -> str:
    if arguments.format == "json":
        from xtrain.plan.serialise import dumps, signed

        return dumps(signed(plan, arguments.sets, arguments.world))
    from xtrain.planner.review.show import PICTURES

    return PICTURES[arguments.format](plan)


def json_text(diagnostics: "Diagnostics") -> str:
    """Return the diagnostics as JSON."""
    return json.dumps({"diagnostics": [diagnostic.to_json() for diagnostic in diagnostics]})


def add_alternatives(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `xtrain plan`."""
    group = parser.add_argument_group("alternatives", "compare other layouts of the same rows on the same ranks")
    group.add_argument(
        "--compare",
        nargs="+",
        action="extend",
        metavar="SETTINGS",
        help="plan SPEC with each of these too, such as tp=2 tp=4,pp=2",
    )
    group.add_argument("--fit", action="store_true", help="try every layout of the ranks and list the five fastest")


def show_alternatives(arguments: argparse.Namespace) -> int | None:
    """Show the alternatives. Exit status: 0 some layout can run, 2 none can. Return None if none are requested. Raises
    Refused."""
    chosen = "--fit" if arguments.fit else "--compare"
    if not (arguments.compare or arguments.fit):
        return None
    if arguments.fit and arguments.compare:
        raise Refused(2, "error: --fit and --compare cannot be combined")
    if arguments.spec.endswith(".json"):
        raise Refused(2, f"error: {chosen} plans variants of a spec; {arguments.spec} is a finished plan")
    if arguments.format not in ("text", "json"):
        raise Refused(2, f"error: {chosen} prints a table; leave out --format {arguments.format}")
    for name in ("full", "part", "rank", "show", "why", "out", "trace"):
        if is_given(getattr(arguments, name)):
            raise Refused(2, f"error: {chosen} prints a table of plans; leave out --{name}")
    return _fit(arguments) if arguments.fit else _compare(arguments)


def _of_server(chosen: str) -> Refused:
    return Refused(2, f"error: {chosen} compares training steps, but this is a server spec")


def _compare(arguments: argparse.Namespace) -> int:
    from xtrain.planner.review.alternatives import compare, figures, render_alternatives

    found = compare(arguments.spec, arguments.compare, arguments.sets, arguments.world)
    if any(each.plan is not None and each.plan.serves for each in found):
        raise _of_server("--compare")
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
        sys.stdout.write(render_alternatives(found, color=colored()))
    return 0 if any(each.plan for each in found) else 2


def _fit(arguments: argparse.Namespace) -> int:
    from xtrain.dsl.load import load_spec
    from xtrain.planner.compile import compile_plan
    from xtrain.planner.review.alternatives import Unsearchable, any_layout, figures, render_fit, search

    loaded = load_spec(arguments.spec, arguments.sets)
    if loaded.spec is None:
        report(loaded.diagnostics)
        return 2
    if loaded.spec.serve is not None:
        raise _of_server("--fit")
    compiled = compile_plan(any_layout(loaded.spec), world=arguments.world)
    if compiled.plan is None:
        compiled.report_to(sys.stderr)
        return 2
    try:
        fit = search(loaded.spec, compiled.plan)
    except Unsearchable as problem:
        raise Refused(2, f"error: {problem}") from None
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
        sys.stdout.write(render_fit(fit, arguments.spec, color=colored()))
    return 0 if fit.best else 2


FAR = 1.5
"""Ratio to the law's fitted range from which a prediction counts as an extrapolation."""


def with_prediction(text: str, plan: "Plan", law: "ScalingLaw", form: str) -> str:
    """Return the plan's text followed by the law's prediction. form: `text` or `json`."""
    if form == "json":
        return json.dumps({**json.loads(text), "predicted": prediction(plan, law)}, indent=2) + "\n"
    return text.rstrip("\n") + "\n\n" + _lines(plan, law)


def prediction(plan: "Plan", law: "ScalingLaw") -> dict[str, Any] | None:
    """Return the predicted loss; None while the number of tokens is unknown."""
    parameters, tokens = plan.parameters.active, plan.timeline.tokens
    if tokens is None:
        return None
    loss, interval = law.predicted(parameters, tokens)
    return {
        "metric": law.metric,
        "loss": loss,
        "interval": list(interval),
        "parameters": parameters,
        "tokens": tokens,
        "runs": law.runs,
        "beyond": law.beyond(parameters, tokens),
    }


def _lines(plan: "Plan", law: "ScalingLaw") -> str:
    from xtrain.records.law import SHARE
    from xtrain.text.units import count_text

    head = f"PREDICTED  by a law of {law.runs} runs\n"
    found = prediction(plan, law)
    if found is None:
        return f"{head}  {law.metric}  unknown until the data has been counted\n"
    low, high = found["interval"]
    size, tokens = count_text(found["parameters"]), count_text(found["tokens"])
    lines = [f"  {law.metric}  {found['loss']:.4f}  {low:.4f} to {high:.4f} in {SHARE:.0%} of samples"]
    lines += [f"  for {size} parameters used per token, {tokens} tokens"]
    if found["beyond"] >= FAR:
        lines += [
            f"  {found['beyond']:.3g} times beyond the runs of the law: the interval does not cover errors of its "
            "form there"
        ]
    return head + "\n".join(lines) + "\n"


def show_sweep(arguments: argparse.Namespace, loaded: "Loaded") -> int | None:
    """Print the sweep's plan; return the exit status, or None if the spec has no sweep or a view of a single plan is
    requested."""
    views = ("part", "rank", "show", "why", "trace", "law")
    if arguments.format not in ("text", "json") or loaded.spec is None or loaded.spec.sweep is None:
        return None
    if any(is_given(getattr(arguments, name)) for name in views):
        return None
    from xtrain.planner.compile_sweep import compile_sweep

    compiled = compile_sweep(arguments.spec, arguments.sets, arguments.world, counted, _progress, loaded)
    if compiled is None:
        return None
    from xtrain.planner.review.sweep import render_sweep

    report(compiled.diagnostics)
    if compiled.plan is None:
        if arguments.format == "json":
            print(json_text(compiled.diagnostics))
        return 2
    if arguments.out is not None:
        raise Refused(2, "error: --out saves the plan of one run; plans of trials are in their run directories")
    if arguments.format == "json":
        print(json.dumps(compiled.plan.to_json(), indent=2))
    else:
        sys.stdout.write(render_sweep(compiled.plan, color=colored(), full=arguments.full))
    return 0


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        end = "\r\x1b[K" if done == of else ""
        out = drawn_on(sys.stderr)
        print(f"\rcompiling trial {done:,} of {of:,} … {end}", end="", file=out, flush=True)
