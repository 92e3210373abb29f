"""`xtrain plan --compare`: the same step on the same ranks under other settings, planned side by side."""

from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.planner.load import plan_from_spec
from xtrain.planner.plan import Plan

# Words of `--compare` and the settings they stand for; anything with a dot is a path as `--set` takes it.
SHORT = {
    **{axis: f"parallel.{axis}" for axis in ("tp", "pp", "cp", "ep", "fsdp", "stack")},
    **{name: f"parallel.fsdp.{name}" for name in ("replicate", "reshard", "offload", "reduce", "sync")},
    **{name: f"parallel.cp.{name}" for name in ("ring", "ulysses", "fold")},
    **{name: f"parallel.pp.{name}" for name in ("schedule", "stages_per_rank")},
    **{name: f"batch.{name}" for name in ("micro", "accumulate", "rows", "sequence")},
}


@frozen(kw_only=True)
class Alternative:
    """One way to run the spec: its plan, or what is wrong with it. sets: the `--set` texts it was made with."""

    name: str
    sets: tuple[str, ...]
    plan: Plan | None
    diagnostics: Diagnostics


def compare(
    path: str | Path, texts: Sequence[str], sets: Sequence[str] = (), world: int | None = None
) -> list[Alternative]:
    """The spec as it is, then with each text of settings, as `tp=4,pp=2`, applied after `sets`.

    Ranks and rows of a step stay those of the spec unless a text speaks of them: fsdp takes the ranks that the other
    axes leave over, and microbatches follow from the rows.
    """
    declared = _plan("as declared", path, sets, world)
    return [declared, *(_variant(text, path, sets, world, declared.plan) for text in texts)]


def _plan(name: str, path: str | Path, sets: Sequence[str], world: int | None) -> Alternative:
    compiled = plan_from_spec(path, sets, world)
    return Alternative(name=name, sets=tuple(sets), plan=compiled.plan, diagnostics=compiled.diagnostics)


def _variant(text: str, path: str | Path, sets: Sequence[str], world: int | None, declared: Plan | None) -> Alternative:
    own = [_written_out(part) for part in split(text)]
    named = {part.partition("=")[0].strip() for part in own}
    unchanged: list[str] = []
    if declared is not None:
        world = declared.mesh.world_size if world is None else world
        if "parallel.fsdp" not in named:
            unchanged.append("parallel.fsdp=auto")
        if not named & {"batch.rows", "batch.accumulate"}:
            rows = declared.node("setup.loader").args["rows"]
            unchanged += ["batch.accumulate=auto", f"batch.rows={rows}"]
    if "parallel.fsdp" in named:
        world = None
    return _plan(text, path, [*sets, *unchanged, *own], world)


def _written_out(part: str) -> str:
    name, sign, value = part.partition("=")
    return f"{SHORT.get(name.strip(), name.strip())}{sign}{value}"


def split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket and no string."""
    parts, depth, quoted, start = [], 0, False, 0
    for place, letter in enumerate(text):
        if letter == '"' and text[place - 1 : place] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]
