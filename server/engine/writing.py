"""Samples being generated, and the pages of keys, values and states of these and of prefixes of later ones."""

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import torch
from attrs import define, field
from torch import Tensor, nn

from xtrain.plan.graph import PAGE, STATES, window_pages
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.texts import Sampling

# Positions of a prefix for each position of the rest. With dim 256 on a CPU, texts of 512 and 1,920 positions took as
# long as a rest of a sixth to a fifteenth of them.
GAIN: Final = 16


@define(eq=False)
class Pages:
    """Pages of layers with one window. free: unused pages; users: samples that use each. tables: the pages of each
    sample; position p is in page p // PAGE of its table, modulo the window's pages. tensors: of each layer [K,
    pages, PAGE, A], so that a row is read page by page; of layers with states [1, pages, …]."""

    window: int | None
    count: int
    free: list[int] = field(init=False)
    users: list[int] = field(init=False)
    tables: dict[Hashable, list[int]] = field(factory=dict)
    tensors: dict[nn.Module, tuple[Tensor, ...]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.free, self.users = list(range(self.count, 0, -1)), [0] * (self.count + 1)

    def reserve(self, sample: Hashable, position: int) -> bool:
        """Give a position a page that no other sample uses; return False if none is free. Earlier positions already
        have pages."""
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

    def share(self, sample: Hashable, other: Hashable, pages: int | None = None) -> None:
        """Let a new sample share the pages of another, or the first `pages` of them."""
        self.tables[sample] = self.tables[other][:pages]
        for page in self.tables[sample]:
            self.users[page] += 1

    def clear(self, sample: Hashable, position: int) -> None:
        """Write zeros from a position to the end of its page, where another text may have left NaN."""
        page = self.tables[sample][self.place(position)]
        for tensors in self.tensors.values():
            for tensor in tensors:
                tensor[:, page, position % PAGE :] = 0

    def copy(self, sample: Hashable) -> bool:
        """Give a sample copies of the pages that it shares; return False if too few are free."""
        return all(self.reserve(sample, place * PAGE) for place in range(len(self.tables[sample])))

    def release(self, sample: Hashable) -> None:
        for page in self.tables.pop(sample, ()):
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)

    def place(self, position: int) -> int:
        """Return the index in a sample's table."""
        number = position // PAGE
        return number if self.window is None else number % window_pages(self.window)

    def table(self, samples: Sequence[Hashable]) -> Tensor:
        """Return the samples' pages, int64 [B, P], padded with page 0."""
        tables = [self.tables[sample] for sample in samples]
        most = max(map(len, tables))
        return torch.tensor([[*table, *[0] * (most - len(table))] for table in tables])

    def positions(self, lengths: Sequence[int], pages: int) -> Tensor:
        """Return int64 [B, L]: the newest position that each place of `pages` pages may hold, for texts of these
        lengths; negative without one."""
        place_L, last_B1 = torch.arange(pages * PAGE), torch.tensor(lengths)[:, None] - 1
        if self.window is None:
            return place_L.expand(len(lengths), -1)
        around = window_pages(self.window)
        back_BL = (last_B1 // PAGE - place_L // PAGE) % around
        return (last_B1 // PAGE - back_BL) * PAGE + place_L % PAGE

    def of(self, layer: nn.Module, new: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the pages of each tensor of a layer. new: tensors like the stored ones, [B, K, S, A]."""
        if layer not in self.tensors:
            self.tensors[layer] = tuple(x.new_empty(x.shape[1], self.count + 1, PAGE, x.shape[3]) for x in new)
            used = [0, *(page for page, users in enumerate(self.users) if users)]
            for tensor in self.tensors[layer]:
                tensor[:, used] = 0
        return self.tensors[layer]

    def spare(self, count: int) -> bool:
        """Return True if `count` pages are free; of states as many as samples need that share one."""
        if self.window == STATES:
            count = sum(max(0, users - 1) for users in self.users)
        return len(self.free) >= count


@define(eq=False)
class Prefix:
    """Computed text whose pages are kept for texts that begin with it. weights: used to compute it."""

    weights: str | None
    tokens: np.ndarray


@define(eq=False)
class SamplePages:
    """Pages of all layers of this rank, by window, and the samples that use them, in order of arrival. read: buffers
    for the tensors that one layer reads. prefixes: kept until a sample needs their pages, least recently used first."""

    of_window: dict[int | None, Pages]
    prefixes: dict[Prefix, None] = field(factory=dict)
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

    @property
    def exact(self) -> bool:
        """True if layers have windows or states, so that pages serve only texts that continue after all of a prefix."""
        return any(window is not None for window in self.of_window)

    def begin(self, sample: Hashable, weights: str | None, text: Sequence[int]) -> tuple[int, int]:
        """Let a new sample begin with the pages of a prefix; return the number of its positions, 0 without one, and
        the position up to which another text is the same, at a page border, where a prefix would have helped.

        The last position is always computed. A prefix is used if it is `GAIN` times as long as the rest of the text, or
        the rest fits into a page.
        """
        tokens, chosen, known, border = np.asarray(text), None, 0, 0
        for prefix in self.prefixes:
            if prefix.weights != weights:
                continue
            common = _common(prefix.tokens, tokens[:-1])
            if self.exact:
                border = max(border, common // PAGE * PAGE)
                common = common if common == len(prefix.tokens) else 0
            if common > known:
                chosen, known = prefix, common
        if chosen is None or not _pays(known, len(tokens)):
            return 0, border if _pays(border, len(tokens)) else 0
        self.prefixes[chosen] = self.prefixes.pop(chosen)
        for window, pages in self.of_window.items():
            pages.share(sample, chosen, -(-known // PAGE) if window is None else None)
        return known, border if border > known else 0

    def keep(self, sample: Hashable, weights: str | None, text: Sequence[int], *, copies: bool = False) -> None:
        """Keep the pages of a sample for texts that begin with these tokens. copies: of the pages that the sample
        writes into without reserving them; kept only if there are free pages."""
        prefix = Prefix(weights, np.asarray(text))
        for other in [other for other in self.prefixes if other.weights == weights]:
            common = _common(other.tokens, prefix.tokens)
            if common == len(other.tokens) and not (self.exact and common < len(prefix.tokens)):
                self.drop(other)
        self.prefixes[prefix] = None
        for window, pages in self.of_window.items():
            pages.share(prefix, sample, -(-len(text) // PAGE) if window is None else None)
            if copies and window is not None and not pages.copy(prefix):
                for other in self.of_window.values():
                    other.release(prefix)
                del self.prefixes[prefix]
                return

    def drop(self, prefix: Prefix) -> None:
        """Release the pages of a prefix."""
        del self.prefixes[prefix]
        for pages in self.of_window.values():
            pages.release(prefix)

    def _enough_after_drops(self, enough: Callable[[], bool]) -> bool:
        """Drop prefixes until there are enough pages; return False if there are too few without any."""
        while not enough():
            if not self.prefixes:
                return False
            self.drop(next(iter(self.prefixes)))
        return True

    def take(self, sample: Hashable, length: int, known: int = 0) -> bool:
        """Give a new sample pages for `length` positions; if there are too few, give it none and return False. known:
        number of positions whose pages it has already."""
        self._came[sample] = None
        firsts = (known, *range((known // PAGE + 1) * PAGE, length, PAGE))
        if all(self.reserve(sample, position) for position in firsts):
            if known and not self.exact:
                self.of_window[None].clear(sample, known)
            return True
        self.release(sample)
        return False

    def share(self, sample: Hashable, other: Hashable) -> None:
        """Let a new sample share the pages of another."""
        self._came[sample] = None
        for pages in self.of_window.values():
            pages.share(sample, other)

    def reserve(self, sample: Hashable, position: int) -> bool:
        """Give a sample its own pages for a position; return False if there are too few."""
        windows = self.of_window.values()
        return self._enough_after_drops(lambda: all(pages.reserve(sample, position) for pages in windows))

    def spare(self, count: int) -> bool:
        """Return True if `count` samples can each get a page of every kind."""
        return self._enough_after_drops(lambda: all(pages.spare(count) for pages in self.of_window.values()))

    def room(self, number: int, like: Tensor, *shape: int) -> Tensor:
        """Return memory for a layer's tensor `number`, valid until the next layer's call."""
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
    """Cache of one forward over the pages of some samples. lengths: their positions, including this forward's. filled:
    0 for all positions of prompts, which end at the same place; else for the newest position of each sample. one_text:
    rows are consecutive positions of one sample, in one page."""

    pages: SamplePages
    samples: Sequence[Hashable]
    lengths: Sequence[int]
    filled: int
    one_text: bool = False
    length: int = field(init=False)
    _written: dict[int | None, tuple[Tensor, ...]] = field(factory=dict, init=False)
    _tables: dict[int | None, Tensor] = field(factory=dict, init=False)
    _seen: dict[int | None, Tensor | None] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.length = max(self.lengths)

    def extended(self, layer: nn.Module, *new: Tensor, window: int | None = None) -> Sequence[Tensor]:
        """Extend the cache as `LayerCache` does: for prompts return the given tensors; else [B, K, L, A], all pages of
        every row, valid until the next layer's call."""
        pages, rows = self.pages.of_window[window], len(self.samples)
        if window not in self._written:  # the first layer with this window
            self._look(pages, new[0].shape[2], new[0].device)
        row_N, at_N, slot_N = self._written[window]
        kept = pages.of(layer, new)
        for tensor, x in zip(kept, new, strict=True):
            tensor.flatten(1, 2)[:, slot_N] = x.transpose(1, 2)[row_N, at_N].transpose(0, 1)
        if not self.filled:
            return new
        table, extended = self._tables[window], list[Tensor]()
        for number, tensor in enumerate(kept):
            by_page = tensor.flatten(2)
            out = self.pages.room(number, tensor, len(tensor), len(table), by_page.shape[2])
            torch.index_select(by_page, 1, table, out=out)
            extended.append(out.view(len(tensor), rows, -1, tensor.shape[3]).transpose(0, 1))
        return extended

    def seen(self, count: int, window: int | None) -> Tensor | None:
        return self._seen[window]

    def keep(self, layer: nn.Module, state: tuple[Tensor, ...]) -> None:
        """Write the states of the samples into their pages."""
        pages, samples = self.pages.of_window[STATES], self._of_states
        by_row = [each.unflatten(0, (len(samples), -1)) for each in state]
        if layer not in pages.tensors:
            pages.tensors[layer] = tuple(each.new_zeros(1, pages.count + 1, *each.shape[1:]) for each in by_row)
        page_B = pages.table(samples)[:, 0].to(state[0].device)
        for tensor, each in zip(pages.tensors[layer], by_row, strict=True):
            tensor[0, page_B] = each

    def kept(self, layer: nn.Module) -> tuple[Tensor, ...]:
        """Return copies of the states of the samples."""
        pages = self.pages.of_window[STATES]
        page_B = pages.table(self._of_states)[:, 0].to(pages.tensors[layer][0].device)
        return tuple(tensor[0, page_B].flatten(0, 1) for tensor in pages.tensors[layer])

    @property
    def _of_states(self) -> Sequence[Hashable]:
        return self.samples[:1] if self.one_text else self.samples

    def _look(self, pages: Pages, size: int, device: torch.device) -> None:
        """Prepare a window's indices: rows, places among the `size` of a row, and slots to write; pages to read, and
        the mask of visible positions."""
        table_BP, length_B1 = pages.table(self.samples), torch.tensor(self.lengths)[:, None]
        position_BS = torch.arange(-size, 0) + length_B1
        stays_BS = position_BS >= 0
        if pages.window is not None:  # if positions wrap around, only the newest ones
            stays_BS &= position_BS >= length_B1 - window_pages(pages.window) * PAGE
        row_N, at_N = stays_BS.nonzero(as_tuple=True)
        position_N = position_BS[stays_BS]
        place_N = position_N // PAGE
        if pages.window is not None:
            place_N %= window_pages(pages.window)
        slot_N = table_BP[row_N, place_N] * PAGE + position_N % PAGE
        self._written[pages.window] = tuple(indices.to(device) for indices in (row_N, at_N, slot_N))
        position_BL = pages.positions(self.lengths, table_BP.shape[1])
        seen_BL = (position_BL >= 0) & (position_BL < length_B1)
        if pages.window is not None:
            seen_BL &= position_BL >= length_B1 - pages.window
        self._tables[pages.window] = table_BP.flatten().to(device)
        self._seen[pages.window] = None if seen_BL.all() else seen_BL[:, None, None].to(device)


@define(eq=False)
class DrawnRow:
    """Sample being generated. request: its id. place: the slot with its weights. tokens, logprobs: generated so far;
    top: the likeliest tokens at each. known: positions in its pages when it joins; border: where other texts may begin
    with its own; 0: nowhere."""

    request: str
    number: int
    values: dict[str, Any]
    prompt: np.ndarray
    place: int = 0
    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    top: list[tuple[list[int], list[float]]] = field(factory=list)
    stopped: bool = False
    known: int = 0
    border: int = 0
    draws: random.Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        seed = self.values["seed"]
        self.draws = random.Random(seed[self.number] if isinstance(seed, list) else f"{seed}/{self.number}")

    @property
    def sampling(self) -> Sampling:
        values = self.values
        return Sampling(temperature=values["temperature"], top_k=values["top_k"], top_p=values["top_p"])

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.values["most"]

    @property
    def positions(self) -> int:
        """Number of computed positions: all but the newest token."""
        return len(self.prompt) + max(0, len(self.tokens) - 1)

    @property
    def text(self) -> list[int]:
        """All tokens so far."""
        return [*self.prompt.tolist(), *self.tokens]

    def add(self, token: int, logprob: float, tokenizer: TextTokenizer) -> None:
        """Append the next token; a stop token or text is part of the sample."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        values = self.values
        self.stopped = token in values["stop_tokens"] or (values["stop_at_end"] and token == tokenizer.eos)
        if not self.stopped and values["stop_texts"]:
            text = tokenizer.decode(self.tokens)
            self.stopped = any(end in text for end in values["stop_texts"])

    def arrays(self) -> dict[str, np.ndarray]:
        name = f"{self.request}.{self.number}"
        arrays = {
            f"tokens.{name}": np.array(self.tokens, np.int32),
            f"logprobs.{name}": np.array(self.logprobs, np.float32),
        }
        if self.top:
            arrays[f"top_tokens.{name}"] = np.array([likeliest for likeliest, _ in self.top], np.int32)
            arrays[f"top_logprobs.{name}"] = np.array([likeliest for _, likeliest in self.top], np.float32)
        return arrays


def _common(one_T: np.ndarray, other_T: np.ndarray) -> int:
    """Return the number of tokens with which both texts begin."""
    least = min(len(one_T), len(other_T))
    apart = (one_T[:least] != other_T[:least]).nonzero()[0]
    return int(apart[0]) if len(apart) else least


def _pays(known: int, length: int) -> bool:
    """Return True if a text of `length` positions begins with `known` ones that are in pages."""
    return known >= PAGE and (length - known <= PAGE or known >= GAIN * (length - known))
