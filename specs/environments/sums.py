"""Sums with a calculator as an environment, and answers to begin with, most of which guess."""

import json
from collections.abc import Iterator
from random import Random

from xtrain import environment, source, tool


@source
def tasks(count: int) -> Iterator[dict]:
    """Tasks that differ by their seeds alone."""
    for number in range(count):
        yield {"question": f"sum {number}", "answer": "-"}


@environment
class sums:
    """Add two numbers; a calculator can be called before the answer."""

    def reset(self, task, random):
        a, b = random.randint(1, 9), random.randint(1, 9)
        self.answer = str(a + b)
        return f"{a}+{b}"

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def step(self, text):
        return None, float(text == self.answer)


@source
def answers(count: int, seed: int = 0) -> Iterator[dict]:
    """Answers of someone who mostly guesses, and else calls the calculator."""
    random = Random(seed)
    for _ in range(count):
        a, b = random.randint(1, 9), random.randint(1, 9)
        messages = [{"role": "system", "content": "add"}, {"role": "user", "content": f"{a}+{b}"}]
        if random.random() < 0.3:
            call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
            messages += [{"role": "assistant", "content": f"!{call}"}, {"role": "tool", "content": str(a + b)}]
            messages.append({"role": "assistant", "content": str(a + b)})
        else:
            messages.append({"role": "assistant", "content": str(random.randint(2, 18))})
        yield {"messages": messages}
