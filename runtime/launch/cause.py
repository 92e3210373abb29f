"""The last word under torchrun, which shows the file that a failed rank has left below its own traceback."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

FILE: Final = "TORCHELASTIC_ERROR_FILE"
# Seconds by which the first rank may say it after the others.
LATER: Final = 10


def write_cause(text: str, *, of_first: bool = False) -> None:
    """Leave the cause of a failure where the launcher, if there is one, looks for it.

    of_first: the first rank says it. Of several files torchrun shows the earliest last.
    """
    path = os.environ.get(FILE)
    if not path:
        return
    at = int(time.time()) + (LATER if of_first else 0)
    text = "as the first rank says" if of_first else text
    said = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(at)}}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": said}), encoding="utf-8")
