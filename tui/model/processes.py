"""What the machine knows of processes and locks: of runs on this machine it says more than their files do."""

import fcntl
import os
from pathlib import Path

from xtrain.regular_files import open_regular

LOCKS = Path("/proc/locks")


def is_running(pid: int, born: int) -> bool:
    """Return True if that process of this machine exists and has not ended.

    born: its start time in clock ticks, as process ids are reused; 0 where unknown.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return _answers(pid)
    return fields[0] not in "ZX" and (not born or int(fields[19]) == born)


def _answers(pid: int) -> bool:
    """Return the result of `is_running` without /proc."""
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
    """Return True if a process holds the lock on a file; None where unknown, as when no such file can be read.

    A lock that the kernel lists is not touched. An unlisted lock may belong to another container: only taking it for a
    moment shows that. On a file system shared by machines (shared), this would affect all of them and prove little; the
    result is None there.
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
    """Return the time of the last change of a file, in seconds since 1970; for a held lock, the time it was taken."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def is_listed(path: Path) -> bool:
    """Return True if the kernel lists a lock on a file, held by a process visible from here. Raises OSError."""
    status = path.stat()
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = LOCKS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    # `7: FLOCK  ADVISORY  WRITE 13861 fe:00:3581860 0 EOF`; who waits for one has `->` after the number.
    return any(fields[1:2] == ["FLOCK"] and place in fields[4:] for fields in map(str.split, lines))


def is_folder(path: Path) -> bool:
    """Return True if the path is a folder that can be read; an error counts as False."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_shared(path: Path) -> bool:
    """Return True if a path is on a file system that other machines write to as well: their locks may not be visible
    here."""
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
