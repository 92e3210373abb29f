"""Reader of `ranks/*.jsonl` and `ranks/*.beat`, and a watcher of whether somebody still writes them."""

import os
import socket
import time
from pathlib import Path
from typing import Any

from attrs import define, evolve

from xtrain.records.lines import objects, read_all
from xtrain.records.metrics import RankMetrics
from xtrain.records.names import heartbeat_path, rank_lines_path
from xtrain.records.status import Heartbeat, read_heartbeat
from xtrain.regular_files import open_regular
from xtrain.tui.model.life import RING, LifeReader, OneRank, Pulse, Ranks, is_running
from xtrain.tui.model.planned import Planned
from xtrain.tui.state import RunState

# Bytes of the end of a rank's file that are read at first, and at most at a time.
END = 32 << 10
# Files that every poll reads, however little time it has.
AT_LEAST = 16
# Seconds between two passes over all progress lines, and over all files of ranks.
LOOK_SECONDS = 1.0
# A progress line is silent after this time, and this number of reads, without a change: with thousands of ranks on a
# slow disk, each line is read rarely, so time alone proves nothing. A line that changed after several unchanged reads,
# as on a file system with delays, gets this multiple of those reads.
SILENT_SECONDS = 4.0
SILENT_LOOKS = 2
SILENT_TIMES = 3.0
# If one pass over all lines takes this long, their age is shown.
OLD_SECONDS = 5.0
# Time without a change after which a line whose process does not exist is gone.
GONE_SECONDS = 1.5
# A rank makes no progress after these seconds, or this number of its steps, without a mark in work that should be
# short.
IDLE_SECONDS = 30.0
IDLE_STEPS = 5.0
# Newest lines from which a rank's own part of a step is computed, and the least number for its variation.
BUSY = 12
LEAST_BUSY = 4


@define
class _RankFile:
    """Read position in a rank's file."""

    inode: int = 0
    offset: int = 0


@define
class _RankLine:
    """Observations of a progress line: its count, when it last changed, the scans since then without a change, and the
    largest such number before; older ones count for less."""

    alive: int
    moved: float
    missed: int = 0
    most: float = 0.0


class RankReader:
    """Reader that keeps the ranks of a run up to date."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._host = socket.gethostname()[:64]
        self._planned: Planned | None = None
        self._attempt = 0
        self._ranks: list[OneRank] = []
        self._files: list[_RankFile] = []
        self._busy: list[tuple[float, ...]] = []
        self._lines: list[_RankLine | None] = []
        self._known = Ranks()
        self._passes = {"files": (0, -LOOK_SECONDS), "beats": (0, -LOOK_SECONDS)}
        self._changed = False
        self._old = 0.0

    def ranks(self) -> Ranks:
        """Return the known state of the ranks; the same object while nothing is new."""
        return self._known

    def poll(self, world_size: int, planned: Planned | None, attempt: int, deadline: float) -> None:
        """Look on. attempt: lines of another start are no news of this one. Never raises because of the files."""
        self._lay_out(world_size, planned, attempt)
        if self._go_on("beats", self._read_beat, deadline):
            took = time.monotonic() - self._passes["beats"][1]
            old = float(round(took)) if took >= OLD_SECONDS else 0.0
            self._changed |= old != self._old
            self._old = old
        self._go_on("files", self._read_file, deadline)
        if self._changed:
            self._known = Ranks(world_size=world_size, all=tuple(self._ranks), seconds_old=self._old)
            self._changed = False

    def _lay_out(self, world_size: int, planned: Planned | None, attempt: int) -> None:
        if attempt != self._attempt:
            self._attempt = attempt
            self._lines = [None] * len(self._ranks)
            self._ranks = [evolve(each, beat=None, pulse="unknown", seconds_silent=0.0) for each in self._ranks]
            self._changed = True
        if planned is self._planned and world_size == len(self._ranks):
            return
        self._planned, self._changed = planned, True
        known = self._ranks[:world_size]
        known += [OneRank(rank=rank) for rank in range(len(known), world_size)]
        if planned is not None:
            known = [
                evolve(each, coordinates=planned.coordinates(each.rank), machine=planned.machine(each.rank))
                for each in known
            ]
        self._ranks = known
        for of_ranks, empty in ((self._files, _RankFile), (self._busy, tuple), (self._lines, lambda: None)):
            del of_ranks[world_size:]
            of_ranks.extend(empty() for _ in range(world_size - len(of_ranks)))  # type: ignore[arg-type]

    def _go_on(self, name: str, look: Any, deadline: float) -> bool:
        """Look at the next ranks, with at most one pass a second. Return True if a pass is complete."""
        place, began = self._passes[name]
        now = time.monotonic()
        if place >= len(self._ranks):
            if now - began < LOOK_SECONDS:
                return False
            place = 0
        if place == 0:
            began = now
        first = place
        while place < len(self._ranks) and (place - first < AT_LEAST or time.monotonic() < deadline):
            look(place)
            place += 1
        self._passes[name] = place, began
        return place > 0 and place >= len(self._ranks)

    def _read_file(self, rank: int) -> None:
        file = self._files[rank]
        try:
            with open_regular(rank_lines_path(self._directory, rank)) as lines:
                status = os.fstat(lines.fileno())
                if status.st_ino != file.inode or status.st_size < file.offset:
                    file.inode, file.offset = status.st_ino, 0
                if status.st_size == file.offset:
                    return
                begin = max(file.offset, status.st_size - END)
                block = os.pread(lines.fileno(), END, begin)
        except OSError:
            return
        end = block.rfind(b"\n") + 1
        first = block.find(b"\n") + 1 if begin > file.offset else 0
        found, _ = objects(block[first:end])
        file.offset = begin + end
        if found:
            self._take(rank, read_all(RankMetrics, found))

    def _take(self, rank: int, found: list[RankMetrics]) -> None:
        last, before = found[-1], self._ranks[rank]
        recent, busy = list(before.recent), list(self._busy[rank])
        for record in found:
            step, seconds = record.step, record.step_seconds
            if seconds is None or step is None:
                continue
            while recent and recent[-1][0] >= step:  # the run has gone back
                recent.pop()
            recent.append((step, seconds))
            waited = record.comm_seconds
            if waited is None and len(self._ranks) == 1:
                waited = 0.0  # for whom
            if (
                waited is not None
            ):  # otherwise its own share of a step is unknown, and the whole step does not show which rank is slow
                busy.append(seconds - waited)
        self._busy[rank] = tuple(busy[-BUSY:])
        busy_seconds, busy_most = _quartiles(self._busy[rank])
        self._ranks[rank] = evolve(
            before,
            last=last,
            step=last.step,
            step_seconds=last.step_seconds,
            data_seconds=last.data_seconds,
            comm_seconds=last.comm_seconds,
            busy_seconds=busy_seconds,
            busy_most=busy_most,
            memory_bytes=last.memory_bytes,
            node_seconds=last.node_seconds or {},
            recent=tuple(recent[-RING:]),
        )
        self._changed = True

    def _read_beat(self, rank: int) -> None:
        before = self._ranks[rank]
        beat = read_heartbeat(heartbeat_path(self._directory, rank))
        if beat is None:  # half a line, or none: the heartbeat read before stays
            beat = before.beat
        if beat is None or (self._attempt and beat.attempt != self._attempt):
            return
        now, line = time.monotonic(), self._lines[rank]
        if line is None:
            line = self._lines[rank] = _RankLine(alive=beat.alive, moved=now)
        elif line.alive != beat.alive:
            line.most = max(0.9 * line.most, line.missed)
            line.alive, line.moved, line.missed = beat.alive, now, 0
        else:
            line.missed += 1
        silent = now - line.moved
        pulse = self._pulse(beat, line, silent, before.step_seconds)
        after = evolve(before, beat=beat, pulse=pulse, seconds_silent=silent if silent >= 2 * LOOK_SECONDS else 0.0)
        if after != before:
            self._ranks[rank] = after
            self._changed = True

    def _pulse(self, beat: Heartbeat, line: _RankLine, silent: float, step_seconds: float | None) -> Pulse:
        here = beat.host == self._host
        # This machine and the rank share a clock. A run opened long after its end needs no waiting.
        still = max(silent, time.time() - beat.time) if here else silent
        if here and still >= GONE_SECONDS and not is_running(beat.pid, beat.born):
            return "gone"
        if silent >= SILENT_SECONDS and line.missed >= max(SILENT_LOOKS, SILENT_TIMES * line.most):
            return "silent"
        limit = max(IDLE_SECONDS, IDLE_STEPS * (step_seconds or 0.0))
        if beat.idle >= limit and beat.step > 0 and not beat.lasting and not beat.debugger:
            return "idle"
        return "alive"


def _quartiles(seconds: tuple[float, ...]) -> tuple[float | None, float]:
    """Return the lower and upper quartile; with too few values, the upper one is infinite."""
    ordered, last = sorted(seconds), len(seconds) - 1
    if last + 1 < LEAST_BUSY:
        return (ordered[0] if ordered else None), float("inf")
    return ordered[last // 4], ordered[-1 - last // 4]


WATCH_SECONDS = 0.25


class RunWatcher:
    """Watcher of the run in a directory, which looks at most four times a second."""

    def __init__(self, directory: Path) -> None:
        self._ranks = RankReader(directory)
        self._life = LifeReader(directory)
        self._looked = float("-inf")
        self._why = ""

    def why_over(self, state: RunState, newest: float | None) -> str:
        """Return why nothing more will come although the run has not recorded its end; empty while it is running.

        state: after all existing records; newest: time of the newest of them.
        """
        now = time.monotonic()
        if now - self._looked >= WATCH_SECONDS:
            self._looked = now
            start = state.start
            size = (start.world_size or 0) if start else 0
            self._ranks.poll(size, None, state.attempt, now + WATCH_SECONDS)
            life = self._life.look(state, self._ranks.ranks(), newest)
            self._why = life.why if life.over else ""
        return self._why
