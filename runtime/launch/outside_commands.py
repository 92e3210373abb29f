"""Commands of other programs that a launcher calls."""

import subprocess
from collections.abc import Sequence
from typing import Final

from ..errors import EnvironmentFault

PATIENCE_SECONDS: Final = 60


def answer_of(*command: str, refused: Sequence[str] = ()) -> str | None:
    """What a command prints; None where it fails with one of the texts `refused`. Raises EnvironmentFault (X461)."""
    said = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    except FileNotFoundError:
        message = f"the command {command[0]} was not found"
        raise EnvironmentFault("X461", f"{message}; call xtrain where it is installed, or use --dry") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault("X461", f"`{said}` failed: {error}") from error
    if done.returncode == 0:
        return done.stdout
    why = (done.stderr or done.stdout).strip()
    if any(each in why for each in refused):
        return None
    raise EnvironmentFault("X461", f"`{said}` failed with exit code {done.returncode}: {why or 'no output'}")
