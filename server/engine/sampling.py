"""Generation of texts with exported adapters or the base model (`request.sample`)."""

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from xtrain.plan.graph import PAGE
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.pipeline import PipelineSchedule, forwarded
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.sampling.text_generator import Prompts, TextGenerator, next_batch, prompt_batch
from xtrain.server.engine.keeping import UNREADABLE, RequestRefused, agree, read_exported
from xtrain.server.engine.messages import TARGETS, RankMessage, TextRow, microbatch, put_losses
from xtrain.server.engine.passes import Handle
from xtrain.server.engine.slots import AdapterSlot, Slots
from xtrain.server.engine.writing import DrawnRow, PagedRows, SamplePages

TURN: Final = 8  # tokens until finished requests are answered and new ones taken


@define(eq=False)
class OpenRequest:
    """Request whose rows are being generated. arrays: results of its prompt."""

    rows: list[DrawnRow]
    arrays: dict[str, np.ndarray]

    @property
    def done(self) -> bool:
        return all(row.done for row in self.rows)


@define(eq=False)
class WrittenRows:
    """Rows generated together. rows: with pages, for all of their tokens but the newest. waiting: not yet joined.
    pages: of these rows, and of rows with other weights."""

    author: TextGenerator
    device: torch.device
    pages: SamplePages
    rows: list[DrawnRow] = field(factory=list)
    waiting: list[DrawnRow] = field(factory=list)

    @property
    def unfinished(self) -> bool:
        return bool(self.rows or self.waiting)

    def grow(self, most: int) -> Iterator[tuple[Tensor | None, Sequence[DrawnRow]]]:
        """Yield logits [B, V] of the next token twice: for rows that join, then for all rows; None if the head is on
        another stage. The caller adds tokens to the rows and removes finished ones in between.

        most: number of rows; one is always allowed. Collective.
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
        """Remove rows that are done, or whose requests are refused."""
        self.waiting = [row for row in self.waiting if row.request not in refused]
        for row in [row for row in self.rows if row.done or row.request in refused]:
            if row.request not in refused:
                self.pages.keep(row, row.values["weights"], row.text[: row.positions])
            self.pages.release(row)
            self.rows.remove(row)

    def _joining(self, most: int) -> list[DrawnRow]:
        """Return the waiting rows that join, at most `most`: those that get pages, with a spare page for the next token
        of each row."""
        new: list[DrawnRow] = []
        firsts: dict[str, DrawnRow] = {}
        for row in self.waiting[:most]:
            first = None if row.tokens else firsts.setdefault(row.request, row)
            if first is None or first is row:
                row.known, row.border = self.pages.begin(row, row.values["weights"], row.text)
                if not self.pages.take(row, len(row.text), row.known):
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
        """Compute the texts of new rows, each prompt once; return the logits [B, V] after them."""
        firsts: dict[object, DrawnRow] = {}
        for row in new:
            firsts.setdefault(row if row.tokens else row.request, row)
        logits = self._begun([row for row in firsts.values() if not row.known])
        for row in firsts.values():
            if row.known < len(row.text):
                logits[row] = self._continued(row)
            self.pages.keep(row, row.values["weights"], row.text)
        self.rows = sorted((*self.rows, *new), key=lambda row: row.place)
        found = [logits[firsts[row if row.tokens else row.request]] for row in new]
        return None if any(each is None for each in found) else torch.stack(found)  # pyright: ignore[reportArgumentType]

    def _begun(self, rows: Sequence[DrawnRow]) -> dict[DrawnRow, Tensor | None]:
        """Compute texts from their first positions, up to their borders; return the logits [V] after them."""
        if not rows:
            return {}
        texts = [row.text[: row.border or None] for row in rows]
        batch = prompt_batch(texts, PagedRows(self.pages, rows, list(map(len, texts)), 0), self.device)
        batch.datasets = tuple(row.place for row in rows)
        logits_PV = self.author.logits(batch)
        for row, text in zip(rows, texts, strict=True):
            row.known = len(text)
            if row.border:
                self.pages.keep(row, row.values["weights"], text, copies=True)
        return {row: None if logits_PV is None else logits_PV[place] for place, row in enumerate(rows)}

    def _continued(self, row: DrawnRow) -> Tensor | None:
        """Compute the positions of a text that are not in its pages, some of one page at a time; return the logits [V]
        after them."""
        text, logits_SV = row.text, None
        while row.known < len(text):
            ends = range(row.known + 1, min((row.known // PAGE + 1) * PAGE, len(text)) + 1)
            cache = PagedRows(self.pages, [row] * len(ends), ends, filled=row.known, one_text=True)
            positions_S1 = torch.arange(row.known, ends[-1], device=self.device)[:, None]
            batch = next_batch(text[row.known : ends[-1]], positions_S1, cache)
            batch.datasets = (row.place,) * len(ends)
            logits_SV, row.known = self.author.logits(batch), ends[-1]
            if row.known == row.border:
                self.pages.keep(row, row.values["weights"], text[: row.known], copies=True)
        return None if logits_SV is None else logits_SV[-1]

    def _make_room(self) -> None:
        """Give every row a page for its next token; the newest rows release theirs if necessary."""
        for row in list(self.rows):
            while row in self.pages and not self.pages.reserve(row, row.positions):
                self.pages.release(self.pages.newest)
        self._step_back()

    def _step_back(self) -> None:
        """Move rows without pages back to the waiting rows."""
        self.waiting = [row for row in self.rows if row not in self.pages] + self.waiting
        self.rows = [row for row in self.rows if row in self.pages]


@define(eq=False)
class ServedSampler:
    """Generation of texts on all ranks together. most: rows generated at once; further ones wait. counts: of pages, by
    the window of layers. open: requests by id. written: the rows generated together: of all adapters, or by weights if
    the model itself is trained. placed: weights → their slot, least recently placed first; later: requests without a
    free slot for their weights."""

    model: ModelParts
    rank: Rank
    slots: Slots
    tokenizer: TextTokenizer
    author: TextGenerator
    most: int
    counts: dict[int | None, int]
    open: dict[str, OpenRequest] = field(factory=dict)
    written: dict[str | None, WrittenRows] = field(factory=dict)
    placed: dict[str | None, int] = field(factory=dict)
    later: dict[str, tuple[dict[str, Any], np.ndarray]] = field(factory=dict)

    def answer(self, message: RankMessage) -> RankMessage:
        """Take the requests of a message, extend all rows by a few tokens, and return the finished ones. values of the
        answer: `done`: ids; `stopped` of their rows; `refused`: reasons by id."""
        if message.values["first"] and (self.open or self.later):  # discard requests of an earlier engine
            self.open, self.written, self.later, self.slots.pages = {}, {}, {}, None
        if not self.slots.replaced:  # training has used the slots since
            self.placed = {}
        refused: dict[str, str] = {}
        self.later |= {
            values["id"]: (values, message.arrays[f"prompt.{values['id']}"]) for values in message.values["requests"]
        }
        whole = self.slots.adapter is None
        asked, self.later = self.later, {}
        pages = self.slots.pages = self.slots.pages or SamplePages.with_counts(self.counts)
        groups = {values["weights"] if whole else None: None for values, _ in asked.values()}
        for weights in [*self.written, *(group for group in groups if group not in self.written)]:
            own = {id: request for id, request in asked.items() if not whole or request[0]["weights"] == weights}
            try:
                with self.whole_model(weights) if whole else nullcontext():
                    rows = self.written.setdefault(weights, WrittenRows(self.author, self.rank.device, pages))
                    for id, (values, prompt) in own.items():
                        self.take(id, values, prompt, rows, refused)
                    self.write(rows, refused)
            except RequestRefused as error:  # before any of its rows was generated
                refused |= dict.fromkeys(own, str(error))
        self.written = {weights: rows for weights, rows in self.written.items() if rows.unfinished}
        done = [id for id, request in self.open.items() if request.done and id not in refused]
        arrays: dict[str, np.ndarray] = {}
        stopped: dict[str, list[bool]] = {}
        for id in done:
            arrays |= self.open[id].arrays
            stopped[id] = [row.stopped for row in self.open[id].rows]
            for row in self.open[id].rows:
                arrays |= row.arrays()
        for id in (*done, *refused):
            self.open.pop(id, None)
        return RankMessage(
            name=message.name, values={"done": done, "stopped": stopped, "refused": refused}, arrays=arrays
        )

    def take(
        self, id: str, values: dict[str, Any], prompt: np.ndarray, rows: WrittenRows, refused: dict[str, str]
    ) -> None:
        """Add the samples of a request once there is a slot for its weights. Collective."""
        try:
            place = 0 if self.slots.adapter is None else self.place(values["weights"])
        except RequestRefused as error:
            refused[id] = str(error)
            return
        if place is None:
            self.later[id] = values, prompt
            return
        own = [
            DrawnRow(request=id, number=number, values=values, prompt=prompt, place=place)
            for number in range(values["count"])
        ]
        self.open[id] = OpenRequest(own, self.scored(id, values, prompt, place))
        rows.waiting += own

    def place(self, weights: str | None) -> int | None:
        """Return the slot with an exported adapter, or a zero one for the base model; None if all slots have rows of
        other adapters. Collective."""
        if weights in self.placed:
            return self.placed[weights]
        taken = {row.place for rows in self.written.values() for row in (*rows.rows, *rows.waiting)}
        free = [slot for slot in self.slots.slots if slot.number not in taken]
        if not free:
            return None
        unused = [number for number in self.placed.values() if number not in taken]
        empty = [slot for slot in free if slot.number not in self.placed.values()]
        slot = empty[-1] if empty else self.slots.slots[unused[0]]
        rank, values = (1, {}) if weights is None else self.values(weights)
        self.placed = {key: number for key, number in self.placed.items() if number != slot.number}
        self.slots.replace(slot, values, rank)
        self.placed[weights] = slot.number
        return slot.number

    @torch.no_grad()
    def write(self, rows: WrittenRows, refused: dict[str, str]) -> None:
        """Extend all rows by a few tokens; waiting rows join if there is room. The rank with the head draws."""
        with self.model.axes.uncut_rows():
            for _ in range(TURN):
                busy = sum(len(other.rows) for other in self.written.values() if other is not rows)
                for logits_BV, grown in rows.grow(self.most - busy):
                    self.add(grown, logits_BV, refused)
                    rows.leave(refused)
                if not rows.rows:
                    return

    def add(self, rows: Sequence[DrawnRow], logits_BV: Tensor | None, refused: dict[str, str]) -> None:
        """Give every row its next token."""
        top = max(row.values["sample_top"] for row in rows)
        tops = self.likeliest(logits_BV, len(rows), top) if top else None
        for place, (row, (token, logprob)) in enumerate(zip(rows, self.drawn(rows, logits_BV), strict=True)):
            if math.isnan(logprob):
                refused[row.request] = "no token can be chosen: logits of the model are NaN or infinite"
                continue
            if tops is not None and (count := row.values["sample_top"]):
                tokens, logprobs = tops[place].tolist()
                row.top.append(([int(token_id) for token_id in tokens[:count]], logprobs[:count]))
            row.add(int(token), logprob, self.tokenizer)

    @contextmanager
    def whole_model(self, weights: str | None) -> Iterator[None]:
        """Give the model the weights of a folder inside the block (None: the initial weights). The trained weights are
        kept in host memory."""
        exported = {} if weights is None else self.values(weights)[1]
        slot = self.slots.slots[0]
        before = {name: local(p).detach().to("cpu", copy=True) for name, p in slot.parameters.items()}
        try:
            if weights is None:
                self.slots.begin(slot)
            else:
                slot.put(exported)
            yield
        finally:
            self.put_back(slot, before)

    @torch.no_grad()
    def put_back(self, slot: AdapterSlot, before: dict[str, Tensor]) -> None:
        reshard(self.model)
        for name, parameter in slot.parameters.items():
            local(parameter).copy_(before[name])

    def values(self, weights: str) -> tuple[int, dict[str, Tensor]]:
        """Return the rank and values of an exported adapter; the newest stay in memory. Collective."""
        kept = self.slots.sampled
        if weights not in kept:
            problem, exported = "", None
            try:
                exported = read_exported(Path(weights), self.slots)
            except UNREADABLE as error:
                problem = f"the weights to sample from cannot be read: {error}"
            agree(self.rank, problem)
            assert exported is not None
            kept[weights] = exported
            while len(kept) > self.slots.most_sampled:
                del kept[next(iter(kept))]
        return kept[weights]

    @torch.no_grad()
    def scored(self, id: str, values: dict[str, Any], prompt: np.ndarray, place: int) -> dict[str, np.ndarray]:
        """Return the log-probabilities of a prompt's tokens, and the likeliest tokens in their places, if requested."""
        results: dict[str, np.ndarray] = {}
        if values["prompt_logprobs"]:
            results[f"prompt_logprobs.{id}"] = np.full(len(prompt), np.nan, np.float32)
            if len(prompt) > 1:
                results[f"prompt_logprobs.{id}"][1:] = self.scores(prompt, place)
        if (count := values["prompt_top"]) and len(prompt) > 1:
            tops = torch.cat([self.likeliest(logits_BV, 1, count) for logits_BV in self.read(prompt[:-1], place)])
            results[f"prompt_top_tokens.{id}"] = tops[:, 0].int().numpy()
            results[f"prompt_top_logprobs.{id}"] = tops[:, 1].float().numpy()
        return results

    def scores(self, prompt: np.ndarray, place: int) -> np.ndarray:
        """Return the log-probability of every token of a prompt but the first. Collective."""
        text = TextRow(tokens=prompt[:-1], inputs={TARGETS: prompt[1:]}, slot=place, start=0)
        logprobs = torch.zeros(text.targets, dtype=torch.float64)
        with self.model.axes.uncut_rows():
            batch = microbatch([text], (), self.rank.device, spare=place)
            for _ in forwarded(self.model, self.author.pipeline, iter([batch])):
                pass
        if batch.losses_BS is not None:
            put_losses(batch, [text], logprobs)
        return self.shared(logprobs).numpy()

    def shared(self, numbers: Tensor) -> Tensor:
        """Share a tensor of the first rank with the head with all ranks. Collective."""
        if self.rank.world_size > 1:
            dist.broadcast(numbers, src=self.head_rank)
        return numbers

    @property
    def head_rank(self) -> int:
        return 0 if self.author.pipeline is None else self.author.pipeline.last_rank

    def likeliest(self, logits_BV: Tensor | None, rows: int, count: int) -> Tensor:
        """Return float64 [rows, 2, count]: tokens and their log-probabilities, the likeliest first. Collective."""
        count = min(count, self.model.parts[0].arch.vocab)
        likeliest = torch.zeros(rows, 2, count, dtype=torch.float64)
        if logits_BV is not None:
            best = logits_BV.double().log_softmax(-1).topk(count)
            likeliest = torch.stack((best.indices.double(), best.values), 1).cpu()
        return self.shared(likeliest)

    def read(self, tokens: np.ndarray, place: int) -> Iterator[Tensor | None]:
        """Yield logits [1, V] after each token of a text; None if the head is on another stage."""
        with self.model.axes.uncut_rows():
            rows = Prompts.of([[int(tokens[0])]], len(tokens), self.rank.device)
            for number, token in enumerate(tokens):
                batch = rows.next([int(token)]) if number else rows.first()
                batch.datasets = (place,)
                yield self.author.logits(batch)

    def drawn(self, rows: Sequence[DrawnRow], logits_BV: Tensor | None) -> list[list[float]]:
        """Return the next token of every row and its log-probability; NaN for non-finite logits. Collective."""
        drawn = torch.zeros(len(rows), 2, dtype=torch.float64)
        if self.rank.rank == self.head_rank:
            assert logits_BV is not None
            for place, row in enumerate(rows):
                drawn[place] = torch.tensor(_draw(row, logits_BV[place]))
        return self.shared(drawn).tolist()


def _draw(row: DrawnRow, logits_V: Tensor) -> tuple[float, float]:
    """Return a token and its log-probability in the distribution that it is drawn from; with temperature 0 the
    likeliest token and the model's log-probability. NaN for non-finite logits."""
    exact_V = logits_V.double().cpu()
    best = exact_V.max()
    if not math.isfinite(best.item()):
        return math.nan, math.nan
    share = row.draws.random()  # one number for every token, whatever the candidates
    if row.values["temperature"] == 0:
        token = int(exact_V.argmax())
        return token, exact_V.log_softmax(-1)[token].item()
    weights_BN, tokens_BN = row.sampling.candidates((exact_V - best)[None])
    ends_N = weights_BN[0].cumsum(-1)
    whole = ends_N[-1]
    target = min(share * whole.item(), math.nextafter(whole.item(), 0.0))  # never a candidate of weight 0
    place = int(torch.searchsorted(ends_N, torch.tensor(target, dtype=ends_N.dtype), right=True))
    token = place if tokens_BN is None else int(tokens_BN[0, place])
    return token, (weights_BN[0, place] / whole).log().item()


@op("request.sample")
def sample(
    model: ModelParts,
    rank: Rank,
    slots: Slots,
    tokenizer: TextTokenizer,
    beat: HeartbeatWriter,
    rows: int,
    pages: list[list[int | None]],
    pipeline: PipelineSchedule | None = None,
) -> Handle:
    """Generate texts after prompts, up to `rows` at once. pages: [window, count] of the pages of layers."""
    author = TextGenerator(model=model, rank=rank, pipeline=pipeline, beat=beat)
    counts = {window: count for window, count in pages if count is not None}
    return ServedSampler(model, rank, slots, tokenizer, author, rows, counts).answer


@op("request.forget")
def forget(slots: Slots) -> Handle:
    """Free the sampling weights of an export's folder, which is about to be removed."""

    def forget_weights(message: RankMessage) -> RankMessage:
        slots.sampled.pop(message.values["folder"], None)
        return RankMessage(name=message.name)

    return forget_weights
