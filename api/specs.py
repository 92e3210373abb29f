"""Specs and plans from Python: what `xtrain check`, `xtrain plan` and `xtrain run` do, in scripts and notebooks."""

import warnings
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final

from attrs import field

from xtrain.api.runs import Run, start
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SpecErrors
from xtrain.dsl.load import load_spec
from xtrain.dsl.spec_text import value_text
from xtrain.lazy_attrs import frozen
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import dumps, signed
from xtrain.planner.load import check_loaded, is_saved, plan_from_path
from xtrain.planner.review.page import parts_of, render
from xtrain.regular_files import MOST_JSON, read_regular, reason_of

NOT_PLAIN: Final = object()


class SpecWarning(UserWarning):
    """A warning of `xtrain check`."""


def load(path: str | PathLike[str], settings: Mapping[str, Any] | None = None) -> "LoadedSpec":
    """Check a spec, or read a plan saved by `xtrain plan --out`.

    settings: `path.to.setting` → value, as of `--set`: numbers, True, False, None and lists of them as in Python; a
    text is written as in a spec (`64 steps`, `cosine`, and with its own quotes `"runs/a"`); a Path is a path; numbers
    and arrays of NumPy are numbers and lists.

    Raises SpecErrors, whose text is that of `xtrain check`, and TypeError for other objects in the settings. Warns with
    SpecWarning for warnings of `xtrain check`, and for a spec with a `sweep`, whose trials only `xtrain run` trains.
    """
    sets = tuple(f"{name}={_spelled(name, value)}" for name, value in (settings or {}).items())
    if is_saved(Path(path)):
        _report(plan_from_path(Path(path), sets).diagnostics)
        return LoadedSpec(Path(path), sets)
    loaded = load_spec(Path(path), sets)
    _report(check_loaded(loaded))
    if loaded.spec is not None and loaded.spec.sweep is not None:
        message = f"{path}: a plan is that of one run, without the trials of `sweep`, which `xtrain run {path}` trains"
        warnings.warn(message, SpecWarning, stacklevel=2)
    return LoadedSpec(Path(path), sets)


@frozen
class LoadedSpec:
    """A valid spec. sets: its settings from outside, as `--set` takes them."""

    path: Path
    sets: tuple[str, ...] = ()

    def plan(self, world: int | None = None) -> "ReviewedPlan":
        """Plan a run on `world` ranks; None: as many as the axes of the spec need. Raises SpecErrors."""
        if world is not None and not isinstance(world, int):
            raise TypeError(f"world is a number of ranks, not {world!r}")
        compiled = plan_from_path(self.path, self.sets, world)
        if compiled.plan is None:
            raise SpecErrors(compiled.diagnostics)
        plan = compiled.plan
        return ReviewedPlan(plan if is_saved(self.path) else signed(plan, self.sets, world))

    def run(self, world: int | None = None, *, wait: bool = True, show: bool = True) -> Run:
        """Plan and train: see `ReviewedPlan.run`."""
        return self.plan(world).run(wait=wait, show=show)

    def _repr_html_(self) -> str:
        from xtrain.tui.report.page import titled

        try:
            text = read_regular(self.path, MOST_JSON).decode("utf-8", "replace")
        except OSError as error:
            text = f"{self.path} cannot be read: {reason_of(error)}"
        return titled(str(self.path), [("set", each) for each in self.sets], text)


@frozen
class ReviewedPlan:
    """An execution plan. content: the plan as in `plan.json`. Its text is the page of `xtrain plan`."""

    content: Plan = field(repr=False)

    @property
    def id(self) -> str:
        """The plan's id as shown by `xtrain plan`; equal plans have equal ids."""
        return self.content.id

    def __str__(self) -> str:
        return render(self.content)

    def page(self, parts: str | Sequence[str] = (), *, full: bool = False) -> str:
        """Return the whole page, or some of its parts in full (`memory`, `order`, …). Raises ValueError for an unknown
        part."""
        parts = [parts] if isinstance(parts, str) else parts
        known = parts_of(self.content)
        if unknown := [each for each in parts if each not in known]:
            raise ValueError(f"a plan has no part {unknown[0]!r}; there are {', '.join(known)}")
        return render(self.content, full=full, parts=parts)

    def save(self, path: str | PathLike[str]) -> None:
        """Save the plan like `xtrain plan --out`, for `xtrain run`, `xtrain diff` and `load`."""
        Path(path).write_text(dumps(self.content), encoding="utf-8")

    def run(self, *, wait: bool = True, show: bool = True) -> Run:
        """Train this plan in separate processes, as `xtrain run` does; a stopped run is resumed.

        wait: return when the run has ended; otherwise as soon as it has started. show: print its lines meanwhile.
        Ctrl-C, or interrupting the cell, saves a checkpoint and stops the run.

        Raises RunFailed if it cannot start, and with `wait` if it fails.
        """
        return start(dumps(self.content), wait=wait, show=show)

    def _repr_html_(self) -> str:
        from xtrain.tui.report.page import titled

        plan = self.content
        facts = {"plan": plan.id, "experiment": plan.config_id, "ranks": plan.mesh.world_size}
        return titled(plan.name, facts.items(), str(self))


def _spelled(name: str, value: Any) -> str:
    """Return a Python value as spec text."""
    if isinstance(value, str):
        return value
    plain = _plain(value)
    if plain is NOT_PLAIN:
        kinds = "a number, True, False, None, a text, or a list or dict of these"
        raise TypeError(f"{name}: a setting is {kinds}, not {type(value).__name__}")
    return value_text(plain)


def _plain(value: Any) -> Any:
    """Convert a value for `value_text`; NOT_PLAIN if a spec cannot express it."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, dict):
        plain = {name: _plain(each) for name, each in value.items()}
        return NOT_PLAIN if any(each is NOT_PLAIN for each in plain.values()) else plain
    if isinstance(value, list | tuple):
        items = tuple(map(_plain, value))
        return NOT_PLAIN if any(each is NOT_PLAIN for each in items) else items
    if isinstance(value, bool | str) or value is None:
        return value
    return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else NOT_PLAIN


def _report(found: Diagnostics) -> None:
    if found.has_errors:
        raise SpecErrors(found)
    for each in found:
        warnings.warn(f"{each.span}: {each.code}: {each.message}", SpecWarning, stacklevel=3)
