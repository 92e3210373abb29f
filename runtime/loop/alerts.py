"""Alerts of a run (`setup.alerts`): who is notified, and the actions of all ranks.

Commands of a user run in the background on the first rank and cannot harm the run.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen

from xtrain.dsl.schema.actions import action_of
from xtrain.dsl.values import filled
from xtrain.plan.plan import Node, Plan, Trigger
from xtrain.records.events import AlertEvent, NotifyEvent
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Clocks, Progress, Rank
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.observe.detectors import (
    DiskDetector,
    Finding,
    HighLossDetector,
    LossSpikeDetector,
    MemoryDetector,
    SlowDetector,
    Stalled,
    StarvationDetector,
)
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.watch import Poller, Watchdog


def informs(node: Node) -> bool:
    """Return True if a node is a command that the first rank runs as soon as the alert is raised."""
    action = action_of(node.op)
    return action is not None and action.informs


@define(eq=False)
class AlertActions:
    """Triggers of a plan that do more on an alert than run commands, and the ones that are due.

    A step without alerts only checks `due`. Ranks exchange nothing if the plan has no such trigger.
    """

    triggers: tuple[Trigger, ...]
    due: list[Trigger] = field(factory=list)
    _waiting: int = 0  # a bit for each trigger; on the first rank
    _lock: threading.Lock = field(factory=threading.Lock)
    _clocks: Clocks | None = None
    _number: int = 0

    @classmethod
    def of(cls, plan: Plan, alerts: tuple[str, ...]) -> "AlertActions":
        """Select the triggers that act on all ranks. alerts: names of the events that are alerts."""

        def acts(trigger: Trigger) -> bool:
            return trigger.stop or not all(informs(plan.node(node)) for node in trigger.nodes)

        return cls(tuple(trigger for trigger in plan.timeline.triggers if trigger.event in alerts and acts(trigger)))

    def ask_through(self, clocks: Clocks) -> None:
        """Share raised alerts with all ranks, if any trigger acts on them."""
        if self.triggers:
            self._clocks, self._number = clocks, clocks.ask_for(self._take)

    def raised(self, kind: str) -> None:
        """Note that an alert was raised; on the first rank, from any thread."""
        for number, trigger in enumerate(self.triggers):
            if trigger.event == kind:
                with self._lock:
                    self._waiting |= 1 << number

    def _take(self) -> float:
        if not self._waiting:
            return 0
        with self._lock:
            waiting, self._waiting = self._waiting, 0
        return waiting

    def hear(self) -> None:
        """After an agreement, collect the triggers that are due after this step; alike on all ranks."""
        if self._clocks is not None and (heard := self._clocks.value(self._number)):
            self.due += [trigger for number, trigger in enumerate(self.triggers) if heard >> number & 1]

    def take(self) -> list[Trigger]:
        """Return the due triggers and clear them."""
        due, self.due = self.due, []
        return due


# Seconds between two starts of a command for the same kind of alert.
PAUSE_SECONDS: Final = 60.0
# Seconds that a command gets to exit after SIGTERM.
GRACE_SECONDS: Final = 5.0
# Seconds that a run waits for commands at its end; longer than their time limit.
CLOSE_SECONDS: Final = 45.0
# Seconds that commands get to exit if the run has to end.
LEAVE_SECONDS: Final = 0.5
# Variables that make a process a rank: a command that trains or tests something must not inherit them.
OF_RANKS: Final = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "XTRAIN_BEGAN", "XTRAIN_RESTART", "XTRAIN_FIRST_STEP",
)  # fmt: skip
OF_LAUNCHERS: Final = ("TORCHELASTIC_", "PET_")


@frozen(kw_only=True)
class Message:
    """Message of an alert or event for a command."""

    kind: str
    text: str
    step: int
    value: float | None = None
    limit: float | None = None
    ranks: tuple[int, ...] = ()


@define(eq=False)
class Notifier:
    """Runner of notification commands, each in a thread that waits for it. total: the steps of the run, None if
    unknown. hidden: variables whose `env(NAME)` in a command stands for the value."""

    records: Records
    progress: Progress
    total: int | None
    environment: Mapping[str, str] = field(factory=lambda: dict(os.environ))
    hidden: frozenset[str] = frozenset()
    _lock: threading.Lock = field(factory=threading.Lock)
    _running: dict[tuple[str, str], threading.Thread] = field(factory=dict)
    _processes: dict[tuple[str, str], subprocess.Popen] = field(factory=dict)
    _over: bool = False
    _begun: dict[tuple[str, str], float] = field(factory=dict)
    _left_out: dict[tuple[str, str], int] = field(factory=dict)

    def alert(self, commands: list[tuple[str, float]], finding: Finding, step: int) -> None:
        """Run the commands of an alert, except those that are still running or ran a moment ago."""
        for command, seconds in commands:
            message = Message(
                kind=finding.kind,
                text=finding.message,
                step=step,
                value=finding.value,
                limit=finding.limit,
                ranks=finding.ranks,
            )
            self.start(command, seconds, message, pause=PAUSE_SECONDS)

    def trigger(self, kind: str, command: str, seconds: float, loss: float) -> None:
        """Run a command for another event: a tick, a stop or the end of the run."""
        step, known = self.progress.step, isfinite(loss)
        of = "" if self.total is None else f" of {self.total:,}"
        at = f"after step {step:,}{of}" + (f", loss {loss:.4g}" if known else "")
        text = {"finish": f"the run has finished {at}", "tick": f"the run continues {at}"}
        stops = f"{kind}: the run stops {at}"
        if kind == "nan":
            stops = f"{self.progress.bad.in_a_row} steps in a row with a non-finite loss or gradient norm, {at}"
        message = Message(kind=kind, text=text.get(kind, stops), step=step, value=loss if known else None)
        self.start(command, seconds, message, pause=0.0)

    def start(self, command: str, seconds: float, message: Message, *, pause: float) -> None:
        """Run a command without waiting, unless it is running for the same event. Never raises."""
        key = (message.kind, command)
        with self._lock:
            before = self._begun.get(key)
            if key in self._running or (before is not None and time.monotonic() - before < pause):
                self._left_out[key] = self._left_out.get(key, 0) + 1
                return
            left_out = self._left_out.pop(key, 0)
            thread = threading.Thread(
                target=self._run, args=(key, command, seconds, message, left_out), name="notify", daemon=True
            )
            self._running[key], self._begun[key] = thread, time.monotonic()
            try:
                thread.start()
            except RuntimeError:  # no more threads on this machine
                del self._running[key]

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait up to `seconds` for running commands, then kill them; does not wait for a disk that cannot record their
        results."""
        self._await(min(seconds, CLOSE_SECONDS))
        with self._lock:
            self._over = bool(self._running)
            left = [process for process in self._processes.values() if process.returncode is None]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in left:
                _signal(process, number)
            self._await(LEAVE_SECONDS)

    def _await(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for thread in tuple(self._running.values()):
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, key: tuple[str, str], command: str, seconds: float, message: Message, left_out: int) -> None:
        begun = time.monotonic()
        try:
            code, detail = self._wait(key, command, seconds, message)
        except (OSError, ValueError) as error:  # no shell, no process, or text that no environment can hold
            code, detail = None, f"could not be run: {error}"
        took = time.monotonic() - begun
        if left_out:
            detail += f"; {left_out} before it came too soon and were skipped"
        event = NotifyEvent(
            step=message.step, kind=message.kind, command=command, exit_code=code, seconds=took, detail=detail
        )
        with suppress(Exception):  # a full disk is reported elsewhere
            self.records.event(event, every_rank=True)
            if code != 0:
                text = f"notify on {message.kind}: `{command}` {detail}; its output is in logs/notify.log"
                self.records.warn(text, step=message.step, every_rank=True)
        with self._lock:
            self._running.pop(key, None)
            self._processes.pop(key, None)

    def _wait(self, key: tuple[str, str], command: str, seconds: float, message: Message) -> tuple[int | None, str]:
        """Return (exit code or None if killed, outcome in words)."""
        with self._log() as log:
            head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message.kind}, step {message.step}: {command}\n"
            with suppress(OSError):
                os.write(log.fileno(), head.encode(errors="backslashreplace"))
            process = subprocess.Popen(
                ["/bin/sh", "-c", filled(command, self.hidden, self.environment)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._variables(message),
                start_new_session=True,
            )
        with self._lock:
            self._processes[key] = process
            over = self._over
        if over:
            _signal(process, signal.SIGKILL)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            return None, f"was killed after {seconds:g} s"
        if self._over and code < 0:
            return None, "was ended with the run"
        return code, "has ended" if code == 0 else f"has ended with exit code {code}"

    def _log(self) -> Any:
        path = self.records.directory / "logs" / "notify.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("ab", buffering=0)
        except OSError:
            return Path(os.devnull).open("wb")

    def _variables(self, message: Message) -> dict[str, str]:
        """Return the original environment without the variables that make this process a rank."""
        inherited = {
            name: value
            for name, value in self.environment.items()
            if name not in OF_RANKS and not name.startswith(OF_LAUNCHERS)
        }
        own = {
            "ALERT": message.kind,
            "MESSAGE": message.text,
            "RUN": self.records.directory.name,
            "DIRECTORY": str(self.records.directory.absolute()),
            "STEP": str(message.step),
            "VALUE": "" if message.value is None else repr(message.value),
            "LIMIT": "" if message.limit is None else repr(message.limit),
            "RANKS": " ".join(map(str, message.ranks)),
        }
        return inherited | {f"XTRAIN_{name}": value.replace("\0", "") for name, value in own.items()}


def _end(process: subprocess.Popen) -> None:
    """Stop a command and all its child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(process, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def _signal(process: subprocess.Popen, number: int) -> None:
    """Send a signal to a command and all its child processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


# Seconds between checks of free space: a disk fills in minutes, and some file systems answer slowly.
DISK_SECONDS: Final = 5.0


@op("setup.alerts", gives="alerts", traced=False)
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
    loss_above: float | None = None,
    loss_steps: int = 1,
) -> "AlertMonitor":
    """Start watching for signs of trouble; metrics only on the first rank."""
    planned = planned_bytes(plan, rank) if memory is not None and rank.device.type == "cuda" else None
    monitor = AlertMonitor(
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
        watch.observers.append(lambda seen: monitor.report(stalled.look(seen), every_rank=True))
    if not rank.is_first:
        return monitor
    monitor.loss_spike = LossSpikeDetector(loss_spike, window) if loss_spike is not None else None
    monitor.loss_above = HighLossDetector(loss_above, loss_steps) if loss_above is not None else None
    monitor.slow = SlowDetector(slow, window) if slow is not None else None
    monitor.starvation = StarvationDetector(starvation) if starvation is not None else None
    monitor.memory = MemoryDetector(memory) if memory is not None and planned is not None else None
    if disk_share is not None or disk_bytes is not None:
        monitor.disk = DiskDetector(disk_share, disk_bytes, checkpoint_bytes, disk_most_bytes)
        poller.looks["free space"] = monitor.look_at_disk
    return monitor


@define(eq=False, kw_only=True)
class AlertMonitor:
    """Alert detectors of this rank; None for those not used. Findings may come from any thread and are reported one by
    one.

    planned_bytes: memory that the plan expects on this rank, None if it is not measured.
    """

    records: Records
    progress: Progress
    notifier: Notifier
    alert_actions: AlertActions
    plan: Plan
    planned_bytes: int | None = None
    loss_spike: LossSpikeDetector | None = None
    loss_above: HighLossDetector | None = None
    slow: SlowDetector | None = None
    starvation: StarvationDetector | None = None
    memory: MemoryDetector | None = None
    disk: DiskDetector | None = None
    _nonfinite: bool = False
    _looked: float = 0.0
    _report_lock: threading.Lock = field(factory=threading.Lock)

    def step_done(self, step: Step, seconds: float) -> None:
        """Update detectors after a finite step that took `seconds`."""
        if self._nonfinite:
            self._nonfinite = False
            self.report(
                Finding("nonfinite", "cleared", f"loss and gradient norm are finite again: loss {step.loss:.4g}"), 1
            )
        if self.loss_spike is not None:
            self.report(self.loss_spike.take(step.minimised, step.phase), 1)
        if self.loss_above is not None:
            self.report(self.loss_above.take(step.minimised), 1)
        if self.slow is not None and not step.warms_up:
            self.report(self.slow.take(seconds / step.share), 1)  # scaled to a step after the batch ramp

    def bad_step(self, loss: float, grad_norm: float) -> None:
        """Report a step whose loss or gradient norm is not finite; alike on all ranks."""
        if not self._nonfinite:
            self._nonfinite = True
            self.report(Finding("nonfinite", "raised", f"loss {loss:g}, gradient norm {grad_norm:g}", loss), 1)

    def logged(self, steps: int, seconds: float, waited: float, memory_share: float) -> None:
        """Update detectors with numbers of all ranks since the last record: seconds of these steps, seconds waited for
        data, and peak memory as a share of the rank's plan."""
        if self.starvation is not None:
            self.report(self.starvation.take(steps, seconds, waited))
        if self.memory is not None:
            self.report(self.memory.take(memory_share))

    def look_at_disk(self) -> None:
        """Check free disk space; called by the poller. Raises OSError if the file system does not answer."""
        now = time.monotonic()
        if self.disk is None or (self._looked and now - self._looked < DISK_SECONDS):
            return
        self._looked = now
        space = os.statvfs(self.records.directory)
        self.report(self.disk.take(space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize))

    def report(self, finding: Finding | None, ahead: int = 0, *, every_rank: bool = False) -> None:
        """Record a finding and run its commands and actions. Any thread; never raises.

        ahead: 1 for a finding about the running step, which is not counted yet. every_rank: this rank reports;
        otherwise only the first rank does.
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
            with suppress(EnvironmentFault, OSError):  # a full disk takes no record
                self.records.event(event, every_rank=every_rank)
            if finding.state == "raised":
                self.alert_actions.raised(finding.kind)
                self.notifier.alert(self._commands(finding.kind), finding, step)

    def _commands(self, kind: str) -> list[tuple[str, float]]:
        """Return the plan's commands for an alert, with their time limits in seconds."""
        nodes = (node for trigger in self.plan.timeline.triggers if trigger.event == kind for node in trigger.nodes)
        commands = [node for node in map(self.plan.node, nodes) if informs(node)]
        return [(node.args["command"], node.args["limit_seconds"]) for node in commands]


def planned_bytes(plan: Plan, rank: Rank) -> int:
    """Return the planned peak of this rank's allocator in a step, without memory of libraries."""
    pp = rank.coordinates["pp"]
    return next(rank_class.memory.allocated_bytes for rank_class in plan.estimates.classes if rank_class.pp == pp)
