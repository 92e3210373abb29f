"""Facts of this machine: devices, driver, memory, limits, and the file system of the run directories."""

import fcntl
import os
import re
import shutil
import socket
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from attrs import asdict, frozen

from xtrain.runtime.base.limits import clock_fault, most_files, tasks_left
from xtrain.runtime.observe.provenance import versions


@frozen(kw_only=True)
class Unfit:
    """Finding of the doctor. code: of a diagnostic; X codes prevent a run, W codes do not. what: the fault, as a
    clause. do: the remedy. host: where it was found."""

    code: str
    what: str
    do: str
    host: str = ""

    @property
    def stops(self) -> bool:
        """True if the run would fail."""
        return self.code.startswith("X")

    def __str__(self) -> str:
        where = f"{self.host}: " if self.host else ""
        return f"{'error' if self.stops else 'warning'}[{self.code}]: {where}{self.what}\n  {self.do}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# The oldest driver that runs a CUDA release, by the release's first number (NVIDIA, CUDA Toolkit release notes,
# "minimum required driver version for CUDA minor version compatibility", Linux).
OLDEST_DRIVER: Final[Mapping[int, tuple[int, ...]]] = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}

# For versions 2 and 1 of control groups: the line of a process, the root folder, the files with the memory limit and
# usage, and the statistic of cached pages.
CONTROL_GROUPS: Final = (
    (r"^0::/(.*)$", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


@frozen(kw_only=True)
class MachineFacts:
    """Facts of a machine. host: its name. memory: bytes that processes may still take, None if unknown. shared_memory:
    bytes of `/dev/shm`, None without it. driver: of NVIDIA's kernel module, None without one. cuda: release that
    torch was built for, None for a CPU build. versions: of computing libraries. lacks: what Triton needs and is
    missing, in words. files: that a process may open. tasks: processes and threads that this user may still start;
    None without a limit. clock: its fault, empty without one."""

    host: str
    memory: int | None
    shared_memory: int | None
    driver: str | None
    cuda: str | None
    versions: Mapping[str, str]
    lacks: str = ""
    files: int | None = None
    tasks: int | None = None
    clock: str = ""


def look_at_machine(root: Path = Path("/")) -> MachineFacts:
    """Gather the facts of this machine. root: of the file system."""
    import torch

    return MachineFacts(
        host=socket.gethostname(),
        memory=_memory(root),
        shared_memory=_shared_memory(root / "dev/shm"),
        driver=_driver(root / "proc/driver/nvidia/version"),
        cuda=torch.version.cuda,
        versions=versions(),
        lacks=_lacks(),
        files=most_files(),
        tasks=tasks_left(root),
        clock=clock_fault(),
    )


def version_numbers(text: str) -> tuple[int, ...]:
    """Return `535.104.05` as numbers."""
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _memory(root: Path) -> int | None:
    """Return the least of the kernel's available memory and the remainder in this process's control groups."""
    limits = []
    if fields := re.search(r"^MemAvailable: +(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE):
        limits.append(int(fields[1]) * 1024)
    for directory, limit, used, cached in _limited(root):
        taken = _text(directory / used).strip()
        if taken.isdecimal():
            # Cached file pages are freed when memory is needed.
            pages = re.search(rf"^{cached} (\d+)$", _text(directory / "memory.stat"), re.MULTILINE)
            limits.append(max(0, limit - int(taken) + (int(pages[1]) if pages else 0)))
    return min(limits, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes that the control groups of this process allow; None without a limit."""
    return min((limit for _, limit, _, _ in _limited(root)), default=None)


def _limited(root: Path) -> Iterator[tuple[Path, int, str, str]]:
    """Yield the control groups with a memory limit: folder, limit, file with the usage, statistic of cached pages."""
    for groups, top, limit, used, cached in CONTROL_GROUPS:
        # In a container the path starts at the container's own root.
        group = re.search(groups, _text(root / "proc/self/cgroup"), re.MULTILINE)
        if group is None:
            continue
        folder = root / top / group[1]
        for directory in (folder, *folder.parents):
            if not directory.is_relative_to(root / top):
                break
            if (most := _text(directory / limit).strip()).isdecimal():
                yield directory, int(most), used, cached


def _shared_memory(folder: Path) -> int | None:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_frsize * disk.f_blocks


def _lacks() -> str:
    """Return what Triton lacks to compile its kernel launchers as Python modules."""
    missing = []
    if not os.environ.get("CC") and not (shutil.which("gcc") or shutil.which("clang")):
        missing.append("C compiler")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append("Python.h")
    return " and no ".join(missing)


def _driver(path: Path) -> str | None:
    """Parse `NVRM version: NVIDIA UNIX x86_64 Kernel Module 535.104.05 …`, also of the open module."""
    match = re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", _text(path), re.MULTILINE)
    return match[1] if match else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# Bytes written to measure the speed, and the time limit in seconds.
SAMPLE: Final = 64 << 20
PATIENCE_SECONDS: Final = 2.0
_CHUNK: Final = 4 << 20


@frozen(kw_only=True)
class DiskFacts:
    """Facts of a disk. folder: the nearest existing one. free: bytes. speed: bytes a second that reach the disk, None
    if it was too full to measure. locks: why locks fail, empty if they work. fault: why nothing can be written
    there, else empty."""

    folder: Path
    free: int
    speed: float | None = None
    locks: str = ""
    fault: str = ""


def look_at_disk(root: Path) -> DiskFacts:
    """Examine the disk for runs below `root`, which may not exist yet; leaves no files."""
    folder = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists() or path.is_symlink())
    if not folder.exists():
        return DiskFacts(
            folder=folder, free=0, fault=f"it is a symbolic link to {folder.readlink()}, which does not exist"
        )
    if not folder.is_dir():
        return DiskFacts(folder=folder, free=0, fault="it is not a folder")
    free = shutil.disk_usage(folder).free
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".xtrain-doctor-") as file:
            speed = _speed(file, min(SAMPLE, free // 4))
        locks = lock_fault(folder)
    except OSError as error:
        return DiskFacts(folder=folder, free=free, fault=error.strerror or str(error))
    return DiskFacts(folder=folder, free=free, speed=speed, locks=locks)


def lock_fault(folder: Path) -> str:
    """Say why locks do not keep two processes apart in this folder; empty if they do. Raises OSError if no file can be
    created."""
    with (
        tempfile.NamedTemporaryFile(dir=folder, prefix=".xtrain-doctor-") as first,
        Path(first.name).open("ab") as second,
    ):
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"the file system refuses them: {error.strerror}"
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        except OSError as error:
            return f"the file system refuses them: {error.strerror}"
    return "two processes get the same one"


def _speed(file: IO[bytes], size: int) -> float | None:
    """Return bytes a second, measured over at most PATIENCE_SECONDS."""
    chunk, written, began = os.urandom(_CHUNK), 0, time.perf_counter()
    while written + _CHUNK <= size and time.perf_counter() - began < PATIENCE_SECONDS:
        file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        written += _CHUNK
    return written / (time.perf_counter() - began) if written else None
