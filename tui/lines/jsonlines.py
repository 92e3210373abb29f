"""Records passed through as NDJSON, for programs: `{"kind": "metrics" | "event", …}`.

Of a run that is gone without a word, the last line says so: `{"kind": "lost", "step": …, "why": …}`.
"""

import json
import math
from typing import Any, TextIO

from ..state import RunState
from ..tail import Record
from .drawer import Drawer


class JsonView(Drawer):
    """One line per record, its fields unchanged but for `kind`; NaN and infinities, which JSON lacks, become null."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def shows(self, record: Record) -> bool:
        return True

    def draw(self, state: RunState, record: Record) -> None:
        self._out.write(line(record) + "\n")

    def lost(self, state: RunState, why: str) -> None:
        self._out.write(json.dumps({"kind": "lost", "step": state.step, "why": why}) + "\n")


def line(record: Record) -> str:
    """`record` as one line of strict JSON."""
    kind = "event" if "event" in record else "metrics"
    tagged = {"kind": kind, **{key: value for key, value in record.items() if key != "kind"}}
    try:
        return json.dumps(tagged, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(tagged), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
