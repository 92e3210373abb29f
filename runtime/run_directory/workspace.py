"""The run directory: `<root>/<lineage>/<run_id>/`, and what it keeps about the code and the machine."""

import os
import time
from pathlib import Path

from attrs import frozen

from xtrain.planner.plan import Plan
from xtrain.planner.schedule.horizon import resumed_plan
from xtrain.planner.schedule.step_sizes import past_of
from xtrain.records.event import Event
from xtrain.records.paths import EVENTS_FILE, METRICS_FILE
from xtrain.records.start_events import ChangedEvent
from xtrain.regular_files import reason_of
from xtrain.runtime.checkpoint.layout import CheckpointFolder
from xtrain.runtime.checkpoint.model_check import check_model, check_origin
from xtrain.runtime.checkpoint.model_folder import check_folder
from xtrain.runtime.checkpoint.publish import Publisher
from xtrain.runtime.checkpoint.rollback_state import finish_rollback
from xtrain.runtime.checkpoint.sources import StartingPoint, check_left, find, left_to_train, starting_point
from xtrain.runtime.data.user_parts import parts_to_copy
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.files.lines import JsonLinesFile, trim_after
from xtrain.runtime.files.locks import LAUNCHER_LOCK, WORKER_LOCK, HeldLock, hold
from xtrain.runtime.provenance import metadata
from xtrain.runtime.provenance.changed import find_changes
from xtrain.runtime.provenance.code import CodeUnread, CodeVersion, read_code
from xtrain.runtime.run_directory.other_runs import OtherRun, other_run, saved_last
from xtrain.runtime.run_directory.set_aside import SetAside, set_aside


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
