"""Views of `xtrain plan`: the page, its parts, one rank, a node, a value, a picture, or the data."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics
    from xtrain.dsl.spec import Spec
    from xtrain.planner.plan import Plan

FORMATS: Final = ("text", "json", "mermaid", "dot")


class NotThere(Exception):
    """A requested view that the plan does not have or the requested format does not support."""


def view(plan: "Plan", arguments: argparse.Namespace) -> str:
    """Return the text to print. Raises NotThere."""
    asked = [name for name in TEXTS if is_given(getattr(arguments, name))]
    if arguments.format != "text":
        if asked:
            raise NotThere(f"--{asked[0]} is text; leave out --format {arguments.format}")
        return _data(plan, arguments)
    return TEXTS[asked[0]](plan, arguments) if asked else _page(plan, arguments)


def is_given(value: object) -> bool:
    """Return True if an option is set; rank 0 counts as set."""
    return value is not None and value is not False and value != []


def _colored() -> bool:
    from xtrain.dsl.diagnostics.diagnostic import shows_color

    return shows_color(sys.stdout)


def _page(plan: "Plan", arguments: argparse.Namespace) -> str:
    from xtrain.planner.report.render import render

    return render(plan, color=_colored(), full=arguments.full)


def _parts(plan: "Plan", arguments: argparse.Namespace) -> str:
    from xtrain.dsl.diagnostics.suggest import did_you_mean
    from xtrain.planner.report.render import PARTS, render

    names = [name for text in arguments.part for name in text.split(",")]
    for name in names:
        if name not in PARTS:
            hint = did_you_mean(name, PARTS) or f"there are {', '.join(PARTS)}"
            raise NotThere(f"the page has no part `{name}`; {hint}")
    return render(plan, color=_colored(), parts=names)


def _rank(plan: "Plan", arguments: argparse.Namespace) -> str:
    from xtrain.planner.report.show_rank import NoSuchRank, show_rank

    try:
        return show_rank(plan, arguments.rank, color=_colored())
    except NoSuchRank as problem:
        raise NotThere(str(problem)) from problem


def _node(plan: "Plan", arguments: argparse.Namespace) -> str:
    from xtrain.planner.report.show_node import NoSuchNode, show_nodes

    try:
        return show_nodes(plan, arguments.show, color=_colored())
    except NoSuchNode as problem:
        raise NotThere(str(problem)) from problem


def _why(plan: "Plan", arguments: argparse.Namespace) -> str:
    from xtrain.planner.report.show_why import NoSuchValue, show_why

    spec, world = _spec(plan, arguments)
    try:
        return show_why(plan, spec, arguments.why, world=world, color=_colored())
    except NoSuchValue as problem:
        raise NotThere(str(problem)) from problem


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
        from xtrain.planner.compare.plan_origin import signed
        from xtrain.planner.serialise import dumps

        return dumps(signed(plan, arguments.sets, arguments.world))
    from xtrain.planner.report.pictures import PICTURES

    return PICTURES[arguments.format](plan)


def json_text(diagnostics: "Diagnostics") -> str:
    """Return the diagnostics as JSON."""
    return json.dumps({"diagnostics": [diagnostic.to_json() for diagnostic in diagnostics]})
