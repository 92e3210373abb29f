"""Worker groups of a run, one after another: restarts after failures, and the last record when no rank wrote it.

A restart may use a smaller world: fewer ranks after devices were lost or a machine failed repeatedly.
"""

import os
import subprocess
import sys
from signal import SIGINT, Signals

from attrs import define, evolve, field, frozen

from xtrain.dsl.schema.actions import SIGNALS
from xtrain.plan.graph import groups_node
from xtrain.plan.plan import ElasticWorld, Plan
from xtrain.planner.load import plan_from_text
from xtrain.records.events import FailureEvent, RestartEvent, RunEndEvent, SignalEvent, StuckEvent, events_since
from xtrain.records.lines import Event, objects_since, read_all
from xtrain.records.metrics import StepMetrics
from xtrain.records.names import EVENTS_FILE, METRICS_FILE, EndStatus
from xtrain.records.training_events import RunStartEvent, SetupDoneEvent
from xtrain.runtime.base.errors import EXIT_CODES, STATUS_OF_SIGNAL, EnvironmentFault
from xtrain.runtime.base.json_lines import JsonLinesFile, size_of
from xtrain.runtime.base.limits import limit_fault
from xtrain.runtime.base.process import FIRST_STEP, RESTART, starts_before
from xtrain.runtime.jobs.launch import (
    AT_ONCE,
    LONGEST,
    SHORTEST,
    Ended,
    FailureCause,
    StopNotes,
    end_leftovers,
    exit_code_of,
    failures_in,
    find_failure_cause,
    launch,
    stopped_early,
)
from xtrain.runtime.jobs.machines import OneNode
from xtrain.runtime.jobs.replica_groups import launch_groups
from xtrain.runtime.loop.preflight import device_of
from xtrain.runtime.observe.stopping import EVENTS
from xtrain.runtime.store.beginning import StartingPoint, has_finished, starting_point, total_steps
from xtrain.runtime.store.checkpoints import CheckpointFolder
from xtrain.runtime.store.run_directory import RunDirectory, reopen
from xtrain.text.units import plural


def conclude(workspace: RunDirectory, said: list[Event], ended: Ended, cause: FailureCause, *, report: str = "") -> int:
    """Write the causes that no rank has reported, then the end of the run; return the exit code.

    said: the events of the last worker group. report: a summary of earlier worker groups.
    """
    lines = JsonLinesFile(workspace.directory / EVENTS_FILE)
    failures = failures_in(said)
    logged = read_all(StepMetrics, objects_since(workspace.directory / METRICS_FILE))
    step = max((metrics.step or 0 for metrics in logged), default=0)
    # A stop request before the loop begins finds nothing to save; one that no rank answered is a failure.
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
        has_fault = rank is not None and ended.failures.get(rank) == EXIT_CODES[EndStatus.ENVIRONMENT]
        exit_code, code = (3, "X706") if has_fault else (1, "")
        failure = FailureEvent(step=step, rank=rank, error=error, exit_code=exit_code, traceback="", code=code)
        failures.append(failure)
        lines.write(failure)
    code = 3 if any(failure.exit_code == 3 for failure in failures) else EXIT_CODES[status]
    return _end(lines, step, status, code, cause.reason)


def conclude_finished(workspace: RunDirectory, plan: Plan, start: StartingPoint) -> int:
    """Record that a run has nothing left to do, as its ranks would after their set-up; return the exit code."""
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
            rewards=not plan.architecture.has_logits,
        )
    )
    return _end(lines, start.step, status, EXIT_CODES[status], "")


def _unrecorded_reason(exit_code: int) -> str:
    """Return a hint for a rank that found an environment fault and could not record it."""
    has_fault = exit_code == EXIT_CODES[EndStatus.ENVIRONMENT]
    return ", and could not record the reason: is the disk full?" if has_fault else ""


def _stopped(lines: JsonLinesFile, step: int, status: str, numbers: set[int], reason: str) -> int:
    """Record a stop; of several signals, name the one that a rank would answer first."""
    name = min((EVENTS[Signals(number)] for number in numbers), key=SIGNALS.index)
    lines.write(SignalEvent(step=step, name=name, reason=reason))
    return _end(lines, step, status, EXIT_CODES[status], reason)


def _end(lines: JsonLinesFile, step: int, status: str, exit_code: int, reason: str) -> int:
    lines.write(RunEndEvent(step=step, status=status, exit_code=exit_code, seconds=None, loss=None, reason=reason))
    lines.close()
    return exit_code


def unreported_causes(said: list[Event], ended: Ended) -> dict[int, str]:
    """Return rank → how it ended, for ranks that could not or did not report.

    If all ranks agreed on a failure, one rank speaks for all. If ranks were stuck, one failure names all of them, and
    the others were ended because of them.
    """
    if any(isinstance(event, StuckEvent) for event in said):
        return {}
    failures = failures_in(said)
    reported = {failure.rank for failure in failures}
    agreed = any(failure.agreed for failure in failures)
    causes = {rank: reason for rank, reason in ended.causes().items() if rank not in reported}
    return {rank: reason for rank, reason in causes.items() if not agreed or ended.failures[rank] < 0}


def report_fault(workspace: RunDirectory, step: int, fault: EnvironmentFault) -> list[Event]:
    """Write a fault of the environment that the launcher has found; return the records."""
    lines = JsonLinesFile(workspace.directory / EVENTS_FILE)
    said = FailureEvent(step=step, rank=None, error=str(fault), exit_code=3, traceback="", code=fault.code)
    lines.write(said)
    lines.close()
    return [said]


@frozen(kw_only=True)
class Try:
    """Failed worker group: its cause, its number of ranks, and the step of the checkpoint it started from."""

    cause: FailureCause
    world: int
    step: int


@define(kw_only=True)
class RestartLoop:
    """Loop that restarts a plan until it has ended or must not be restarted. machines: of the plan; several only with
    replica groups."""

    plan: Plan
    workspace: RunDirectory
    machines: OneNode = field(factory=OneNode)
    tries: list[Try] = field(factory=list)
    _notes: StopNotes = field(factory=StopNotes)
    _starts_before: int = field(factory=starts_before)
    """Starts of the job before this one."""

    def run(self) -> int:
        """Run the plan; return the exit code. Main thread only."""
        directory = self.workspace.directory
        if has_finished(self.plan, start := starting_point(self.plan, directory), directory):
            return conclude_finished(self.workspace, self.plan, start)
        events = directory / EVENTS_FILE
        self._notes.listen()
        while True:
            begin, step = size_of(events), self._saved_step()
            if not self.tries:
                os.environ[FIRST_STEP] = str(start.step)
            os.environ[RESTART] = str(self._starts_before + len(self.tries))
            try:
                ended = self._launch()
            except (EnvironmentFault, OSError, RuntimeError, OverflowError) as error:
                fault = error if isinstance(error, EnvironmentFault) else limit_fault(error)
                if fault is None:
                    raise
                return self._end_with(fault, FailureCause(reason=str(fault), ranks=(), again=False, begun=False))
            self._notes.listen()
            said = events_since(events, begin)
            cause = find_failure_cause(said, ended)
            if cause is None:
                return exit_code_of(said)
            self.tries.append(Try(cause=cause, world=self.plan.mesh.world_size, step=step))
            if not self._may_go_on():
                return conclude(self.workspace, said, ended, cause, report=self._report())
            try:
                ready = self._begin_again(cause)
            except EnvironmentFault as fault:
                return self._end_with(fault, cause)
            if not ready:
                stopped = Ended(signal=self._notes.signal, when="before the ranks were started again")
                return conclude(self.workspace, [], stopped, cause)

    def _launch(self) -> Ended:
        place = self.workspace.directory, self.workspace.attempt
        seconds: float = self.plan.launch["stop_deadline_seconds"]
        if (node := groups_node(self.plan)) is not None:
            given = {"stop_seconds": seconds, "notes": self._notes, "machines": self.machines}
            return launch_groups(self.plan, node, *place, **given)
        return launch(*place, ranks=self.plan.mesh.world_size, stop_seconds=seconds, notes=self._notes)

    def _end_with(self, fault: EnvironmentFault, cause: FailureCause) -> int:
        """End the run with a fault that the launcher has found."""
        return conclude(self.workspace, report_fault(self.workspace, self._saved_step(), fault), Ended(), cause)

    def _may_go_on(self) -> bool:
        last = self.tries[-AT_ONCE:]
        at_once = len(last) == AT_ONCE and not any(attempt.cause.begun for attempt in last)
        return last[-1].cause.again and len(self.tries) <= self.plan.launch["restarts"] and not at_once

    def _begin_again(self, cause: FailureCause) -> bool:
        """Prepare a restart; return False if a stop was requested meanwhile."""
        directory, number = self.workspace.directory, len(self.tries)
        os.environ[RESTART] = str(self._starts_before + number)
        end_leftovers(directory)
        self.plan = fewer_ranks(self.plan, again=self._same_rank_again()) or self.plan
        lines = JsonLinesFile(directory / EVENTS_FILE)
        lines.write(
            RestartEvent(
                step=starting_point(self.plan, directory).step,
                number=number,
                of=self.plan.launch["restarts"],
                reason=cause.reason,
                world=self.plan.mesh.world_size,
            )
        )
        lines.close()
        if self._notes.wait(min(SHORTEST * 2 ** (number - 1), LONGEST)):
            return False
        self.workspace = reopen(self.workspace, self.plan)
        return self._notes.signal is None

    def _same_rank_again(self) -> bool:
        """Return True if the last two worker groups failed because of the same rank, with no new checkpoint in
        between."""
        if len(self.tries) < 2:
            return False
        before, now = self.tries[-2:]
        same = set(before.cause.ranks) & set(now.cause.ranks)
        return bool(same) and before.world == now.world and self._saved_step() <= now.step

    def _saved_step(self) -> int:
        """Return the step of the newest complete checkpoint; 0 without one."""
        latest = CheckpointFolder(self.workspace.directory / "checkpoints").latest()
        return latest.step if latest is not None else 0

    def _report(self) -> str:
        """Return a summary of all failed worker groups; empty if there was only one."""
        if len(self.tries) < 2:
            return ""
        used = len(self.tries) > self.plan.launch["restarts"]
        why = "all restarts are used up" if used else "a restart would fail in the same way"
        lines = [f"given up after {len(self.tries)} starts: {why}"]
        for number, attempt in enumerate(self.tries, start=1):
            where = f"from step {attempt.step:,}" if attempt.step else "from the beginning"
            ranks = plural(attempt.world, "rank")
            lines.append(f"start {number}, {where}, on {ranks}: {attempt.cause.reason}")
        return "\n".join(lines)


_COUNT = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else -1)"


def fewer_ranks(plan: Plan, *, again: bool) -> Plan | None:
    """Return the plan of a smaller world if one is needed and allowed; None to stay.

    again: the same rank has failed twice without progress. Raises EnvironmentFault if too few devices are left for
    every world of the plan, or if a recorded plan can no longer be reproduced.
    """
    if not plan.elastic:
        return None
    most, now = _devices(plan), plan.mesh.world_size
    if most is not None and most < now:
        smaller = largest_world(plan, most)
        if smaller is None:
            message = (
                f"this run needs {plural(now, 'CUDA device')}; {most or 'none'} {'is' if most == 1 else 'are'} left, "
                "and this plan has no world size that small"
            )
            raise EnvironmentFault("X702", message)
        return plan_of_world(plan, smaller)
    smaller = largest_world(plan, now - 1) if again else None
    return plan_of_world(plan, smaller) if smaller is not None else None


def plan_of_started(plan: Plan, started: int) -> Plan:
    """Return the plan for the ranks that another launcher has started: this one, or that of an allowed world."""
    allowed = next((other for other in plan.elastic if other.world == started), None)
    if allowed is None or started == plan.mesh.world_size:
        return plan
    return plan_of_world(plan, allowed)


def largest_world(plan: Plan, most: int) -> ElasticWorld | None:
    """Return the largest world of a plan with at most so many ranks."""
    return max((other for other in plan.elastic if other.world <= most), key=lambda other: other.world, default=None)


def plan_of_world(plan: Plan, elastic_world: ElasticWorld) -> Plan:
    """Compile the plan of another world from the text in this plan.

    Raises EnvironmentFault if it differs from the plan recorded in this one.
    """
    compiled = plan_from_text(plan.spec_text, f"{plan.spec} (as planned)", world=elastic_world.world)
    if compiled.plan is None or compiled.plan.id != elastic_world.id:
        came = (
            "the spec has no plan for this number of ranks now"
            if compiled.plan is None
            else f"its id is {compiled.plan.id} now"
        )
        recorded = f"the plan for {elastic_world.world} ranks was recorded as {elastic_world.id}"
        message = f"{recorded}, and {came}: its spec or xtrain has changed"
        raise EnvironmentFault("X711", message)
    return evolve(compiled.plan, spec=plan.spec, origin=plan.origin)


def _devices(plan: Plan) -> int | None:
    """Count the CUDA devices in a new process: this one would still count lost devices.

    None if ranks need none, or if the count is unknown.
    """
    import torch

    asked = plan.launch["device"]
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return None
    try:
        done = subprocess.run([sys.executable, "-P", "-c", _COUNT], capture_output=True, text=True, timeout=120)
        count = int(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return max(count, 0)
