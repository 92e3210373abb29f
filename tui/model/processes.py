"""What the machine knows of processes and locks: of runs on this machine it says more than their files do."""

import fcntl
import os
from pathlib import Path

from xtrain.regular_files import open_regular

LOCKS = Path("/proc/locks")


def is_running(pid: int, born: int) -> bool:
    """Whether that process of this machine is there and has not ended.

    born: when it began, in clock ticks, as its number may be given again; 0 where that is not known.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return _answers(pid)
    return fields[0] not in "ZX" and (not born or int(fields[19]) == born)


def _answers(pid: int) -> bool:
    """The same where there is no /proc."""
    if Path("/proc/self").exists():
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def is_locked(path: Path, *, shared: bool) -> bool | None:
    """Whether a process holds the lock on a file; None where that is not known, as there is no file that may be read.

    A lock that the kernel lists is not touched. One that it does not list may be of another container: only taking it,
    for a moment, tells. On a file system of several machines (shared) that would be felt on all of them, and would say
    little: there it is None.
    """
    try:
        if is_listed(path):
            return True
        if shared:
            return None
        lock = open_regular(path)
    except OSError:
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def time_of(path: Path) -> float | None:
    """When a file was last changed, in seconds since 1970; of a lock that is held, since when."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def is_listed(path: Path) -> bool:
    """Whether the kernel lists a lock on a file, held by a process that can be seen from here. Raises OSError."""
    status = path.stat()
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = LOCKS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    # `7: FLOCK  ADVISORY  WRITE 13861 fe:00:3581860 0 EOF`; who waits for one has `->` after the number.
    return any(fields[1:2] == ["FLOCK"] and place in fields[4:] for fields in map(str.split, lines))


def is_folder(path: Path) -> bool:
    """Whether there is a folder that can be looked into; no error is one."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_shared(path: Path) -> bool:
    """Whether a path lies on a file system that other machines write to as well: then a lock may not be seen here."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        place = str(path.resolve())
    except OSError:
        return True
    kinds = [fields[1:3] for line in mounts if len(fields := line.split()) > 2]
    fitting = [(len(at), kind) for at, kind in kinds if place == at or place.startswith(at.rstrip("/") + "/")]
    return max(fitting, default=(0, ""))[1] in SHARED


SHARED = frozenset(
    {
        "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "virtiofs", "glusterfs", "afs",
        "pvfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs", "fuse.lustre", "fuse.s3fs",
        "fuse.gcsfuse", "panfs", "wekafs", "vboxsf",
    }
)  # fmt: skip
