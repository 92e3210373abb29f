"""`tick.generate`: continue prompts with the model as it is, to look at what it has learned.

Shapes: S positions so far, V vocabulary.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .data.tokenizers import Tokenizer
from .models.attention import Packing
from .ops import op
from .parallel.fsdp import reshard
from .records import Records
from .state import Progress, Rank, Step


@op("tick.generate")
def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    rank: Rank,
    records: Records,
    progress: Progress,
    node_id: str,
    prompts: list[str],
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
):
    """Every rank runs the model, the first one draws; the draw depends on the seed and the prompt alone."""

    def run(step: Step) -> None:
        begin = time.perf_counter()
        model.eval()
        samples = [
            {"prompt": p, "text": continue_text(model, tokenizer, rank, p, tokens, temperature, top_p, seed)}
            for p in prompts
        ]
        reshard(model)
        model.train()
        seconds = time.perf_counter() - begin
        records.event("generate", step=progress.step, node=node_id, samples=samples, seconds=seconds)

    return run


@torch.no_grad()
def continue_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    rank: Rank,
    prompt: str,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> str:
    """The text that follows `prompt`, at most `tokens` tokens, ending early at the end of a document. Collective."""
    ids = [tokenizer.bos, *map(int, tokenizer.encode(prompt))]
    begin = len(ids)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        logits_V = last_logits(model, ids, rank.device)
        following = torch.tensor(draw(logits_V.cpu().float(), temperature, top_p, generator), device=rank.device)
        if rank.world_size > 1:
            dist.broadcast(following, src=0)
        if int(following) == tokenizer.eos:
            break
        ids.append(int(following))
    return tokenizer.decode(ids[begin:])


def last_logits(model: nn.Module, ids: list[int], device: torch.device) -> Tensor:
    """Logits [V] of the token after `ids`."""
    input_ids_BS = torch.tensor([ids], device=device)
    positions_BS = torch.arange(len(ids), device=device)[None]
    packing = Packing.from_lengths(torch.tensor([0, len(ids)], dtype=torch.int32), 1, len(ids), device)
    return model(input_ids_BS, positions_BS, packing)[0, -1]


def draw(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Nucleus sampling (Holtzman et al. 2020) from the fewest tokens that hold `top_p`; temperature 0: the argmax."""
    if temperature == 0:
        return int(logits_V.argmax())
    probability_V, order_V = torch.softmax(logits_V / temperature, dim=-1).sort(descending=True)
    before_V = probability_V.cumsum(-1) - probability_V
    kept_V = probability_V * (before_V < top_p)
    return int(order_V[torch.multinomial(kept_V, 1, generator=generator)])
