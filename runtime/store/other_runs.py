"""Other runs next to a new run: of the same experiment, or of the same spec with other values."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from xtrain.dsl.schema.data import TEMPLATES, is_template_text
from xtrain.dsl.schema.data_components import SOURCES, tokenizer_kind
from xtrain.plan.data import own_modules
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import PlanError
from xtrain.plan.step_sizes import past_of
from xtrain.plan.views import ValueChange, changed_values
from xtrain.planner.review.resumable import resumable
from xtrain.regular_files import read_json
from xtrain.runtime.observe.provenance import ENVIRONMENT, plan_in
from xtrain.runtime.store.checkpoints import CheckpointEntry, CheckpointFolder

# The newest other runs that are examined: each costs reading a plan.
MOST_OTHER_RUNS: Final = 50
_BUILT_IN: Final = ("auto", *TEMPLATES)
_MOST_VALUES: Final = 4
# Origins of values that nobody wrote.
_DERIVED: Final = ("derived", "default")


def change_text(change: ValueChange) -> str:
    before, after = (side.value if side else "not there" for side in (change.before, change.after))
    return f"{change.path} {before} → {after}"


def changed_modules(before: Plan, plan: Plan) -> list[str]:
    then, now = own_modules(before), own_modules(plan)
    return [f"{name} has changed" for name, digest in now.items() if then.get(name, digest) != digest]


@frozen(kw_only=True)
class OtherRun:
    """A run that is not resumed. step: of its latest checkpoint; what: its relation to the new run; refusal: why it
    cannot be resumed with the present plan; world: the ranks under which it is found, None if they are the same."""

    directory: Path
    step: int
    what: str
    refusal: str = ""
    world: int | None = None

    def text(self) -> str:
        """Return one line for people."""
        ways = [f"--world {self.world}"] if self.world else []
        ways += [] if self.refusal else [f"--set workspace.run={self.directory.name}"]
        text = f"{self.directory}, at step {self.step:,}, is {self.what}, and this is a new run"
        text += f"; that run cannot be resumed with these values: {self.refusal}" if self.refusal else ""
        return text + (f"; to resume that run: {' or '.join(ways)}" if ways else "")


def other_run(directory: Path, plan: Plan, code_id: str | None) -> OtherRun | None:
    """Find the other run in the same folder that the user may have wanted to resume; None if there is none.

    In this order: the same experiment under other code (the last to save); the newest run whose paths are written
    differently; the newest run of the same spec with other derived values or other user code.
    """
    if (other := saved_last(directory, plan.config_id)) is not None:
        theirs = _read(other.path.parents[1] / ENVIRONMENT).get("code_id")
        words = f"{theirs or 'unknown'} → {code_id or 'unknown'}"
        return _found(other, f"a run of the same experiment with other code ({words})")
    beside = [*_beside(directory)]
    ours = meaning(plan.config, Path.cwd())
    for entry, content, folder in beside:
        if content["config"] != plan.config and meaning(content["config"], folder) == ours:
            return _found(entry, "a run of the same experiment with paths written differently")
    spec = Path(plan.spec).resolve()
    for entry, content, folder in beside:
        if (folder / content["spec"]).resolve() == spec and (other := _derived(entry, plan)) is not None:
            return other
    return None


def saved_last(directory: Path, config_id: str) -> CheckpointEntry | None:
    """Return the latest checkpoint among the other runs of an experiment next to `directory`: of the last to save,
    whatever its code."""
    others = [other for other in directory.parent.glob(f"*{config_id}") if other != directory]
    # Names of code have at most two dashes; the name of a run that the user named says nothing about its code.
    others = [other for other in others if other.name.removesuffix(config_id).count("-") <= 2 and "~" not in other.name]
    latest = (CheckpointFolder(other / "checkpoints").latest() for other in others)
    return max((entry for entry in latest if entry), key=lambda entry: entry.state().get("time", 0.0), default=None)


def _derived(entry: CheckpointEntry, plan: Plan) -> OtherRun | None:
    """Return a run of the same spec, if no one wrote the values of the experiment that differ."""
    try:
        before = plan_in(entry.path.parents[1])
    except PlanError:
        return None
    changes = [change for change in changed_values(before, plan) if change.group == "experiment"]
    sides = [side for change in changes for side in (change.before, change.after) if side is not None]
    if any(side.origin not in _DERIVED for side in sides):
        return None
    texts = [*map(change_text, changes), *changed_modules(before, plan)]
    texts = texts or [name for name, value in plan.config.items() if before.config.get(name) != value]
    verdict = resumable(before, plan, entry.step, past_of(entry.state()))
    refusal = f"{verdict.refusals[0].path} {verdict.refusals[0].text}" if verdict.refusals and verdict.certain else ""
    world = before.mesh.world_size if before.mesh.world_size != plan.mesh.world_size else None
    what = f"a run of the same spec with other values ({', '.join(texts[:_MOST_VALUES])})"
    return evolve(_found(entry, what), refusal=refusal, world=world)


def _found(entry: CheckpointEntry, what: str) -> OtherRun:
    return OtherRun(directory=entry.path.parents[1], step=entry.step, what=what)


def _beside(directory: Path) -> Iterator[tuple[CheckpointEntry, dict[str, Any], Path]]:
    """Yield the latest checkpoint, plan and working folder of each other run, newest first."""
    for other in _newest(directory):
        content, folder = _read(other / "plan.json"), _read(other / ENVIRONMENT).get("folder")
        entry = CheckpointFolder(other / "checkpoints").latest()
        if entry is not None and isinstance(folder, str) and {"config", "spec"} <= content.keys():
            yield entry, content, Path(folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def meaning(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the experiment's identity with every path made absolute and links resolved. folder: base of relative
    paths."""
    resolved = {**config, "tokenizer": _tokenizer(config["tokenizer"], folder)}
    resolved["datasets"] = {name: _dataset(dataset, folder) for name, dataset in config["datasets"].items()}
    if "checkpoint" in config:
        resolved["checkpoint"] = {name: _place(path, folder) for name, path in config["checkpoint"].items()}
    return resolved


def _tokenizer(source: str, folder: Path) -> str:
    return _place(source, folder) if tokenizer_kind(source).of_files else source


def _dataset(dataset: dict[str, Any], folder: Path) -> dict[str, Any]:
    resolved = {**dataset, "source": _source(dataset["source"], folder)}
    if isinstance(dataset["text"], dict) and "template" in dataset["text"]:
        resolved["text"] = {**dataset["text"], "template": _place(dataset["text"]["template"], folder)}
    return resolved


def _source(source: Any, folder: Path) -> Any:
    if not isinstance(source, list):
        return source
    name, given = source[0], source[1]
    kind = next((source_class for source_class in SOURCES.values() if source_class.__name__ == name), None)
    return source if kind is None else [name, kind.placed(given, lambda path: _place(path, folder))]


def _place(path: str, folder: Path) -> str:
    return path if path in _BUILT_IN or is_template_text(path) else str((folder / path).resolve())


def _newest(directory: Path) -> list[Path]:
    plans = []
    for plan in directory.parent.glob("*/plan.json"):
        if plan.parent != directory and "~" not in plan.parent.name:
            try:
                plans.append((plan.stat().st_mtime, plan.parent))
            except OSError:
                continue  # it has just been removed
    return [other for _, other in sorted(plans, reverse=True)[:MOST_OTHER_RUNS]]
