"""Where the files lie that a run writes while it goes on, below its directory."""

from pathlib import Path
from typing import Final

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
