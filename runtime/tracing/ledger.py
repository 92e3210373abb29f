"""What is alive in the course of a step: every storage from the operator that makes it to its end."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


class Ledger:
    """Bytes of storages over time. A storage is known by a number, and belongs to the category it was last given.

    Time is counted in changes: `now` after a change is one more than before it.
    """

    def __init__(self) -> None:
        self._number_of: dict[int, int] = {}  # by address of the storage, as long as it lives
        self._bytes: dict[int, int] = {}  # of what is alive, by number
        self._references: dict[int, Any] = {}  # by address, likewise
        self._changes: list[tuple[int, int]] = []  # (number, bytes more)
        self._category: dict[int, str] = {}
        self._start = ""
        self._count = 0

    @property
    def now(self) -> int:
        return len(self._changes)

    def see(self, tensor: Tensor) -> None:
        """Take note of the storage of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._number_of:
            self._begin(storage, address)

    def assign(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Say what storages are for; those that are not known are left out.

        It holds from the beginning of a storage, or from now on where something else was said before.
        """
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            number = self._number_of.get(address)
            if number is None or self._category.get(number) == category:
                continue
            if self._category.get(number, self._start) != self._start:
                number = self._renumber(address)
            self._category[number] = category

    def begin(self, category: str) -> None:
        """Count from here: what is alive now is the start, and belongs to `category` until something else is said."""
        self._changes = list(self._bytes.items())
        self._start, self._category = category, dict.fromkeys(self._bytes, category)

    def over_time(self, category: str | None = None, *, but: Sequence[str] = ()) -> list[int]:
        """Bytes alive after every change: of one category (`""`: of none), or of all `but` some."""
        kinds = (self._category.get(number, "") for number, _ in self._changes)
        counts = [kind == category if category is not None else kind not in but for kind in kinds]
        return list(accumulate(size * count for (_, size), count in zip(self._changes, counts, strict=True)))

    @contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """FSDP gives storages their memory and takes it, which is no operator."""
        original: Callable[[UntypedStorage, int], Any] = UntypedStorage.resize_

        def resize_(storage: UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._resized(storage)
            return result

        with ExitStack() as stack:
            stack.callback(setattr, UntypedStorage, "resize_", original)
            UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
            yield

    def _begin(self, storage: UntypedStorage, address: int) -> None:
        self._count += 1
        number, size = self._count, storage.nbytes()
        self._number_of[address], self._bytes[number] = number, size
        self._changes.append((number, size))

        def end(_: Any) -> None:
            last = self._number_of.pop(address)
            del self._references[address]
            self._changes.append((last, -self._bytes.pop(last)))

        self._references[address] = weakref.ref(storage, end)

    def _renumber(self, address: int) -> int:
        """Let a storage count as another one from now on."""
        self._count += 1
        old, new = self._number_of[address], self._count
        size = self._bytes.pop(old)
        self._number_of[address], self._bytes[new] = new, size
        self._changes += [(old, -size), (new, size)]
        return new

    def _resized(self, storage: UntypedStorage) -> None:
        number = self._number_of.get(storage._cdata)
        if number is not None:
            size = storage.nbytes()
            self._changes.append((number, size - self._bytes[number]))
            self._bytes[number] = size


def pieces(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """The local parts of tensors, without those that are not there."""
    # As they are: `to_local` would make a view of each.
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors if t is not None]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
