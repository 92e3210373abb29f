"""What a process is doing: its Python stacks, and what is known of one that cannot tell any more."""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

import xtrain
from xtrain.records.heartbeat import Heartbeat
from xtrain.runtime.monitoring import waits
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter, born, process_state

# Asks a rank for its stacks even where its Python does not run: the answer is written by the handler itself.
ASK: Final = signal.SIGUSR2
# The name of the file in memory that the answer goes to; others find it by that among the open files of the process.
ANSWER: Final = "xtrain-stacks"
_DEBUGGERS: Final = ("pdb", "bdb", "pydevd", "debugpy")
_SITE: Final = str(Path(torch.__file__).parent.parent)
_OURS: Final = str(Path(str(xtrain.__file__)).parent.parent)


def answer_when_asked() -> int | None:
    """Let ASK write the stacks of this process into a file in memory; its descriptor. None where there are none."""
    if not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError):
        answer = os.memfd_create(ANSWER)
        faulthandler.register(ASK, file=answer, all_threads=True)
        return answer
    return None


def whereabouts() -> tuple[str, bool]:
    """What the main thread is in, as `torch/distributed/distributed_c10d.py:2990 all_reduce`, and whether a debugger
    has stopped it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    # What measures how long a rank waits stands where torch itself would: the rank is in what has called it.
    while frame is not None and frame.f_code.co_filename == waits.__file__:
        frame = frame.f_back
    if frame is None:
        return "", False
    return place_of(frame), _debugged(frame)


def place_of(frame: FrameType) -> str:
    """File, line and function; the file as it is imported."""
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
    """Write the last collectives, where torch keeps them, to `<rank>.collectives.json`, then the stacks of all threads
    and the last marks to `<rank>.txt`: where that is, the rank has written all."""
    with suppress(Exception):
        if (found := collectives()) is not None:
            (folder / f"{rank:05d}.collectives.json").write_text(json.dumps(found))
    partial = folder / f"{rank:05d}.partial"
    with suppress(OSError), partial.open("w") as file:
        step = f"step {beat.step}" if beat.step else "set-up"
        file.write(f"rank {rank}, process {os.getpid()}, {step}, mark {beat.marks}\n")
        file.write(f"last marks: {' '.join(beat.trail)}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        partial.rename(folder / f"{rank:05d}.txt")


def collectives() -> dict[str, Any] | None:
    """The last collectives that this rank has entered, as torch's flight recorders of all backends tell them, and under
    `groups` the ranks of every group that it is in; None where nothing is recorded."""
    if not dist.is_initialized():
        return None
    found: dict[str, Any] = {"entries": []}
    for recorder in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(_distributed_c10d, recorder, None)) is not None:
            dumped = json.loads(dump())
            entries = found["entries"] + [entry for entry in dumped.get("entries", ()) if entry not in found["entries"]]
            found |= {**dumped, "entries": entries}
    found["groups"] = {name: list(ranks) for name, ranks in _groups()}
    return found


def _groups() -> Iterator[tuple[str, Iterable[int]]]:
    world = dist.distributed_c10d._world
    for group, name in world.pg_names.items():
        yield name, world.pg_group_ranks[group]


def save_of(folder: Path, reading: Heartbeat) -> None:
    """Write what can be known of another process of this machine to `<rank>.txt`: its state, what the kernel has it
    wait for, and its Python stacks, if it still writes them when asked. The first rank to call does it for all."""
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
    """The stacks that a process writes when asked."""
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if ANSWER in str(file.readlink()):
                os.kill(pid, ASK)
                return _settled(file)
    return "its stacks are not available"


def _settled(file: Path) -> str:
    """What is in a file once nothing more comes; a busy machine takes its time, and a stuck process may never write."""
    found = ""
    with suppress(OSError):  # the process may end meanwhile
        for _ in range(10):
            time.sleep(0.3)
            before, found = found, file.read_text(encoding="utf-8", errors="replace")
            if found and found == before:
                break
    return found


def here(reading: Heartbeat, host: str) -> bool:
    """Whether what wrote the line is a process of this machine that still has its number."""
    return reading.host == host and reading.born != 0 and born(reading.pid) in (0, reading.born)


def end(reading: Heartbeat) -> None:
    """End a process of this machine that cannot end itself."""
    if born(reading.pid) == reading.born != 0:
        with suppress(OSError):
            os.kill(reading.pid, signal.SIGKILL)
