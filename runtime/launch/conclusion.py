"""The last record of a run, written by the launcher where no rank could: after a failure, or when all were killed."""

from signal import SIGINT, Signals

from xtrain.dsl.schema.actions import SIGNALS
from xtrain.planner.plan import Plan
from xtrain.records.end_status import EndStatus
from xtrain.records.event import Event
from xtrain.records.events import events_since
from xtrain.records.lines import objects_since, read_all
from xtrain.records.metrics import StepMetrics
from xtrain.records.paths import EVENTS_FILE, METRICS_FILE
from xtrain.records.run_events import FailureEvent, RunEndEvent, SignalEvent, StuckEvent
from xtrain.records.start_events import RunStartEvent, SetupDoneEvent
from xtrain.runtime.checkpoint.sources import StartingPoint, total_steps
from xtrain.runtime.control.signals import EVENTS
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.files.lines import JsonLinesFile
from xtrain.runtime.launch.failure_cause import FailureCause, failures_in, stopped_early
from xtrain.runtime.launch.launch import Ended
from xtrain.runtime.launch.preflight import device_of
from xtrain.runtime.outcome import EXIT_CODES, STATUS_OF_SIGNAL
from xtrain.runtime.run_directory.workspace import RunDirectory


def conclude(workspace: RunDirectory, said: list[Event], ended: Ended, cause: FailureCause, *, report: str = "") -> int:
    """Write the causes that nobody has told, then how the run has ended; returns the exit code.

    said: the events of the last worker group. report: what is to be said of the worker groups before it.
    """
    lines = JsonLinesFile(workspace.directory / EVENTS_FILE)
    failures = failures_in(said)
    logged = read_all(StepMetrics, objects_since(workspace.directory / METRICS_FILE))
    step = max((metrics.step or 0 for metrics in logged), default=0)
    # A stop request that comes before the loop has begun finds nothing to save; one that no rank answered is a failure.
    begun = any(isinstance(event, SetupDoneEvent) for event in said)
    early = EndStatus.INTERRUPTED if ended.at_once else stopped_early(said, ended)
    if early is not None:
        reason = "Ctrl-C was pressed a second time" if ended.at_once else f"{cause.reason} before the first step"
        numbers = {int(SIGINT)} if ended.at_once else {-code for code in ended.failures.values() if code < 0}
        return _stopped(lines, step, early, numbers, reason)
    asked = STATUS_OF_SIGNAL.get(ended.signal)
    unreported = unreported_causes(said, ended)
    status = asked if asked and not (failures or unreported or begun) else EndStatus.FAILED
    if ended.signal is not None and status != EndStatus.FAILED:
        reason = f"{ended.who} received {Signals(ended.signal).name} {ended.when}"
        return _stopped(lines, step, status, {ended.signal}, reason)
    log = workspace.directory / "logs" / workspace.attempt
    causes: list[tuple[int | None, str]] = [
        (rank, f"{reason}{_unrecorded_reason(ended.failures[rank])}; its output is in {log}")
        for rank, reason in unreported.items()
    ]
    if not failures and not causes:
        causes = [(None, "the ranks were killed before they had saved" if ended.signal else cause.reason)]
    if report:
        causes.append((None, report))
    for rank, error in causes:
        found = rank is not None and ended.failures.get(rank) == EXIT_CODES[EndStatus.ENVIRONMENT]
        exit_code, code = (3, "X706") if found else (1, "")
        failure = FailureEvent(step=step, rank=rank, error=error, exit_code=exit_code, traceback="", code=code)
        failures.append(failure)
        lines.write(failure)
    code = 3 if any(failure.exit_code == 3 for failure in failures) else EXIT_CODES[status]
    return _end(lines, step, status, code, cause.reason)


def conclude_finished(workspace: RunDirectory, plan: Plan, start: StartingPoint) -> int:
    """Record that a run has nothing left to do, as its ranks would after their set-up; returns the exit code."""
    directory, status = workspace.directory, EndStatus.COMPLETE
    lines = JsonLinesFile(directory / EVENTS_FILE)
    before = sum(isinstance(event, RunStartEvent) for event in events_since(directory / EVENTS_FILE, 0))
    lines.write(
        RunStartEvent(
            step=0,
            run_id=directory.name,
            plan_id=plan.id,
            name=plan.name,
            world_size=plan.mesh.world_size,
            device=device_of(plan),
            steps=total_steps(plan, start),
            attempt=before + 1,
            resumed_step=start.step,
            directory=str(directory),
            rewards=plan.architecture.head == "reward",
        )
    )
    return _end(lines, start.step, status, EXIT_CODES[status], "")


def _unrecorded_reason(exit_code: int) -> str:
    """What may be the matter with a rank that found a fault of its environment, and could not write that down."""
    found = exit_code == EXIT_CODES[EndStatus.ENVIRONMENT]
    return ", and could not record the reason: is the disk full?" if found else ""


def _stopped(lines: JsonLinesFile, step: int, status: str, numbers: set[int], reason: str) -> int:
    """Of several signals the one is named that a rank would have answered first."""
    name = min((EVENTS[Signals(number)] for number in numbers), key=SIGNALS.index)
    lines.write(SignalEvent(step=step, name=name, reason=reason))
    return _end(lines, step, status, EXIT_CODES[status], reason)


def _end(lines: JsonLinesFile, step: int, status: str, exit_code: int, reason: str) -> int:
    lines.write(RunEndEvent(step=step, status=status, exit_code=exit_code, seconds=None, loss=None, reason=reason))
    lines.close()
    return exit_code


def unreported_causes(said: list[Event], ended: Ended) -> dict[int, str]:
    """Rank → how it ended, of those that had no chance to tell, or have left without a word.

    Where all ranks have agreed on a failure a single rank speaks for all: that others left as well is no news. Where
    ranks were found to stand still one failure names all of them, and the rest was ended because of them.
    """
    if any(isinstance(event, StuckEvent) for event in said):
        return {}
    failures = failures_in(said)
    reported = {failure.rank for failure in failures}
    agreed = any(failure.agreed for failure in failures)
    causes = {rank: reason for rank, reason in ended.causes().items() if rank not in reported}
    return {rank: reason for rank, reason in causes.items() if not agreed or ended.failures[rank] < 0}


def report_fault(workspace: RunDirectory, step: int, fault: EnvironmentFault) -> list[Event]:
    """Write what is wrong with the environment where the launcher itself has found it; the records that say so."""
    lines = JsonLinesFile(workspace.directory / EVENTS_FILE)
    said = FailureEvent(step=step, rank=None, error=str(fault), exit_code=3, traceback="", code=fault.code)
    lines.write(said)
    lines.close()
    return [said]
