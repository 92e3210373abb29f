"""Learn on a server from rewards of its own samples (GRPO, arXiv 2402.03300): to answer in vowels.

xtrain serve specs/serve_cpu.xtrain
python examples/grpo.py http://127.0.0.1:8000
"""

import argparse
import os
from collections.abc import Sequence

import numpy as np

from xtrain.client import Server, TrainingRow

PROMPTS = ("Sing:", "Hum:")
VOWELS = frozenset(b"aeiou")
LENGTH = 6  # tokens of an answer


def reward(tokens: Sequence[int]) -> float:
    """The share of vowels."""
    return sum(token in VOWELS for token in tokens) / LENGTH


def train(server: Server, steps: int, group: int = 32, rate: float = 5e-2) -> list[float]:
    """The mean reward of the samples before each step."""
    model = server.create_model(rank=8, seed=1)
    rewards = []
    for step in range(steps):
        sampler = model.sampler()
        asked = {
            prompt: sampler.sample(list(prompt.encode()), max_tokens=LENGTH, count=group, seed=step, stop=[])
            for prompt in PROMPTS
        }
        rows, own = [], []
        for prompt, pending in asked.items():
            answers = pending.result()
            rewards_G = np.array([reward(answer.tokens) for answer in answers])
            advantages_G = (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-4)
            own += rewards_G.tolist()
            rows += [
                TrainingRow.of_answer(list(prompt.encode()), answer, float(advantage))
                for answer, advantage in zip(answers, advantages_G, strict=True)
            ]
        model.forward_backward(rows, "ppo")
        model.optim_step(rate, grad_clip_norm=1.0)
        rewards.append(float(np.mean(own)))
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=15)
    arguments = parser.parse_args()
    with Server(arguments.url, key=os.environ.get("XTRAIN_KEY"), name="grpo") as server:
        for step, mean in enumerate(train(server, arguments.steps), start=1):
            if step % 3 == 1 or step == arguments.steps:
                print(f"step {step:4d}  reward {mean:.3f}")


if __name__ == "__main__":
    main()
