"""Worker groups, one after the other: ranks that fail over something they had not agreed on are started again.

A restart goes on from the last checkpoint, as after a stop. Nothing is started again that would fail the same way: a
spec or an environment that is wrong, numbers that are not finite, a stop that was asked for.
"""

import os
from typing import Final

from attrs import define, field, frozen

from xtrain.planner.graph.replica_groups import groups_node
from xtrain.planner.plan import Plan
from xtrain.planner.units import plural
from xtrain.records.events import events_since
from xtrain.records.paths import EVENTS_FILE
from xtrain.records.run_events import RestartEvent
from xtrain.runtime.checkpoint.layout import CheckpointFolder
from xtrain.runtime.checkpoint.sources import has_finished, starting_point
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.files.lines import JsonLinesFile, size_of
from xtrain.runtime.launch.conclusion import conclude, conclude_finished, report_fault
from xtrain.runtime.launch.failure_cause import FailureCause, exit_code_of, find_failure_cause
from xtrain.runtime.launch.first_node import OneNode
from xtrain.runtime.launch.launch import Ended, launch
from xtrain.runtime.launch.leftovers import end_leftovers
from xtrain.runtime.launch.limits import limit_fault
from xtrain.runtime.launch.replica_groups import launch_groups
from xtrain.runtime.launch.stop_notes import StopNotes
from xtrain.runtime.launch.worlds import fewer_ranks
from xtrain.runtime.provenance.start import FIRST_STEP, RESTART, starts_before
from xtrain.runtime.run_directory.workspace import RunDirectory, reopen

# Worker groups in a row that fail before their set-up is done: another one would fail as well.
AT_ONCE: Final = 3
# Seconds before a restart, twice as many each time: what has failed for a moment may have come back.
SHORTEST: Final = 1.0
LONGEST: Final = 30.0


@frozen(kw_only=True)
class Try:
    """A worker group that has failed: why, on how many ranks, and the step of the checkpoint it began with."""

    cause: FailureCause
    world: int
    step: int


@define(kw_only=True)
class RestartLoop:
    """Runs a plan in a workspace until it has ended, or is not to be started again. machines: those of the plan, which
    are several only where its ranks are in replica groups."""

    plan: Plan
    workspace: RunDirectory
    machines: OneNode = field(factory=OneNode)
    tries: list[Try] = field(factory=list)
    _notes: StopNotes = field(factory=StopNotes)
    _starts_before: int = field(factory=starts_before)
    """Of the job that this is a start of."""

    def run(self) -> int:
        """The exit code of the run. Main thread only."""
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
        """What the launcher itself has found ends the run."""
        return conclude(self.workspace, report_fault(self.workspace, self._saved_step(), fault), Ended(), cause)

    def _may_go_on(self) -> bool:
        last = self.tries[-AT_ONCE:]
        at_once = len(last) == AT_ONCE and not any(each.cause.begun for each in last)
        return last[-1].cause.again and len(self.tries) <= self.plan.launch["restarts"] and not at_once

    def _begin_again(self, cause: FailureCause) -> bool:
        """Make everything ready for a restart; False if a stop was asked for meanwhile."""
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
        """Whether the last two worker groups failed because of the same rank, with no new checkpoint between."""
        if len(self.tries) < 2:
            return False
        before, now = self.tries[-2:]
        same = set(before.cause.ranks) & set(now.cause.ranks)
        return bool(same) and before.world == now.world and self._saved_step() <= now.step

    def _saved_step(self) -> int:
        """The step of the newest checkpoint that is whole; 0 for none."""
        latest = CheckpointFolder(self.workspace.directory / "checkpoints").latest()
        return latest.step if latest is not None else 0

    def _report(self) -> str:
        """All worker groups that have failed, where there was more than one."""
        if len(self.tries) < 2:
            return ""
        used = len(self.tries) > self.plan.launch["restarts"]
        why = "all restarts are used up" if used else "a restart would fail in the same way"
        lines = [f"given up after {len(self.tries)} starts: {why}"]
        for number, each in enumerate(self.tries, start=1):
            where = f"from step {each.step:,}" if each.step else "from the beginning"
            ranks = plural(each.world, "rank")
            lines.append(f"start {number}, {where}, on {ranks}: {each.cause.reason}")
        return "\n".join(lines)
