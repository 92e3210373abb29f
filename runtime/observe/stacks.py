"""Python stacks of a process, and the collectives in flight, when a run makes no progress.

The collectives are read from the records that torch keeps of them.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch._C import _distributed_c10d

from xtrain import version
from xtrain.records.status import Heartbeat
from xtrain.regular_files import read_json
from xtrain.runtime.observe import heartbeat as waits
from xtrain.runtime.observe.heartbeat import HeartbeatWriter, born, process_state

# Signal that asks a rank for its stacks. The handler writes them itself, so it works while Python is blocked.
ASK: Final = signal.SIGUSR2
# Name of the in-memory file for the answer; others find it by this name among the process's open files.
ANSWER: Final = "xtrain-stacks"
_DEBUGGERS: Final = ("pdb", "bdb", "pydevd", "debugpy")
_SITE: Final = str(Path(torch.__file__).parent.parent)
_OURS: Final = str(Path(version.__file__).parent.parent)


def answer_when_asked() -> int | None:
    """Make ASK write the stacks of this process into a file in memory; returns its descriptor, or None if
    unsupported."""
    if not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError):
        answer = os.memfd_create(ANSWER)
        faulthandler.register(ASK, file=answer, all_threads=True)
        return answer
    return None


def whereabouts() -> tuple[str, bool]:
    """Return the place of the main thread, as `torch/distributed/distributed_c10d.py:2990 all_reduce`, and True if a
    debugger has stopped it."""
    with _ALONE, _without_collection():
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    # The wrappers that measure waiting stand in for torch's functions: the place is in their caller.
    while frame is not None and frame.f_code.co_filename == waits.__file__:
        frame = frame.f_back
    if frame is None:
        return "", False
    return place_of(frame), _debugged(frame)


# Some versions of CPython 3.11 and 3.12 may collect garbage while they hold the lock of the list of threads. If this
# lets another thread run, which begins one or asks for frames, it is a deadlock (python/cpython#106883).
_ALONE: Final = threading.Lock()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage; to be used by one thread at a time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def place_of(frame: FrameType) -> str:
    """Return file, line and function; the file relative to the import path."""
    path = frame.f_code.co_filename
    for folder in (_SITE, _OURS):
        path = path.removeprefix(f"{folder}/")
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"


def _debugged(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def save_own(folder: Path, rank: int, beat: HeartbeatWriter) -> None:
    """Write this rank's report: the last collectives, if torch recorded them, to `<rank>.collectives.json`, then the
    stacks of all threads and the last marks to `<rank>.txt`, which completes the report."""
    with suppress(Exception):
        if (recorded := collectives()) is not None:
            (folder / f"{rank:05d}.collectives.json").write_text(json.dumps(recorded))
    partial = folder / f"{rank:05d}.partial"
    with suppress(OSError), partial.open("w") as file:
        step = f"step {beat.step}" if beat.step else "set-up"
        file.write(f"rank {rank}, process {os.getpid()}, {step}, mark {beat.marks}\n")
        file.write(f"last marks: {' '.join(beat.trail)}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        partial.rename(folder / f"{rank:05d}.txt")


def collectives() -> dict[str, Any] | None:
    """Return the last collectives of this rank from torch's flight recorders of all backends, and under `groups` the
    ranks of every group of this rank; None if nothing is recorded."""
    if not dist.is_initialized():
        return None
    trace: dict[str, Any] = {"entries": []}
    for recorder in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(_distributed_c10d, recorder, None)) is not None:
            dumped = json.loads(dump())
            entries = trace["entries"] + [entry for entry in dumped.get("entries", ()) if entry not in trace["entries"]]
            trace |= {**dumped, "entries": entries}
    trace["groups"] = {name: list(ranks) for name, ranks in _groups()}
    return trace


def _groups() -> Iterator[tuple[str, Iterable[int]]]:
    world = dist.distributed_c10d._world
    for group, name in world.pg_names.items():
        yield name, world.pg_group_ranks[group]


def save_of(folder: Path, reading: Heartbeat) -> None:
    """Write the report of another process of this machine to `<rank>.txt`: its state, where it waits in the kernel, and
    its Python stacks if it still answers. The first rank to call does it for all."""
    partial = folder / f"{reading.rank:05d}.partial"
    try:
        partial.open("x").close()
    except OSError:
        return
    lines = [f"rank {reading.rank}, process {reading.pid}, written by another rank", ""]
    folder_of = Path(f"/proc/{reading.pid}")
    with suppress(OSError):
        lines += [
            line
            for line in (folder_of / "status").read_text().splitlines()
            if line.startswith(("State", "TracerPid", "Threads", "VmRSS", "SigQ", "SigPnd"))
        ]
    with suppress(OSError):
        lines.append(f"waits in the kernel in: {(folder_of / 'wchan').read_text() or 'nothing'}")
    if process_state(reading.pid) not in ("", "T", "t", "Z"):
        lines += ["", _asked(reading.pid)]
    with suppress(OSError):
        partial.write_text("\n".join(lines) + "\n")
        partial.rename(folder / f"{reading.rank:05d}.txt")


def _asked(pid: int) -> str:
    """Return the stacks that a process writes when asked."""
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if ANSWER in str(file.readlink()):
                os.kill(pid, ASK)
                return _settled(file)
    return "its stacks are not available"


def _settled(file: Path) -> str:
    """Return the content of a file once it stops growing; a stuck process may never write."""
    content = ""
    with suppress(OSError):  # the process may end meanwhile
        for _ in range(10):
            time.sleep(0.3)
            before, content = content, file.read_text(encoding="utf-8", errors="replace")
            if content and content == before:
                break
    return content


def here(reading: Heartbeat, host: str) -> bool:
    """Return True if the writer of the line is a process of this machine and its process id was not reused."""
    return reading.host == host and reading.born != 0 and born(reading.pid) in (0, reading.born)


def end(reading: Heartbeat) -> None:
    """Kill a process of this machine that cannot exit by itself."""
    if born(reading.pid) == reading.born != 0:
        with suppress(OSError):
            os.kill(reading.pid, signal.SIGKILL)


# Purpose of groups by their description in torch, if that is not the name of an axis.
MEANT: Final = {
    "default_pg": "of all ranks",
    "shard": "along fsdp",
    "row": "of the ranks of a row",
    "ends of the pipeline": "of the ends of the pipeline",
    "saving": "of all ranks, to save",
}


@frozen
class CollectiveEntry:
    """A collective that a rank has entered. group: its name and description in torch; number: its sequence number in
    the group."""

    group: tuple[str, str]
    number: int
    name: str
    sizes: str
    under_way: bool
    between_two: bool

    @property
    def what(self) -> str:
        """Description for messages: `all_reduce 118 of all ranks`, `all_gather 4 along fsdp`."""
        group = self.group[1].removeprefix("mesh_")
        return f"{self.name} {self.number} {MEANT.get(group, f'along {group}')}"


@frozen
class RankCollectives:
    """Collectives of one rank in the order in which it entered them, and the ranks of its groups."""

    calls: tuple[CollectiveEntry, ...]
    groups: Mapping[str, tuple[int, ...]]

    @property
    def waits_in(self) -> CollectiveEntry | None:
        """The first collective that has not finished; None without one."""
        return next((call for call in self.calls if call.under_way), None)

    def last_in(self, group: tuple[str, str]) -> CollectiveEntry | None:
        """Return the last collective of a group that the rank has entered, without point-to-point ones."""
        return next((call for call in reversed(self.calls) if call.group == group and not call.between_two), None)


def read_collectives(folder: Path, world: int, first: int = 0) -> dict[int, RankCollectives]:
    """Return the recorded collectives of every rank that has any, of `world` ranks from `first` on; ranks of groups are
    numbered in the same way."""
    by_rank = {}
    for rank in range(first, first + world):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = read_json(folder / f"{rank:05d}.collectives.json")
            entries = sorted(content["entries"], key=lambda entry: entry.get("time_created_ns", 0))
            named = content.get("groups", {}).items()
            groups = {name: tuple(first + member for member in ranks) for name, ranks in named}
            by_rank[rank] = RankCollectives(calls=tuple(map(_call, entries)), groups=groups)
    return by_rank


def _call(entry: dict[str, Any]) -> CollectiveEntry:
    name, between_two = entry["profiling_name"].partition(":")[2] or entry["profiling_name"], bool(entry["is_p2p"])
    return CollectiveEntry(
        group=(entry["process_group"][0], entry["process_group"][1]),
        number=entry["p2p_seq_id"] if between_two else entry["collective_seq_id"],
        name=name,
        sizes="×".join(map(str, entry["input_sizes"][0])) if entry["input_sizes"] else "",
        under_way=not entry["retired"] and entry["state"] != "completed",
        between_two=between_two,
    )


def read(known: Mapping[int, RankCollectives], world: int) -> list[str]:
    """Return a sentence for each collective that ranks wait in; empty if no rank waits."""
    waiting: dict[tuple[tuple[str, str], int], list[int]] = {}
    sentences = []
    for rank, collectives in sorted(known.items()):
        call = collectives.waits_in
        if call is not None and call.between_two:
            sentences.append(f"rank {rank} waits in {call.what}")
        elif call is not None:
            waiting.setdefault((call.group, call.number), []).append(rank)
    return [*(_sentence(group, number, ranks, known, world) for (group, number), ranks in waiting.items()), *sentences]


def _sentence(
    group: tuple[str, str], number: int, waiting: list[int], known: Mapping[int, RankCollectives], world: int
) -> str:
    calls = {rank: call for rank in waiting if (call := known[rank].waits_in) is not None}
    first = calls[waiting[0]]
    kinds = {(call.name, call.sizes) for call in calls.values()}
    if len(kinds) > 1:
        entered = ", ".join(f"rank {rank} {call.name} of {call.sizes or 'nothing'}" for rank, call in calls.items())
        return f"ranks have entered different collectives as number {number} of one group: {entered}"
    members = known[waiting[0]].groups.get(group[0]) or tuple(range(world))
    others = [rank for rank in members if rank not in waiting]
    behind = [rank for rank in others if rank in known and _number(known[rank].last_in(group)) < number]
    silent = [rank for rank in others if rank not in known]
    beyond = [rank for rank in others if rank in known and rank not in behind]
    wait = f"{_ranks(waiting)} {_verb(waiting, 'wait')} in {first.what}"
    parts = []
    if behind:
        parts.append(f"{_ranks(behind)} did not enter {first.what}")
        last = {call.what for rank in behind if (call := known[rank].last_in(group)) is not None}
        parts[-1] += f" (the last one there was {last.pop()})" if len(last) == 1 else ""
    if silent:
        parts.append(f"no record from {_ranks(silent)}")
    if beyond:
        parts.append(f"{_ranks(beyond)} {_verb(beyond, 'have', 'has')} already left this collective")
    return f"{wait}; {'; '.join(parts)}" if parts else f"{wait}, which all ranks have entered"


def _number(call: CollectiveEntry | None) -> int:
    return 0 if call is None else call.number


def _verb(ranks: list[int], many: str, one: str = "") -> str:
    return many if len(ranks) > 1 else one or f"{many}s"


def _ranks(ranks: Iterable[int]) -> str:
    """Return `rank 2`, or `ranks 0, 1 and 3`; of more than nine ranks the first eight."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    shown = [*names[:8], f"{len(names) - 8} more"] if len(names) > 9 else names
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
