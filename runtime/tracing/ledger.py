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
        self._like: dict[int, int] = {}  # of storages that are made up, the one whose category they have
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

    @property
    def newest(self) -> int:
        """The number of the storage that came last; those of later ones are higher."""
        return self._count

    def since(self, time: int) -> list[tuple[int, int]]:
        """The changes from `time` on: (number of the storage, bytes more)."""
        return self._changes[time:]

    def number_of(self, tensor: Tensor) -> int | None:
        """That of its storage, if it is known."""
        return self._number_of.get(tensor.untyped_storage()._cdata)

    def alive(self) -> dict[int, int]:
        """Bytes of what is alive, by number."""
        return {number: size for number, size in self._bytes.items() if size}

    def made_up(self, kind: str | int) -> int:
        """The number of a storage that nobody makes: of a category, or of that which another one will have."""
        self._count += 1
        self._set_kind(self._count, kind)
        return self._count

    def _set_kind(self, number: int, kind: str | int) -> None:
        if isinstance(kind, int):
            self._like[number] = kind
        else:
            self._category[number] = kind

    def has_kind(self, tensor: Tensor, kind: str | int) -> None:
        """Let the storage of a tensor be of a category, or of that of another storage."""
        number = self.number_of(tensor)
        assert number is not None
        self._set_kind(number, kind)

    def change(self, number: int, size: int) -> None:
        """What nobody does: a storage begins, ends, or gets another size."""
        self._changes.append((number, size))
        self._bytes[number] = self._bytes.get(number, 0) + size

    def kind_of(self, number: int) -> str:
        """The category of a storage, by what has been said so far."""
        return self._category.get(self._like.get(number, number), "")

    def begin(self, category: str) -> None:
        """Count from here: what is alive now is the start, and belongs to `category` until something else is said."""
        self._changes = list(self._bytes.items())
        self._start, self._category = category, dict.fromkeys(self._bytes, category)

    def over_time(self, category: str | None = None, *, but: Sequence[str] = ()) -> list[int]:
        """Bytes alive after every change: of one category (`""`: of none), or of all `but` some."""
        kinds = {number: self.kind_of(number) for number in {number for number, _ in self._changes}}
        counts = {n: kind == category if category is not None else kind not in but for n, kind in kinds.items()}
        return list(accumulate(size * counts[number] for number, size in self._changes))

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
