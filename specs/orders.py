"""Pairs of answers that are made, not read: numbers in order, and the same numbers in another one."""

from collections.abc import Iterator
from random import Random

from xtrain import source


@source
def orders(count: int = 10_000, length: int = 5, seed: int = 0) -> Iterator[dict]:
    """A person asks for digits in order; one answer has them so, the other has them in another order."""
    random = Random(seed)
    for _ in range(count):
        digits = random.sample(range(10), length)
        right, wrong = sorted(digits), sorted(digits)
        while wrong == right:
            random.shuffle(wrong)
        asked, chosen, rejected = (" ".join(map(str, each)) for each in (digits, right, wrong))
        yield {"prompt": f"order {asked}", "chosen": chosen, "rejected": rejected}
