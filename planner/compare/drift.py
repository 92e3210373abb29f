"""Whether a saved plan is still what its spec and the code would make of it today.

A plan carries its spec as text and needs no file. But who runs a plan that was reviewed should not be surprised: by a
spec that was edited since, or by another xtrain, which would execute the same nodes in another way.
"""

from pathlib import Path
from shlex import quote
from typing import Final

from attrs import evolve

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, Note
from xtrain.planner.compare.diff_values import ValueChange, changed_values
from xtrain.planner.compare.plan_origin import source_fingerprint
from xtrain.planner.compile import Compiled
from xtrain.planner.data.chain import own_modules
from xtrain.planner.load import plan_from_spec, plan_from_text
from xtrain.planner.plan import Plan, PlanOrigin
from xtrain.version import __version__

MOST_VALUES: Final = 5
ACCEPT: Final = "--accept-drift"


def find_drift(plan: Plan) -> Diagnostics:
    """What has changed since `plan` was saved: X710 for its spec, X711 for xtrain, W705 where that cannot be known.

    The spec is looked for where the plan names it, from the working folder, as everything else that a plan names.
    """
    found = Diagnostics()
    if _changed_code(plan, found):
        return found
    if plan.origin is None:
        message = "this plan does not say how it was made, so it cannot be compared with its spec"
        found.warning("W705", message, None, hint="save plans with `xtrain plan SPEC --out FILE`")
        _compare_stored(plan, found)
    elif not Path(plan.spec).is_file():
        message = f"`{plan.spec}`, the spec of this plan, does not exist here, so it cannot be compared with the plan"
        hint = "the plan is run unchanged; start in the folder in which it was made to compare it"
        found.warning("W705", message, None, hint=hint)
        _compare_stored(plan, found)
    else:
        _compare_spec(plan, plan.origin, found)
    return found


def accepted(found: Diagnostics) -> Diagnostics:
    """The same findings as warnings, of a user who wants the plan as it stands."""
    changed = Diagnostics()
    for each in found:
        error = each.severity == "error"
        changed.add(evolve(each, severity="warning", code="W706", hint=None) if error else each)
    return changed


def _changed_code(plan: Plan, found: Diagnostics) -> bool:
    """Whether another xtrain has saved the plan; reported, with what this one makes of the spec it carries."""
    if plan.origin is None or plan.origin.source == source_fingerprint():
        return False
    before, now = plan.origin.version, __version__
    versions = f"{before} then, {now} now" if before != now else f"version {now}, with other source files"
    stored = _stored(plan)
    if stored.plan is None:
        notes = [("this version has no plan for the spec that the plan contains", None), *_first_error(stored)]
    elif stored.plan.id == plan.id:
        notes = [("it would make the same plan, but may execute it differently", None)]
    else:
        notes = [(f"it would plan {stored.plan.id}, not {plan.id}", None), *_value_notes(plan, stored.plan)]
    message = f"xtrain has changed since this plan was made ({versions})"
    found.error("X711", message, None, hint=_remedy(plan), notes=notes)
    return True


def _compare_spec(plan: Plan, origin: PlanOrigin, found: Diagnostics) -> None:
    """Plan the spec again as it was planned; what differs is the spec's doing, unless the text in the plan does so."""
    now = plan_from_spec(plan.spec, origin.sets, origin.world)
    if now.plan is not None and now.plan.id == plan.id:
        return
    if not _compare_stored(plan, found):
        return
    if now.plan is None:
        message = f"`{plan.spec}` has changed since this plan was made: it has no plan now"
        found.error("X710", message, None, hint=f"correct it, or {_as_it_stands()}", notes=_first_error(now))
        return
    message = f"`{plan.spec}` has changed since this plan was made: it gives plan {now.plan.id} now, not {plan.id}"
    found.error("X710", message, None, hint=_remedy(plan), notes=_value_notes(plan, now.plan))


def _compare_stored(plan: Plan, found: Diagnostics) -> bool:
    """Whether the text that the plan carries still gives the plan. Under the same code only what is read beside it, a
    tokenizer, can make a difference; reported, like another code where the plan does not say which had made it."""
    stored = _stored(plan)
    if stored.plan is not None and stored.plan.id == plan.id:
        return True
    notes = _value_notes(plan, stored.plan) if stored.plan is not None else _first_error(stored)
    if plan.origin is None:
        message = "this xtrain makes another plan from the spec that the plan contains"
        found.error("X711", message, None, hint=_remedy(plan), notes=notes)
    else:
        message = "the inputs of this plan have changed: the spec that it contains now gives another plan"
        found.error("X710", message, None, hint=_remedy(plan), notes=notes)
    return False


def _stored(plan: Plan) -> Compiled:
    return plan_from_text(plan.spec_text, f"{plan.spec} (as planned)", world=plan.mesh.world_size)


def _first_error(compiled: Compiled) -> list[Note]:
    first = compiled.diagnostics.errors[0]
    return [(f"{first.code}: {first.message}", first.span)]


def _value_notes(plan: Plan, again: Plan) -> list[Note]:
    changes = changed_values(plan, again)
    notes: list[Note] = [(_change_text(change), None) for change in changes[:MOST_VALUES]]
    before, after = own_modules(plan), own_modules(again)
    notes += [(f"{name} has changed", None) for name, digest in before.items() if after.get(name, digest) != digest]
    if len(changes) > MOST_VALUES:
        notes.append((f"and {len(changes) - MOST_VALUES} more values", None))
    return notes


def _change_text(change: ValueChange) -> str:
    before, after = change.before, change.after
    if before is None or after is None:
        return f"{change.path} is {'new' if before is None else 'gone'}"
    place = f" ({after.place})" if after.place else ""
    return f"{change.path} was {before.value} and is {after.value} now{place}"


def _remedy(plan: Plan) -> str:
    return f"plan it again: {plan_command(plan)} --out plan.json; or {_as_it_stands()}"


def _as_it_stands() -> str:
    return f"add {ACCEPT} to run the plan unchanged"


def plan_command(plan: Plan) -> str:
    """The command line that makes the plan anew."""
    origin = plan.origin
    parts = ["xtrain plan", quote(plan.spec)]
    if origin is not None and origin.world is not None:
        parts.append(f"--world {origin.world}")
    parts += [f"--set {quote(text)}" for text in (origin.sets if origin else ())]
    return " ".join(parts)
