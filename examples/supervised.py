"""Learn from texts on a server: what follows a question.

    xtrain serve specs/serve_cpu.xtrain
    python examples/supervised.py http://127.0.0.1:8000

The tokens of the server's spec are bytes, so `list(text.encode())` are those of a text.
"""

import argparse
import os
from collections.abc import Sequence

from xtrain.client import Server, TrainingRow

TALKS = {"sky?": " blue", "grass?": " green", "snow?": " white", "coal?": " black"}


def rows() -> list[TrainingRow]:
    """Questions with their answers, of which the answers are learned."""
    return [
        TrainingRow.of_text(list((question + answer).encode()), prompt=len(question))
        for question, answer in TALKS.items()
    ]


def train(server: Server, steps: int, rate: float = 2e-2) -> tuple[list[float], dict[str, str]]:
    """The loss a token before each step, and what the model answers behind the last."""
    model = server.create_model(rank=8, seed=1)
    passes = []
    for _ in range(steps):  # requests are sent without waiting for results
        passes.append(model.forward_backward(rows()))
        model.optim_step(rate, grad_clip_norm=1.0)
    losses = [each.result().mean for each in passes]
    sampler = model.sampler()
    answers = {question: ask(sampler.sample, question, len(answer)) for question, answer in TALKS.items()}
    return losses, answers


def ask(sample, question: str, length: int) -> str:
    (answer,) = sample(list(question.encode()), max_tokens=length, temperature=0.0).result()
    return text_of(answer.tokens)


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    with Server(arguments.url, key=os.environ.get("XTRAIN_KEY"), name="supervised") as server:
        losses, answers = train(server, arguments.steps)
    for step, loss in enumerate(losses, start=1):
        if step % 10 == 1 or step == len(losses):
            print(f"step {step:4d}  loss {loss:.4f}")
    for question, answer in answers.items():
        print(f"{question}{answer}")


if __name__ == "__main__":
    main()
