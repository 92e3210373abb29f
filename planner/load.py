"""Loader of plans: compiles a spec, or reads back a `plan.json`.

Compiler and reader are imported only when needed; checking a spec does not need them.
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
    """Compile a spec, or read a saved plan (`*.json`), which accepts neither `sets` nor another `world`.

    count: as in `compile_plan`.
    """
    if is_saved(path):
        return _saved(Path(path), sets, world)
    return plan_from_spec(path, sets, world, count)


def is_saved(path: str | Path) -> bool:
    """Return True if a path ends like a saved plan's."""
    return str(path).endswith(".json")


def plan_from_spec(
    path: str | Path, sets: Sequence[str] = (), world: int | None = None, count: "Count | None" = None
) -> "Compiled":
    """Load the spec at `path` with `--set` texts (`path.to.field=value`) and compile it for `world` ranks.

    User errors are reported in the diagnostics, in source order, and never raised.
    """
    return plan_from_loaded(load_spec(path, sets), world, count)


def plan_from_text(text: str, name: str, sets: Sequence[str] = (), world: int | None = None) -> "Compiled":
    """Compile a spec given as text, such as the one in a plan; `name` is its path in diagnostics."""
    return plan_from_loaded(load_spec(name, sets, {name: text}), world)


def plan_from_loaded(loaded: Loaded, world: int | None = None, count: "Count | None" = None) -> "Compiled":
    """Compile a loaded spec without its sweep: the plan of one run."""
    from xtrain.planner.compile import Compiled, compile_plan

    if loaded.spec is None:
        return Compiled(None, check_loaded(loaded, world))
    loaded = evolve(loaded, spec=evolve(loaded.spec, sweep=None))  # a run does not know other runs
    compiled = compile_plan(loaded.require(), world=world, spec_text=loaded.resolved_text(), count=count)
    merged = Diagnostics()
    merged.extend(loaded.diagnostics)
    merged.extend(compiled.diagnostics)
    return Compiled(None if merged.has_errors else compiled.plan, merged)


def check_from_spec(path: str | Path, sets: Sequence[str] = (), texts: Mapping[str, str] | None = None) -> Diagnostics:
    """Return all diagnostics of the spec at `path`, from its syntax to its topology. texts: as in `load_spec`."""
    return check_loaded(load_spec(path, sets, texts))


def check_loaded(loaded: Loaded, world: int | None = None) -> Diagnostics:
    """Return the diagnostics of the language, and of the planner's rules that can be checked."""
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
