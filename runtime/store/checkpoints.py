"""Folder of checkpoints: entries, pointer files, `state.json` and checksums, and `Publisher`, which alone changes it.

An entry never changes once it is published. `state.json` has the counters, and the size and checksum of every file.
"""

import json
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Final
from zlib import crc32

import msgspec
from attrs import frozen

from xtrain.plan.canonical import SEAL, digest
from xtrain.plan.checkpoints import ALIAS, EPOCH, FULL, POINTERS, STATE, WEIGHTS, Pointer
from xtrain.regular_files import read_json, read_regular
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.files import PARTIAL, REMOVING, means
from xtrain.runtime.base.locks import unless_read

PIECE_BYTES = 4 * 2**20
DIGEST_BYTES = 16
MOST_THREADS = 8  # a disk gains nothing from more, and other work needs cores


def file_checksums(paths: Iterable[Path], threads: int | None = None) -> dict[str, str]:
    """Return the checksum in hex of each file, by name. Raises OSError for an unreadable file.

    threads: None for this process's share of the cores.
    """
    spans = {path: range(0, max(path.stat().st_size, 1), PIECE_BYTES) for path in paths}
    with ThreadPoolExecutor(threads or share_of_cores()) as pool:
        pieces = {path: [pool.submit(_piece, path, start) for start in starts] for path, starts in spans.items()}
        sums = {path.name: b"".join(piece.result() for piece in futures) for path, futures in pieces.items()}
    return {name: blake2b(sum, digest_size=DIGEST_BYTES).hexdigest() for name, sum in sums.items()}


def share_of_cores() -> int:
    """Return the number of threads for this process, one of LOCAL_WORLD_SIZE processes on the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _piece(path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left, sum = PIECE_BYTES, 0
        while left and (read := file.read(left)):
            sum = crc32(read, sum)  # releases the GIL
            left -= len(read)
    return sum.to_bytes(4)


LATE_METRICS = "metrics.json"
# The file without which nothing can be read: the index of a sharded checkpoint, or the only file.
METADATA = ".metadata"
TENSORS = "state.pt"


Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class _Average(msgspec.Struct):
    updates: Count
    decay: float | None = None


class _BegunFrom(msgspec.Struct):
    path: str
    step: Count


class _Stored(msgspec.Struct):
    """Types of the sidecar's values that are shown or computed with; each may be missing."""

    step: Count = 0
    tokens: Count = 0
    metrics: dict[str, float] = {}
    time: Seconds | None = None
    plan_id: str | None = None
    config_id: str | None = None
    world_size: Count = 0
    steps: Count | None = None
    epoch: float | None = None
    epoch_ended: Count | None = None
    ema: _Average | None = None
    begun_from: _BegunFrom | None = None
    made_by: dict[str, str] | None = None
    model: dict[str, Any] | None = None
    tensors: dict[str, list[Count]] | list[str] | None = None
    params: str | None = None
    nonfinite: dict[str, Any] | None = None
    record: dict[str, Any] | None = None
    files: dict[str, Any] = {}


def read_sidecar(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's `state.json`. Raises OSError or ValueError if it is missing or invalid."""
    content = read_json(folder / STATE)
    if not isinstance(content, dict):
        raise ValueError("not an object")
    try:
        msgspec.convert(content, _Stored)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return content


def read_late_metrics(folder: Path) -> dict[str, float]:
    """Return metric → value; empty if nothing was measured after the save, or if the file cannot be read."""
    try:
        metrics = read_json(folder / LATE_METRICS)
    except (OSError, ValueError):
        return {}
    numbers = isinstance(metrics, dict) and all(isinstance(value, int | float) for value in metrics.values())
    return metrics if numbers else {}


def flaws(folder: Path, *, content: bool = False, part: tuple[int, int] = (0, 1)) -> list[str]:
    """List the defects of a published checkpoint; empty if there are none.

    Compares sizes, which is fast; with `content` also checksums, which reads every file. part: (i, n) reads the i-th of
    n parts of the files, for n processes that share the work.
    """
    try:
        state = read_sidecar(folder)
        files = {name: _recorded(record) for name, record in state["files"].items()}
    except FileNotFoundError:
        return [f"{STATE} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{STATE} cannot be read"]
    if "seal" in state and state["seal"] != content_seal(
        {name: value for name, value in state.items() if name != "seal"}
    ):
        return [f"{STATE} has changed since it was written"]
    if METADATA not in files and TENSORS not in files:
        return [f"{STATE} names neither {METADATA} nor {TENSORS}"]
    if strange := next((name for name in files if Path(name).name != name), None):
        return [f"{STATE} names {strange!r}, which is no file of the checkpoint"]
    size_flaws = [flaw for name, (size, _) in files.items() if (flaw := _size_flaw(folder / name, size))]
    if size_flaws or not content:
        return size_flaws
    # Dealt by size, so that no process gets all the large files.
    names = sorted(files, key=lambda name: (files[name][0], name))[part[0] :: part[1]]
    known = [name for name in names if files[name][1]]  # the first format had no checksums
    try:
        sums = file_checksums(folder / name for name in known)
    except OSError as error:
        return [f"{error.filename or folder} cannot be read: {error.strerror}"]
    return [f"{name} has changed since it was written" for name in known if sums[name] != files[name][1]]


def total_bytes(state: dict[str, Any]) -> int:
    """Return the bytes of all files except the sidecar."""
    return sum(_recorded(record)[0] for record in state["files"].values())


def _recorded(record: Any) -> tuple[int, str]:
    """Return (bytes, checksum) of a file; the first format had only the bytes."""
    return (record, "") if isinstance(record, int) else (record["bytes"], record["checksum"])


def _size_flaw(file: Path, size: int) -> str:
    try:
        mode, actual_size = file.stat().st_mode, file.stat().st_size
    except OSError:
        return f"{file.name} is missing"
    if not stat.S_ISREG(mode):
        return f"{file.name} is not a regular file"
    return "" if actual_size == size else f"{file.name} has {actual_size:,} of {size:,} bytes"


def content_seal(content: dict[str, Any]) -> str:
    """Return the seal of a sidecar's content."""
    return digest(content, SEAL, size=DIGEST_BYTES)


@frozen
class CheckpointEntry:
    """Published checkpoint, intact or not. step: optimizer steps that its state has taken."""

    path: Path
    step: int

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_full(self) -> bool:
        """True if a run can be resumed from it; otherwise it holds weights alone."""
        return FULL.fullmatch(self.name) is not None

    def state(self) -> dict[str, Any]:
        """Return the sidecar, including metrics measured after the save. Raises OSError or ValueError if it is
        damaged."""
        state = read_sidecar(self.path)
        return {**state, "metrics": {**state.get("metrics", {}), **read_late_metrics(self.path)}}

    def flaws(self, *, content: bool = False) -> list[str]:
        """See `flaws`."""
        return flaws(self.path, content=content)


@frozen
class CheckpointFolder:
    """`checkpoints/` of a run."""

    root: Path

    def path(self, step: int) -> Path:
        return self.root / f"ckpt-s{step:012d}"

    def model_path(self, step: int) -> Path:
        return self.root / f"model-s{step:012d}"

    def published(self) -> list[CheckpointEntry]:
        """Return all published full checkpoints, oldest first, intact or not."""
        return self._named(FULL)

    def models(self) -> list[CheckpointEntry]:
        """Return all published checkpoints of weights alone, oldest first, intact or not."""
        return self._named(WEIGHTS)

    def entries(self) -> list[CheckpointEntry]:
        """Return the full checkpoints whose files all have their sizes, oldest first."""
        return [entry for entry in self.published() if not entry.flaws()]

    def remains(self) -> list[Path]:
        """Return the leftovers of interrupted saves and removals."""
        return sorted(path for path in self._paths() if path.suffix in (PARTIAL, REMOVING))

    def named(self, pointer: Pointer = "latest") -> str:
        """Return the name in a pointer; empty without one."""
        try:
            name = read_regular(self.root / pointer, 1000).decode().strip()
        except (OSError, UnicodeDecodeError):
            return ""
        return name if FULL.fullmatch(name) or WEIGHTS.fullmatch(name) else ""

    def alias(self, pointer: Pointer) -> Path:
        """Return the path of the alias (a second, stable name) of a pointer's single-file checkpoint."""
        return self.root / f"{pointer}{ALIAS}"

    def pointed(self, pointer: Pointer) -> CheckpointEntry | None:
        """Return a pointer's target if all its files have their sizes."""
        entry = entry_of(self.root / self.named(pointer))
        return entry if entry is not None and not entry.flaws() else None

    def at_epoch(self, number: int) -> CheckpointEntry | None:
        """Return the newest full checkpoint taken at the end of this epoch (counted from 1)."""
        return next((entry for entry in reversed(self.entries()) if entry.state().get("epoch_ended") == number), None)

    def protected(self) -> dict[str, tuple[Pointer, ...]]:
        """Return name → the pointers to it."""
        names = {pointer: self.named(pointer) for pointer in POINTERS}
        return {name: tuple(p for p in POINTERS if names[p] == name) for name in names.values() if name}

    def old(self, keep: int, *, begun: CheckpointEntry | None = None) -> list[CheckpointEntry]:
        """Return all checkpoints except the newest `keep` and those that a pointer names; `best` does not count against
        `keep` unless it is among the newest.

        begun: the checkpoint that the run resumes from. Checkpoints of later steps, which the run will save again, are
        not counted either: counting them would remove one that an uninterrupted run would still keep.
        """
        protected, counted = self.protected(), self.entries()
        if begun is not None:
            counted = [entry for entry in counted if entry.step <= begun.step]
        return [entry for entry in counted[:-keep] if entry.name not in protected and not self._aliased(entry)]

    def candidates(self) -> list[CheckpointEntry]:
        """Return the checkpoints that a run can resume from, best first: the target of `latest`, then the others,
        newest first."""
        named = self.named()
        return sorted(self.published(), key=lambda entry: (entry.name == named, entry.step), reverse=True)

    def latest(self) -> CheckpointEntry | None:
        """Return the first candidate whose files all have their sizes."""
        return next((entry for entry in self.candidates() if not entry.flaws()), None)

    def _aliased(self, entry: CheckpointEntry) -> bool:
        """Return True if an alias is still a file of this checkpoint, because of a crash before the alias moved."""
        return any(means(self.alias(pointer), entry.path / TENSORS) for pointer in POINTERS)

    def best_of(self, metric: str, *, highest: bool, besides: str) -> CheckpointEntry | None:
        """Return the full checkpoint, other than `besides`, with the least value of a metric (the greatest if
        `highest`); the oldest of equals."""
        measured = [(value, entry) for entry in self.entries() if entry.name != besides
                 if (value := entry.state().get("metrics", {}).get(metric)) is not None]  # fmt: skip
        return min(measured, key=lambda pair: -pair[0] if highest else pair[0])[1] if measured else None

    def _named(self, pattern: re.Pattern[str]) -> list[CheckpointEntry]:
        matches = [(path, pattern.fullmatch(path.name)) for path in self._paths()]
        return sorted((CheckpointEntry(path, int(m[1])) for path, m in matches if m), key=lambda entry: entry.step)

    def _paths(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []


def epoch_named(name: str) -> int | None:
    """Return 2 for `epoch-2`; None for any other name."""
    match = EPOCH.fullmatch(name)
    return int(match[1]) if match else None


def entry_of(path: Path) -> CheckpointEntry | None:
    """Return the checkpoint in a folder; None if it does not exist or its name is not a checkpoint's."""
    match = FULL.fullmatch(path.name) or WEIGHTS.fullmatch(path.name)
    return CheckpointEntry(path, int(match[1])) if match and path.is_dir() else None


def size_bytes(path: Path) -> int:
    """Return the bytes of all files in a folder, including the sidecar."""
    return sum(file.stat().st_size for file in path.iterdir())


FORMAT: Final = 2


@frozen
class Publisher:
    """Writer of a run's folder of checkpoints; one process at a time. All methods raise OSError.

    best: the metric that `best` follows, the least value or the highest if `highest`; None without one.
    """

    folder: CheckpointFolder
    best: str | None = None
    highest: bool = False

    def sweep(self) -> None:
        """Remove leftovers of interrupted saves and removals; no process may be saving here."""
        for path in self.folder.remains():
            durable.clear(path) if path.is_dir() else durable.forget(path)
        for pointer in POINTERS:
            if not self._follows(pointer):
                self._follow(pointer)

    def begin(self, final: Path) -> Path:
        """Create an empty folder to write `final` into; leftovers of an earlier attempt are removed."""
        partial = partial_of(final)
        if partial.exists():
            durable.clear(partial)
        partial.mkdir(parents=True)
        return partial

    def abandon(self, final: Path) -> None:
        """Remove a partly written checkpoint."""
        partial = partial_of(final)
        if partial.exists():
            durable.clear(partial)

    def publish(
        self, final: Path, state: dict[str, Any], checksums: dict[str, str], pointers: tuple[Pointer, ...]
    ) -> None:
        """Seal the written files, rename the folder to `final` and set pointers, in that order.

        Every file must be synced already and be listed in `checksums`.
        """
        partial = partial_of(final)
        write_sidecar(partial, state, checksums)  # also syncs the folder
        aside = self._make_way(final) if final.exists() else None
        durable.rename(partial, final)
        for pointer in pointers:
            self.point(pointer, final.name)
        if aside is not None:
            durable.clear(aside)

    def point(self, pointer: Pointer, name: str) -> None:
        """Set a pointer, then its alias if the checkpoint is a single file."""
        durable.write(self.folder.root / pointer, f"{name}\n")
        self._follow(pointer)

    def _follow(self, pointer: Pointer) -> None:
        """Bring an alias in line with its pointer."""
        alias, file = self.folder.alias(pointer), self._file(pointer)
        if file is not None:
            durable.name_also(file, alias)
        elif alias.exists():
            durable.forget(alias)

    def _follows(self, pointer: Pointer) -> bool:
        alias, file = self.folder.alias(pointer), self._file(pointer)
        return durable.means(alias, file) if file is not None else not alias.exists()

    def _file(self, pointer: Pointer) -> Path | None:
        """Return the single file of a pointer's target; None without one."""
        file = self.folder.root / self.folder.named(pointer) / TENSORS
        return file if file.is_file() else None

    def retain(self, keep: int | None, *, begun: CheckpointEntry | None = None) -> list[Path]:
        """Remove the checkpoints of `CheckpointFolder.old` (None: no full checkpoints), and weights that `model` no
        longer names.

        begun: the checkpoint that the run resumes from, which is kept. A checkpoint that another process reads, for
        example to export it, is left for the next call. Returns the removed paths.
        """
        old = self.folder.old(keep, begun=begun) if keep is not None else []
        old = [entry for entry in old if begun is None or entry.name != begun.name]
        if model := self.folder.named("model"):
            old += [entry for entry in self.folder.models() if entry.name != model]
        removed = []
        for entry in old:
            with unless_read(entry.path) as unread:
                if unread:
                    self.remove(entry.path)
                    removed.append(entry.path)
        return removed

    def remove(self, path: Path) -> None:
        durable.clear(durable.set_aside(path))

    def _make_way(self, final: Path) -> Path:
        """Free the name of a step that is saved again; its pointers move to another checkpoint or are removed."""
        for pointer in POINTERS:
            if self.folder.named(pointer) == final.name:
                other = self._other(pointer, final.name)
                if other is not None:
                    self.point(pointer, other.name)
                else:
                    durable.forget(self.folder.root / pointer)
                    self._follow(pointer)
        return durable.set_aside(final)

    def _other(self, pointer: Pointer, name: str) -> CheckpointEntry | None:
        """Return the checkpoint that a pointer moves to; None without one."""
        if pointer == "latest":
            return next((entry for entry in reversed(self.folder.entries()) if entry.name != name), None)
        if pointer != "best" or not self.best:
            return None
        return self.folder.best_of(self.best, highest=self.highest, besides=name)


def write_sidecar(folder: Path, state: dict[str, Any], checksums: dict[str, str]) -> None:
    """Seal a folder whose other files are all written. checksums: of each of these files. Raises OSError."""
    files = {name: {"bytes": (folder / name).stat().st_size, "checksum": sum} for name, sum in checksums.items()}
    content = {"format": FORMAT, **state, "files": files}
    durable.write(folder / STATE, json.dumps({**content, "seal": content_seal(content)}, indent=1))


def write_late_metrics(folder: Path, metrics: dict[str, float]) -> None:
    """Store metrics measured after the state was saved, next to the sealed files. Raises OSError."""
    durable.write(folder / LATE_METRICS, json.dumps(metrics, indent=1))


def partial_of(final: Path) -> Path:
    """Return the path where a checkpoint is written before it is published."""
    return final.with_name(final.name + durable.PARTIAL)
