"""Where profiles and memory snapshots lie in a run's directory, and what the ranks settle together about them."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xtrain.runtime.state import Rank

PARTIAL = ".partial"


def folder_of(directory: Path) -> Path:
    """All of them."""
    return directory / "profile"


def file_of(folder: Path, rank: int, ending: str) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank:05d}.{ending}"


def from_first(rank: Rank, found: Callable[[], int]) -> int:
    """A number that only the first rank can know, on all of them. Collective."""
    return int(summed(rank, found() if rank.is_first else 0)[0])


def summed(rank: Rank, *numbers: float) -> list[float]:
    """Numbers summed over all ranks. Collective."""
    if rank.world_size == 1:
        return list(numbers)
    shared = torch.tensor(numbers, dtype=torch.float64, device=rank.device)
    dist.all_reduce(shared)
    return shared.tolist()


def taken(directory: Path, begin: str) -> int:
    """How many folders have a name that begins so: steps may be trained again, and what was seen before is kept."""
    with suppress(OSError):
        return sum(path.name.startswith(begin) for path in folder_of(directory).iterdir())
    return 0


def named(name: str, number: int) -> str:
    """The name of the folder where `number` others have it before."""
    return f"{name}-{number + 1}" if number else name


def sweep(directory: Path) -> None:
    """Remove what processes that were killed have left unfinished."""
    with suppress(OSError):
        for path in folder_of(directory).glob(f"*/*{PARTIAL}"):
            path.unlink(missing_ok=True)


def write_whole(path: Path, write: Callable[[Path], Any]) -> int:
    """Let a file be written under another name first; its bytes. Nothing is left of one that cannot be.

    Raises whatever `write` does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + PARTIAL)
    try:
        write(beside)
        size = beside.stat().st_size
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    return size


def write_json(path: Path, content: Any) -> int:
    """Bytes of the file. Raises OSError."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
