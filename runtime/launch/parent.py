"""What a launcher starts ends with it."""

import ctypes
import os
import signal
import sys
from typing import Final

from xtrain.runtime.outcome import exit_process

# Says to a rank that others go on without it when its launcher dies.
OTHERS_GO_ON: Final = "XTRAIN_OTHERS_GO_ON"


def die_with_launcher(launcher: int) -> None:
    """Ask the kernel for a SIGTERM when the launcher dies, so that no rank outlives it (Linux; elsewhere nothing).
    Where others go on without this process it is a SIGKILL: they do not hear of a stop."""
    PR_SET_PDEATHSIG = 1
    number = signal.SIGKILL if OTHERS_GO_ON in os.environ else signal.SIGTERM
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != launcher:
            exit_process(1)  # it died before the kernel was asked
