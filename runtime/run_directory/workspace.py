"""The run directory: `<root>/<lineage>/<run_id>/`, and what it keeps about the code and the machine."""

import os
import time
from pathlib import Path
from typing import IO

from attrs import frozen

from ...planner.plan import Plan
from ...planner.schedule.horizon import resumed_plan
from ...planner.schedule.step_sizes import past_of
from ...records.event import Event
from ...records.paths import EVENTS_FILE, METRICS_FILE
from ...records.start_events import ChangedEvent
from ...regular_files import reason_of
from ..checkpoint.layout import CheckpointFolder
from ..checkpoint.model_check import check_model, check_origin
from ..checkpoint.model_folder import check_folder
from ..checkpoint.publish import Publisher
from ..checkpoint.rollback_state import finish_rollback
from ..checkpoint.sources import StartingPoint, check_left, find, left_to_train, starting_point
from ..data.user_parts import parts_to_copy
from ..errors import EnvironmentFault
from ..files.lines import JsonLinesFile, trim_after
from ..files.locks import LAUNCHER_LOCK, WORKER_LOCK, hold
from ..provenance import metadata
from ..provenance.changed import find_changes
from ..provenance.code import CodeVersion, read_code
from .same_paths import same_run
from .set_aside import SetAside, set_aside


@frozen
class RunDirectory:
    """A run's directory, opened for one attempt at running it. `lock` is held until the object is gone.

    plan: what the attempt does, with lengths in tokens and epochs counted from the checkpoint that it resumes.
    elsewhere: of the runs of the same experiment under other states of the code the one that has saved last, if this
    one has no checkpoint to go on from, and None if there is none or the run is to begin anew.
    changes: what is not as it was when the run was last started, in words. aside: the run that lay here before, if it
    had to make way. same: another run of the same experiment, whose paths are written in other words, if this one has
    no checkpoint.
    """

    directory: Path
    attempt: str
    lock: IO[str]
    plan: Plan
    elsewhere: Path | None = None
    changes: tuple[str, ...] = ()
    aside: SetAside | None = None
    same: Path | None = None


def locate(plan: Plan, code: CodeVersion | None) -> Path:
    """Where this plan's run lives; the same plan under the same code always gives the same place."""
    chosen = plan.workspace["run"]
    run_id = chosen or (f"{code.code_id}-{plan.config_id}" if code else plan.config_id)
    return Path(plan.workspace["root"]) / (plan.workspace["lineage"] or plan.name) / run_id


def open_workspace(plan: Plan, resolved_spec: str) -> RunDirectory:
    """Make the run directory ready for another attempt.

    Records of steps that will be computed again are moved to `logs/`; a run that is not to be resumed moves aside as a
    whole. Raises EnvironmentFault if the directory cannot be written or another process is running in it.
    """
    code = read_code(Path(plan.spec).resolve().parent)
    return _open(locate(plan, code), plan, resolved_spec, code, None)


def reopen(workspace: RunDirectory, plan: Plan) -> RunDirectory:
    """Make the directory ready for another attempt by the process that has opened it, whose lock goes on.

    plan: the same run, perhaps on other ranks. Raises EnvironmentFault as `open_workspace` does.
    """
    code = read_code(Path(plan.spec).resolve().parent)
    return _open(workspace.directory, plan, plan.spec_text, code, workspace.lock)


def _open(
    directory: Path, plan: Plan, resolved_spec: str, code: CodeVersion | None, lock: IO[str] | None
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
            lock = hold(directory, LAUNCHER_LOCK)
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
    named = plan.workspace["run"] is not None
    elsewhere = None if start.entry or start.anew or named else _elsewhere(directory, plan.config_id)
    other = same_run(directory, plan) if not (start.own or start.anew or named or elsewhere) else None
    shown = plan if past is None else resumed_plan(plan, past, start.step)[0]
    return RunDirectory(directory, attempt, lock, shown, elsewhere, changes.texts if changes else (), aside, other)


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


def _elsewhere(directory: Path, config_id: str) -> Path | None:
    others = [other for other in directory.parent.glob(f"*{config_id}") if other != directory]
    # Only runs whose name says that the code was another one; a run that the user has named says nothing of that.
    others = [other for other in others if other.name.count("-") in (1, 2) and "~" not in other.name]
    latest = {other: CheckpointFolder(other / "checkpoints").latest() for other in others}
    saved = {other: entry.state().get("time", 0.0) for other, entry in latest.items() if entry is not None}
    return max(saved, key=lambda other: saved[other], default=None)
