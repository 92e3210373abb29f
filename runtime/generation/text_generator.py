"""The model as something that continues texts, whatever it is cut over.

Shapes: S positions so far, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from ..data.collate.batch import IGNORE_INDEX, Microbatch
from ..data.documents.tokenizers import TextTokenizer
from ..input.feed import Feed
from ..models.batch import ModelBatch
from ..models.parts import ModelParts
from ..monitoring.heartbeat import HeartbeatWriter
from ..parallelize.pipeline import PipelineSchedule
from ..state import Rank


@frozen(kw_only=True, eq=False)
class TextGenerator:
    """The model as something that continues texts, whatever it is cut over. Every call is collective.

    local_part: leaves a rank its positions of a row, under context parallel. multiple: what the number of positions has
    to be a multiple of.
    """

    model: ModelParts
    rank: Rank
    local_part: Callable[[Microbatch], Microbatch] | None = None
    multiple: int = 1
    pipeline: PipelineSchedule | None = None
    beat: HeartbeatWriter | None = None

    @torch.no_grad()
    def next_token(self, ids: list[int], temperature: float, top_p: float, generator: torch.Generator) -> int:
        """The token after `ids`: one rank draws it, all learn of it."""
        if self.beat is not None:
            self.beat.mark()
        logits_V = self._logits(ids)
        token = -1 if logits_V is None else sample_token(logits_V.cpu().float(), temperature, top_p, generator)
        if self.rank.world_size > 1:
            chosen = torch.tensor(token, device=self.rank.device)
            dist.broadcast(chosen, src=0 if self.pipeline is None else self.pipeline.last_rank)
            token = int(chosen)
        return token

    def _logits(self, ids: list[int]) -> Tensor | None:
        """Logits [V] of the token after `ids`, where the last stage of a pipeline is."""
        batch = self._batch(ids)
        if self.pipeline is None:
            return self.model.whole(None, batch)[0]
        ((_, logits_BV),) = self.pipeline.forward([batch])
        return None if logits_BV is None else logits_BV[0]

    def _batch(self, ids: list[int]) -> ModelBatch:
        """One document, filled up behind its end where no token before it can see that."""
        length = -(-len(ids) // self.multiple) * self.multiple
        tokens_BS = torch.zeros(1, length, dtype=torch.int64)
        tokens_BS[0, : len(ids)] = torch.tensor(ids)
        positions_BS = torch.arange(length)[None]
        batch = Microbatch(
            input_ids_BS=tokens_BS,
            labels_BS=torch.full_like(tokens_BS, IGNORE_INDEX),
            positions_BS=positions_BS,
            real_BS=positions_BS < len(ids),
            cumulative_lengths=torch.tensor([0, length], dtype=torch.int32),
            real_lengths=torch.tensor([len(ids)], dtype=torch.int32),
            num_valid=0,
        )
        if self.local_part is not None:
            batch = self.local_part(batch)
        batch = ModelBatch.of(batch, self.rank.device)
        batch.last_BS = batch.positions_BS == len(ids) - 1
        return batch


def writer(
    model: ModelParts, rank: Rank, feed: Feed, pipeline: PipelineSchedule | None, beat: HeartbeatWriter | None = None
) -> TextGenerator:
    """The writer of a running plan."""
    axes = model.axes
    sizes = [1 if group is None else group.size() for group in (axes.ring, axes.ulysses)]
    pieces = 1 if axes.tensor is None else axes.tensor.size
    return TextGenerator(
        model=model,
        rank=rank,
        local_part=feed.collate.local_part,
        multiple=(2 * sizes[0] if sizes[0] > 1 else 1) * sizes[1] * pieces,
        pipeline=pipeline,
        beat=beat,
    )


def continue_text(
    author: TextGenerator,
    tokenizer: TextTokenizer,
    prompt: str,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> str:
    """The text that follows `prompt`, at most `tokens` tokens, ending early at the end of a document. Collective."""
    ids = prompt_tokens(tokenizer, prompt)
    begin = len(ids)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        following = author.next_token(ids, temperature, top_p, generator)
        if following == tokenizer.eos:
            break
        ids.append(following)
    return tokenizer.decode(ids[begin:])


def prompt_tokens(tokenizer: TextTokenizer, prompt: str) -> list[int]:
    """The tokens of a prompt, begun as a document is. The names of special tokens stand for these: a prompt may be a
    conversation, written out as its template does."""
    ids = tokenizer.encode_rendered([prompt])[0].ids.tolist()
    # Without a bos of its own a tokenizer begins texts with eos, and conversations with what their template says.
    begun = bool(ids) and (ids[0] == tokenizer.bos or (not tokenizer.has_bos and ids[0] in tokenizer.specials))
    return ids if begun else [tokenizer.bos, *ids]


def sample_token(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Nucleus sampling (Holtzman et al. 2020) from the fewest tokens that hold `top_p`; temperature 0: the argmax."""
    if temperature == 0:
        return int(logits_V.argmax())
    probability_V, order_V = torch.softmax(logits_V / temperature, dim=-1).sort(descending=True)
    before_V = probability_V.cumsum(-1) - probability_V
    nucleus_V = probability_V * (before_V < top_p)
    return int(order_V[torch.multinomial(nucleus_V, 1, generator=generator)])
