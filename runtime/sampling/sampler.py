"""Sampler of completions, with their log-probabilities, and the ranks that hold the same rows."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from xtrain.dsl.schema.policy import KEPT, SEEN, SHARES
from xtrain.plan.mesh import piece
from xtrain.runtime.base.collectives import all_gather
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.batch import Completion, ModelBatch
from xtrain.runtime.nn.head_product import leave_out, shares_of
from xtrain.runtime.nn.loss import Head, Statistics, statistics_of
from xtrain.runtime.nn.texts import NO_TOKEN, Continuation, Draws, Sampling, TextEnds
from xtrain.runtime.sampling.text_generator import LogitsNotFinite, Prompts, TextGenerator

COLUMNS: Final = {KEPT: np.int32, SEEN: np.int32, SHARES: np.float32}
"""Columns of sampled tokens that a sampler can record, in the order of their numbers."""


@frozen(eq=False)
class RowRanks:
    """Ranks that hold the same rows. row: the ranks of tp and cp; pipeline: the stages; None if that is this rank
    alone."""

    rank: Rank
    row: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup | None

    @classmethod
    def of(cls, rank: Rank, meshes: Meshes) -> "RowRanks":
        return cls(rank, *(meshes.group(axis) if meshes.has(axis) else None for axis in ("row", "pp")))

    @property
    def is_first(self) -> bool:
        """True on the one rank, of all with the same rows, that does work needed once."""
        return all(self.rank.coordinates[axis] == 0 for axis in ("pp", "ring", "ulysses", "tp"))

    def share(self, tensor: Tensor, stage: int = 0) -> Tensor:
        """Broadcast a tensor in place from the first rank of a pipeline coordinate. Collective."""
        if self.row is not None:
            dist.broadcast(tensor, group=self.row, group_src=0)
        if self.pipeline is not None:
            dist.broadcast(tensor, group=self.pipeline, group_src=stage)
        return tensor

    def share_numbers(self, rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """Return the first rank's numbers, as fp64; all ranks give as many rows. Collective."""
        if self.row is None and self.pipeline is None:
            return [*rows]
        device, own = self.rank.device, rows if self.is_first else [()] * len(rows)
        lengths = self.share(torch.tensor([len(row) for row in own], dtype=torch.int64, device=device)).tolist()
        flat = [float(number) for row in own for number in row] or [0.0] * sum(lengths)
        numbers = self.share(torch.tensor(flat, dtype=torch.float64, device=device)).tolist() if flat else []
        ends = [*accumulate(lengths)]
        return [numbers[end - length : end] for end, length in zip(ends, lengths, strict=True)]


@frozen(kw_only=True, eq=False)
class Sampler:
    """Sampler of completions. most: tokens of a completion. records: also record the experts of each token. processed:
    log-probabilities are of the tokens that sampling leaves, which are recorded; there is a `top_k`. compared: number
    of most probable tokens that are recorded with their probabilities. Calls are collective over all ranks, which need
    the same number of rows each."""

    author: TextGenerator
    tokenizer: TextTokenizer
    row_ranks: RowRanks
    sampling: Sampling
    most: int
    records: bool = False
    processed: bool = False
    compared: int = 0

    @property
    def widths(self) -> dict[str, int]:
        """Numbers of a sampled token that are recorded, by the name of their column."""
        vocabulary = self.author.model.parts[0].arch.vocab
        widths = {KEPT: min(self.sampling.top_k or vocabulary, vocabulary)} if self.processed else {}
        if self.compared:
            widths[SEEN] = min(self.compared, vocabulary)
            widths[SHARES] = widths[SEEN] + 1
        return widths

    def columns(self, numbers: Sequence[Sequence[float]]) -> dict[str, np.ndarray]:
        """Return the columns of recorded numbers, [tokens, sum of widths]."""
        widths = self.widths
        whole = np.array(numbers, np.float64).reshape(len(numbers), sum(widths.values()))
        parts = np.split(whole, [*accumulate(widths.values())][:-1], axis=1)
        return {name: part.astype(COLUMNS[name]) for name, part in zip(widths, parts, strict=False)}

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        ends: Sequence[TextEnds],
        keys: Sequence[str],
        most: Sequence[int] | None = None,
        ended: Callable[[int, Continuation], None] | None = None,
    ) -> list[Completion]:
        """Sample a completion of each prompt, with random numbers that depend only on its key and the position.

        most: tokens of each completion, up to the sampler's; 0: none. ended: called with the row of a
        completion when it ends, while others continue. Raises LogitsNotFinite on all ranks alike.
        """
        limits = [self.most] * len(prompts) if most is None else most
        pairs = zip(prompts, ends, limits, strict=True)
        texts = [Continuation(self.tokenizer, ids, end, limit, done=not limit) for ids, end, limit in pairs]
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        numbers: list[list[Sequence[float]]] = [[] for _ in prompts]
        left_out = [0.0] * len(prompts)
        sent: list[np.ndarray] = []
        draws = Draws(self.sampling, [Random(key) for key in keys])
        rows = Prompts.of(prompts, max(map(len, prompts)) + self.most - 1, self.author.rank.device)
        with self.author.model.axes.uncut_rows():
            batch = rows.first()
            for number in range(1, self.most + 1):
                following, chances, missing, recorded = self._drawn(draws, self._logits(batch, sent), len(prompts))
                for row, text in enumerate(texts):
                    if not text.done:
                        tokens[row].append(following[row])
                        logprobs[row].append(chances[row])
                        numbers[row].append(recorded[row])
                        left_out[row] += missing[row]
                        text.add(following[row])
                        if text.done and ended is not None:
                            ended(row, text)
                if self._all_done(all(text.done for text in texts), NO_TOKEN not in following):
                    break
                if number < self.most:
                    batch = rows.next(following)
        experts = [None] * len(prompts) if not self.records else _of_rows(sent, prompts, tokens)
        columns = map(self.columns, numbers)
        parts = zip(tokens, logprobs, texts, left_out, columns, experts, strict=True)
        return [
            Completion(
                tokens=ids, logprobs=chance, text=text.text, cut=text.cut, left_out=missing, columns=wide, experts=own
            )
            for ids, chance, text, missing, wide, own in parts
        ]

    def _logits(self, batch: ModelBatch, sent: list[np.ndarray]) -> Tensor | None:
        """Return the author's logits. sent: receives the experts of the batch's positions, int32 [B, S, width]."""
        if not self.records:
            return self.author.logits(batch)
        model, axes = self.author.model, self.author.model.axes
        axes.recorded = recorded = []
        try:
            logits_BV = self.author.logits(batch)
        finally:
            axes.recorded = None
        arch, (rows, positions) = model.parts[0].arch, batch.shape
        of_layer = dict(zip((layer for part in model.parts for layer in part.routing_layers), recorded, strict=True))
        none_BSK = torch.full((rows, positions, arch.experts_per_token), -1, device=self.author.rank.device)
        chosen_layers = []
        for layer in arch.expert_layers:
            chosen_BSK = of_layer.get(layer, none_BSK)
            if layer in of_layer and axes.tensor is not None:  # ranks have sharded the positions
                chosen_BSK = all_gather(chosen_BSK, 1, axes.tensor.group)[:, :positions]
            chosen_layers.append(chosen_BSK)
        sent.append((torch.cat(chosen_layers, 2) + 1).int().cpu().numpy())
        return logits_BV

    def _drawn(
        self, draws: Draws, logits_BV: Tensor | None, rows: int
    ) -> tuple[list[int], list[float], list[float], list[list[float]]]:
        """Return the next token of every row, its log-probability, the probability of left-out tokens, and the numbers
        that are recorded."""
        pipeline, device, widths = self.author.pipeline, self.author.rank.device, self.widths
        drawn = torch.zeros(3 + sum(widths.values()), rows, dtype=torch.float64, device=device)
        kept_KB, seen_KB, shares_KB = drawn[3:].split([widths.get(name, 0) for name in COLUMNS])
        last = 0 if pipeline is None else pipeline.last_owner
        exact_BV = logits_BV if logits_BV is None or logits_BV.dtype == torch.float64 else logits_BV.float()
        if logits_BV is not None and exact_BV is not None:
            drawn[0] = draws.next(logits_BV)
            if self.processed:
                kept_KB.copy_(self.sampling.kept(logits_BV).T)
            if self.compared:  # the likeliest tokens are those that sampling leaves
                seen_KB.copy_(exact_BV.topk(len(seen_KB)).indices.T)
        if self._cuts_loss:  # then its statistics are of the same token on all ranks
            self.row_ranks.share(drawn, last)
        if exact_BV is not None:
            kept_BK = kept_KB.T if self.processed else None
            found, head = self._statistics(exact_BV, drawn[0].long().clamp(min=0), kept_BK)
            drawn[1] = found.logprobs(torch.ones(rows, dtype=torch.bool, device=device))
            cold_BV = exact_BV / self.sampling.temperature
            lse_B = found.lse_T if kept_BK is None else cold_BV.logsumexp(-1)
            drawn[2] = self.sampling.left_out(exact_BV, cold_BV - lse_B[:, None])
            if self.compared:
                shares_KB.copy_(shares_of(found.softmax_TV, seen_KB.T.long(), head.first, head.group).T)
        self.row_ranks.share(drawn, last)
        chosen, chances, missing = drawn[:3].tolist()
        return [int(token) for token in chosen], chances, missing, drawn[3:].T.tolist()

    @property
    def _cuts_loss(self) -> bool:
        """True if each rank computes losses of its piece of the vocabulary."""
        tensor = self.author.model.axes.tensor
        return tensor is not None and tensor.loss

    def _statistics(self, logits_BV: Tensor, chosen_B: Tensor, kept_BK: Tensor | None) -> tuple[Statistics, Head]:
        """Return the statistics of logits / temperature with the chosen tokens as labels, as the loss computes them,
        and the head of these. kept_BK: as `Head.kept_TK`."""
        transformer = self.author.model.parts[-1]
        tensor = self.author.model.axes.tensor if self._cuts_loss else None
        head = evolve(transformer.head, tensor=tensor, kept_TK=kept_BK)
        piece_BV = logits_BV
        if head.tensor is not None:
            piece_BV = logits_BV[
                :, head.first : head.first + piece(head.vocabulary, head.tensor.size, head.tensor.group.rank())
            ]
        piece_BV = piece_BV / self.sampling.temperature
        if kept_BK is not None:
            leave_out(piece_BV, kept_BK, head.first)
        # Probabilities are rounded as the loss rounds them, which depends on what it reads.
        reads = getattr(head.term, "reads", ()) if self.compared else ()
        return statistics_of(piece_BV, chosen_B, head, reads), head

    def _all_done(self, done: bool, finite: bool) -> bool:
        """Return True if every rank has finished its completions. Raises LogitsNotFinite if a rank has no token."""
        rank = self.author.rank
        state = torch.tensor([not done, not finite], dtype=torch.int32, device=rank.device)
        if rank.data_ranks > 1:
            dist.all_reduce(state, op=dist.ReduceOp.MAX)
        goes_on, broken = state.tolist()
        if broken:
            raise LogitsNotFinite("no token can be chosen: logits of the model are NaN or infinite")
        return not goes_on


def _of_rows(
    sent: Sequence[np.ndarray], prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return the experts of each row: a token has the entry of the position before it, where it is a label.

    sent: of the prompts, which end together, then of one position at a time, int32 [B, S, width].
    """
    whole = np.concatenate(sent, axis=1)
    longest, width = max(map(len, prompts)), whole.shape[2]
    columns = []
    for row, (ids, own) in enumerate(zip(prompts, tokens, strict=True)):
        first, positions = longest - len(ids), len(ids) + len(own) - 1
        columns.append(np.concatenate((np.zeros((1, width), np.int32), whole[row, first : first + positions])))
    return columns
