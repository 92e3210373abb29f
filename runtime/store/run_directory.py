"""Run directory `<root>/<lineage>/<run_id>/`: its path, opening it, and moving earlier runs aside.

Opening reports the differences from the last start, and other runs of the same experiment that are not resumed.
"""

import json
import os
import time
from pathlib import Path
from shlex import join, quote
from typing import Any, Final

from attrs import frozen

from xtrain.plan.plan import Plan
from xtrain.plan.step_sizes import StepSizes, past_of
from xtrain.plan.timeline import resumed_plan
from xtrain.plan.views import changed_values
from xtrain.planner.review.resumable import Verdict, resumable
from xtrain.planner.review.resuming_course import BUDGET
from xtrain.records.lines import Event
from xtrain.records.names import EVENTS_FILE, METRICS_FILE
from xtrain.records.training_events import ChangedEvent, SetAsideEvent
from xtrain.regular_files import reason_of
from xtrain.runtime.base.errors import EnvironmentFault, ResumeRefused
from xtrain.runtime.base.json_lines import JsonLinesFile, trim_after
from xtrain.runtime.base.locks import LAUNCHER_LOCK, WORKER_LOCK, HeldLock, hold
from xtrain.runtime.base.user_parts import parts_to_copy
from xtrain.runtime.observe import provenance as metadata
from xtrain.runtime.observe.provenance import Before, CodeUnread, CodeVersion, read_code, versions
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
from xtrain.runtime.store.other_runs import OtherRun, change_text, changed_modules, other_run, saved_last
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
    texts = [left if change.path == "steps" and left else change_text(change) for change in changes]
    return texts + changed_modules(before, plan)


def _short(texts: list[str]) -> tuple[str, ...]:
    return tuple(texts) if len(texts) <= MOST else (*texts[:MOST], f"and {len(texts) - MOST} more")


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
