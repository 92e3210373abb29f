"""Tokens per second of generated text: with the key-value cache, recomputing the whole text, and transformers.

    python benchmarks/generation.py                       # one and two threads, in turns
    python benchmarks/generation.py --turns 3 --threads 1
    python benchmarks/generation.py --latent              # what the cache of latent attention has

One model with the same weights on all sides, in fp32 on the CPU: llama with grouped heads, from 2 to 40 million
parameters; greedy and drawn tokens, one prompt and four. `recomputed` takes every token from a forward over the whole
text so far, as there is without a cache. transformers: `generate` with its defaults, which are a cache that grows and
torch's scaled dot product. The least of several turns that alternate, of wall time and of the processor time of all
threads, which other work on the machine disturbs less; greedy tokens must agree. Prints a JSON line for each case.

--latent: a deepseek_v3 whose cache has narrow vectors, and the same with keys and values in it, as where `kv_b_proj`
has an adapter; steps behind the prompts alone.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import frozen

from xtrain.planner.load import plan_from_text
from xtrain.runtime.nn.latent_attention import LatentAttention
from xtrain.runtime.nn.texts import Draws, Sampling
from xtrain.runtime.sampling.text_generator import Prompts, TextGenerator
from xtrain.runtime.sampling.trained_run import alone, whole_model

PROMPT, TOKENS = 32, 96
SIZES = {
    "2 million": {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab": 4096},
    "12 million": {"dim": 256, "layers": 8, "heads": 8, "kv_heads": 2, "ffn": 768, "vocab": 8192},
    "40 million": {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 1536, "vocab": 16384},
}
LATENT = {"dim": 512, "layers": 4, "heads": 16, "q_rank": 192, "kv_rank": 256, "nope_dim": 64, "rope_dim": 32}
LATENT |= {"value_dim": 64, "ffn": 512, "first_dense": 3, "experts": 4, "experts_per_token": 2, "expert_ffn": 128}
DRAWN = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
SPEC = """
experiment generation {{ seed = 1, budget = 1 steps }}
model {family} {{ {sizes}, init_std = 0.05 }}
tokenizer bytes
dataset made {{ source = synthetic(documents = 10) }}
batch {{ sequence = 32 }}
optimizer adamw {{ lr = 1e-3 }}
"""


def ours(sizes: dict[str, int], family: str = "llama") -> TextGenerator:
    """A model with random weights."""
    text = SPEC.format(family=family, sizes=", ".join(f"{name} = {value}" for name, value in sizes.items()))
    plan = plan_from_text(text, "generation.xtrain").plan
    assert plan is not None
    rank = alone(torch.device("cpu"))
    model = whole_model(plan, rank)
    model.train(False)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.ndim == 1), 0.05, generator=random)
    return TextGenerator(model=model, rank=rank)


def theirs(author: TextGenerator, sizes: dict[str, int]) -> Any:
    """The same model in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes["dim"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        intermediate_size=sizes["ffn"],
        vocab_size=sizes["vocab"],
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    values = dict(author.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values.pop(name.removeprefix("model.")))
    assert not values
    return model


Taken = list[list[int]]


def cached(author: TextGenerator, prompts: Taken, sampling: Sampling) -> Taken:
    taken = author.tokens(prompts, sampling, PROMPT + TOKENS - 1)
    return [list(row) for row in zip(*taken, strict=True)]


def recomputed(author: TextGenerator, prompts: Taken, sampling: Sampling) -> Taken:
    texts = [list(prompt) for prompt in prompts]
    draws = Draws.of(sampling, len(prompts))
    for _ in range(TOKENS):
        rows = Prompts.of(texts, len(texts[0]), torch.device("cpu"))
        logits_BV = author.logits(rows.first())
        assert logits_BV is not None
        for text, token in zip(texts, draws.next(logits_BV).tolist(), strict=True):
            text.append(token)
    return [text[PROMPT:] for text in texts]


def of_transformers(model: Any, prompts: Taken, sampling: Sampling) -> Taken:
    drawn = {"do_sample": False} if sampling.temperature == 0 else {"do_sample": True, **DRAWN}
    ids = torch.tensor(prompts)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, **drawn}
    return model.generate(ids, **given)[:, PROMPT:].tolist()


@frozen
class Least:
    """Seconds, the least of all turns."""

    wall: float = float("inf")
    processor: float = float("inf")

    def with_turn(self, wall: float, processor: float) -> "Least":
        return Least(min(self.wall, wall), min(self.processor, processor))


def measure(sides: dict[str, Callable[[], Taken]], turns: int) -> tuple[dict[str, Least], dict[str, Taken]]:
    """What each side takes, and what it gave."""
    best = dict.fromkeys(sides, Least())
    found: dict[str, Taken] = {}
    for _ in range(turns):
        for name, call in sides.items():
            begin = time.perf_counter(), time.process_time()
            found[name] = call()
            best[name] = best[name].with_turn(time.perf_counter() - begin[0], time.process_time() - begin[1])
    return best, found


def steps(author: TextGenerator, prompts: Taken, tokens: int) -> tuple[Taken, float]:
    """Greedy tokens behind prompts, and seconds of processor time of all but the first."""
    following = author.tokens(prompts, Sampling(temperature=0), len(prompts[0]) + tokens - 1)
    taken = [next(following)]
    begin = time.process_time()
    taken += following
    return taken, time.process_time() - begin


def latent(threads: Sequence[int], turns: int) -> None:
    author = ours(LATENT, "deepseek_v3")
    caches = {"narrow_vectors": LatentAttention.keeps_latent, "keys_and_values": property(lambda layer: False)}
    random = torch.Generator().manual_seed(1)
    for count in threads:
        torch.set_num_threads(count)
        for length, tokens, rows in ((32, 96, 1), (32, 96, 4), (1000, 64, 1), (1000, 64, 4)):
            prompts = torch.randint(256, (rows, length), generator=random).tolist()
            least, found = dict.fromkeys(caches, float("inf")), {}
            for name, keeps in [*caches.items()] * turns:
                LatentAttention.keeps_latent = keeps
                found[name], seconds = steps(author, prompts, tokens)
                least[name] = min(least[name], 1e3 * seconds / (tokens - 1))
            case = {"threads": count, "positions": length, "prompts": rows}
            case |= {f"{name}_ms_a_step": round(each, 1) for name, each in least.items()}
            print(json.dumps({**case, "same_tokens": len({str(each) for each in found.values()}) == 1}), flush=True)


def main(threads: Sequence[int], turns: int, names: Sequence[str]) -> None:
    for name in names:
        sizes = SIZES[name]
        author = ours(sizes)
        model = theirs(author, sizes)
        random = torch.Generator().manual_seed(1)
        for count in threads:
            torch.set_num_threads(count)
            for rows, sampling in ((1, Sampling(temperature=0)), (4, Sampling(temperature=0)), (1, Sampling(**DRAWN))):
                prompts = torch.randint(sizes["vocab"], (rows, PROMPT), generator=random).tolist()
                least, found = measure(
                    {
                        "cached": partial(cached, author, prompts, sampling),
                        "recomputed": partial(recomputed, author, prompts, sampling),
                        "transformers": partial(of_transformers, model, prompts, sampling),
                    },
                    turns,
                )
                greedy = sampling.temperature == 0
                case = {
                    "model": name,
                    "threads": count,
                    "prompts": rows,
                    "tokens": "greedy" if greedy else "drawn",
                    **{f"{side}_tokens_per_s": round(rows * TOKENS / took.wall) for side, took in least.items()},
                    **{f"{side}_ms_a_step": round(1e3 * took.processor / TOKENS, 3) for side, took in least.items()},
                    "over_recomputed": round(least["recomputed"].processor / least["cached"].processor, 2),
                    "over_transformers": round(least["transformers"].processor / least["cached"].processor, 2),
                }
                if greedy:
                    case["same_tokens"] = found["cached"] == found["transformers"] == found["recomputed"]
                print(json.dumps(case), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--latent", action="store_true")
    arguments = parser.parse_args()
    if arguments.latent:
        latent(arguments.threads, arguments.turns)
    else:
        main(arguments.threads, arguments.turns, arguments.models)
