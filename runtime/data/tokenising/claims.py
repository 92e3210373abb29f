"""Who builds a store: of many processes on many machines one, and when it is gone, another.

Only files tell, and no lock is relied upon, for shared file systems often have none that works. Each process puts a
claim beside the stores, a small file that it rewrites every few seconds. The one that builds has a folder of the same
name. Were two to build at once, they would write two equal stores, and the first would stay: claims save work, and
correctness never depends on them.

A folder whose claim is gone, or whose claim's process certainly is, belongs to whoever renames it. One whose claim has
only fallen silent may yet be written to (its process stopped, or its machine out of reach), so it is copied.
"""

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from attrs import define, field, frozen

from xtrain.regular_files import read_json
from xtrain.runtime.data.stores.cache_folder import PARTIAL

CLAIM = ".claim-"
FOLDER = ".building-"
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0
# So far behind the newest of our own, by the clock of the file system, a claim needs not be watched.
OLD_SECONDS = 600.0


def claims_of(cache: Path, key: str) -> dict[str, Path]:
    """The claims on a store by name, the earliest first."""
    return {path.name.removeprefix(CLAIM): path for path in sorted(cache.glob(f"{CLAIM}{key}-*"))}


def folders_of(cache: Path, key: str) -> dict[str, Path]:
    """The folders in which a store is, or was, built, by the name of the claim."""
    return {path.name.removeprefix(FOLDER): path for path in sorted(cache.glob(f"{FOLDER}{key}-*"))}


@define(eq=False)
class Claim:
    """This process's own. Its file is there, and fresh, from `put` to `withdraw`."""

    cache: Path
    key: str
    name: str = field(init=False)
    _beat: int = field(default=0, init=False)
    _builds: bool = field(default=False, init=False)
    _over: threading.Event = field(factory=threading.Event, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        # Names are ordered by when their process came.
        self.name = f"{self.key}-{time.time_ns():020d}-{uuid4().hex[:8]}"

    @property
    def path(self) -> Path:
        return self.cache / f"{CLAIM}{self.name}"

    @property
    def folder(self) -> Path:
        """Where this process builds."""
        return self.cache / f"{FOLDER}{self.name}"

    def put(self) -> None:
        """Raises OSError if it cannot be written."""
        self._write()
        threading.Thread(target=self._keep_fresh, name="claim", daemon=True).start()

    def says(self, *, builds: bool) -> None:
        """Tell the others whether this process builds. Raises OSError."""
        self._builds = builds
        self._write()

    def withdraw(self) -> None:
        self._over.set()
        with self._lock, suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _keep_fresh(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(OSError):
                self._write()

    def _write(self) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._beat += 1
            says = {"host": os.uname().nodename, "pid": os.getpid(), "process": this_process(), "builds": self._builds}
            rest = self.cache / f"{PARTIAL}{self.name}"
            rest.write_text(json.dumps({**says, "beat": self._beat}))
            rest.replace(self.path)


@frozen(kw_only=True)
class OtherClaim:
    """Another process's claim, as it stands."""

    name: str
    builder: str
    """`process 17 on node3`."""
    builds: bool
    gone: bool
    """Its process has certainly ended."""
    silent: bool
    """It has not been heard of for long: it may have ended."""

    @property
    def alive(self) -> bool:
        return not self.gone and not self.silent


@define
class ClaimWatch:
    """The other claims on a store, looked at again and again: clocks of other machines are not relied upon."""

    mine: Claim
    _heard: dict[str, tuple[object, float]] = field(factory=dict, init=False)

    def rivals(self) -> list[OtherClaim]:
        found = []
        for name, path in claims_of(self.mine.cache, self.mine.key).items():
            if name != self.mine.name:
                with suppress(FileNotFoundError):
                    found.append(self._rival(name, path))
        return found

    def _rival(self, name: str, path: Path) -> OtherClaim:
        try:
            says = read_json(path)
            beat, process, builds = int(says["beat"]), says["process"], bool(says["builds"])
            builder = f"process {says['pid']} on {says['host']}"
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError):
            beat, process, builds, builder = -1, None, True, "an unreadable claim"
        if name not in self._heard or self._heard[name][0] != beat:
            self._heard[name] = (beat, time.monotonic())
        silent = time.monotonic() - self._heard[name][1] > SILENT_SECONDS or self._is_old(path)
        return OtherClaim(name=name, builder=builder, builds=builds, gone=has_ended(process), silent=silent)

    def _is_old(self, path: Path) -> bool:
        with suppress(OSError):
            return self.mine.path.stat().st_mtime - path.stat().st_mtime > OLD_SECONDS
        return False


def this_process() -> list[str] | None:
    """What tells this process from every other one that is or was: machine since it was started, process, start."""
    return _process("self")


def has_ended(process: object) -> bool:
    """Whether that process certainly is no more. Of those of other machines and containers nothing is known."""
    own = this_process()
    if own is None or not isinstance(process, list) or len(process) != 4 or process[:2] != own[:2]:
        return False
    return _process(str(process[2])) != process


def _process(number: str) -> list[str] | None:
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8", errors="replace").strip()
        container = str(Path("/proc/self/ns/pid").readlink())  # numbers of processes count within one
    except OSError:
        return None
    try:
        # `17 (name) S …`: the name of the program may itself hold blanks and brackets.
        first, rest = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)
        state, *numbers = rest.split()
        return [machine, container, first.split()[0], "ended" if state in "ZX" else numbers[18]]
    except (OSError, ValueError, IndexError):
        return [machine, container, number, "ended"]
