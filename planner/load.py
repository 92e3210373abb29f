"""From a path to a plan: a spec is loaded and compiled, a `plan.json` read back."""

import json
from collections.abc import Sequence
from pathlib import Path

from ..dsl.diagnostics import Diagnostic, Diagnostics
from ..dsl.load import load_spec
from .compile import Compiled, check_spec, compile_plan
from .plan import Plan
from .serialise import PlanError, from_json


def plan_from_path(path: str | Path, sets: Sequence[str] = (), world: int | None = None) -> Compiled:
    """Compile a spec, or read a saved plan (`*.json`), which takes neither `sets` nor another `world`."""
    if str(path).endswith(".json"):
        return _saved(Path(path), sets, world)
    return plan_from_spec(path, sets, world)


def plan_from_spec(path: str | Path, sets: Sequence[str] = (), world: int | None = None) -> Compiled:
    """Load the spec at `path` with `--set` texts (`path.to.field=value`) and compile it for `world` ranks.

    Never raises for what a user wrote: it stands in the diagnostics, in source order.
    """
    loaded = load_spec(path, sets)
    if loaded.spec is None:
        return Compiled(None, loaded.diagnostics)
    compiled = compile_plan(loaded.spec, world=world, spec_text=loaded.resolved_text())
    merged = Diagnostics()
    merged.extend(loaded.diagnostics)
    merged.extend(compiled.diagnostics)
    return Compiled(None if merged.has_errors else compiled.plan, merged)


def check_from_spec(path: str | Path, sets: Sequence[str] = ()) -> Diagnostics:
    """All that is to be said about the spec at `path`, from its syntax to its topology."""
    loaded = load_spec(path, sets)
    said = Diagnostics()
    said.extend(loaded.diagnostics)
    if loaded.spec is not None:
        said.extend(check_spec(loaded.spec))
    return said


def load_plan(path: str | Path) -> Plan:
    """Read a saved plan. Raises PlanError, also for a file that is missing or is not JSON."""
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise PlanError("X704", f"{path}: {error.strerror}", "give the path of a plan or a spec") from error
    except ValueError as error:
        raise PlanError("X704", f"{path} is not JSON", "write one with `xtrain plan SPEC --out plan.json`") from error
    return from_json(content)


def _saved(path: Path, sets: Sequence[str], world: int | None) -> Compiled:
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
