"""Run directory `<root>/<lineage>/<run_id>/`: its path, opening it, and moving earlier runs aside.

Opening reports the differences from the last start, and other runs of the same experiment that are not resumed.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import join, quote
from typing import Any, Final

from attrs import evolve, frozen

from xtrain.dsl.schema.data import TEMPLATES, is_template_text
from xtrain.dsl.schema.data_components import SOURCES, tokenizer_kind
from xtrain.plan.data import own_modules
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import PlanError
from xtrain.plan.step_sizes import StepSizes, past_of
from xtrain.plan.timeline import resumed_plan
from xtrain.plan.views import ValueChange, changed_values
from xtrain.planner.review.resumable import Verdict, resumable
from xtrain.planner.review.resuming_course import BUDGET
from xtrain.records.lines import Event
from xtrain.records.names import EVENTS_FILE, METRICS_FILE
from xtrain.records.training_events import ChangedEvent, SetAsideEvent
from xtrain.regular_files import read_json, reason_of
from xtrain.runtime.base.errors import EnvironmentFault, ResumeRefused
from xtrain.runtime.base.json_lines import JsonLinesFile, trim_after
from xtrain.runtime.base.locks import LAUNCHER_LOCK, WORKER_LOCK, HeldLock, hold
from xtrain.runtime.base.user_parts import parts_to_copy
from xtrain.runtime.observe import provenance as metadata
from xtrain.runtime.observe.provenance import ENVIRONMENT, Before, CodeUnread, CodeVersion, plan_in, read_code, versions
from xtrain.runtime.store.beginning import (
    StartingPoint,
    check_folder,
    check_left,
    check_model,
    check_origin,
    find,
    left_to_train,
    origin_of,
    starting_point,
)
from xtrain.runtime.store.checkpoints import CheckpointEntry, CheckpointFolder, Publisher
from xtrain.runtime.store.rollback import finish_rollback

MOST: Final = 8
MOST_REASONS: Final = 3


@frozen(kw_only=True)
class ChangedSinceStart:
    """Differences from the last start. texts: a short list for people. found: the verdict for checkpoints under this
    plan; None if the earlier plan cannot be read."""

    texts: tuple[str, ...]
    found: Verdict | None

    def __bool__(self) -> bool:
        return bool(self.texts)

    @property
    def verdict(self) -> str:
        """same, safe, resharded or incompatible; empty if unknown."""
        return self.found.kind if self.found is not None else ""

    def refuse_if_unfit(self, directory: Path) -> None:
        """Raise ResumeRefused if it is certain that no checkpoint of the earlier plan can be resumed."""
        if self.found is None or self.found.kind != "incompatible" or not self.found.certain:
            return
        reasons = [reason for reason in self.found.refusals if reason.certain]
        more = f"; and {len(reasons) - MOST_REASONS} more differences" if len(reasons) > MOST_REASONS else ""
        said = "; ".join(f"{reason.path} {reason.text}" for reason in reasons[:MOST_REASONS])
        raise ResumeRefused(f"the run in {directory} cannot be resumed with this plan: {said}{more}")


def find_changes(
    before: Before, plan: Plan, code: CodeVersion | CodeUnread | None, step: int | None, past: StepSizes | None = None
) -> ChangedSinceStart:
    """Compare with the previous start. step: of the checkpoint that the run resumes from, None without one; past: the
    batch sizes of the steps before it."""
    texts = [*_of_code(before, code)]
    if before.plan is None:
        return ChangedSinceStart(texts=tuple(texts), found=None)
    verdict = resumable(before.plan, plan, step, past)
    if before.plan.id != plan.id:
        texts += _of_plan(before.plan, plan, verdict)
    return ChangedSinceStart(texts=_short(texts), found=verdict)


def _of_code(before: Before, code: CodeVersion | CodeUnread | None) -> list[str]:
    known = isinstance(code, CodeVersion)
    now: dict[str, Any] = {"code_id": code.code_id if known else None, **versions()}
    names = {"code_id": "code", "xtrain": "xtrain", "torch": "torch", "python": "python"}
    then = before.environment
    unread = "could not be read" if isinstance(code, CodeUnread) else "no checkout"
    then_unread = "could not be read" if then.get("code_unread") else "no checkout"
    texts = [
        f"{words} {then[name] or then_unread} → {now[name] or unread}"
        for name, words in names.items()
        if name in then and then[name] != now[name]
    ]
    if then.get("xtrain") == now["xtrain"] and then.get("source", now["source"]) != now["source"]:
        texts.append(f"xtrain {now['xtrain']} has other source files")
    return texts


def _of_plan(before: Plan, plan: Plan, verdict: Verdict) -> list[str]:
    # The budget's remaining steps, counted from the checkpoint, say more than a run's total steps.
    left = next((f"steps {reason.text}" for reason in verdict.reasons if reason.path == BUDGET), None)
    changes = changed_values(before, plan)
    texts = [left if change.path == "steps" and left else _change_text(change) for change in changes]
    return texts + _changed_modules(before, plan)


def _change_text(change: ValueChange) -> str:
    before, after = (side.value if side else "not there" for side in (change.before, change.after))
    return f"{change.path} {before} → {after}"


def _changed_modules(before: Plan, plan: Plan) -> list[str]:
    then, now = own_modules(before), own_modules(plan)
    return [f"{name} has changed" for name, digest in now.items() if then.get(name, digest) != digest]


def _short(texts: list[str]) -> tuple[str, ...]:
    return tuple(texts) if len(texts) <= MOST else (*texts[:MOST], f"and {len(texts) - MOST} more")


# The newest other runs that are examined: each costs reading a plan.
MOST_OTHER_RUNS: Final = 50
_BUILT_IN: Final = ("auto", *TEMPLATES)
_MOST_VALUES: Final = 4
# Origins of values that nobody wrote.
_DERIVED: Final = ("derived", "default")


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
    except (OSError, ValueError, PlanError):
        return None
    changes = [change for change in changed_values(before, plan) if change.group == "experiment"]
    sides = [side for change in changes for side in (change.before, change.after) if side is not None]
    if any(side.origin not in _DERIVED for side in sides):
        return None
    texts = [*map(_change_text, changes), *_changed_modules(before, plan)]
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


# Settings that choose a run's directory and starting point; the command that resumes a moved run sets them itself.
_CHOSEN = ("workspace.run", "checkpoint.from", "checkpoint.resume")


@frozen(kw_only=True)
class SetAside:
    """A run that was moved aside. directory: its new place. step: of its latest complete checkpoint, 0 without one.
    reason: why it was moved. command: resumes it; empty if it has no checkpoint."""

    directory: Path
    step: int
    reason: str
    command: str

    def text(self) -> str:
        """Return lines for people."""
        where = f"at step {self.step:,}" if self.step else "without a complete checkpoint"
        lines = [f"the earlier run in this directory, {where}, was moved to {self.directory}: {self.reason}"]
        return "\n".join([*lines, *([f"  to resume that run: {self.command}"] if self.command else [])])

    def event(self, attempt: str) -> SetAsideEvent:
        """Return the event for the records of the start that moved it."""
        directory = str(self.directory)
        return SetAsideEvent(
            step=self.step, attempt=attempt, directory=directory, reason=self.reason, command=self.command
        )


def set_aside(directory: Path, attempt: str, plan: Plan) -> SetAside | None:
    """Move the earlier run out of the directory of a run that starts anew; None if there is no earlier run. Raises
    OSError.

    The directory is empty afterwards.
    """
    latest = CheckpointFolder(directory / "checkpoints").latest()
    if latest is None and not (directory / METRICS_FILE).exists():
        return None
    beside = directory.with_name(f"{directory.name}~{attempt}")
    directory.rename(beside)
    directory.mkdir()
    entry = None if latest is None else CheckpointEntry(beside / latest.path.relative_to(directory), latest.step)
    return SetAside(
        directory=beside,
        step=entry.step if entry else 0,
        reason=_reason(plan, entry),
        command=_command(plan, beside, origin_of(entry)) if entry else "",
    )


def _reason(plan: Plan, latest: CheckpointEntry | None) -> str:
    args = plan.node("setup.resume").args
    if not args["resume"]:
        return "checkpoint.resume = false"
    began = origin_of(latest) if latest else None
    return f"it started {f'from {began}' if began else 'at step 0'}, and this run starts from {args['origin']}"


def _command(plan: Plan, beside: Path, origin: str | None) -> str:
    """Return the command that resumes a moved run: the original one with another starting point."""
    sets, world = (plan.origin.sets, plan.origin.world) if plan.origin else ((), None)
    others = [text for text in sets if text.partition("=")[0].strip() not in _CHOSEN]
    named = "none" if origin is None else _text(origin)
    chosen = [f"workspace.run={_text(beside.name)}", f"checkpoint.from={named}"]
    words = ["xtrain", "run", plan.spec, *(["--world", str(world)] if world is not None else [])]
    given = " ".join(f"--set {quote(text)}" for text in [*others, *chosen, "checkpoint.resume=true"])
    return f"{join(words)} {given}"


def _text(value: str) -> str:
    """Return a text as a spec writes it."""
    return json.dumps(value, ensure_ascii=False)


@frozen
class RunDirectory:
    """Directory of a run, opened for one attempt. `lock` is held until the object is freed.

    plan: of the attempt; lengths in tokens and epochs count from the checkpoint that it resumes. other: a run that the
    user may have wanted to resume, if this one has no checkpoint. changes: differences from the last start, in words.
    aside: the earlier run, if it was moved. unread: why git could not read the code, if that chose the directory.
    """

    directory: Path
    attempt: str
    lock: HeldLock
    plan: Plan
    other: OtherRun | None = None
    changes: tuple[str, ...] = ()
    aside: SetAside | None = None
    unread: str = ""


def locate(plan: Plan, code: CodeVersion | CodeUnread | None) -> Path:
    """Return the directory of this plan's run; the same plan under the same code always gives the same path.

    If git cannot read the code, this is the run of the experiment that saved last, whatever its code.
    """
    chosen = plan.workspace["run"]
    run_id = chosen or (f"{code.code_id}-{plan.config_id}" if isinstance(code, CodeVersion) else plan.config_id)
    directory = Path(plan.workspace["root"]) / (plan.workspace["lineage"] or plan.name) / run_id
    if chosen or not isinstance(code, CodeUnread) or not plan.node("setup.resume").args["resume"]:
        return directory
    # The code is unknown: resume any resumable run of the experiment.
    own = CheckpointFolder(directory / "checkpoints").latest()
    last_saved = saved_last(directory, plan.config_id)
    return directory if own is not None or last_saved is None else last_saved.path.parents[1]


def open_workspace(plan: Plan, resolved_spec: str, directory: Path | None = None) -> RunDirectory:
    """Prepare the run directory for another attempt. directory: None for the plan's own.

    Records of steps that will be computed again are moved to `logs/`; a run that is not resumed moves aside as a whole.
    Raises EnvironmentFault if the directory cannot be written or another process is running in it.
    """
    code = read_code(Path(plan.spec).resolve().parent)
    return _open(directory or locate(plan, code), plan, resolved_spec, code, None)


def reopen(workspace: RunDirectory, plan: Plan) -> RunDirectory:
    """Prepare the directory for another attempt by the process that already holds its lock.

    plan: the same run, perhaps on other ranks. Raises EnvironmentFault as `open_workspace` does.
    """
    code = read_code(Path(plan.spec).resolve().parent)
    return _open(workspace.directory, plan, plan.spec_text, code, workspace.lock)


def _open(
    directory: Path, plan: Plan, resolved_spec: str, code: CodeVersion | CodeUnread | None, lock: HeldLock | None
) -> RunDirectory:
    attempt = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    if not directory.exists():
        check_folder(plan)  # a run that cannot start leaves no directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock or hold(directory, LAUNCHER_LOCK)
        hold(directory, WORKER_LOCK).close()
        Publisher(CheckpointFolder(directory / "checkpoints")).sweep()
        finish_rollback(directory)
        start = starting_point(plan, directory)
        _check_start(plan, start, directory)  # before anything of the run is overwritten
        before = None if start.anew else metadata.read_before(directory)
        # A finished run reports this itself: its steps are not checked against the budget.
        step = start.step if left_to_train(plan, start) else None
        past = past_of(start.entry.state()) if start.entry is not None and step is not None else None
        changes = find_changes(before, plan, code, step, past) if before is not None else None
        if start.own and changes is not None:
            changes.refuse_if_unfit(directory)
        aside = set_aside(directory, attempt, plan) if start.anew else None
        if aside is not None:
            lock = hold(directory, LAUNCHER_LOCK)  # the lock before belongs to the moved folder
        contents = {**parts_to_copy(plan, directory), **metadata.describe(plan, resolved_spec, code, attempt, before)}
        for name in ("metadata", "ranks", "logs", "checkpoints"):
            (directory / name).mkdir(exist_ok=True)
        superseded = directory / "logs" / f"metrics-superseded-{attempt}.jsonl"
        trim_after(directory / METRICS_FILE, start.step, superseded)
        metadata.write(directory, contents, before)
        if aside is not None:
            _write_event(directory, aside.event(attempt))
        if changes:
            texts = [*changes.texts]
            _write_event(
                directory, ChangedEvent(step=start.step, attempt=attempt, verdict=changes.verdict, changes=texts)
            )
    except OSError as error:
        raise EnvironmentFault(
            "X706", f"the run directory {directory} cannot be written: {reason_of(error)}"
        ) from error
    named = plan.workspace["run"] is not None or directory != locate(plan, code)
    code_id = code.code_id if isinstance(code, CodeVersion) else None
    other = None if start.own or start.anew or named else other_run(directory, plan, code_id)
    shown = plan if past is None else resumed_plan(plan, past, start.step)[0]
    unread = code.reason if isinstance(code, CodeUnread) and not named else ""
    return RunDirectory(directory, attempt, lock, shown, other, changes.texts if changes else (), aside, unread)


def _check_start(plan: Plan, start: StartingPoint, directory: Path) -> None:
    """Raise EnvironmentFault if the run cannot start from its starting point."""
    if start.entry is not None:
        check_model(plan, start.entry)
        check_left(plan, start, directory)
        return
    check_folder(plan)
    for node in plan.nodes:
        if node.op == "setup.pretrained":
            check_origin(plan, find(Path(node.args["path"]), weights=True))


def _write_event(directory: Path, event: Event) -> None:
    """Write an event of the start; no rank is running yet."""
    events = JsonLinesFile(directory / EVENTS_FILE)
    events.write(event)
    events.close()
