"""`setup.alerts`: what is raised, by whom it is seen, and who is told."""

import os
import threading
import time
from contextlib import suppress
from typing import Final

from attrs import define, field

from xtrain.planner.plan import Plan
from xtrain.records.run_events import AlertEvent
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.monitoring.alert_actions import AlertActions, informs
from xtrain.runtime.monitoring.detectors import (
    DiskDetector,
    Finding,
    LossSpikeDetector,
    MemoryDetector,
    SlowDetector,
    StarvationDetector,
)
from xtrain.runtime.monitoring.notify import Notifier
from xtrain.runtime.monitoring.poller import Poller
from xtrain.runtime.monitoring.stalled import Stalled
from xtrain.runtime.monitoring.watch import Watchdog
from xtrain.runtime.ops import op
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Progress, Rank
from xtrain.runtime.step_state import Step

# Seconds between two looks at how much is free: a disk fills in minutes, and some file systems answer slowly.
DISK_SECONDS: Final = 5.0


@op("setup.alerts", gives="alerts")
def alerts(
    plan: Plan,
    rank: Rank,
    records: Records,
    progress: Progress,
    poller: Poller,
    watch: Watchdog,
    notifier: Notifier,
    alert_actions: AlertActions,
    window: int,
    loss_spike: float | None,
    slow: float | None,
    starvation: float | None,
    memory: float | None,
    disk_share: float | None,
    disk_most_bytes: int | None,
    disk_bytes: int | None,
    checkpoint_bytes: int | None,
    stalled_seconds: float | None,
) -> "AlertMonitor":
    """Begin to look for signs that something is wrong, those of numbers on the first rank alone."""
    planned = planned_bytes(plan, rank) if memory is not None and rank.device.type == "cuda" else None
    found = AlertMonitor(
        planned_bytes=planned,
        records=records,
        progress=progress,
        notifier=notifier,
        alert_actions=alert_actions,
        plan=plan,
    )
    if stalled_seconds is not None:
        before = 0 if rank.replica is None else rank.replica.first
        stalled = Stalled(records.rank, rank.world_size, records.directory, stalled_seconds, before)
        watch.observers.append(lambda seen: found.report(stalled.look(seen), every_rank=True))
    if not rank.is_first:
        return found
    found.loss_spike = LossSpikeDetector(loss_spike, window) if loss_spike is not None else None
    found.slow = SlowDetector(slow, window) if slow is not None else None
    found.starvation = StarvationDetector(starvation) if starvation is not None else None
    found.memory = MemoryDetector(memory) if memory is not None and planned is not None else None
    if disk_share is not None or disk_bytes is not None:
        found.disk = DiskDetector(disk_share, disk_bytes, checkpoint_bytes, disk_most_bytes)
        poller.looks["free space"] = found.look_at_disk
    return found


@define(eq=False, kw_only=True)
class AlertMonitor:
    """What is watched on this rank, None where nothing is. Findings come from any thread and are told one by one.

    planned_bytes: what this rank is planned to hold, None where nothing is measured that could be held against it.
    """

    records: Records
    progress: Progress
    notifier: Notifier
    alert_actions: AlertActions
    plan: Plan
    planned_bytes: int | None = None
    loss_spike: LossSpikeDetector | None = None
    slow: SlowDetector | None = None
    starvation: StarvationDetector | None = None
    memory: MemoryDetector | None = None
    disk: DiskDetector | None = None
    _nonfinite: bool = False
    _looked: float = 0.0
    _report_lock: threading.Lock = field(factory=threading.Lock)

    def step_done(self, step: Step, seconds: float) -> None:
        """A step has ended whose loss and norm are numbers; `seconds` it took."""
        if self._nonfinite:
            self._nonfinite = False
            self.report(
                Finding("nonfinite", "cleared", f"loss and gradient norm are finite again: loss {step.loss:.4g}"), 1
            )
        if self.loss_spike is not None:
            self.report(self.loss_spike.take(step.minimised, step.phase), 1)
        if self.slow is not None and not step.warms_up:
            self.report(self.slow.take(seconds / step.share), 1)  # as long as a step behind the ramp

    def bad_step(self, loss: float, grad_norm: float) -> None:
        """The loss or the norm of the step is not a number, on all ranks alike."""
        if not self._nonfinite:
            self._nonfinite = True
            self.report(Finding("nonfinite", "raised", f"loss {loss:g}, gradient norm {grad_norm:g}", loss), 1)

    def logged(self, steps: int, seconds: float, waited: float, memory_share: float) -> None:
        """Numbers of all ranks since the last record: seconds of all these steps, those waited for rows, and the
        largest peak of memory as a share of what the plan says of the rank."""
        if self.starvation is not None:
            self.report(self.starvation.take(steps, seconds, waited))
        if self.memory is not None:
            self.report(self.memory.take(memory_share))

    def look_at_disk(self) -> None:
        """Called by the poller. Raises OSError where the file system cannot be asked."""
        now = time.monotonic()
        if self.disk is None or (self._looked and now - self._looked < DISK_SECONDS):
            return
        self._looked = now
        space = os.statvfs(self.records.directory)
        self.report(self.disk.take(space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize))

    def report(self, finding: Finding | None, ahead: int = 0, *, every_rank: bool = False) -> None:
        """Write what was found, and let everybody know whom the plan names for it. Any thread; never raises.

        ahead: 1 where it is about the step under way, which is not counted yet. every_rank: this rank is the one that
        tells, whichever it is; else only the first one does.
        """
        if finding is None or not (every_rank or self.records.speaks):
            return
        step = self.progress.step + ahead
        event = AlertEvent(
            step=step,
            kind=finding.kind,
            state=finding.state,
            message=finding.message,
            value=finding.value,
            limit=finding.limit,
            ranks=[*finding.ranks],
        )
        with self._report_lock:
            with suppress(EnvironmentFault, OSError):  # a disk that is full takes no record of it
                self.records.event(event, every_rank=every_rank)
            if finding.state == "raised":
                self.alert_actions.raised(finding.kind)
                self.notifier.alert(self._commands(finding.kind), finding, step)

    def _commands(self, kind: str) -> list[tuple[str, float]]:
        """The commands that the plan has for an alert, with the seconds that each may take."""
        nodes = (node for each in self.plan.timeline.triggers if each.event == kind for node in each.nodes)
        found = [node for node in map(self.plan.node, nodes) if informs(node)]
        return [(node.args["command"], node.args["limit_seconds"]) for node in found]


def planned_bytes(plan: Plan, rank: Rank) -> int:
    """What the allocator of this rank is planned to give at the peak of a step: without what libraries take."""
    pp = rank.coordinates["pp"]
    return next(each.memory.allocated_bytes for each in plan.estimates.classes if each.pp == pp)
