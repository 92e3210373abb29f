"""Documents that are drawn from a distribution which is known: each letter by the two before it."""

from collections.abc import Iterator
from math import log
from random import Random

from xtrain import source

LETTERS = "abcdefghijkl"
LENGTH = 60


def table() -> dict[str, list[float]]:
    """The probabilities of the next letter behind each two, of which few count."""
    random = Random(0)
    found = {}
    for pair in (first + second for first in LETTERS for second in LETTERS):
        weights = [random.random() ** 6 for _ in LETTERS]
        found[pair] = [weight / sum(weights) for weight in weights]
    return found


@source
def chain(count: int = 1_000, seed: int = 0) -> Iterator[str]:
    """Documents of 60 letters; others with another seed."""
    following, random = table(), Random(seed)
    for _ in range(count):
        text = random.choice(LETTERS) + random.choice(LETTERS)
        while len(text) < LENGTH:
            text += random.choices(LETTERS, following[text[-2:]])[0]
        yield text


def entropy(count: int, seed: int) -> float:
    """The least loss that any model can have on some documents: nats a token, the end of each document included."""
    following = table()
    nats = tokens = 0.0
    for text in chain(count, seed):
        chosen = (following[text[at - 2 : at]][LETTERS.index(text[at])] for at in range(2, len(text)))
        nats += 2 * log(len(LETTERS)) - sum(map(log, chosen))
        tokens += len(text) + 1
    return nats / tokens
