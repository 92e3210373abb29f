"""Tokenise once: one process builds a store, from where another was interrupted, and all others wait for it."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.records.bad_records import BadRecord, BadRecordReport
from xtrain.runtime.data.stores.cache_folder import PARTIAL, STALE_SECONDS, move_aside, publish, sweep
from xtrain.runtime.data.stores.progress import DataProgress, Report
from xtrain.runtime.data.stores.store import JOURNAL, META
from xtrain.runtime.data.tokenising.claims import CLAIM, FOLDER, Claim, ClaimWatch, OtherClaim, claims_of, folders_of
from xtrain.runtime.data.tokenising.pool import encoded_units
from xtrain.runtime.data.tokenising.store_writer import StoreWriter, copy_unfinished, read_journal, tidy

if TYPE_CHECKING:
    from xtrain.runtime.data.documents.encoder import DocumentEncoder
    from xtrain.runtime.data.sources.source import DataSource

# What a crash may cost.
COMMIT_SECONDS = 5.0
POLL_SECONDS = 0.2
# An unfinished store that nobody has gone on with for so long is deleted.
UNFINISHED_SECONDS = 7 * 86_400
REMEDY = (
    "Free some space or choose another cache folder; the finished part is kept, and the build continues from there."
)


@frozen(kw_only=True)
class TokeniseJob:
    """A store that is to be built at `final`, a folder named by its key, from all units of a source."""

    final: Path
    source: "DataSource"
    encoder: "DocumentEncoder"
    dtype: np.dtype
    meta: dict[str, Any]
    """What the store is to say of itself besides."""
    is_intact: Callable[[Path], bool]
    """Whether a folder is a complete store."""
    check_unchanged: Callable[[], None]
    """Raises DataError if the source is not what it was when the key was made."""
    jobs: int | None = None
    report: Report | None = None

    @property
    def cache(self) -> Path:
        return self.final.parent

    @property
    def key(self) -> str:
        return self.final.name


def make_store(job: TokeniseJob) -> None:
    """Return once there is an intact store at `job.final`, having built it or waited for a process that did.

    An exception, also one that `report` raises, leaves what is done to the next who asks. Raises DataError if the cache
    cannot be written, for a source without documents, or more bad records than it may have, and what its units raise.
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
    """Whom to wait for; None if it is for this process to build, which it has then said.

    Of those that come at once the first by name builds. It says so and looks again: of two, one sees the other.
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
            elif not complete and not writer.go_on():
                writer.begin()
        if not complete:
            _tokenise(job, writer)
        with _writing(job.final):
            publish(claim.folder, job.final, job.is_intact)
            # Another process may have been faster, and others have left what is of no use now.
            for name in folders_of(job.cache, job.key):
                if name == claim.name or name not in claims_of(job.cache, job.key):
                    move_aside(job.cache / f"{FOLDER}{name}")
    except BaseException:
        # What is done is kept as far as it can be; the error that is under way says more than one of this.
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
        # The source deals itself out otherwise than before.
        with _writing(job.final):
            writer.begin()
        units = iter(source.units())
    writer.bad_records.check(limit)
    total, resumed = source.num_bytes(), writer.journal.done
    committed = time.monotonic()
    with closing(encoded_units(source, job.encoder, units, job.dtype, job.jobs)) as encoded:
        for unit, documents in encoded:
            # Beyond the limit nothing is written: with a higher one it can be gone on from here.
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
        counts = f"{len(source.files)} files, {bad.count} bad records" + (f":{bad.listed}" if bad.count else "")
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
    """Put what others have left unfinished into this process's folder, the longest there is; True if it is complete."""
    # Folders before claims: a folder without a claim has then been left for good.
    folders = folders_of(job.cache, job.key)
    rivals = {rival.name: rival for rival in watch.rivals()}
    live = {name for name, rival in rivals.items() if rival.alive}

    def progress(name: str) -> int:
        if job.is_intact(folders[name]):
            return 1 << 62
        journal = read_journal(folders[name], job.key)
        return 0 if journal is None else journal.units

    for name in sorted((name for name in folders if name not in live), key=progress, reverse=True):
        # To a complete one nothing is written any more, whatever has become of its process.
        if name in rivals and not rivals[name].gone and not job.is_intact(folders[name]):
            if not claim.folder.exists() and progress(name):
                _copy(job, folders[name], claim.folder)
            continue
        with suppress(FileNotFoundError):  # someone else was faster
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
