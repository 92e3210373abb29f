"""`request.sample`: texts that follow prompts, written with exported adapters or with the base alone.

Weights of a sampler are read from the folder that `export` has written, so what it writes does not change while its
adapter is trained further. They lie in a slot for as long as it writes; what was there comes back.

Shapes: B rows, each a sample of a request; V vocabulary; N candidates.
"""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor

from ..data.documents.tokenizers import TextTokenizer
from ..generation.sampling import Sampling
from ..generation.text_generator import Prompts, TextGenerator, cache_length
from ..models.parts import ModelParts
from ..monitoring.heartbeat import HeartbeatWriter
from ..ops import op
from ..parallel.tensor import local
from ..parallelize.fsdp import reshard
from ..state import Rank
from .files import read_exported
from .keeping import UNREADABLE, RequestRefused, agree
from .losses import TARGETS
from .messages import RankMessage
from .passes import Handle
from .rows import TextRow, microbatch
from .slots import AdapterSlot, Slots

MOST_ROWS: Final = 64  # that are written at once; of more, some wait


@define(eq=False)
class DrawnRow:
    """A sample that grows. tokens, logprobs: of what has been written; top: the likeliest tokens at each."""

    request: int
    number: int
    values: dict[str, Any]
    prompt: np.ndarray
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

    def add(self, token: int, logprob: float, tokenizer: TextTokenizer) -> None:
        """Take the next token; what ends a sample is part of it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        values = self.values
        self.stopped = token in values["stop_tokens"] or (values["stop_at_end"] and token == tokenizer.eos)
        if not self.stopped and values["stop_texts"]:
            text = tokenizer.decode(self.tokens)
            self.stopped = any(end in text for end in values["stop_texts"])


@frozen(eq=False)
class ServedSampler:
    """Writes texts on all ranks together."""

    model: ModelParts
    rank: Rank
    slots: Slots
    tokenizer: TextTokenizer
    author: TextGenerator

    def answer(self, message: RankMessage) -> RankMessage:
        """The samples of all requests of a message. Raises RequestRefused where weights cannot be read."""
        requests = message.values["requests"]
        prompts = [message.arrays[f"prompt.{number}"] for number in range(len(requests))]
        arrays: dict[str, np.ndarray] = {}
        stopped: dict[str, bool] = {}
        by_weights: dict[str | None, list[int]] = {}
        for number, values in enumerate(requests):
            by_weights.setdefault(values["weights"], []).append(number)
        for weights, own in by_weights.items():
            with self.adapter(weights):
                for number in own:
                    arrays |= self.scored(number, requests[number], prompts[number])
                rows = [
                    DrawnRow(request=number, number=each, values=requests[number], prompt=prompts[number])
                    for number in own
                    for each in range(requests[number]["count"])
                ]
                for first in range(0, len(rows), MOST_ROWS):
                    self.write(rows[first : first + MOST_ROWS])
            for row in rows:
                name = f"{row.request}.{row.number}"
                arrays[f"tokens.{name}"] = np.array(row.tokens, np.int32)
                arrays[f"logprobs.{name}"] = np.array(row.logprobs, np.float32)
                stopped[name] = row.stopped
                if row.top:
                    arrays[f"top_tokens.{name}"] = np.array([each for each, _ in row.top], np.int32)
                    arrays[f"top_logprobs.{name}"] = np.array([each for _, each in row.top], np.float32)
        return RankMessage(name=message.name, values={"stopped": stopped}, arrays=arrays)

    @contextmanager
    def adapter(self, weights: str | None) -> Iterator[None]:
        """Meanwhile rows go through the adapter of a folder, None: through none; or the model has the weights of a
        folder, None: those that it began with."""
        whole = self.slots.adapter is None
        if weights is None and not whole:
            with self.model.with_adapter_of(None):
                yield
            return
        found = None if weights is None else self.values(weights)
        slot = self.slots.slots[0]
        before = {name: self.copied(parameter) for name, parameter in slot.parameters.items()}
        try:
            if found is None:
                self.slots.begin(slot)
            else:
                slot.put(found[1])
                self.slots.scale(slot, found[0])
            with self.model.with_adapter_of(slot.name):
                yield
        finally:
            self.put_back(slot, before)

    def copied(self, parameter: Tensor) -> Tensor:
        """This rank's piece; where it is one of the model itself, in the memory of the machine."""
        own = local(parameter).detach()
        return own.to("cpu", copy=True) if self.slots.adapter is None else own.clone()

    @torch.no_grad()
    def put_back(self, slot: AdapterSlot, before: dict[str, Tensor]) -> None:
        reshard(self.model)
        for name, parameter in slot.parameters.items():
            local(parameter).copy_(before[name])
        if slot.shape is not None:
            self.slots.scale(slot, slot.shape.rank)

    def values(self, weights: str) -> tuple[int, dict[str, Tensor]]:
        """The rank and the values of an exported adapter, of which the newest stay in memory. Collective."""
        kept = self.slots.sampled
        if weights not in kept:
            problem, found = "", None
            try:
                found = read_exported(Path(weights), self.slots)
            except UNREADABLE as error:
                problem = f"the weights to sample from cannot be read: {error}"
            agree(self.rank, problem)
            assert found is not None
            kept[weights] = found
            while len(kept) > self.slots.most_sampled:
                del kept[next(iter(kept))]
        return kept[weights]

    @torch.no_grad()
    def scored(self, number: int, values: dict[str, Any], prompt: np.ndarray) -> dict[str, np.ndarray]:
        """The log-probabilities of the tokens of a prompt, and the likeliest ones in their places, if asked for."""
        found: dict[str, np.ndarray] = {}
        if values["prompt_logprobs"]:
            scores = np.full(len(prompt), np.nan, np.float32)
            if len(prompt) > 1:
                text = TextRow(tokens=prompt[:-1], inputs={TARGETS: prompt[1:]}, slot=0, start=0)
                tensor = self.model.axes.tensor
                multiple = tensor.size if tensor is not None and tensor.sequence else 1
                batch = microbatch([text], (), multiple, self.rank.device)
                self.model.whole(None, batch)
                assert batch.losses_BS is not None
                scores[1:] = -batch.losses_BS[0, : len(prompt) - 1].float().cpu().numpy()
            found[f"prompt_logprobs.{number}"] = scores
        if (count := values["prompt_top"]) and len(prompt) > 1:
            tops = [_top(logits_BV[0], count) for logits_BV in self.read(prompt[:-1])]
            found[f"prompt_top_tokens.{number}"] = np.array([each for each, _ in tops], np.int32)
            found[f"prompt_top_logprobs.{number}"] = np.array([each for _, each in tops], np.float32)
        return found

    def read(self, tokens: np.ndarray) -> Iterator[Tensor]:
        """Logits [1, V] behind every token of a text, one after the other."""
        with self.model.axes.uncut_rows():
            rows = Prompts.of([[int(tokens[0])]], len(tokens), self.rank.device)
            logits_BV = self.author.logits(rows.first())
            for token in tokens[1:]:
                assert logits_BV is not None
                yield logits_BV
                logits_BV = self.author.logits(rows.next([int(token)]))
            assert logits_BV is not None
            yield logits_BV

    @torch.no_grad()
    def write(self, rows: Sequence[DrawnRow]) -> None:
        """Let rows grow until all are done. The first rank draws, all learn of it."""
        if not rows:
            return
        prompts = [row.prompt.tolist() for row in rows]
        most = max(row.values["most"] for row in rows)
        length = cache_length(prompts, most, self.model.parts[0].arch.rope.limit, 0)
        with self.model.axes.uncut_rows():
            batches = Prompts.of(prompts, length, self.rank.device)
            batch = batches.first()
            while True:
                logits_BV = self.author.logits(batch)
                assert logits_BV is not None
                drawn = self.drawn(rows, logits_BV)
                for place, (row, (token, logprob)) in enumerate(zip(rows, drawn, strict=True)):
                    if row.done:
                        continue
                    if row.values["sample_top"]:
                        row.top.append(_top(logits_BV[place], row.values["sample_top"]))
                    row.add(token, logprob, self.tokenizer)
                if all(row.done for row in rows) or batches.cache.filled == length:
                    return
                batch = batches.next([token for token, _ in drawn])

    def drawn(self, rows: Sequence[DrawnRow], logits_BV: Tensor) -> list[tuple[int, float]]:
        """The next token of every row and its log-probability. Raises RequestRefused where logits are not finite."""
        found = torch.zeros(len(rows), 2, dtype=torch.float64)
        if self.rank.is_first:
            for place, row in enumerate(rows):
                found[place] = torch.tensor(_draw(row, logits_BV[place]))
        if self.rank.world_size > 1:
            dist.broadcast(found, src=0)
        if bool(found.isnan().any()):
            raise RequestRefused("no token can be chosen: logits of the model are NaN or infinite")
        return [(int(token), logprob) for token, logprob in found.tolist()]


def _draw(row: DrawnRow, logits_V: Tensor) -> tuple[float, float]:
    """A token and its log-probability in the distribution that it is drawn from; of the likeliest, which is not drawn,
    that of the model. NaN where logits are not finite."""
    exact_V = logits_V.double().cpu()
    best = exact_V.max()
    if not math.isfinite(best.item()):
        return math.nan, math.nan
    share = row.draws.random()  # one number for every token, whatever there is to choose from
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


def _top(logits_V: Tensor, count: int) -> tuple[list[int], list[float]]:
    """The likeliest tokens and their log-probabilities."""
    found = logits_V.double().log_softmax(-1).topk(min(count, len(logits_V)))
    return found.indices.tolist(), found.values.tolist()


@op("request.sample")
def sample(model: ModelParts, rank: Rank, slots: Slots, tokenizer: TextTokenizer, beat: HeartbeatWriter) -> Handle:
    """Texts that follow prompts, of several samplers one after the other."""
    author = TextGenerator(model=model, rank=rank, beat=beat)
    return ServedSampler(model, rank, slots, tokenizer, author).answer


@op("request.forget")
def forget(slots: Slots) -> Handle:
    """Release what sampling has kept of the folder of an export, which is about to be removed."""

    def run(message: RankMessage) -> RankMessage:
        slots.sampled.pop(message.values["folder"], None)
        return RankMessage(name=message.name)

    return run
