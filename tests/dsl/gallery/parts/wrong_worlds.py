import numpy as np

from xtrain import environment, tool


@environment
class endless:
    def reset(self, task):
        return ""


@environment
class settled:
    def reset(self, task, seconds: int = 3):
        return ""

    def step(self, text):
        return None


@environment
class mute:
    def reset(self, task):
        return ""

    @tool
    def look(self, at: int):
        return at

    def step(self, text):
        return None


@environment
class strange:
    def reset(self, task):
        return ""

    @tool
    def move(self, by: np.ndarray):
        """Move."""

    def step(self, text, more):
        return None


@environment
class shapeless:
    def reset(self, task):
        return ""

    @tool
    def move(self, by: np.ndarray):
        """Move."""

    def step(self, text):
        return None


@environment
def function(task):
    return ""
