"""Rows that are written together, each with its adapter: new ones join at any token, and those that are done leave.

Keys and values lie in pages. Where there are too few, the row that came last gives its own back, and joins again later
with what it has written. Samples of one request have the same prompt, which is computed once. Rows of one adapter lie
side by side.
Shapes: B rows, P prompts, V vocabulary.
"""

import random
from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.generation.sampling import Sampling
from xtrain.runtime.generation.text_generator import TextGenerator, next_batch, prompt_batch
from xtrain.runtime.serving.pages import PagedRows, SamplePages


@define(eq=False)
class DrawnRow:
    """A sample that grows. request: its id. place: the slot with its weights. tokens, logprobs: of what has been
    written; top: the likeliest tokens at each."""

    request: str
    number: int
    values: dict[str, Any]
    prompt: np.ndarray
    place: int = 0
    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    top: list[tuple[list[int], list[float]]] = field(factory=list)
    stopped: bool = False
    draws: random.Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.draws = random.Random(f"{self.values['seed']}/{self.number}")

    @property
    def sampling(self) -> Sampling:
        values = self.values
        return Sampling(temperature=values["temperature"], top_k=values["top_k"], top_p=values["top_p"])

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.values["most"]

    @property
    def positions(self) -> int:
        """That are computed: all but the newest token."""
        return len(self.prompt) + max(0, len(self.tokens) - 1)

    @property
    def text(self) -> list[int]:
        """All tokens so far."""
        return [*self.prompt.tolist(), *self.tokens]

    def add(self, token: int, logprob: float, tokenizer: TextTokenizer) -> None:
        """Take the next token; what ends a sample is part of it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        values = self.values
        self.stopped = token in values["stop_tokens"] or (values["stop_at_end"] and token == tokenizer.eos)
        if not self.stopped and values["stop_texts"]:
            text = tokenizer.decode(self.tokens)
            self.stopped = any(end in text for end in values["stop_texts"])

    def arrays(self) -> dict[str, np.ndarray]:
        name = f"{self.request}.{self.number}"
        found = {
            f"tokens.{name}": np.array(self.tokens, np.int32),
            f"logprobs.{name}": np.array(self.logprobs, np.float32),
        }
        if self.top:
            found[f"top_tokens.{name}"] = np.array([each for each, _ in self.top], np.int32)
            found[f"top_logprobs.{name}"] = np.array([each for _, each in self.top], np.float32)
        return found


@define(eq=False)
class WrittenRows:
    """rows: that have pages, with all of their tokens but the newest. waiting: that are still to join. pages: those of
    these rows, and of others that are written with other weights."""

    author: TextGenerator
    device: torch.device
    pages: SamplePages
    rows: list[DrawnRow] = field(factory=list)
    waiting: list[DrawnRow] = field(factory=list)

    @property
    def unfinished(self) -> bool:
        return bool(self.rows or self.waiting)

    def grow(self, most: int) -> Iterator[tuple[Tensor | None, Sequence[DrawnRow]]]:
        """Logits [B, V] of the next token of rows, twice: of those that join, and of all that are there then; None
        where the head is on another stage. Whoever asks gives the rows their tokens, and lets those that are done
        leave, before the next ones come.

        most: rows that there may be; one may always be. Collective.
        """
        self._step_back()
        if new := self._joining(max(most - len(self.rows), int(not self.rows))):
            yield self._first(new), new
        self._make_room()
        if self.rows:
            cache = PagedRows(self.pages, self.rows, [row.positions + 1 for row in self.rows], filled=1)
            positions_B1 = torch.tensor([[row.positions] for row in self.rows], device=self.device)
            batch = next_batch([row.tokens[-1] for row in self.rows], positions_B1, cache)
            batch.datasets = tuple(row.place for row in self.rows)
            yield self.author.logits(batch), list(self.rows)

    def leave(self, refused: Container[str]) -> None:
        """Rows that are done, or whose requests are refused, make room."""
        self.waiting = [row for row in self.waiting if row.request not in refused]
        for row in [row for row in self.rows if row.done or row.request in refused]:
            self.pages.release(row)
            self.rows.remove(row)

    def _joining(self, most: int) -> list[DrawnRow]:
        """Of those that wait as many as have pages, one for the next token of each row beside; at most so many."""
        new: list[DrawnRow] = []
        firsts: dict[str, DrawnRow] = {}
        for row in self.waiting[:most]:
            first = None if row.tokens else firsts.setdefault(row.request, row)
            if first is None or first is row:
                if not self.pages.take(row, len(row.text)):
                    break
            else:
                self.pages.share(row, first)
            if not self.pages.spare(len(self.rows) + len(new) + 1) and (self.rows or new):
                self.pages.release(row)
                break
            new.append(row)
        self.waiting = self.waiting[len(new) :]
        return sorted(new, key=lambda row: row.place)

    def _first(self, new: Sequence[DrawnRow]) -> Tensor | None:
        """Compute the texts of new rows, each prompt once: logits [B, V] behind them."""
        firsts: dict[object, DrawnRow] = {}
        for row in new:
            firsts.setdefault(row if row.tokens else row.request, row)
        texts = [row.text for row in firsts.values()]
        batch = prompt_batch(texts, PagedRows(self.pages, list(firsts.values()), list(map(len, texts)), 0), self.device)
        batch.datasets = tuple(row.place for row in firsts.values())
        logits_PV = self.author.logits(batch)
        self.rows = sorted((*self.rows, *new), key=lambda row: row.place)
        if logits_PV is None:
            return None
        place_of = {key: place for place, key in enumerate(firsts)}
        places = [place_of[row if row.tokens else row.request] for row in new]
        return logits_PV[torch.tensor(places, device=self.device)]

    def _make_room(self) -> None:
        """Let every row have a page for its next token: the newest ones give theirs back."""
        for row in list(self.rows):
            while row in self.pages and not self.pages.reserve(row, row.positions):
                self.pages.release(self.pages.newest)
        self._step_back()

    def _step_back(self) -> None:
        """Rows without pages wait."""
        self.waiting = [row for row in self.rows if row not in self.pages] + self.waiting
        self.rows = [row for row in self.rows if row in self.pages]
