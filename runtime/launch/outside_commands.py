"""Commands of other programs that a launcher calls."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from xtrain.runtime.control.signals import killed_by
from xtrain.runtime.errors import EnvironmentFault

PATIENCE_SECONDS: Final = 60


def answer_of(*command: str, refused: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> str | None:
    """What a command prints; None where it fails with one of the texts `refused`. environment: None for that of this
    process. Raises EnvironmentFault (X461)."""
    said = shlex.join(command)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE_SECONDS,
            check=False,
            env=environment,
        )
    except FileNotFoundError:
        message = f"the command {command[0]} was not found"
        raise EnvironmentFault("X461", f"{message}; call xtrain where it is installed") from None
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault("X461", f"`{said}` has not ended within {PATIENCE_SECONDS} s") from error
    except OSError as error:
        raise EnvironmentFault("X461", f"`{said}` cannot be started: {error.strerror}") from error
    if done.returncode == 0:
        return done.stdout
    why = (done.stderr or done.stdout).strip()
    if any(each in why for each in refused):
        return None
    how = f"failed with exit code {done.returncode}" if done.returncode > 0 else f"was {killed_by(-done.returncode)}"
    raise EnvironmentFault("X461", f"`{said}` {how}: {why or 'no output'}")
