"""Documents that are made, not read: sums, as text to go on with and as conversations."""

from collections.abc import Iterator
from random import Random

from xtrain import source


def _terms(count: int, seed: int) -> Iterator[tuple[int, int]]:
    random = Random(seed)
    for _ in range(count):
        yield random.randrange(100), random.randrange(100)


@source
def sums(count: int = 10_000, seed: int = 0) -> Iterator[str]:
    """Sums of two numbers, eight a document."""
    lines: list[str] = []
    for a, b in _terms(count * 8, seed):
        lines.append(f"{a} + {b} = {a + b}\n")
        if len(lines) == 8:
            yield "".join(lines)
            lines = []


@source
def conversations(count: int = 10_000, seed: int = 0) -> Iterator[dict]:
    """A person asks for a sum, an assistant gives it."""
    for a, b in _terms(count, seed):
        question = {"role": "user", "content": f"{a} + {b}?"}
        yield {"messages": [question, {"role": "assistant", "content": str(a + b)}]}
