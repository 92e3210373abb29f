"""Generation of texts with a model in any layout."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from xtrain.runtime.base.data_errors import DataError
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.batch import DocumentLayout, KeyValueCache, LayerCache, ModelBatch
from xtrain.runtime.nn.pipeline import PipelineSchedule
from xtrain.runtime.nn.texts import NO_TOKEN, Chat, Continuation, Draws, Sampling, TextEnds
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter


class LogitsNotFinite(Exception):
    """Weights of the model are NaN, infinite or so large that no token can be chosen. Every rank raises it."""


@frozen(kw_only=True, eq=False)
class TextGenerator:
    """The model as something that continues texts, whatever it is cut over. Every call is collective."""

    model: ModelParts
    rank: Rank
    pipeline: PipelineSchedule | None = None
    beat: HeartbeatWriter | None = None

    @torch.no_grad()
    def logits(self, batch: ModelBatch) -> Tensor | None:
        """Logits [B, V] of the token behind every row, where the last stage of a pipeline is. The cache of the batch
        then has its positions too."""
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
        """The next token of every prompt, time and again, while the cache of `length` positions has room: one rank
        draws, all learn of it. Raises LogitsNotFinite."""
        rows = Prompts.of(prompts, length, self.rank.device)
        draws = Draws.of(sampling, len(prompts))
        batch = rows.first()
        while True:
            following = self._drawn(draws, self.logits(batch), len(prompts))
            if NO_TOKEN in following:
                which = f"prompt {following.index(NO_TOKEN) + 1}"
                raise LogitsNotFinite(f"no token can be chosen behind {which}: logits of the model are NaN or infinite")
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
    """Prompts as the rows of a batch, and the rows of one position that follow.

    positions_BL: of every place in the cache, counted from the beginning of the prompt.
    """

    cache: KeyValueCache
    ids: Sequence[Sequence[int]]
    positions_BL: Tensor

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]], length: int, device: torch.device) -> "Prompts":
        longest = max(map(len, ids))
        missing_B = torch.tensor([longest - len(each) for each in ids], device=device)
        positions_BL = torch.arange(length, device=device) - missing_B[:, None]
        seen = (positions_BL >= 0)[:, None, None] if missing_B.any() else None
        return cls(KeyValueCache(length, seen_B11L=seen), ids, positions_BL.clamp_(min=0))

    def first(self) -> ModelBatch:
        """All positions of the prompts."""
        return prompt_batch(self.ids, self.cache, self.positions_BL.device)

    def next(self, tokens: Sequence[int]) -> ModelBatch:
        """One position more: `tokens`, one for each row."""
        at = self.cache.filled
        return next_batch(tokens, self.positions_BL[:, at : at + 1], self.cache)


def prompt_batch(ids: Sequence[Sequence[int]], cache: LayerCache, device: torch.device) -> ModelBatch:
    """Prompts as rows that end at the same place."""
    rows, longest = len(ids), max(map(len, ids))
    tokens_BS = torch.zeros(rows, longest, dtype=torch.int64)
    bounds = [0]
    for row, each in enumerate(ids):
        tokens_BS[row, longest - len(each) :] = torch.tensor(each)
        bounds += [] if len(each) == longest else [row * longest + longest - len(each)]
        bounds.append((row + 1) * longest)
    layout = DocumentLayout.from_lengths(torch.tensor(bounds, dtype=torch.int32), rows, longest, device)
    missing_B1 = torch.tensor([[longest - len(each)] for each in ids], device=device)
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
    """One position more of each row, behind those in the cache."""
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
    """The texts that follow prompts, given as tokens: at most `tokens` tokens each, up to the first of its ends.

    positions: that the cache has at least. show: called after every token. Collective. Raises LogitsNotFinite.
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
        text.finish()  # where the model reads no longer texts
    if show is not None:
        show(texts)
    return [text.text for text in texts]


def tokens_and_ends(
    tokenizer: TextTokenizer, prompts: Sequence[str], stop: Sequence[str] = (), chat: Chat | None = None
) -> tuple[list[list[int]], TextEnds]:
    """The tokens of prompts, and what ends the texts behind them: with `chat` also the end of a turn."""
    if chat is None:
        return [prompt_tokens(tokenizer, prompt) for prompt in prompts], TextEnds.of(tokenizer, stop)
    closing = [chat.closing] if chat.closing else []
    return [chat.prompt(prompt) for prompt in prompts], TextEnds.of(tokenizer, [*stop, *closing])


def cache_length(prompts: Sequence[Sequence[int]], tokens: int, limit: int | None, positions: int) -> int:
    """Positions that a cache needs, `positions` at least: nothing follows the last token. limit: those of the longest
    text that the model reads. Raises DataError for a prompt that is longer."""
    longest = max(map(len, prompts))
    wanted = max(positions, longest + tokens - 1)
    if limit is None or wanted <= limit:
        return wanted
    if longest > limit:
        raise DataError(f"a prompt of {longest:,} tokens is longer than the {limit:,} positions that the model reads")
    return limit


def prompt_tokens(tokenizer: TextTokenizer, prompt: str) -> list[int]:
    """The tokens of a prompt, begun as a document is. The names of special tokens stand for these: a prompt may be a
    conversation, written out as its template does."""
    ids = tokenizer.encode_rendered([prompt])[0].ids.tolist()
    # Without a bos of its own a tokenizer begins texts with eos, and conversations with what their template says.
    begun = bool(ids) and (ids[0] == tokenizer.bos or (not tokenizer.has_bos and ids[0] in tokenizer.specials))
    return ids if begun else [tokenizer.bos, *ids]
