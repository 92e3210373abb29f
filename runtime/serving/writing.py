"""Rows that are written together, each with its adapter: new ones join at any token, and those that are done leave.

Rows end at the same position of the cache; what is missing before the first one of a shorter row is seen by nothing.
Samples of one request have the same prompt, which is computed once. Rows of one adapter lie side by side.
Shapes: B rows, V vocabulary.
"""

import random
from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from ..data.documents.tokenizers import TextTokenizer
from ..generation.sampling import Sampling
from ..generation.text_generator import Prompts, TextGenerator


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
    def left(self) -> int:
        """Tokens that may still come."""
        return self.values["most"] - len(self.tokens)

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
    """rows: that are in the cache, with all of their tokens but the newest. waiting: that are still to join."""

    author: TextGenerator
    device: torch.device
    rows: list[DrawnRow] = field(factory=list)
    waiting: list[DrawnRow] = field(factory=list)
    _prompts: Prompts | None = None

    @property
    def unfinished(self) -> bool:
        return bool(self.rows or self.waiting)

    def grow(self, most: int) -> Iterator[tuple[Tensor | None, Sequence[DrawnRow]]]:
        """Logits [B, V] of the next token of rows, twice: of those that join, and of all that are there then; None
        where the head is on another stage. Whoever asks gives the rows their tokens, and lets those that are done
        leave, before the next ones come.

        most: rows that there may be; one may always be. Collective.
        """
        free = max(most - len(self.rows), int(not self.rows))
        new, self.waiting = sorted(self.waiting[:free], key=lambda row: row.place), self.waiting[free:]
        if new:
            yield self._joining(new), new
        if self.rows:
            assert self._prompts is not None
            batch = self._prompts.next([row.tokens[-1] for row in self.rows])
            batch.datasets = tuple(row.place for row in self.rows)
            yield self.author.logits(batch), list(self.rows)

    def leave(self, refused: Container[str]) -> None:
        """Rows that are done, or whose requests are refused, make room."""
        self.waiting = [row for row in self.waiting if row.request not in refused]
        kept = [place for place, row in enumerate(self.rows) if not row.done and row.request not in refused]
        if len(kept) < len(self.rows):
            self._lay_out([self.rows[place] for place in kept], kept)

    def _joining(self, new: Sequence[DrawnRow]) -> Tensor | None:
        """Compute the prompts of new rows, each once, and put them beside the others."""
        firsts = list({row.request: row for row in new}.values())
        place_of = {row.request: place for place, row in enumerate(firsts)}
        prompts = [row.prompt.tolist() for row in firsts]
        first = Prompts.of(prompts, max(map(len, prompts)), self.device)
        places = [place_of[row.request] for row in new]
        batch = first.first()
        batch.datasets = tuple(row.place for row in firsts)
        logits_PV = self.author.logits(batch)
        self._lay_out([*self.rows, *new], range(len(self.rows)), first, places)
        return None if logits_PV is None else logits_PV[torch.tensor(places, device=self.device)]

    def _lay_out(
        self, rows: list[DrawnRow], kept: Sequence[int], first: Prompts | None = None, places: Sequence[int] = ()
    ) -> None:
        """A cache with these rows. kept: places of those that have been there; first, places: where the others are."""
        order = sorted(range(len(rows)), key=lambda number: rows[number].place)  # an adapter's lie side by side
        before, self.rows, self._prompts = self._prompts, [rows[number] for number in order], None
        if not rows:
            return
        filled = max(row.positions for row in rows)
        length = filled + max(row.left for row in rows)
        caches = [] if before is None or not kept else [before.cache.moved(kept, filled, length)]
        caches += [] if first is None else [first.cache.moved(places, filled, length)]
        cache = caches[0] if len(caches) == 1 else caches[0].joined(caches[1], order)
        self._prompts = Prompts.over(cache, [filled - row.positions for row in self.rows], self.device)
