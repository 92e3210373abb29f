"""Building of a token store by one process, which resumes interrupted work, while all others wait for the store.

Claims decide which of many processes on many machines builds a store, and which one takes over when it is lost. They
use files instead of locks, because shared file systems often have no working locks. Each process puts a claim next to
the stores, a small file that it rewrites every few seconds; the building process has a folder of the same name. If two
built at the same time, they would write two equal stores, and the first would stay: claims save work, and correctness
never depends on them.

A folder without a claim, or with the claim of a process that has certainly ended, belongs to the process that renames
it. A folder whose claim is only overdue may still be written to (its process is stopped, or its machine is out of
reach), so it is copied.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from attrs import define, field, frozen

from xtrain.regular_files import read_json
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.files import PARTIAL_PREFIX as PARTIAL
from xtrain.runtime.base.files import STALE_SECONDS, move_aside, publish, sweep
from xtrain.runtime.feed.records import BadRecord, BadRecordReport
from xtrain.runtime.feed.token_store import JOURNAL, META, DataProgress, Report
from xtrain.runtime.feed.tokenizing.store_writer import StoreWriter, copy_unfinished, read_journal, tidy
from xtrain.runtime.feed.tokenizing.workers import encoded_units

if TYPE_CHECKING:
    from xtrain.runtime.feed.documents import DocumentEncoder
    from xtrain.runtime.feed.sources.source import DataSource


CLAIM = ".claim-"
FOLDER = ".building-"
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0
# Age of a claim, relative to this process's own by the file system's clock, from which it counts as overdue at once.
OLD_SECONDS = 600.0


def claims_of(cache: Path, key: str) -> dict[str, Path]:
    """Return the claims on a store by name, the earliest first."""
    return {path.name.removeprefix(CLAIM): path for path in sorted(cache.glob(f"{CLAIM}{key}-*"))}


def folders_of(cache: Path, key: str) -> dict[str, Path]:
    """Return the folders in which a store is, or was, built, by the name of the claim."""
    return {path.name.removeprefix(FOLDER): path for path in sorted(cache.glob(f"{FOLDER}{key}-*"))}


@define(eq=False)
class Claim:
    """Claim of this process. Its file exists and is rewritten from `put` to `withdraw`."""

    cache: Path
    key: str
    name: str = field(init=False)
    _beat: int = field(default=0, init=False)
    _builds: bool = field(default=False, init=False)
    _over: threading.Event = field(factory=threading.Event, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        # Names sort by the start of their process.
        self.name = f"{self.key}-{time.time_ns():020d}-{uuid4().hex[:8]}"

    @property
    def path(self) -> Path:
        return self.cache / f"{CLAIM}{self.name}"

    @property
    def folder(self) -> Path:
        """Folder in which this process builds."""
        return self.cache / f"{FOLDER}{self.name}"

    def put(self) -> None:
        """Create the claim. Raises OSError if it cannot be written."""
        self._write()
        threading.Thread(target=self._keep_fresh, name="claim", daemon=True).start()

    def says(self, *, builds: bool) -> None:
        """Record in the claim whether this process builds. Raises OSError."""
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
    """Claim of another process."""

    name: str
    builder: str
    """As `process 17 on node3`."""
    builds: bool
    gone: bool
    """True if its process has certainly ended."""
    silent: bool
    """True if it is overdue: its process may have ended."""

    @property
    def alive(self) -> bool:
        return not self.gone and not self.silent


@define
class ClaimWatch:
    """Observer of the other claims on a store, independent of other machines' clocks."""

    mine: Claim
    _heard: dict[str, tuple[object, float]] = field(factory=dict, init=False)

    def rivals(self) -> list[OtherClaim]:
        others = []
        for name, path in claims_of(self.mine.cache, self.mine.key).items():
            if name != self.mine.name:
                with suppress(FileNotFoundError):
                    others.append(self._rival(name, path))
        return others

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
    """Return a unique name of this process: boot of its machine, container, process number, start time."""
    return _process("self")


def has_ended(process: object) -> bool:
    """Return True if a process has certainly ended; False for other machines and containers."""
    own = this_process()
    if own is None or not isinstance(process, list) or len(process) != 4 or process[:2] != own[:2]:
        return False
    return _process(str(process[2])) != process


def _process(number: str) -> list[str] | None:
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8", errors="replace").strip()
        container = str(Path("/proc/self/ns/pid").readlink())  # process numbers are unique within one
    except OSError:
        return None
    try:
        # `17 (name) S …`: the name of the program may contain blanks and brackets.
        first, rest = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)
        state, *numbers = rest.split()
        return [machine, container, first.split()[0], "ended" if state in "ZX" else numbers[18]]
    except (OSError, ValueError, IndexError):
        return [machine, container, number, "ended"]


# Work that a crash may cost.
COMMIT_SECONDS = 5.0
POLL_SECONDS = 0.2
# Age from which an unfinished store that no process resumed is deleted.
UNFINISHED_SECONDS = 7 * 86_400
REMEDY = (
    "Free some space or choose another cache folder; the finished part is kept, and the build continues from there."
)


@frozen(kw_only=True)
class TokeniseJob:
    """Job to build a store at `final`, a folder named by its key, from all units of a source."""

    final: Path
    source: "DataSource"
    encoder: "DocumentEncoder"
    dtype: np.dtype
    meta: dict[str, Any]
    """Further metadata of the store."""
    is_intact: Callable[[Path], bool]
    """Returns True if a folder is a complete store."""
    check_unchanged: Callable[[], None]
    """Raises DataError if the source has changed since the key was made."""
    jobs: int | None = None
    report: Report | None = None

    @property
    def cache(self) -> Path:
        return self.final.parent

    @property
    def key(self) -> str:
        return self.final.name


def make_store(job: TokeniseJob) -> None:
    """Wait until an intact store exists at `job.final`, built by this process or another.

    After an exception, also of `report`, the finished part stays for the next process. Raises DataError if the cache
    cannot be written, for a source without documents, for too many bad records, and what its units raise.
    """
    claim = Claim(job.cache, job.key)
    with _writing(job.final):
        job.cache.mkdir(parents=True, exist_ok=True)
        _sweep(job.cache)
        claim.put()
    try:
        watch = ClaimWatch(claim)
        while not job.is_intact(job.final):
            rival = _rival(claim, watch, job.final)
            if rival is None:
                _build(job, claim, watch)
                return
            _report_waiting(job, rival)
            time.sleep(POLL_SECONDS)
    finally:
        claim.withdraw()


def _rival(claim: Claim, watch: ClaimWatch, final: Path) -> OtherClaim | None:
    """Return the process to wait for; None if this one builds, which its claim then says.

    Of simultaneous processes the first by name builds. Each announces it and looks again: of two, one sees the other.
    """
    for rival in watch.rivals():
        if rival.alive and (rival.builds or rival.name < claim.name):
            return rival
    with _writing(final):
        claim.says(builds=True)
        for rival in watch.rivals():
            if rival.alive and rival.name < claim.name:
                claim.says(builds=False)
                return rival
    return None


def _report_waiting(job: TokeniseJob, rival: OtherClaim) -> None:
    if job.report is None:
        return
    journal = read_journal(job.cache / f"{FOLDER}{rival.name}", job.key)
    numbers: dict[str, int] = {}
    if journal is not None:
        numbers = {"done": journal.done, "documents": journal.documents, "tokens": journal.tokens}
        numbers["bad_records"] = journal.bad_records
    job.report(DataProgress(stage="waiting", builder=rival.builder, total=job.source.num_bytes(), **numbers))


def _build(job: TokeniseJob, claim: Claim, watch: ClaimWatch) -> None:
    writer = StoreWriter(claim.folder, job.key, job.dtype)
    try:
        with _writing(job.final):
            complete = _take_over(job, claim, watch)
            if not complete and not (claim.folder / JOURNAL).exists():
                claim.folder.mkdir(exist_ok=True)
                writer.begin()
            elif not complete and not writer.resume():
                writer.begin()
        if not complete:
            _tokenise(job, writer)
        with _writing(job.final):
            publish(claim.folder, job.final, job.is_intact)
            # Another process may have been faster, and others have left files that are now useless.
            for name in folders_of(job.cache, job.key):
                if name == claim.name or name not in claims_of(job.cache, job.key):
                    move_aside(job.cache / f"{FOLDER}{name}")
    except BaseException:
        # Keep the finished part if possible; the current error matters more than one here.
        with suppress(OSError):
            writer.commit()
            if not (claim.folder / JOURNAL).exists() and not (claim.folder / META).exists():
                move_aside(claim.folder)
        raise
    finally:
        writer.close()


def _tokenise(job: TokeniseJob, writer: StoreWriter) -> None:
    source, limit = job.source, job.source.bad_record_limit
    units = iter(source.units())
    if not writer.knows(unit.size for unit in islice(units, writer.journal.units)):
        # The source has other units than before.
        with _writing(job.final):
            writer.begin()
        units = iter(source.units())
    writer.bad_records.check(limit)
    total, resumed = source.num_bytes(), writer.journal.done
    committed = time.monotonic()
    with closing(encoded_units(source, job.encoder, units, job.dtype, job.jobs)) as encoded:
        for unit, documents in encoded:
            # Nothing is written beyond the limit: with a higher one the build can resume from here.
            _with(writer.bad_records, documents.bad).check(limit)
            with _writing(job.final):
                writer.append(unit.size, documents)
                if time.monotonic() - committed >= COMMIT_SECONDS:
                    writer.commit()
                    committed = time.monotonic()
            if job.report is not None:
                now = writer.journal
                job.report(
                    DataProgress(
                        stage="tokens", done=now.done, total=total, documents=now.documents, tokens=now.tokens,
                        bad_records=now.bad_records, resumed=resumed,
                    )
                )  # fmt: skip
    if not writer.journal.documents:
        bad = writer.bad_records
        writer.begin()  # nothing to keep
        counts = f"{source.num_files} files, {bad.count} bad records" + (f":{bad.listed}" if bad.count else "")
        path = source.files[0] if source.files else None
        raise DataError(f"source `{source.kind}` has no documents: {counts}", path=path)
    try:
        job.check_unchanged()
    except DataError:
        writer.begin()
        raise
    with _writing(job.final):
        writer.finish(**job.meta)


def _with(report: BadRecordReport, bad: tuple[BadRecord, ...]) -> BadRecordReport:
    for record in bad:
        report = report.including(record)
    return report


def _take_over(job: TokeniseJob, claim: Claim, watch: ClaimWatch) -> bool:
    """Move the longest unfinished store of others into this process's folder; return True if it is complete."""
    # Folders before claims: a folder without a claim is then certainly abandoned.
    folders = folders_of(job.cache, job.key)
    rivals = {rival.name: rival for rival in watch.rivals()}
    live = {name for name, rival in rivals.items() if rival.alive}

    def progress(name: str) -> int:
        if job.is_intact(folders[name]):
            return 1 << 62
        journal = read_journal(folders[name], job.key)
        return 0 if journal is None else journal.units

    for name in sorted((name for name in folders if name not in live), key=progress, reverse=True):
        # A complete one is not written any more, even if its process runs.
        if name in rivals and not rivals[name].gone and not job.is_intact(folders[name]):
            if not claim.folder.exists() and progress(name):
                _copy(job, folders[name], claim.folder)
            continue
        with suppress(FileNotFoundError):  # another process was faster
            if claim.folder.exists() or not progress(name):
                move_aside(folders[name])
            else:
                folders[name].rename(claim.folder)
        (job.cache / f"{CLAIM}{name}").unlink(missing_ok=True)
    for name, rival in rivals.items():
        if rival.gone:
            (job.cache / f"{CLAIM}{name}").unlink(missing_ok=True)
    if (claim.folder / META).exists() and job.is_intact(claim.folder):
        tidy(claim.folder)
        return True
    return False


def _copy(job: TokeniseJob, folder: Path, own: Path) -> None:
    copied = 0

    def report(count: int) -> None:
        nonlocal copied
        copied += count
        if job.report is not None:
            job.report(DataProgress(stage="files", done=copied))

    own.mkdir()
    if not copy_unfinished(folder, own, job.key, report):
        move_aside(own)


def _sweep(cache: Path) -> None:
    sweep(cache, f"{PARTIAL}*", STALE_SECONDS)
    for pattern in (f"{CLAIM}*", f"{FOLDER}*"):
        sweep(cache, pattern, UNFINISHED_SECONDS)


@contextmanager
def _writing(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write the token store: {error}", path=final, remedy=REMEDY) from error
