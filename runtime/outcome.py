"""How a run can end, and the exit code that says so."""

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    pass

EXIT_CODES = {"done": 0, "complete": 0, "failed": 1, "environment": 3, "stopped": 75, "interrupted": 130}

# What a signal that came before there was anything to save makes of a run.
STATUS_OF_SIGNAL: Final[dict[int | None, str]] = {
    signal.SIGTERM: "stopped",
    signal.SIGHUP: "stopped",
    signal.SIGUSR1: "stopped",
    signal.SIGINT: "interrupted",
}


def exit_process(code: int) -> None:
    """End this process without tearing the interpreter down: torch's teardown aborts about once in a hundred runs."""
    with suppress(OSError):  # a full disk takes none of it, and is no reason to stay
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
