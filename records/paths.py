"""Where the files lie that a run writes while it goes on, below its directory."""

from pathlib import Path
from typing import Final

METRICS: Final = "metrics.jsonl"
EVENTS: Final = "events.jsonl"
CONTROL: Final = "control"


def rank_lines_path(directory: Path, rank: int) -> Path:
    """The lines of one rank."""
    return directory / "ranks" / f"{rank:05d}.jsonl"


def heartbeat_path(directory: Path, rank: int) -> Path:
    """The line of one rank that says how far it is, and that it is alive."""
    return directory / "ranks" / f"{rank:05d}.beat"
