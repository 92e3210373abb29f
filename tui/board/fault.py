"""Where an unexpected error of the dashboard is written: never on the screen."""

import contextlib
import os
import tempfile
import time
import traceback
from pathlib import Path

# A larger file is started over: an error that recurs four times a second must not fill a disk.
MOST_BYTES = 1 << 20


def log_path() -> Path:
    """Return the path of the fault file in the user's state folder (XDG base directories)."""
    state = os.environ.get("XDG_STATE_HOME")
    home = Path(state) if state else Path("~/.local/state").expanduser()
    return home / "xtrain" / "dashboard.log"


def write(error: BaseException) -> Path | None:
    """Add an error with its traceback; the file it went to, None if nothing could be written."""
    text = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} pid {os.getpid()}\n{''.join(traceback.format_exception(error))}\n"
    for path in (log_path(), Path(tempfile.gettempdir()) / f"xtrain-dashboard-{os.getuid()}.log"):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            full = path.exists() and path.stat().st_size > MOST_BYTES
            with path.open("w" if full else "a") as file:
                file.write(text)
            return path
    return None
