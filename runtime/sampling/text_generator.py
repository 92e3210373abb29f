"""Generation of texts with a model in any layout."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.batch import DocumentLayout, KeyValueCache, LayerCache, ModelBatch
from xtrain.runtime.nn.pipeline import PipelineSchedule
from xtrain.runtime.nn.texts import NO_TOKEN, Chat, Continuation, Draws, Sampling, TextEnds
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter


class LogitsNotFinite(Exception):
    """Logits that are NaN or infinite, so that no token can be chosen. Every rank raises it."""


@frozen(kw_only=True, eq=False)
class TextGenerator:
    """Generator of texts from a model in any layout. Every call is collective."""

    model: ModelParts
    rank: Rank
    pipeline: PipelineSchedule | None = None
    beat: HeartbeatWriter | None = None

    @torch.no_grad()
    def logits(self, batch: ModelBatch) -> Tensor | None:
        """Return the logits [B, V] of the next token of every row, on the last pipeline stage. The cache then includes
        the batch's positions."""
        assert batch.cache is not None
        if self.beat is not None:
            self.beat.mark()
        if self.pipeline is None:
            logits_BV = self.model.whole(None, batch)
        else:
            ((_, logits_BV),) = self.pipeline.forward([batch])
        batch.cache.filled += batch.shape[1]
        return logits_BV

    def tokens(self, prompts: Sequence[Sequence[int]], sampling: Sampling, length: int) -> Iterator[list[int]]:
        """Yield the next token of every prompt until the cache of `length` positions is full: one rank draws, all
        receive the tokens. Raises LogitsNotFinite."""
        rows = Prompts.of(prompts, length, self.rank.device)
        draws = Draws.of(sampling, len(prompts))
        batch = rows.first()
        while True:
            following = self._drawn(draws, self.logits(batch), len(prompts))
            if NO_TOKEN in following:
                which = f"prompt {following.index(NO_TOKEN) + 1}"
                raise LogitsNotFinite(f"no token can be chosen after {which}: logits of the model are NaN or infinite")
            yield following
            if rows.cache.filled == length:
                return
            batch = rows.next(following)

    def _drawn(self, draws: Draws, logits_BV: Tensor | None, rows: int) -> list[int]:
        source = 0 if self.pipeline is None else self.pipeline.last_rank
        if self.rank.world_size == 1:
            assert logits_BV is not None
            return draws.next(logits_BV).tolist()
        if self.rank.rank == source:
            assert logits_BV is not None
            chosen_B = draws.next(logits_BV)
        else:
            chosen_B = torch.empty(rows, dtype=torch.int64, device=self.rank.device)
        dist.broadcast(chosen_B, src=source)
        return chosen_B.tolist()


@frozen(eq=False)
class Prompts:
    """Prompts as the rows of a batch, followed by batches of one position.

    positions_BL: of every place in the cache, counted from the start of the prompt.
    """

    cache: KeyValueCache
    ids: Sequence[Sequence[int]]
    positions_BL: Tensor

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]], length: int, device: torch.device) -> "Prompts":
        longest = max(map(len, ids))
        missing_B = torch.tensor([longest - len(prompt_ids) for prompt_ids in ids], device=device)
        positions_BL = torch.arange(length, device=device) - missing_B[:, None]
        seen = (positions_BL >= 0)[:, None, None] if missing_B.any() else None
        return cls(KeyValueCache(length, seen_B11L=seen), ids, positions_BL.clamp_(min=0))

    def first(self) -> ModelBatch:
        """Return a batch with all positions of the prompts."""
        return prompt_batch(self.ids, self.cache, self.positions_BL.device)

    def next(self, tokens: Sequence[int]) -> ModelBatch:
        """Return a batch of the next position: `tokens`, one for each row."""
        at = self.cache.filled
        return next_batch(tokens, self.positions_BL[:, at : at + 1], self.cache)


def prompt_batch(ids: Sequence[Sequence[int]], cache: LayerCache, device: torch.device) -> ModelBatch:
    """Return a batch of prompts that end at the same place."""
    rows, longest = len(ids), max(map(len, ids))
    tokens_BS = torch.zeros(rows, longest, dtype=torch.int64)
    bounds = [0]
    for row, prompt_ids in enumerate(ids):
        tokens_BS[row, longest - len(prompt_ids) :] = torch.tensor(prompt_ids)
        bounds += [] if len(prompt_ids) == longest else [row * longest + longest - len(prompt_ids)]
        bounds.append((row + 1) * longest)
    layout = DocumentLayout.from_lengths(torch.tensor(bounds, dtype=torch.int32), rows, longest, device)
    missing_B1 = torch.tensor([[longest - len(prompt_ids)] for prompt_ids in ids], device=device)
    places_S = torch.arange(longest, device=device)
    return ModelBatch(
        input_ids_BS=tokens_BS.to(device),
        labels_BS=None,
        positions_BS=(places_S - missing_B1).clamp_(min=0),
        real_BS=places_S >= missing_B1,
        packing=layout,
        cache=cache,
    )


def next_batch(tokens: Sequence[int], positions_B1: Tensor, cache: LayerCache) -> ModelBatch:
    """Return a batch of the next position of each row, after those in the cache."""
    device = positions_B1.device
    real_B1 = torch.ones(len(tokens), 1, dtype=torch.bool, device=device)
    return ModelBatch(
        input_ids_BS=torch.tensor(tokens, device=device)[:, None],
        labels_BS=None,
        positions_BS=positions_B1,
        real_BS=real_B1,
        packing=DocumentLayout(segments=(), document_BS=real_B1.int(), single=True, cached=cache),
        cache=cache,
    )


def continue_texts(
    author: TextGenerator,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    ends: TextEnds,
    tokens: int,
    sampling: Sampling,
    positions: int = 0,
    show: Callable[[list[Continuation]], None] | None = None,
) -> list[str]:
    """Return the continuations of prompts, given as tokens: at most `tokens` tokens each, up to the first end.

    positions: minimum size of the cache. show: called after every token. Collective. Raises LogitsNotFinite.
    """
    if not prompts:
        return []
    texts = [Continuation(tokenizer, prompt, ends, tokens) for prompt in prompts]
    length = cache_length(prompts, tokens, author.model.parts[0].arch.rope.limit, positions)
    with author.model.axes.uncut_rows():
        for following in author.tokens(prompts, sampling, length):
            for text, token in zip(texts, following, strict=True):
                text.add(token)
            if show is not None:
                show(texts)
            if all(text.done for text in texts):
                break
    for text in texts:
        text.finish()  # if the model reads no longer texts
    if show is not None:
        show(texts)
    return [text.text for text in texts]


def tokens_and_ends(
    tokenizer: TextTokenizer, prompts: Sequence[str], stop: Sequence[str] = (), chat: Chat | None = None
) -> tuple[list[list[int]], TextEnds]:
    """Return the tokens of prompts, and what ends their continuations: with `chat` also the end of a turn."""
    if chat is None:
        return [prompt_tokens(tokenizer, prompt) for prompt in prompts], TextEnds.of(tokenizer, stop)
    closing = [chat.closing] if chat.closing else []
    return [chat.prompt(prompt) for prompt in prompts], TextEnds.of(tokenizer, [*stop, *closing])


def cache_length(prompts: Sequence[Sequence[int]], tokens: int, limit: int | None, positions: int) -> int:
    """Return the positions that a cache needs, at least `positions`; the last token needs none. limit: of the longest
    text that the model reads. Raises DataError for a longer prompt."""
    longest = max(map(len, prompts))
    wanted = max(positions, longest + tokens - 1)
    if limit is None or wanted <= limit:
        return wanted
    if longest > limit:
        raise DataError(f"a prompt of {longest:,} tokens is longer than the {limit:,} positions that the model reads")
    return limit


def prompt_tokens(tokenizer: TextTokenizer, prompt: str) -> list[int]:
    """Return the tokens of a prompt, started as a document is. Names of special tokens become these tokens: a prompt
    may be a conversation rendered by its template."""
    ids = tokenizer.encode_rendered([prompt])[0].ids.tolist()
    # Without a bos of its own, a tokenizer starts texts with eos, and conversations as their template says.
    begun = bool(ids) and (ids[0] == tokenizer.bos or (not tokenizer.has_bos and ids[0] in tokenizer.specials))
    return ids if begun else [tokenizer.bos, *ids]
