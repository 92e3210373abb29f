"""Learn on a server which of two answers is better (DPO, arXiv 2305.18290), with the loss computed in this program.

    xtrain serve specs/serve_cpu.xtrain
    python examples/dpo.py http://127.0.0.1:8000

The server gives log-probabilities, this program the loss and its derivatives, and the server the gradient.
"""

import argparse
import os

import numpy as np

from xtrain.client import Server, TrainingRow

BETA = 0.5
PAIRS = [("sky?", " blue", " grey"), ("grass?", " green", " brown"), ("snow?", " white", " black")]


def rows() -> list[TrainingRow]:
    """Of each pair the better answer and the worse one."""
    return [
        TrainingRow.of_text(list((question + answer).encode()), prompt=len(question))
        for question, *answers in PAIRS
        for answer in answers
    ]


def dpo(logprobs: list[np.ndarray], reference: list[float]) -> tuple[float, list[np.ndarray]]:
    """−log σ(β · ((π − r) of the better answer − (π − r) of the worse one)), the mean over pairs, π and r being the
    log-probabilities of an answer by the model and by what it began as; and its derivatives."""
    shifts = [float(own.sum()) - before for own, before in zip(logprobs, reference, strict=True)]
    margins = np.array([BETA * (shifts[pair] - shifts[pair + 1]) for pair in range(0, len(shifts), 2)])
    loss = float(np.log1p(np.exp(-margins)).mean())
    slopes = -BETA / (1 + np.exp(margins)) / len(margins)
    signed = [sign * slope for slope in slopes for sign in (1, -1)]
    return loss, [np.full(len(own), slope) for own, slope in zip(logprobs, signed, strict=True)]


def train(server: Server, steps: int, rate: float = 5e-3) -> tuple[list[float], list[float]]:
    """The loss before each step, and behind the last how much likelier the better answer of each pair has become,
    beside the worse one."""
    model = server.create_model(rank=8, seed=1)
    reference = [float(own.sum()) for own in model.forward(rows()).result().logprobs]
    losses = []
    for _ in range(steps):
        losses.append(model.forward_backward_custom(rows(), lambda found: dpo(found, reference)))
        model.optim_step(rate, reduction="sum", grad_clip_norm=1.0)
    now = [float(own.sum()) for own in model.forward(rows()).result().logprobs]
    shifts = [after - before for after, before in zip(now, reference, strict=True)]
    return losses, [shifts[pair] - shifts[pair + 1] for pair in range(0, len(shifts), 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    with Server(arguments.url, key=os.environ.get("XTRAIN_KEY"), name="dpo") as server:
        losses, margins = train(server, arguments.steps)
    for step, loss in enumerate(losses, start=1):
        if step % 5 == 1 or step == len(losses):
            print(f"step {step:4d}  loss {loss:.4f}")
    for (question, better, worse), margin in zip(PAIRS, margins, strict=True):
        print(f"{question}{better} rather than{worse}: {margin:+.2f} nats")


if __name__ == "__main__":
    main()
