"""What the machine knows of processes and locks: of runs on this machine it says more than their files do."""

import fcntl
import os
from pathlib import Path


def is_running(pid: int, born: int) -> bool:
    """Whether that process of this machine is there and has not ended.

    born: when it began, in clock ticks, as its number may be given again; 0 where that is not known.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
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


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock on a file, which is taken for a moment to see that; None where there is no file,
    or none that may be read."""
    try:
        lock = path.open("r")
    except OSError:
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder that can be looked into; no error is one."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_shared(path: Path) -> bool:
    """Whether a path lies on a file system that other machines write to as well: then a lock may not be seen here."""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
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
