"""Keys and values of samples in pages: a sample gets them as it grows, and gives them back when it ends.

Layers that see equally far have the same pages, each a tensor of its own with all of them. Where there is a window the
positions of a sample go round in as many pages as the window touches. Samples with the same prompt have its pages
together; who writes into one of these gets a copy of it first.
Page 0 is zero: it is read where a row has fewer pages than another. All pages are zero before they are written, as
what nothing sees is multiplied by 0.
Shapes: B rows, K key/value heads of this rank, S positions of a forward, P pages of a row, L = P · PAGE positions that
are read, A head width, N positions that are written.
"""

from collections.abc import Hashable, Mapping, Sequence
from math import prod

import torch
from attrs import define, field
from torch import Tensor, nn

from xtrain.planner.serving.pages import PAGE, window_pages


@define(eq=False)
class Pages:
    """Those of layers with one window. free: pages without a sample; users: how many samples have each. tables: the
    pages of each sample; position p is in page p // PAGE of its table, counted round where there is a window. tensors:
    of each layer [K, pages, PAGE, A], so that a row is read page by page."""

    window: int | None
    count: int
    free: list[int] = field(init=False)
    users: list[int] = field(init=False)
    tables: dict[Hashable, list[int]] = field(factory=dict)
    tensors: dict[nn.Module, tuple[Tensor, ...]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.free, self.users = list(range(self.count, 0, -1)), [0] * (self.count + 1)

    def reserve(self, sample: Hashable, position: int) -> bool:
        """Let a position have a page that no other sample has; False where none is free. Those before it have one."""
        table = self.tables.setdefault(sample, [])
        place = self.place(position)
        if place < len(table) and self.users[table[place]] == 1:
            return True
        if not self.free:
            return False
        page = self.free.pop()
        self.users[page] = 1
        before = table[place] if place < len(table) else 0
        for tensors in self.tensors.values():
            for tensor in tensors:
                tensor[:, page] = tensor[:, before]
        if before:
            self.users[before] -= 1
            table[place] = page
        else:
            table.append(page)
        return True

    def share(self, sample: Hashable, other: Hashable) -> None:
        """Let a new sample have the pages of another."""
        self.tables[sample] = list(self.tables[other])
        for page in self.tables[sample]:
            self.users[page] += 1

    def release(self, sample: Hashable) -> None:
        for page in self.tables.pop(sample, ()):
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)

    def place(self, position: int) -> int:
        """In the table of a sample."""
        number = position // PAGE
        return number if self.window is None else number % window_pages(self.window)

    def table(self, samples: Sequence[Hashable]) -> Tensor:
        """int64 [B, P], their pages, and behind them page 0."""
        tables = [self.tables[sample] for sample in samples]
        most = max(map(len, tables))
        return torch.tensor([[*table, *[0] * (most - len(table))] for table in tables])

    def positions(self, lengths: Sequence[int], pages: int) -> Tensor:
        """int64 [B, L]: the newest position that may be in each place of so many pages of texts of these lengths; below
        0 where there was none."""
        place_L, last_B1 = torch.arange(pages * PAGE), torch.tensor(lengths)[:, None] - 1
        if self.window is None:
            return place_L.expand(len(lengths), -1)
        around = window_pages(self.window)
        back_BL = (last_B1 // PAGE - place_L // PAGE) % around
        return (last_B1 // PAGE - back_BL) * PAGE + place_L % PAGE

    def of(self, layer: nn.Module, new: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The pages of each tensor of a layer. new: such as are kept, [B, K, S, A]."""
        if layer not in self.tensors:
            self.tensors[layer] = tuple(x.new_empty(x.shape[1], self.count + 1, PAGE, x.shape[3]) for x in new)
            used = [0, *(page for page, users in enumerate(self.users) if users)]
            for tensor in self.tensors[layer]:
                tensor[:, used] = 0
        return self.tensors[layer]


@define(eq=False)
class SamplePages:
    """The pages of all layers of this rank, by their windows, and the samples that have some, in the order in which
    they came. read: memory for what one layer reads."""

    of_window: dict[int | None, Pages]
    _came: dict[Hashable, None] = field(factory=dict)
    _read: dict[int, Tensor] = field(factory=dict)

    @classmethod
    def with_counts(cls, counts: Mapping[int | None, int]) -> "SamplePages":
        return cls({window: Pages(window, count) for window, count in counts.items()})

    def __contains__(self, sample: Hashable) -> bool:
        return sample in self._came

    @property
    def newest(self) -> Hashable:
        return next(reversed(self._came))

    def take(self, sample: Hashable, length: int) -> bool:
        """Give a new sample pages for so many positions, unless there are too few: then it gets none."""
        self._came[sample] = None
        if all(self.reserve(sample, position) for position in range(0, length, PAGE)):
            return True
        self.release(sample)
        return False

    def share(self, sample: Hashable, other: Hashable) -> None:
        """Let a new sample have the pages of another."""
        self._came[sample] = None
        for pages in self.of_window.values():
            pages.share(sample, other)

    def reserve(self, sample: Hashable, position: int) -> bool:
        """Let a sample have pages of its own for a position; False where there are too few."""
        return all(pages.reserve(sample, position) for pages in self.of_window.values())

    def spare(self, count: int) -> bool:
        """Whether so many pages of each kind are free."""
        return all(len(pages.free) >= count for pages in self.of_window.values())

    def room(self, number: int, like: Tensor, *shape: int) -> Tensor:
        """Memory for the tensor of a layer with a number, until the next layer asks for it."""
        size = prod(shape)
        if number not in self._read or len(self._read[number]) < size:
            self._read[number] = like.new_empty(size)
        return self._read[number][:size].view(shape)

    def release(self, sample: Hashable) -> None:
        del self._came[sample]
        for pages in self.of_window.values():
            pages.release(sample)


@define(eq=False)
class PagedRows:
    """The pages of some samples as the cache of one forward. lengths: their positions, with those of this forward.
    filled: 0: of prompts all positions, which end at the same place; else of each sample the newest one."""

    pages: SamplePages
    samples: Sequence[Hashable]
    lengths: Sequence[int]
    filled: int
    length: int = field(init=False)
    _written: dict[int | None, tuple[Tensor, ...]] = field(factory=dict, init=False)
    _tables: dict[int | None, Tensor] = field(factory=dict, init=False)
    _seen: dict[int | None, Tensor | None] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.length = max(self.lengths)

    def extended(self, layer: nn.Module, *new: Tensor, window: int | None = None) -> Sequence[Tensor]:
        """As of `LayerCache`: of prompts what is given; else [B, K, L, A], all pages of every row, until the next layer
        asks for its own."""
        pages, rows = self.pages.of_window[window], len(self.samples)
        if window not in self._written:  # the first layer that sees so far
            self._look(pages, new[0].shape[2], new[0].device)
        row_N, at_N, slot_N = self._written[window]
        kept = pages.of(layer, new)
        for tensor, x in zip(kept, new, strict=True):
            tensor.flatten(1, 2)[:, slot_N] = x.transpose(1, 2)[row_N, at_N].transpose(0, 1)
        if not self.filled:
            return new
        table, found = self._tables[window], list[Tensor]()
        for number, tensor in enumerate(kept):
            by_page = tensor.flatten(2)
            out = self.pages.room(number, tensor, len(tensor), len(table), by_page.shape[2])
            torch.index_select(by_page, 1, table, out=out)
            found.append(out.view(len(tensor), rows, -1, tensor.shape[3]).transpose(0, 1))
        return found

    def seen(self, count: int, window: int | None) -> Tensor | None:
        return self._seen[window]

    def _look(self, pages: Pages, size: int, device: torch.device) -> None:
        """Rows, places among the `size` of a row, and slots of what layers with a window write; and of what they read
        pages, and what is seen of these."""
        table_BP, length_B1 = pages.table(self.samples), torch.tensor(self.lengths)[:, None]
        position_BS = torch.arange(-size, 0) + length_B1
        stays_BS = position_BS >= 0
        if pages.window is not None:  # where positions go round, the newest ones alone
            stays_BS &= position_BS >= length_B1 - window_pages(pages.window) * PAGE
        row_N, at_N = stays_BS.nonzero(as_tuple=True)
        position_N = position_BS[stays_BS]
        place_N = position_N // PAGE
        if pages.window is not None:
            place_N %= window_pages(pages.window)
        slot_N = table_BP[row_N, place_N] * PAGE + position_N % PAGE
        self._written[pages.window] = tuple(each.to(device) for each in (row_N, at_N, slot_N))
        position_BL = pages.positions(self.lengths, table_BP.shape[1])
        seen_BL = (position_BL >= 0) & (position_BL < length_B1)
        if pages.window is not None:
            seen_BL &= position_BL >= length_B1 - pages.window
        self._tables[pages.window] = table_BP.flatten().to(device)
        self._seen[pages.window] = None if seen_BL.all() else seen_BL[:, None, None].to(device)
