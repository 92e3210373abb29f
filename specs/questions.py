"""Questions with answers that can be checked."""

from collections.abc import Iterator

from xtrain import source


@source
def questions(below: int = 10) -> Iterator[dict]:
    """Every sum of two numbers below that one, as a question and its answer."""
    for a in range(below):
        for b in range(below):
            yield {"question": f"{a}+{b}", "answer": str(a + b)}
