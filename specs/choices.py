"""Pairs of answers that are made, not read: one of two numbers is asked for, and the other one is the worse answer."""

from collections.abc import Iterator
from random import Random

from xtrain import source


@source
def choices(count: int = 10_000, seed: int = 0) -> Iterator[dict]:
    """`most of 12 80: 80` is preferred to `most of 12 80: 12`, `least of 12 80: 12` to `least of 12 80: 80`."""
    random = Random(seed)
    for _ in range(count):
        low, high = sorted(random.sample(range(10, 100), 2))
        first, second = random.sample((low, high), 2)
        word, chosen, rejected = random.choice((("most", high, low), ("least", low, high)))
        question = f"{word} of {first} {second}: "
        yield {"chosen": f"{question}{chosen}", "rejected": f"{question}{rejected}"}
