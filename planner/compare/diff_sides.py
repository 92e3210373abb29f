"""The two things that are compared: where their plans come from, and what to type to go on from one under the other."""

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Final, Literal

from attrs import evolve, frozen

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.user_parts.files import is_file
from xtrain.planner.compare.resumable import Verdict
from xtrain.planner.compare.resumable_curve import BUDGET
from xtrain.planner.compile import Compiled
from xtrain.planner.data.chain import own_modules
from xtrain.planner.load import is_saved, plan_from_path, plan_from_spec, plan_from_text
from xtrain.planner.plan import Plan
from xtrain.planner.schedule.step_sizes import StepSizes
from xtrain.planner.units import WIDTH

PLAN_FILE: Final = "plan.json"


@frozen(kw_only=True)
class Side:
    """A spec, a saved plan or a run directory. sets, world: what is asked of it on the command line.

    step: how far the latest checkpoint of a run has come, None where there is none; past: the rows of these steps.
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
        """What it is called on the page."""
        said = [*([f"--world {self.world}"] if self.world else []), *(f"--set {quote(text)}" for text in self.sets)]
        return " ".join((self.path, *said))


def open_sides(
    paths: Sequence[str], sets: Sequence[str], world: int | None
) -> tuple[Side | None, Side | None, Diagnostics]:
    """The sides of one or two paths, None with errors among the diagnostics.

    Of two different paths, `sets` and `world` go to every spec. Of a single one, also if it is given twice, they go to
    B alone: A is the thing as it is, and B the same with them; a plan or a run is then planned again from its text.
    """
    found = Diagnostics()
    alone = len(paths) == 1 or paths[0] == paths[1]
    if not alone and (sets or world) and not any(_kind(path) == "spec" for path in paths):
        message = "--set and --world need a spec, and neither argument is a spec"
        found.error("X704", message, None, hint="give one argument alone to see what they would change")
        return None, None, found
    first = _open(paths[0], *(((), None) if alone else (sets, world)), found)
    if not alone:
        return first, _open(paths[1], sets, world, found), found
    if first is None or not (sets or world):
        return first, first, found
    return first, _altered(first, tuple(sets), world, found), found


def _kind(path: str) -> Literal["spec", "plan", "run"]:
    if os.path.isdir(path):  # noqa: PTH112 - of a name too long for a file, Path.is_dir raises
        return "run"
    return "plan" if is_saved(path) else "spec"


def _open(path: str, sets: Sequence[str], world: int | None, found: Diagnostics) -> Side | None:
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
    """The same with `sets` and `world`."""
    if side.kind == "spec":
        return _side(side.path, "spec", plan_from_spec(side.path, sets, world), found, sets, world)
    plan = side.plan
    ranks = plan.mesh.world_size if world is None else world
    compiled = plan_from_text(plan.spec_text, f"{_beside_parts(side)} (its spec)", sets, ranks)
    if compiled.plan is not None:  # it is still the run of that spec
        compiled = Compiled(evolve(compiled.plan, spec=plan.spec, origin=plan.origin), compiled.diagnostics)
    return _side(side.path, side.kind, compiled, found, sets, world)


def _beside_parts(side: Side) -> Path:
    """A path in the folder that modules of the user's own start at: a run keeps them as they were."""
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
        message = f"{path} is a server, and what is compared are the steps of training runs"
        found.error("X704", message, None, hint="compare two training runs")
        return None
    return Side(path=path, kind=kind, plan=compiled.plan, sets=sets, world=world)


def run_command(b: Side, more: Sequence[str] = ()) -> list[str]:
    """What runs B, with `more` `--set` texts, as words that belong together."""
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
    """Lines that say what to type to go on from a checkpoint of A under B, or what else there is."""
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
    """A command over as many lines as it needs, which a shell takes for one."""
    lines = [f"  {' '.join(words[:2])}"]
    for word in words[2:]:
        if len(lines[-1]) + len(word) + 5 > WIDTH - 2:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines
