"""A module of collators that make pairs and sequences, with numbers that losses read, of any lines of text."""

# Pairs and sequences of unequal length from the lines of the trials, with numbers that are made of their tokens, some
# tokens without a label, where the numbers are large, and some sequences without any label.
PARTS = """
import torch
from attrs import evolve
from xtrain import IGNORE_INDEX, collator

def numbered(sample, first, end, side):
    tokens, labels = sample.tokens[first:end], sample.labels[first:end]
    hidden = (tokens % 5 == 0) | (int(tokens.sum()) % 7 == 0)
    made = {
        "ref_logprobs": -(labels % 7) / 4 - 0.2,
        "logprobs": -(labels % 6) / 3 - 0.1,
        "advantages": (tokens % 4) - 1.3,
        "weights": (labels % 3) / 2,
    }
    columns = {name: torch.where(hidden, 60.0, values.float()) for name, values in made.items()}
    return evolve(
        sample,
        tokens=tokens,
        labels=torch.where(hidden, IGNORE_INDEX, labels),
        columns=columns,
        values={"label": float(len(tokens) % 2), "margin": len(tokens) % 3 / 2, "reward": len(tokens) % 4 - 1.5},
        side=side,
    )

@collator(takes="labelled samples")
def pairs(samples):
    for sample in samples:
        cut = len(sample.tokens) // 3 // 8 * 8
        if cut:
            yield numbered(sample, 0, cut, 0)
            yield numbered(sample, cut, len(sample.tokens), 1)

@collator(takes="labelled samples")
def sequences(samples):
    for sample in samples:
        yield numbered(sample, 0, len(sample.tokens), 0)
"""
CHAIN = 'use "numbered.py"\ncollate = to_tensor -> flatten -> shift_tokens -> {kind}() -> pack(sequential, align = 8)\n'
