"""The token store of a dataset: opened where there is one, else built; its name is a digest of all it depends on."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen

from xtrain.planner.canonical import DATA, digest
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.stores.digests import FileDigests, remembering
from xtrain.runtime.data.stores.progress import DataProgress, Report
from xtrain.runtime.data.tokenising.tokenise import TokeniseJob, make_store

if TYPE_CHECKING:
    from xtrain.runtime.data.documents.encoder import DocumentEncoder
    from xtrain.runtime.data.sources.source import DataSource
from xtrain.runtime.data.stores.store import FORMAT, TokenStore, open_named, open_store

INDEX = "files.json"
"""Beside the stores: what is known of the content of files."""


@frozen(kw_only=True)
class StoreIdentity:
    """The name of a store, and everything it depends on."""

    covers: dict[str, Any] = field()
    """JSON values: where one of them is another, so is the key."""
    contents: tuple[str, ...] = ()
    """What else `content` in `covers` may have been for the same data."""

    @property
    def key(self) -> str:
        """Hex name of the store."""
        return _key(self.covers)

    @property
    def names(self) -> tuple[str, ...]:
        """The key, and other names that a store of the same data may have."""
        return (self.key, *(_key({**self.covers, "content": content}) for content in self.contents))


def _key(covers: dict[str, Any]) -> str:
    return digest(covers, DATA, size=16)


def identify(
    source: "DataSource", encoder: "DocumentEncoder", cache: Path, progress: Report | None = None
) -> StoreIdentity:
    """What the store of a source and an encoder depends on; reads each file once, and again when it has changed.

    The limit on bad records is not in it: it decides whether a store may be used, not what is in it.
    Raises DataError if a file cannot be read.
    """

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(DataProgress(stage="files", done=done, total=total))

    digests = FileDigests(cache / INDEX)
    with remembering(digests):
        digests.learn(source.files, report)
        content, *others = source.fingerprints()
    return StoreIdentity(
        covers={
            "code": f"format {FORMAT}",
            "source": source.kind,
            "fields": list(source.reads.fields),
            # Of the files, and of the options of the source as far as they decide what is read.
            "content": content,
            **encoder.covers,
        },
        contents=tuple(others),
    )


def build_store(
    source: "DataSource",
    encoder: "DocumentEncoder",
    cache: Path,
    *,
    jobs: int | None = None,
    progress: Report | None = None,
    identity: StoreIdentity | None = None,
) -> TokenStore:
    """Open the store under `cache/<key>/`, or under another name of the same data; if there is none, or it is damaged,
    it is built first.

    `jobs` processes tokenise (None: as many as there are cores, unless there is little to do; 1: this one alone). Any
    number of processes may call this at once: one builds, the others wait, and go on with the work if it ends before.
    An unfinished build is resumed. What `progress` raises ends this call and nothing else. It may be called in any
    thread. `identity` saves looking at the files again.
    Raises DataError for bad records beyond the source's limit, for a source without documents, for files that change
    meanwhile, or if the cache cannot be written; and whatever a user's own source raises.
    """
    identity = identity or identify(source, encoder, cache, progress)
    final = cache / identity.key
    store = open_named(cache, identity.names)
    if store is None:

        def check_unchanged() -> None:
            if identify(source, encoder, cache) != identity:
                remedy = "Wait until they are complete, and start again."
                raise DataError(
                    "files of this source have changed while they were read", path=source.base, remedy=remedy
                )

        make_store(
            TokeniseJob(
                final=final,
                source=source,
                encoder=encoder,
                dtype=np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32),
                meta={"files": len(source.files), "covers": identity.covers},
                is_intact=lambda folder: open_store(folder) is not None,
                check_unchanged=check_unchanged,
                jobs=jobs,
                report=progress,
            )
        )
        store = open_named(cache, identity.names)
    if store is None:
        raise DataError(
            "the token store was damaged while it was written", path=final, remedy="Check this file system."
        )
    store.bad_records.check(source.bad_record_limit)
    return store
