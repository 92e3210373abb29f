"""A tiny text world as an environment, and walks in it to begin with."""

from collections.abc import Iterator
from random import Random

from xtrain import environment, source

STEPS = {"n": (0, 1), "s": (0, -1), "e": (1, 0), "w": (-1, 0)}
PLACES = [(x, y) for x in range(-1, 2) for y in range(-1, 2) if (x, y) != (0, 0)]


def seen(x: int, y: int) -> str:
    """Where the way out is, from a place at x, y from it: such as `se`."""
    return ("s" if y > 0 else "n" if y < 0 else "") + ("w" if x > 0 else "e" if x < 0 else "")


@source
def walks(count: int) -> Iterator[dict]:
    """Tasks that differ by their seeds alone."""
    for number in range(count):
        yield {"question": f"walk {number}", "answer": "-"}


@environment
class walking:
    """Walk out of a meadow with `n`, `e`, `s` and `w`, told where the way out is."""

    def reset(self, task, random, wrong: float = -0.25):
        self.place, self.wrong = random.choice(PLACES), wrong
        return seen(*self.place)

    def step(self, text):
        if text not in STEPS:
            return None, self.wrong
        reward = 0.0 if text in seen(*self.place) else self.wrong
        self.place = tuple(map(sum, zip(self.place, STEPS[text], strict=True)))
        return (None, 1.0 + reward) if self.place == (0, 0) else (seen(*self.place), reward)


@source
def rambles(count: int, seed: int = 0) -> Iterator[dict]:
    """Walks of someone who mostly goes anywhere."""
    random = Random(seed)
    for _ in range(count):
        place, messages = random.choice(PLACES), []
        for _ in range(3):
            told = seen(*place)
            step = random.choice(told if random.random() < 0.3 else "nesw")
            messages += [{"role": "user", "content": told}, {"role": "assistant", "content": step}]
            place = (place[0] + STEPS[step][0], place[1] + STEPS[step][1])
            if place == (0, 0):
                break
        yield {"messages": messages}
