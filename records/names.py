"""Words and paths of a run directory, for code that reads and writes no records."""

from enum import StrEnum
from pathlib import Path
from typing import Final


class ControlWord(StrEnum):
    """Commands for a running run: the first word in its plan, in a file and in the answers."""

    STOP = "stop"
    SAVE = "save"
    EVAL = "eval"
    PROFILE = "profile"
    PAUSE = "pause"
    RESUME = "resume"


class ControlState(StrEnum):
    """State of a command: `state` of a `control` event."""

    ACCEPTED = "accepted"
    DONE = "done"
    REFUSED = "refused"


class EndStatus(StrEnum):
    """`status` of a `run_end` event."""

    DONE = "done"
    COMPLETE = "complete"
    FAILED = "failed"
    ENVIRONMENT = "environment"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"


METRICS_FILE: Final = "metrics.jsonl"
EVENTS_FILE: Final = "events.jsonl"
LR_SWEEP_FILE: Final = "lr_sweep.json"
CONTROL_FOLDER: Final = "control"


def rank_lines_path(directory: Path, rank: int) -> Path:
    """Return the path of one rank's lines."""
    return directory / "ranks" / f"{rank:05d}.jsonl"


def heartbeat_path(directory: Path, rank: int) -> Path:
    """Return the path of one rank's heartbeat."""
    return directory / "ranks" / f"{rank:05d}.beat"
