"""Where the files lie that a run writes while it goes on, below its directory."""

from pathlib import Path
from typing import Final

METRICS_FILE: Final = "metrics.jsonl"
EVENTS_FILE: Final = "events.jsonl"
LR_SWEEP_FILE: Final = "lr_sweep.json"
CONTROL_FOLDER: Final = "control"


def rank_lines_path(directory: Path, rank: int) -> Path:
    """The lines of one rank."""
    return directory / "ranks" / f"{rank:05d}.jsonl"


def heartbeat_path(directory: Path, rank: int) -> Path:
    """The line of one rank that says how far it is, and that it is alive."""
    return directory / "ranks" / f"{rank:05d}.beat"
