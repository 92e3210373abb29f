"""A game of guessing numbers as an environment, and rounds of it to begin with."""

from collections.abc import Iterator
from random import Random

from xtrain import environment, source

LOWEST, HIGHEST = 1, 7


def conversation(*texts: str) -> dict:
    """Messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]}


@source
def tasks(count: int) -> Iterator[dict]:
    """Tasks that differ by their seeds alone."""
    for number in range(count):
        yield {"question": f"task {number}", "answer": "-"}


@environment
class guessing:
    """Guess a number from 1 to 7 with the hints `more` and `less`."""

    def reset(self, task, random, wrong: float = -0.5):
        self.number, self.wrong = random.randint(LOWEST, HIGHEST), wrong
        self.low, self.high = LOWEST, HIGHEST
        return "guess"

    def step(self, text):
        guess = int(text) if text.isdecimal() else 0
        if guess == self.number:
            return None, 1.0
        reward = 0.0 if self.low <= guess <= self.high else self.wrong  # it cannot be right after the hints
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return "more", reward
        self.high = min(self.high, guess - 1)
        return "less", reward


@source
def guesses(count: int, seed: int = 0) -> Iterator[dict]:
    """Rounds of a player who often does not listen."""
    random = Random(seed)
    for _ in range(count):
        number, texts, low, high = random.randint(LOWEST, HIGHEST), ["guess"], LOWEST, HIGHEST
        for _ in range(3):
            guess = random.randint(low, high) if random.random() < 0.5 else random.randint(LOWEST, HIGHEST)
            texts.append(str(guess))
            if guess == number:
                break
            texts.append("more" if guess < number else "less")
            low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        yield conversation(*texts[: len(texts) // 2 * 2])
