"""Limits of a machine (open files, processes, shared memory, clock), compared with the needs of a plan's ranks.

This module imports little, because it is also loaded after a limit has been reached.
"""

import errno
import os
import re
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import frozen

from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.text.units import plural

# Open files of a rank alone, measured: 28 on a CPU; a CUDA driver opens tens for each device of the machine.
_FILES: Final = 64
_FILES_CUDA: Final = 256
_FILES_OF_PART: Final = 8
"""Open files per dataset (its stores are mapped), per data worker, and per rank in its launcher."""
# Threads of a rank in addition to those that compute, measured: 9 alone, 15 with another rank.
_THREADS: Final = 32
# Groups of all ranks: gloo's own, and one each for devices, commands and checkpoints.
_GROUPS: Final = 4
# Years of plausible clocks: machines without a clock start in 1970, and 64 bits of nanoseconds end in 2262.
_YEARS: Final = range(2020, 2200)


@frozen(kw_only=True)
class Need:
    """Needs of a plan. files: open at once in one process. tasks: processes and threads of all ranks of a machine
    together."""

    files: int
    tasks: int


def need_of(plan: Plan, device: str, local_ranks: int) -> Need:
    """Return the needs of a machine's processes, with a margin. device: `cpu` or `cuda`."""
    bootstrap = plan.node("setup.bootstrap").args
    sizes = [axis.size for axis in (*plan.mesh.axes, *plan.mesh.expert_axes) if axis.size > 1]
    # Each rank of a group is a connection; with lazy connections, only ranks that exchange data connect.
    connections = _GROUPS * (sum(sizes) if bootstrap.get("lazily") else plan.mesh.world_size) + sum(sizes)
    datasets = sum(node.op == "setup.data" for node in plan.nodes)
    workers = sum(node.args.get("workers") or 0 for node in plan.nodes if node.op == "setup.loader")
    rank = (_FILES_CUDA if device == "cuda" else _FILES) + connections + _FILES_OF_PART * (datasets + workers)
    cores = len(os.sched_getaffinity(0))
    threads = bootstrap["threads"] or max(1, cores // local_ranks)
    return Need(
        files=max(rank, _FILES + _FILES_OF_PART * local_ranks),
        # Processes that tokenize run before the threads that compute, one for each core.
        tasks=_THREADS + local_ranks * (_THREADS + 2 * threads + 4 * workers) + cores,
    )


def faults_of_limits(need: Need, files: int | None, tasks: int | None) -> Iterator[str]:
    """Yield each limit that is too low and, after a semicolon, the remedy. files, tasks: None without a limit."""
    if files is not None and files < need.files:
        yield (
            f"a process may open {files:,} files, but a rank of this plan needs {need.files:,}; raise the limit "
            "(`ulimit -n`, LimitNOFILE of a service, `--ulimit nofile=…` of a container)"
        )
    if tasks is not None and tasks < need.tasks:
        yield (
            f"this user may start {tasks:,} more processes and threads, but the ranks of this machine need "
            f"{need.tasks:,}; raise the limit (`ulimit -u`, TasksMax of a service, `--pids-limit` of a container), "
            "end other processes, or lower launch.threads and batch.workers"
        )


def check_limits(plan: Plan, device: str, local_ranks: int) -> None:
    """Raise the soft limit of open files up to the hard one; ranks inherit it.

    Raises EnvironmentFault if that is not enough, or too few processes are left.
    """
    need = need_of(plan, device, local_ranks)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _finite(soft) is not None and soft < need.files:
        soft = min(need.files, hard) if _finite(hard) is not None else need.files
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for fault in faults_of_limits(need, _finite(soft), tasks_left()):
        raise EnvironmentFault("X738", fault)


def most_files() -> int | None:
    """Return the most files that a process may open, after raising its soft limit; None without a limit."""
    return _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def tasks_left(root: Path = Path("/")) -> int | None:
    """Return the number of processes and threads that this user may still start here; None without a limit."""
    limit, remaining = _finite(resource.getrlimit(resource.RLIMIT_NPROC)[0]), []
    if limit is not None and os.geteuid():  # the kernel does not limit root
        remaining.append(limit - _tasks_of_user(root))
    for groups, top in ((r"^0::/(.*)$", "sys/fs/cgroup"), (r"^\d+:(?:[^:]*,)?pids:/(.*)$", "sys/fs/cgroup/pids")):
        group = re.search(groups, _text(root / "proc/self/cgroup"), re.MULTILINE)
        folder = root / top / (group[1] if group else "")
        for cgroup in (folder, *folder.parents):
            most, taken = (_text(cgroup / name).strip() for name in ("pids.max", "pids.current"))
            if cgroup.is_relative_to(root / top) and most.isdecimal() and taken.isdecimal():
                remaining.append(int(most) - int(taken))
    return min(remaining, default=None)


def _tasks_of_user(root: Path) -> int:
    count, user = 0, os.getuid()
    for process in (root / "proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == user:
                count += len(os.listdir(process / "task"))  # noqa: PTH208
        except OSError:  # the process has ended
            continue
    return count


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def clock_fault() -> str:
    """Return the fault of this machine's clock and, after a semicolon, the remedy; empty if the clock is right."""
    year = None
    with suppress(OverflowError, OSError):
        year = time.gmtime().tm_year
    if year is not None and year in _YEARS:
        return ""
    says = "a year out of range" if year is None else f"the year {year}"
    return f"the clock of this machine shows {says}, so waits cannot be computed; set it (NTP, `timedatectl`)"


def limit_fault(error: BaseException) -> EnvironmentFault | None:
    """Return the fault of a limit or clock that caused an error of Python, torch or NCCL; None for other errors."""
    text, number = str(error), error.errno if isinstance(error, OSError) else None
    if isinstance(error, EnvironmentFault):
        return None
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        what = f"a process may open no more than {plural(most, 'file')}"
        return EnvironmentFault("X738", f"{what}; raise the limit of open files (`ulimit -n`)")
    # EAGAIN means processes and threads here, because no file is opened without waiting.
    starts = isinstance(error, BlockingIOError) and number == errno.EAGAIN
    if starts or "can't start new thread" in text or "Resource temporarily unavailable" in text:
        message = "this user, or this container, may start no more processes and threads; raise the limit"
        return EnvironmentFault("X738", f"{message} (`ulimit -u`, `--pids-limit`), or lower launch.threads")
    # Python's sleep and its times count nanoseconds in 64 bits.
    if (isinstance(error, OverflowError) or number == errno.EINVAL) and (fault := clock_fault()):
        return EnvironmentFault("X739", f"{fault}, and run the same command again: the run resumes")
    if "/dev/shm" in text:
        reason = text.strip().partition("\n")[0]
        return EnvironmentFault(
            "X736", f"shared memory: {reason}; start the container with `--shm-size=1g` or more, or mount memory there"
        )
    return None
