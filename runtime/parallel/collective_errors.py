"""What ranks do together around a checkpoint: if one fails, all fail alike, and all say why."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from attrs import frozen
from torch.distributed.checkpoint.api import CheckpointException

from xtrain.runtime.errors import StorageFailed
from xtrain.runtime.state import Rank

T = TypeVar("T")
# The slowest rank may be writing for so long while the others wait for it.
TIMEOUT = timedelta(hours=2)


@frozen(eq=False)
class CollectiveErrors:
    """The ranks of a run, over a group of their own: what a thread says here cannot be taken for what a step says."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, rank: Rank) -> "CollectiveErrors":
        """Collective."""
        if rank.world_size == 1:
            return cls(rank.rank, 1, None)
        group = dist.new_group(backend="gloo", timeout=TIMEOUT, group_desc="saving")
        assert isinstance(group, dist.ProcessGroup)
        return cls(rank.rank, rank.world_size, group)

    def all(self, action: Callable[[], T]) -> list[T]:
        """Do something on every rank; what each got, by rank. Raises StorageFailed on all if it failed on any."""
        outcomes = [_tried(action)]
        if self.group is not None:
            own, outcomes = outcomes[0], [("", None)] * self.size
            dist.all_gather_object(outcomes, own, group=self.group)
        errors = dict.fromkeys(error for error, _ in outcomes if error)  # the same of many ranks is said once
        if errors:
            raise StorageFailed("; ".join(errors))
        return [result for _, result in outcomes]  # type: ignore[misc]

    def first(self, action: Callable[[], T]) -> T:
        """Do something on the first rank alone; what it got, on all. Raises StorageFailed on all if it failed."""
        outcome: list[tuple[str, T | None]] = [_tried(action) if self.rank == 0 else ("", None)]
        if self.group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        error, result = outcome[0]
        if error:
            raise StorageFailed(error)
        return result  # type: ignore[return-value]


def _tried(action: Callable[[], T]) -> tuple[str, T | None]:
    """(why it failed, what it gave). Only what comes from outside is caught: disks and what is read from them."""
    try:
        return "", action()
    except OSError as error:
        return reason(error), None
    except CheckpointException as error:
        if not all(isinstance(each, OSError) for each, _ in error.failures.values()):
            raise  # on all ranks, which have it from one another
        return "; ".join(dict.fromkeys(reason(each) for each, _ in error.failures.values())), None


def reason(error: BaseException) -> str:
    """An error of a file in a few words, with the file where it is known."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
