"""Run directory `<root>/<lineage>/<run_id>/`: where it is, how it is opened, and runs that are moved aside."""

import json
import os
import time
from pathlib import Path
from shlex import join, quote

from attrs import frozen

from xtrain.plan.plan import Plan
from xtrain.plan.step_sizes import past_of
from xtrain.plan.timeline import resumed_plan
from xtrain.records.lines import Event
from xtrain.records.names import EVENTS_FILE, METRICS_FILE
from xtrain.records.training_events import ChangedEvent, SetAsideEvent
from xtrain.regular_files import reason_of
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.json_lines import JsonLinesFile, trim_after
from xtrain.runtime.base.locks import LAUNCHER_LOCK, WORKER_LOCK, HeldLock, hold
from xtrain.runtime.base.user_parts import parts_to_copy
from xtrain.runtime.observe import provenance as metadata
from xtrain.runtime.observe.provenance import CodeUnread, CodeVersion, read_code
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
from xtrain.runtime.store.checkpoints import CheckpointEntry, CheckpointFolder
from xtrain.runtime.store.earlier_runs import OtherRun, find_changes, other_run, saved_last
from xtrain.runtime.store.publication import Publisher, finish_rollback

# What says where a run is and begins: of the command that goes back, they say that of the run that was set aside.
_CHOSEN = ("workspace.run", "checkpoint.from", "checkpoint.resume")


@frozen(kw_only=True)
class SetAside:
    """directory: where it lies now. step: of its latest whole checkpoint, 0 for none. reason: why it made way.
    command: goes on with it; empty where there is nothing to go on from."""

    directory: Path
    step: int
    reason: str
    command: str

    def text(self) -> str:
        """For people, in lines."""
        where = f"at step {self.step:,}" if self.step else "without a complete checkpoint"
        lines = [f"the earlier run in this directory, {where}, was moved to {self.directory}: {self.reason}"]
        return "\n".join([*lines, *([f"  to resume that run: {self.command}"] if self.command else [])])

    def event(self, attempt: str) -> SetAsideEvent:
        """For the file of the start that has moved it."""
        directory = str(self.directory)
        return SetAsideEvent(
            step=self.step, attempt=attempt, directory=directory, reason=self.reason, command=self.command
        )


def set_aside(directory: Path, attempt: str, plan: Plan) -> SetAside | None:
    """Move what lies in the directory of a run that begins anew; None where there is nothing. Raises OSError.

    The directory is empty then.
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
    """What was started, but for where it is to begin."""
    sets, world = (plan.origin.sets, plan.origin.world) if plan.origin else ((), None)
    others = [text for text in sets if text.partition("=")[0].strip() not in _CHOSEN]
    named = "none" if origin is None else _text(origin)
    chosen = [f"workspace.run={_text(beside.name)}", f"checkpoint.from={named}"]
    words = ["xtrain", "run", plan.spec, *(["--world", str(world)] if world is not None else [])]
    given = " ".join(f"--set {quote(text)}" for text in [*others, *chosen, "checkpoint.resume=true"])
    return f"{join(words)} {given}"


def _text(value: str) -> str:
    """A text as a spec writes it."""
    return json.dumps(value, ensure_ascii=False)


@frozen
class RunDirectory:
    """A run's directory, opened for one attempt at running it. `lock` is held until the object is gone.

    plan: what the attempt does, with lengths in tokens and epochs counted from the checkpoint that it resumes.
    other: a run that whoever started this one may have wanted to resume, if this one has no checkpoint. changes: what
    is not as it was when the run was last started, in words. aside: the run that lay here before, if it made way.
    unread: why git could not read the code, if that chose the directory.
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
    """Where this plan's run lives; the same plan under the same code always gives the same place.

    Where git could not read the code it is the run of this experiment that saved last, whatever its code.
    """
    chosen = plan.workspace["run"]
    run_id = chosen or (f"{code.code_id}-{plan.config_id}" if isinstance(code, CodeVersion) else plan.config_id)
    directory = Path(plan.workspace["root"]) / (plan.workspace["lineage"] or plan.name) / run_id
    if chosen or not isinstance(code, CodeUnread) or not plan.node("setup.resume").args["resume"]:
        return directory
    # Which code this is, nobody knows: a run of the experiment that can be resumed is resumed.
    own = CheckpointFolder(directory / "checkpoints").latest()
    found = saved_last(directory, plan.config_id)
    return directory if own is not None or found is None else found.path.parents[1]


def open_workspace(plan: Plan, resolved_spec: str, directory: Path | None = None) -> RunDirectory:
    """Make the run directory ready for another attempt. directory: None for where the plan says.

    Records of steps that will be computed again are moved to `logs/`; a run that is not to be resumed moves aside as a
    whole. Raises EnvironmentFault if the directory cannot be written or another process is running in it.
    """
    code = read_code(Path(plan.spec).resolve().parent)
    return _open(directory or locate(plan, code), plan, resolved_spec, code, None)


def reopen(workspace: RunDirectory, plan: Plan) -> RunDirectory:
    """Make the directory ready for another attempt by the process that has opened it, whose lock goes on.

    plan: the same run, perhaps on other ranks. Raises EnvironmentFault as `open_workspace` does.
    """
    code = read_code(Path(plan.spec).resolve().parent)
    return _open(workspace.directory, plan, plan.spec_text, code, workspace.lock)


def _open(
    directory: Path, plan: Plan, resolved_spec: str, code: CodeVersion | CodeUnread | None, lock: HeldLock | None
) -> RunDirectory:
    attempt = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    if not directory.exists():
        check_folder(plan)  # of a run that cannot begin there is no directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock or hold(directory, LAUNCHER_LOCK)
        hold(directory, WORKER_LOCK).close()
        Publisher(CheckpointFolder(directory / "checkpoints")).sweep()
        finish_rollback(directory)
        start = starting_point(plan, directory)
        _check_start(plan, start, directory)  # before anything of the run is overwritten
        before = None if start.anew else metadata.read_before(directory)
        # A run that has ended, and is not to train more, says so by itself: its steps are held against no budget.
        step = start.step if left_to_train(plan, start) else None
        past = past_of(start.entry.state()) if start.entry is not None and step is not None else None
        changes = find_changes(before, plan, code, step, past) if before is not None else None
        if start.own and changes is not None:
            changes.refuse_if_unfit(directory)
        aside = set_aside(directory, attempt, plan) if start.anew else None
        if aside is not None:
            lock = hold(directory, LAUNCHER_LOCK)  # the other one is of the folder that has been moved
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
    """Raise EnvironmentFault if the run cannot begin with what it is to begin with."""
    if start.entry is not None:
        check_model(plan, start.entry)
        check_left(plan, start, directory)
        return
    check_folder(plan)
    for node in plan.nodes:
        if node.op == "setup.pretrained":
            check_origin(plan, find(Path(node.args["path"]), weights=True))


def _write_event(directory: Path, event: Event) -> None:
    """Write an event of the start; no rank is there yet that could."""
    events = JsonLinesFile(directory / EVENTS_FILE)
    events.write(event)
    events.close()
