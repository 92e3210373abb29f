from xtrain import environment, source, tool


@source
def made():
    yield {"q": "1+1", "a": "2"}


@environment
class counting:
    """Counts, with a tool."""

    def reset(self, task, most: int = 5):
        return "count"

    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    def step(self, text):
        return None


@environment
class silent:
    """Says nothing."""

    def reset(self, task):
        return "?"

    def step(self, text):
        return None
