"""Completions from the model as training has it, with the log-probability of each token.

Shapes: B completions, V vocabulary.
"""

from collections.abc import Sequence
from random import Random

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.generation.continuation import Continuation, TextEnds
from xtrain.runtime.generation.sampling import NO_TOKEN, Draws, Sampling
from xtrain.runtime.generation.text_generator import LogitsNotFinite, Prompts, TextGenerator
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.parallel.collectives import all_gather
from xtrain.runtime.rollout.groups import Completion
from xtrain.runtime.rollout.row_ranks import RowRanks


@frozen(kw_only=True, eq=False)
class Sampler:
    """most: tokens of a completion. records: also the experts that tokens are sent to. Every call is collective over
    all ranks, which need as many rows each."""

    author: TextGenerator
    tokenizer: TextTokenizer
    row_ranks: RowRanks
    sampling: Sampling
    most: int
    records: bool = False

    def sample(
        self, prompts: Sequence[Sequence[int]], ends: Sequence[TextEnds], keys: Sequence[str]
    ) -> list[Completion]:
        """A completion of each prompt, drawn by random numbers that follow from its key and the position alone. Raises
        LogitsNotFinite, on all ranks alike."""
        texts = [Continuation(self.tokenizer, ids, end, self.most) for ids, end in zip(prompts, ends, strict=True)]
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        left_out = [0.0] * len(prompts)
        sent: list[np.ndarray] = []
        draws = Draws(self.sampling, [Random(key) for key in keys])
        rows = Prompts.of(prompts, max(map(len, prompts)) + self.most - 1, self.author.rank.device)
        with self.author.model.axes.uncut_rows():
            batch = rows.first()
            for number in range(1, self.most + 1):
                following, chances, missing = self._drawn(draws, self._logits(batch, sent), len(prompts))
                for row, text in enumerate(texts):
                    if not text.done:
                        tokens[row].append(following[row])
                        logprobs[row].append(chances[row])
                        left_out[row] += missing[row]
                        text.add(following[row])
                if self._all_done(all(text.done for text in texts), NO_TOKEN not in following):
                    break
                if number < self.most:
                    batch = rows.next(following)
        experts = [None] * len(prompts) if not self.records else _of_rows(sent, prompts, tokens)
        return [
            Completion(tokens=ids, logprobs=chance, text=text.text, cut=text.cut, left_out=missing, experts=own)
            for ids, chance, text, missing, own in zip(tokens, logprobs, texts, left_out, experts, strict=True)
        ]

    def _logits(self, batch: ModelBatch, sent: list[np.ndarray]) -> Tensor | None:
        """As of the author. sent: gets the experts that the positions of the batch are sent to, int32 [B, S, width]."""
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
        each = []
        for layer in arch.expert_layers:
            chosen_BSK = of_layer.get(layer, none_BSK)
            if layer in of_layer and axes.tensor is not None:  # ranks have cut the positions
                chosen_BSK = all_gather(chosen_BSK, 1, axes.tensor.group)[:, :positions]
            each.append(chosen_BSK)
        sent.append((torch.cat(each, 2) + 1).int().cpu().numpy())
        return logits_BV

    def _drawn(self, draws: Draws, logits_BV: Tensor | None, rows: int) -> tuple[list[int], list[float], list[float]]:
        """The next token of every row, its log-probability, and the probability of the tokens that are left out."""
        pipeline, device = self.author.pipeline, self.author.rank.device
        drawn = torch.zeros(3, rows, dtype=torch.float64, device=device)
        if logits_BV is not None:
            chosen_B = draws.next(logits_BV)
            exact_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
            logprob_BV = (exact_BV / self.sampling.temperature).log_softmax(-1)
            drawn[0] = chosen_B
            drawn[1] = logprob_BV.gather(1, chosen_B.clamp(min=0)[:, None])[:, 0]
            drawn[2] = self.sampling.left_out(exact_BV, logprob_BV)
        self.row_ranks.share(drawn, 0 if pipeline is None else pipeline.last_owner)
        chosen, chances, missing = drawn.tolist()
        return [int(token) for token in chosen], chances, missing

    def _all_done(self, done: bool, finite: bool) -> bool:
        """Whether every rank has all of its completions. Raises LogitsNotFinite where one of them has no token."""
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
    """The column of each row: the number of a token is that of the position before it, where it is a label.

    sent: of the prompts, which end together, and of one position after another, int32 [B, S, width].
    """
    whole = np.concatenate(sent, axis=1)
    longest, width = max(map(len, prompts)), whole.shape[2]
    found = []
    for row, (ids, own) in enumerate(zip(prompts, tokens, strict=True)):
        first, positions = longest - len(ids), len(ids) + len(own) - 1
        found.append(np.concatenate((np.zeros((1, width), np.int32), whole[row, first : first + positions])))
    return found
