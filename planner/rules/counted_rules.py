"""The rules on a plan whose data has been counted since: what a budget in steps hears when it is planned, one in epochs
hears then."""

from attrs import evolve

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.diagnostics.source import SourceText
from xtrain.dsl.load import load_spec
from xtrain.dsl.spec import Origin, Spec
from xtrain.planner.plan import Plan
from xtrain.planner.rules.rule_inputs import Verdicts
from xtrain.planner.rules.validate import validate
from xtrain.planner.schedule.arithmetic import Counts


class Unreadable(Exception):
    """The spec that a plan carries cannot be loaded here; says why."""


def check_counted(plan: Plan, counts: Counts) -> Diagnostics:
    """What the rules say with the data counted and have not said of the plan yet, with the places in the user's spec.

    Raises Unreadable.
    """
    name = f"{plan.spec} (as planned)"
    loaded = load_spec(name, (), {name: plan.spec_text})
    if loaded.spec is None:
        raise Unreadable(loaded.diagnostics.errors[0].message)
    found = Verdicts(_placed(loaded.spec, plan))
    validate(found.spec, plan.mesh.world_size, found, counts)
    said = {(check.code, check.evidence) for check in plan.checks}
    new = Diagnostics()
    new.extend(each for each in found.diagnostics if (each.code, f"{each.message}; {each.hint}") not in said)
    return new


def _placed(spec: Spec, plan: Plan) -> Spec:
    """The spec that a plan carries, each value at the place that the plan says it came from."""
    places = {}
    for entry in plan.provenance:
        path, _, column = entry.place.rpartition(":")
        path, _, line = path.rpartition(":")
        if line.isdecimal() and column.isdecimal():
            places[entry.path] = (path, int(line), int(column))
    origins = {}
    for path in {path for path, *_ in places.values()}:
        own = {name: place[1:] for name, place in places.items() if place[0] == path}
        # Of the file, which may have changed, no more is known than the places: its lines are blank.
        wide = max(column for _, column in own.values())
        source = SourceText(path, f"{' ' * wide}\n" * max(line for line, _ in own.values()))
        for name, (line, column) in own.items():
            at = source.line_start(line) + column - 1
            origins[name] = Origin("text", source.span(at, at))
    return evolve(spec, origins=origins)
