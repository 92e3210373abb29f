"""What a launcher starts ends with it."""

import ctypes
import os
import signal
import sys

from ..outcome import exit_process


def die_with_launcher(launcher: int) -> None:
    """Ask the kernel for a SIGTERM when the launcher dies, so that no rank outlives it (Linux; elsewhere nothing)."""
    PR_SET_PDEATHSIG = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:
            exit_process(1)  # it died before the kernel was asked
