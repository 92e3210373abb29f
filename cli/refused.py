"""Errors that refuse a command."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Refused(Exception):
    """A refused command. code: the exit code. The message is for people; `shown`: it was shown already."""

    def __init__(self, code: int, message: str, *, shown: bool = False) -> None:
        super().__init__(message)
        self.code, self.shown = code, shown

    def show(self) -> int:
        """Print the message unless it was shown; return the exit code."""
        if not self.shown:
            print(self, file=sys.stderr, flush=True)
            self.shown = True
        return self.code


@contextmanager
def refusals() -> Iterator[None]:
    """Convert faults of the machine, the data or an earlier run into Refused."""
    from xtrain.dsl.diagnostics.source import printable
    from xtrain.runtime.data.errors import DataError
    from xtrain.runtime.errors import EnvironmentFault

    try:
        yield
    except (EnvironmentFault, DataError) as error:
        lines = f"error[{error.code}]: {error}".split("\n")
        raise Refused(3, "\n".join(map(printable, lines))) from None
