"""Changes between plans: the two sides of a diff, the drift of a saved plan, and changed figures.

A plan carries its spec as text and needs no file. Drift warns when a reviewed plan would now be different: the spec was
edited, or another xtrain would execute the same nodes differently.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Final, Literal

from attrs import evolve

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, Note
from xtrain.dsl.user_parts.files import is_file
from xtrain.lazy_attrs import frozen
from xtrain.plan.data import own_modules
from xtrain.plan.plan import Plan, PlanOrigin
from xtrain.plan.serialise import source_fingerprint
from xtrain.plan.step_sizes import StepSizes
from xtrain.plan.timeline import known_timeline
from xtrain.plan.views import ValueChange, changed_values, headroom
from xtrain.planner.compile import Compiled
from xtrain.planner.load import is_saved, plan_from_path, plan_from_spec, plan_from_text
from xtrain.planner.review.page import launcher_text
from xtrain.planner.review.resumable import Verdict
from xtrain.planner.review.resuming_course import BUDGET, phase_text
from xtrain.text.units import WIDTH, bytes_text, count_text, flops_text, plural, rate_text, seconds_text
from xtrain.version import __version__


def changed_figures(before: Plan, after: Plan) -> dict[str, tuple[str, str]]:
    """Return the figures and phases that differ: name → text before and after."""
    pairs = {name: (old, new) for (name, old), (_, new) in zip(_texts(before), _texts(after), strict=True)}
    if not all(len(plan.timeline.phases) == len(plan.timeline.phases[0].amounts) == 1 for plan in (before, after)):
        phases = [{phase.name: phase_text(phase, plan) for phase in plan.timeline.phases} for plan in (before, after)]
        pairs |= {
            f"phase {name}": (phases[0].get(name, "none"), phases[1].get(name, "none"))
            for name in {**phases[0], **phases[1]}
        }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _texts(plan: Plan) -> list[tuple[str, str]]:
    estimates, times, timeline, cluster = plan.estimates, plan.estimates.times, known_timeline(plan), plan.cluster
    axes = " · ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes if axis.size > 1) or "one rank"
    sent = max(sum(each.bytes for each in one.traffic) for one in estimates.classes)
    return [
        ("mesh", axes),
        ("machines", f"{plural(plan.launch['nodes'], 'node')}, {plan.launch['device']}"),
        ("parameters", count_text(plan.parameters.total)),
        ("memory of the fullest rank", bytes_text(headroom(plan).worst.memory.total_bytes)),
        ("sent by a rank in a step", bytes_text(sent)),
        ("a step takes", "unknown" if times is None else seconds_text(times.step)),
        ("compute of a step", flops_text(estimates.flops_per_step)),
        ("tokens of a step", f"{estimates.tokens_per_step:,}"),
        ("steps", "unknown" if timeline.steps is None else f"{timeline.steps:,}"),
        ("ticks fire", ", ".join("?" if tick.count is None else f"{tick.count:,}" for tick in timeline.ticks)),
        ("runs are written to", "/".join(str(plan.workspace[key]) for key in ("root", "lineage", "run"))),
        ("launcher", launcher_text(plan)),
        ("threads of a rank", str(plan.launch["threads"])),
        ("time to stop", seconds_text(plan.launch["stop_deadline_seconds"])),
        ("restarts", f"{plan.launch['restarts']}"),
        ("device memory", "unknown" if cluster.memory_bytes is None else bytes_text(cluster.memory_bytes)),
        ("device speed", "unknown" if cluster.flops is None else rate_text(cluster.flops, "FLOP/s")),
        ("efficiency", f"{cluster.efficiency[0]:.0%} to {cluster.efficiency[1]:.0%}"),
        ("link", "unknown" if cluster.link is None else rate_text(cluster.link, "B/s")),
        ("network", "unknown" if cluster.network is None else rate_text(cluster.network, "B/s")),
        ("price", "unknown" if cluster.price is None else f"{cluster.price:g} a device-hour"),
    ]


PLAN_FILE: Final = "plan.json"


@frozen(kw_only=True)
class Side:
    """Spec, saved plan or run directory. sets, world: from the command line.

    step: the step of a run's latest checkpoint, None without one; past: the rows of these steps.
    """

    path: str
    kind: Literal["spec", "plan", "run"]
    plan: Plan
    sets: tuple[str, ...] = ()
    world: int | None = None
    step: int | None = None
    past: StepSizes | None = None

    @property
    def name(self) -> str:
        """Name on the page."""
        said = [*([f"--world {self.world}"] if self.world else []), *(f"--set {quote(text)}" for text in self.sets)]
        return " ".join((self.path, *said))


def open_sides(
    paths: Sequence[str], sets: Sequence[str], world: int | None
) -> tuple[Side | None, Side | None, Diagnostics]:
    """Open the sides of one or two paths; None with errors among the diagnostics.

    With two different paths, `sets` and `world` apply to every spec. With a single path, or the same one twice, they
    apply only to B: A is the thing as it is, and B the same with them; a plan or a run is then planned again from its
    text.
    """
    found = Diagnostics()
    alone = len(paths) == 1 or paths[0] == paths[1]
    if not alone and (sets or world) and not any(_kind(path) == "spec" for path in paths):
        message = "--set and --world need a spec, and neither argument is a spec"
        found.error("X704", message, None, hint="give one argument alone to see what they would change")
        return None, None, found
    first = open_side(paths[0], *(((), None) if alone else (sets, world)), found)
    if not alone:
        return first, open_side(paths[1], sets, world, found), found
    if first is None or not (sets or world):
        return first, first, found
    return first, _altered(first, tuple(sets), world, found), found


def _kind(path: str) -> Literal["spec", "plan", "run"]:
    if os.path.isdir(path):  # noqa: PTH112 - of a name too long for a file, Path.is_dir raises
        return "run"
    return "plan" if is_saved(path) else "spec"


def open_side(path: str, sets: Sequence[str], world: int | None, found: Diagnostics) -> Side | None:
    """Open a spec, saved plan or run; None with errors among the diagnostics."""
    kind = _kind(path)
    if kind == "run" and not (Path(path) / PLAN_FILE).is_file():
        message = f"{path} is not a run directory: it has no {PLAN_FILE}"
        found.error("X704", message, None, hint="name a run directory, a plan (*.json) or a spec")
        return None
    if kind == "spec":
        compiled = plan_from_spec(path, sets, world)
        return _side(path, kind, compiled, found, tuple(sets), world)
    return _side(path, kind, plan_from_path(Path(path) / PLAN_FILE if kind == "run" else path), found)


def _altered(side: Side, sets: tuple[str, ...], world: int | None, found: Diagnostics) -> Side | None:
    """Return a side with `sets` and `world`."""
    if side.kind == "spec":
        return _side(side.path, "spec", plan_from_spec(side.path, sets, world), found, sets, world)
    plan = side.plan
    ranks = plan.mesh.world_size if world is None else world
    compiled = plan_from_text(plan.spec_text, f"{_beside_parts(side)} (its spec)", sets, ranks)
    if compiled.plan is not None:  # it is still the run of that spec
        compiled = Compiled(evolve(compiled.plan, spec=plan.spec, origin=plan.origin), compiled.diagnostics)
    return _side(side.path, side.kind, compiled, found, sets, world)


def _beside_parts(side: Side) -> Path:
    """Return a path in the folder that relative paths of a user's modules start from: a run keeps copies of them."""
    copy = Path(side.path) / "spec.xtrain"
    files = [module for module in own_modules(side.plan) if is_file(module)]
    if side.kind == "run" and all((copy.parent / module).is_file() for module in files):
        return copy
    return Path(side.plan.spec) if files else Path(side.path)


def _side(
    path: str,
    kind: Literal["spec", "plan", "run"],
    compiled: Compiled,
    found: Diagnostics,
    sets: tuple[str, ...] = (),
    world: int | None = None,
) -> Side | None:
    found.extend(compiled.diagnostics)
    if compiled.plan is None:
        return None
    if compiled.plan.serves:
        message = f"{path} is a server, and only training runs can be compared"
        found.error("X704", message, None, hint="compare two training runs")
        return None
    return Side(path=path, kind=kind, plan=compiled.plan, sets=sets, world=world)


def run_command(b: Side, more: Sequence[str] = ()) -> list[str]:
    """Return the command that runs B, with `more` `--set` texts, as unbreakable words."""
    origin = b.plan.origin
    if b.kind == "plan" and not (b.sets or b.world or more):
        return ["xtrain run", quote(b.path)]
    spec, sets, world = b.path, b.sets, b.world
    if b.kind != "spec":
        spec = b.plan.spec
        sets = (*(origin.sets if origin else ()), *sets)
        world = world if world is not None else origin.world if origin else b.plan.mesh.world_size
    said = [] if world is None else [f"--world {world}"]
    replaced = {text.partition("=")[0] for text in more}
    sets = tuple(text for text in sets if text.partition("=")[0].strip() not in replaced)
    return ["xtrain run", quote(spec), *said, *(f"--set {quote(text)}" for text in (*sets, *more))]


def going_on(a: Side, b: Side, verdict: Verdict) -> tuple[str, ...]:
    """Return lines with the command that resumes a checkpoint of A under B, or the alternatives."""
    if verdict.kind == "incompatible":
        if b.plan.node("setup.resume").args["origin"] is not None and any(r.path == BUDGET for r in verdict.refusals):
            return ("B is refused as well: its checkpoint has reached the budget. Use a larger experiment.budget.",)
        finds_a = a.plan.config_id == b.plan.config_id and b.plan.workspace["run"] is None
        return ("B starts a new run:", *_lines(run_command(b, ["workspace.run=NEW"] if finds_a else [])))
    if a.kind == "run" and a.step is None:
        return ("A has no checkpoint yet.",)
    more = [] if b.plan.node("setup.resume").args["resume"] else ["checkpoint.resume=true"]
    folder, here = a.plan.workspace, b.plan.workspace
    run = Path(a.path).resolve().name if a.kind == "run" else folder["run"]
    itself = a.plan.config_id == b.plan.config_id and (run is None or run.endswith(a.plan.config_id))
    itself = itself and here["run"] is None
    remark = ""
    if itself:
        remark = " (with the same experiment and code, the run is found without this)"
    elif here["run"] is None or here["run"] != run:
        more.append(f"workspace.run={run or 'RUN'}")
        if run is None:
            remark = f" (RUN: the folder of A's run under {folder['root']}/{folder['lineage']}, …-{a.plan.config_id})"
    more += [f"workspace.{key}={folder[key]}" for key in ("lineage", "root") if folder[key] != here[key]]
    return (f"To resume{remark}:", *_lines(run_command(b, more)))


def _lines(words: Sequence[str]) -> list[str]:
    """Return a command broken into lines that a shell reads as one."""
    lines = [f"  {' '.join(words[:2])}"]
    for word in words[2:]:
        if len(lines[-1]) + len(word) + 5 > WIDTH - 2:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


MOST_VALUES: Final = 5
ACCEPT: Final = "--accept-drift"


def find_drift(plan: Plan) -> Diagnostics:
    """Report what has changed since `plan` was saved: X710 for the spec, X711 for xtrain, W705 if unknown.

    The spec is looked up at the path in the plan, from the working folder, like all paths in a plan.
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
    """Return the findings as warnings, for a user who accepts the plan as it stands."""
    changed = Diagnostics()
    for each in found:
        error = each.severity == "error"
        changed.add(evolve(each, severity="warning", code="W706", hint=None) if error else each)
    return changed


def _changed_code(plan: Plan, found: Diagnostics) -> bool:
    """Return True if another xtrain saved the plan; report it, with the plan that this xtrain makes of its spec."""
    if plan.origin is None or plan.origin.source == source_fingerprint():
        return False
    before, now = plan.origin.version, __version__
    versions = f"{before} then, {now} now" if before != now else f"version {now}, with other source files"
    stored = _stored(plan)
    if stored.plan is None:
        notes = [("this version cannot plan the spec in the plan", None), *_first_error(stored)]
    elif stored.plan.id == plan.id:
        notes = [("it would make the same plan, but may execute it differently", None)]
    else:
        notes = [(f"it would plan {stored.plan.id}, not {plan.id}", None), *_value_notes(plan, stored.plan)]
    message = f"xtrain has changed since this plan was made ({versions})"
    found.error("X711", message, None, hint=_remedy(plan), notes=notes)
    return True


def _compare_spec(plan: Plan, origin: PlanOrigin, found: Diagnostics) -> None:
    """Plan the spec again as it was planned. Differences come from the spec, unless the text in the plan also gives
    another plan."""
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
    """Return True if the text in the plan still gives the plan. With the same code, only other files, such as a
    tokenizer, can change it; report that, or other code if the plan does not name its code."""
    stored = _stored(plan)
    if stored.plan is not None and stored.plan.id == plan.id:
        return True
    notes = _value_notes(plan, stored.plan) if stored.plan is not None else _first_error(stored)
    if plan.origin is None:
        message = "this xtrain makes a different plan from the spec in the plan"
        found.error("X711", message, None, hint=_remedy(plan), notes=notes)
    else:
        message = "the inputs of this plan have changed: the spec in it now gives a different plan"
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
    """Return the command line that makes the plan again."""
    origin = plan.origin
    parts = ["xtrain plan", quote(plan.spec)]
    if origin is not None and origin.world is not None:
        parts.append(f"--world {origin.world}")
    parts += [f"--set {quote(text)}" for text in (origin.sets if origin else ())]
    return " ".join(parts)
