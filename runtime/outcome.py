"""How a run can end, and the exit code that says so."""

import signal
from typing import Final

EXIT_CODES = {"done": 0, "complete": 0, "failed": 1, "environment": 3, "stopped": 75, "interrupted": 130}

# What a signal that came before there was anything to save makes of a run.
STATUS_OF_SIGNAL: Final[dict[int | None, str]] = {
    signal.SIGTERM: "stopped",
    signal.SIGHUP: "stopped",
    signal.SIGUSR1: "stopped",
    signal.SIGINT: "interrupted",
}
