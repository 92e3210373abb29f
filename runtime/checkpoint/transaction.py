"""One save from the first byte to the removal of what is too old: all ranks succeed, or all know why not.

Order: an empty folder under another name → shards and metadata → checksums, all on the disk → sidecar → the name →
pointers → retention. Whatever fails before the name leaves what was there before.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

from xtrain.planner.graph.checkpoint_names import Pointer
from xtrain.runtime.checkpoint.backend import Backend, write_tensors
from xtrain.runtime.checkpoint.checksums import file_checksums
from xtrain.runtime.checkpoint.layout import CheckpointEntry
from xtrain.runtime.checkpoint.publish import Publisher, partial_of
from xtrain.runtime.checkpoint.save_planner import CachedSavePlanner
from xtrain.runtime.files import durable
from xtrain.runtime.parallel.collective_errors import CollectiveErrors


@frozen(kw_only=True, eq=False)
class Transaction:
    """How this run saves. keep: see `Publisher.retain`."""

    publisher: Publisher
    collective: CollectiveErrors
    keep: int | None
    backend: Backend = "dcp"
    _planner: CachedSavePlanner = field(factory=CachedSavePlanner, init=False)

    def run(
        self,
        final: Path,
        tensors: dict[str, Any],
        state: dict[str, Any],
        pointers: tuple[Pointer, ...],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Save `tensors`, and on the first rank `files` by their names, as `final`; on return it is durable and named.
        Collective.

        Raises StorageFailed on all ranks alike; what was written so far is then removed as far as the disk allows.
        """
        collective, publisher = self.collective, self.publisher
        try:
            collective.first(lambda: publisher.begin(final))
            checksums = write_tensors(self.backend, tensors, partial_of(final), collective, self._planner)
            collective.first(
                lambda: publisher.publish(final, state, checksums | _written(files, partial_of(final)), pointers)
            )
        except BaseException:
            if collective.rank == 0:
                with suppress(OSError):
                    publisher.abandon(final)
            raise

    def retain(self, *, begun: CheckpointEntry | None = None) -> list[str]:
        """Remove what is too old but for what a run goes on from (`begun`); the names of what was removed. Collective.

        Raises StorageFailed on all ranks alike.
        """
        return self.collective.first(lambda: [path.name for path in self.publisher.retain(self.keep, begun=begun)])


def _written(files: Mapping[str, bytes], folder: Path) -> dict[str, str]:
    """Name → checksum of files that are on the disk when it returns. Raises OSError."""
    for name, content in files.items():
        durable.write(folder / name, content)
    return file_checksums(folder / name for name in files)
