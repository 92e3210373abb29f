"""Launcher of replica groups: a group that fails is restarted while the others train."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from attrs import define, field

from xtrain.plan.plan import Node, Plan
from xtrain.records.events import ReplicaGroupEvent
from xtrain.records.names import EVENTS_FILE, EndStatus, heartbeat_path
from xtrain.records.status import read_heartbeat
from xtrain.runtime.base.errors import EXIT_CODES
from xtrain.runtime.base.json_lines import JsonLinesFile
from xtrain.runtime.base.locks import WORKER_LOCK, hold
from xtrain.runtime.base.process import (
    BEGAN,
    FEWER,
    FIRST_STEP,
    GROUP,
    JOINED,
    LIGHTHOUSE,
    OPEN,
    OVER,
    READY,
    RESTART,
    START,
    gone,
)
from xtrain.runtime.jobs.launch import AT_ONCE, SHORTEST, Ended, StopNotes
from xtrain.runtime.jobs.machines import OneNode, RankProcess, RankStart
from xtrain.runtime.jobs.meeting_place import MeetingPlace
from xtrain.runtime.observe.judge import SeenRank
from xtrain.runtime.observe.stopping import stop_signals

# Variables of a start that the ranks of all machines receive.
OF_START: Final = (RESTART, FIRST_STEP, BEGAN)
# Seconds for ranks to exit, in addition to saving; and seconds between two checks of their heartbeats.
LEAVE: Final = 10.0
LOOK: Final = 1.0
_PAUSE: Final = 0.05
_FAULT: Final = EXIT_CODES[EndStatus.ENVIRONMENT]


def launch_groups(
    plan: Plan,
    node: Node,
    directory: Path,
    attempt: str,
    *,
    stop_seconds: float,
    notes: StopNotes,
    machines: OneNode,
) -> Ended:
    """Run the groups over the plan in `directory` until all have ended, or no group with the run's state is left. node:
    of the stack. machines: of the plan. Main thread only.

    A signal to this process is passed on to every rank, which then has `stop_seconds` to save and exit; nothing is
    started afterwards. Raises EnvironmentFault if a requirement of the stack is missing.
    """
    from xtrain.dsl.schema.parallel import stack_of_node

    stack = stack_of_node(node.op)
    assert stack is not None
    meeting, count = MeetingPlace(stack.run_module(), node.args, machines.host), int(node.args["replicas"])
    lock = hold(directory, WORKER_LOCK)
    try:
        meeting.keep_open()
        return _Launcher(plan, count, directory, attempt, meeting, machines, stop_seconds, notes).run()
    finally:
        lock.close()
        meeting.close()


@define(eq=False, kw_only=True)
class _Group:
    """Replica group, running or waiting for a restart. due: time of the restart, None while it runs or has ended for
    good. starts: number of starts. short: starts in a row without a step."""

    index: int
    ranks: range
    starts: int = 0
    short: int = 0
    due: float | None = None
    over: bool = False
    processes: list[RankProcess] = field(factory=list)
    store: Any = None
    seen: dict[int, SeenRank] = field(factory=dict)

    @property
    def runs(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended."""
        codes = zip(self.ranks, (process.poll() for process in self.processes), strict=False)
        return {rank: code for rank, code in codes if code is not None}

    @property
    def failed(self) -> dict[int, int]:
        return {rank: code for rank, code in self.codes.items() if code != 0}

    def has(self, key: str) -> bool:
        """Return True if its ranks have set this key."""
        with suppress(RuntimeError):
            return bool(self.processes) and self.store.check([key])
        return False

    def say(self, *keys: str) -> None:
        """Set keys in its store, which is in this process."""
        for key in keys:
            self.store.set(key, "1")

    def send(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)

    def end(self) -> None:
        """Kill its remaining ranks; other groups have the same state."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()


class _Launcher:
    """Launcher of all groups of a plan."""

    def __init__(
        self,
        plan: Plan,
        count: int,
        directory: Path,
        attempt: str,
        meeting: MeetingPlace,
        machines: OneNode,
        stop_seconds: float,
        notes: StopNotes,
    ) -> None:
        self._directory, self._attempt, self._meeting, self._notes = directory, attempt, meeting, notes
        self._plan, self._machines, self._stop_seconds = plan, machines, stop_seconds
        self._stuck: float | None = plan.node("setup.watch").args["stuck_seconds"]
        size = plan.mesh.world_size // count
        self._groups = [_Group(index=i, ranks=range(i * size, (i + 1) * size)) for i in range(count)]
        self._lines = JsonLinesFile(directory / EVENTS_FILE)
        self._own: list[int] = []
        self._asked: list[int] = []
        self._sent = 0
        self._until: float | None = None
        self._opened = False
        self._looked = 0.0

    def run(self) -> Ended:
        before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        try:
            if self._notes.signal is not None:
                return Ended(signal=self._notes.signal)
            while (ended := self._look()) is None:
                time.sleep(_PAUSE)
            return ended
        finally:
            for group in self._groups:
                group.end()
            self._lines.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._own.append(number)

    def _pass_on(self) -> None:
        """Pass each signal on to all ranks, once."""
        self._until = self._until or time.monotonic() + self._stop_seconds + LEAVE
        for number in self._asked[self._sent :]:
            for group in self._groups:
                group.send(number)
        self._sent = len(self._asked)

    def _look(self) -> Ended | None:
        """Update all groups once; return how they have ended, or None."""
        self._meeting.keep_open()
        # A signal sent to all machines counts once.
        self._asked = max([*self._own], self._machines.look(self._opened), self._asked, key=len)
        if self._asked:
            self._pass_on()
            return self._stopping()
        if not self._opened:
            return self._opening()
        self._look_for_frozen()
        for group in self._groups:
            if group.processes and not group.runs and not group.failed:
                group.over = True
        done = any(group.over and group.processes and not group.failed for group in self._groups)
        for group in self._groups:
            if group.over or group.due is not None:
                continue
            if group.failed:
                self._ended(group, done=done)
            elif done and not group.has(JOINED):
                group.end()  # it would join a finished run
                group.over = True
            elif done:
                group.say(OVER)
        alive = [group for group in self._groups if group.runs and group.has(JOINED)]
        if done:
            return None if alive else Ended()
        if not alive:
            return self._lost()
        for group in self._groups:
            if group.due is not None and time.monotonic() >= group.due and self._can_start(group):
                self._start(group)
                self._tell(group, "started", "")
        return None

    def _can_start(self, group: _Group) -> bool:
        """Return True if its machines are present: a missing one may come back."""
        return all(map(self._machines.has, group.ranks))

    def _opening(self) -> Ended | None:
        """Start all groups before the first step, which needs all of them."""
        for group in self._groups:
            if not group.processes and self._can_start(group):
                self._start(group)
        if any(group.failed or not group.runs for group in self._begun()):
            return self._lost()
        if all(group.has(READY) for group in self._groups):
            for group in self._groups:
                group.say(OPEN, JOINED)  # all have the initial state of the run
            self._opened = True
        return None

    def _stopping(self) -> Ended | None:
        """Wait while ranks save and exit. A second Ctrl-C was passed on to them like the first."""
        for group in self._begun():
            if group.failed:
                for other in self._begun():
                    other.say(gone(group.index))
        over = self._until is not None and time.monotonic() > self._until
        if any(group.runs for group in self._groups) and not over:
            return None
        failures = {rank: code for group in self._groups for rank, code in group.failed.items()}
        at_once = self._asked.count(signal.SIGINT) > 1
        # A signal may end a group that is joining again: it had nothing to save.
        own = {rank: code for rank, code in failures.items() if -code not in self._asked}
        if own and not at_once:
            return Ended(failures=own, signal=self._asked[0])
        return Ended(signal=self._asked[0], at_once=at_once)

    def _lost(self) -> Ended:
        """Return the end of a run without any group that has its state: exit codes of ranks not killed here."""
        failures = {rank: code for group in self._groups for rank, code in group.failed.items()}
        return Ended(failures=failures)

    def _begun(self) -> Iterator[_Group]:
        """Return the groups that were started at least once."""
        return (group for group in self._groups if group.store is not None)

    def _ended(self, group: _Group, *, done: bool) -> None:
        """End a group that has lost a rank, and schedule its restart."""
        failed, took_part = group.failed, group.has(JOINED)
        group.end()
        for other in self._begun():
            other.say(FEWER, gone(group.index))
        if done:
            group.over = True
            return
        rank, reason = next(iter(Ended(failures=failed).causes().items()))
        if (node := self._machines.gone_with(group.processes[rank - group.ranks.start])) is not None:
            reason = f"is gone with node {node}"
        self._tell(group, "ended", f"rank {rank} {reason}")
        group.short = 1 if took_part else group.short + 1
        if group.short >= AT_ONCE or _FAULT in failed.values():
            group.over = True
            why = (
                f"{group.short} starts in a row came to no step" if group.short >= AT_ONCE else "another would fail too"
            )
            self._tell(group, "given_up", why)
            return
        group.due = time.monotonic() + SHORTEST * 2 ** (group.short - 1)

    def _start(self, group: _Group) -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        # In this process, so that it outlives the group: others may still read addresses in it.
        group.store = TCPStore(self._machines.host, 0, is_master=True, wait_for_workers=False)
        if self._opened:
            group.say(
                OPEN, FEWER, *(gone(other.index) for other in self._groups if other is not group and not other.runs)
            )
        for other in self._begun():
            other.store.delete_key(gone(group.index))
        group.due, group.seen = None, {}
        group.processes = list(self._processes(group))
        group.starts += 1

    def _processes(self, group: _Group) -> Iterator[RankProcess]:
        local_world = self._plan.mesh.ranks_per_node
        for number, rank in enumerate(group.ranks):
            start = f"group{group.index}/start{group.starts}/{rank}"
            environment = {
                "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),  # as under torch's agent
                "RUST_LOG": os.environ.get("RUST_LOG", "error"),
                GROUP: str(group.index),
                START: str(group.starts),
                LIGHTHOUSE: self._meeting.address,
                "RANK": str(number),
                "WORLD_SIZE": str(len(group.ranks)),
                "LOCAL_RANK": str(rank % local_world),
                "LOCAL_WORLD_SIZE": str(local_world),
                "MASTER_ADDR": self._machines.host,
                "MASTER_PORT": str(group.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                **{name: os.environ[name] for name in OF_START if name in os.environ},
            }
            given = RankStart(
                directory=str(self._directory),
                plan=self._plan.id,
                log=str(self._directory / "logs" / self._attempt / start),
                environment=environment,
            )
            yield self._machines.start(rank, given)

    def _tell(self, group: _Group, state: str, reason: str) -> None:
        event = ReplicaGroupEvent(
            step=self._step(),
            group=group.index,
            state=state,
            reason=reason,
            ranks=[*group.ranks],
            number=group.starts,
        )
        self._lines.write(event)

    def _step(self) -> int:
        """Return the number of finished steps of the furthest rank, from its last heartbeat."""
        lines = (read_heartbeat(heartbeat_path(self._directory, rank)) for rank in range(self._plan.mesh.world_size))
        return max((heartbeat.step - 1 for heartbeat in lines if heartbeat is not None and heartbeat.step), default=0)

    def _look_for_frozen(self) -> None:
        """Kill ranks that no longer run Python: no other rank waits for them and could report this."""
        now = time.monotonic()
        if self._stuck is None or now - self._looked < LOOK:
            return
        self._looked = now
        for group in self._groups:
            for rank in group.ranks if group.runs else ():
                reading = read_heartbeat(heartbeat_path(self._directory, rank))
                if rank not in group.seen:
                    group.seen[rank] = SeenRank(reading, now, now)
                group.seen[rank].take(reading, now)
                if now - group.seen[rank].line_moved > self._stuck:
                    group.processes[rank - group.ranks.start].send_signal(signal.SIGKILL)
