"""How a run can end, and the exit code that says so."""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from xtrain.records.end_status import EndStatus

EXIT_CODES: Final[Mapping[str, int]] = {
    EndStatus.DONE: 0,
    EndStatus.COMPLETE: 0,
    EndStatus.FAILED: 1,
    EndStatus.ENVIRONMENT: 3,
    EndStatus.STOPPED: 75,
    EndStatus.INTERRUPTED: 130,
}

# What a signal that came before there was anything to save makes of a run.
STATUS_OF_SIGNAL: Final[dict[int | None, str]] = {
    signal.SIGTERM: EndStatus.STOPPED,
    signal.SIGHUP: EndStatus.STOPPED,
    signal.SIGUSR1: EndStatus.STOPPED,
    signal.SIGINT: EndStatus.INTERRUPTED,
}


def exit_process(code: int) -> None:
    """End this process without tearing the interpreter down: torch's teardown aborts about once in a hundred runs."""
    with suppress(OSError):  # a full disk takes none of it, and is no reason to stay
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
