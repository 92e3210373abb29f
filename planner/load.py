"""From a path to a plan: a spec is loaded and compiled, a `plan.json` read back.

What makes and reads plans is imported when there is one: a spec is checked without.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics
from xtrain.dsl.load import Loaded, load_spec
from xtrain.plan.findings import Findings
from xtrain.planner.rules.validate import check_spec

if TYPE_CHECKING:
    from xtrain.planner.compile import Compiled, Count


def plan_from_path(
    path: str | Path, sets: Sequence[str] = (), world: int | None = None, count: "Count | None" = None
) -> "Compiled":
    """Compile a spec, or read a saved plan (`*.json`), which takes neither `sets` nor another `world`.

    count: as `compile_plan` takes it.
    """
    if is_saved(path):
        return _saved(Path(path), sets, world)
    return plan_from_spec(path, sets, world, count)


def is_saved(path: str | Path) -> bool:
    """Whether a path names a saved plan, by its ending."""
    return str(path).endswith(".json")


def plan_from_spec(
    path: str | Path, sets: Sequence[str] = (), world: int | None = None, count: "Count | None" = None
) -> "Compiled":
    """Load the spec at `path` with `--set` texts (`path.to.field=value`) and compile it for `world` ranks.

    Never raises for what a user wrote: it stands in the diagnostics, in source order.
    """
    return plan_from_loaded(load_spec(path, sets), world, count)


def plan_from_text(text: str, name: str, sets: Sequence[str] = (), world: int | None = None) -> "Compiled":
    """The same for a spec that is no file, as the one a plan carries; `name` stands for its path in diagnostics."""
    return plan_from_loaded(load_spec(name, sets, {name: text}), world)


def plan_from_loaded(loaded: Loaded, world: int | None = None, count: "Count | None" = None) -> "Compiled":
    """Compile a spec that is loaded, without its sweep: the plan of one run."""
    from xtrain.planner.compile import Compiled, compile_plan

    if loaded.spec is None:
        return Compiled(None, check_loaded(loaded, world))
    loaded = evolve(loaded, spec=evolve(loaded.spec, sweep=None))  # a run knows of no other runs
    compiled = compile_plan(loaded.require(), world=world, spec_text=loaded.resolved_text(), count=count)
    merged = Diagnostics()
    merged.extend(loaded.diagnostics)
    merged.extend(compiled.diagnostics)
    return Compiled(None if merged.has_errors else compiled.plan, merged)


def check_from_spec(path: str | Path, sets: Sequence[str] = (), texts: Mapping[str, str] | None = None) -> Diagnostics:
    """All that is to be said about the spec at `path`, from its syntax to its topology. texts: as in `load_spec`."""
    return check_loaded(load_spec(path, sets, texts))


def check_loaded(loaded: Loaded, world: int | None = None) -> Diagnostics:
    """What the language has to say of a spec, and the rules of the planner as far as they can be checked."""
    said = Diagnostics()
    said.extend(loaded.diagnostics)
    if loaded.draft is not None:
        said.extend(check_spec(loaded.draft, world, loaded.unknown_settings))
    if loaded.spec is not None and loaded.spec.sweep is not None:
        from xtrain.planner.rules.sweep import check_dimensions, check_sweep

        found = Findings(loaded.spec)
        check_sweep(loaded.spec, loaded.spec.sweep, found)
        said.extend(found.diagnostics)
        said.extend(check_dimensions(loaded))
    return said


def _saved(path: Path, sets: Sequence[str], world: int | None) -> "Compiled":
    from xtrain.plan.serialise import PlanError, load_plan
    from xtrain.planner.compile import Compiled

    diagnostics = Diagnostics()
    try:
        plan = load_plan(path)
        if sets or world not in (None, plan.mesh.world_size):
            message = f"{path} is a finished plan for {plan.mesh.world_size} ranks"
            raise PlanError("X704", message, "--set and another --world need the spec it was made from")
    except PlanError as error:
        diagnostics.add(
            Diagnostic(severity="error", code=error.code, message=error.message, span=None, hint=error.hint)
        )
        return Compiled(None, diagnostics)
    return Compiled(plan, diagnostics)
