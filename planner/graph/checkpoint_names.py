"""What checkpoints are called in a folder, and what a path that is to be one looks like, without reading any."""

import re
from pathlib import Path
from typing import Final, Literal, get_args

from xtrain.regular_files import read_regular

Pointer = Literal["latest", "best", "model"]
POINTERS: Final[tuple[Pointer, ...]] = get_args(Pointer)
ALIAS: Final = ".pt"
FULL: Final = re.compile(r"ckpt-s(\d{12})")
WEIGHTS: Final = re.compile(r"model-s(\d{12})")
EPOCH: Final = re.compile(r"epoch-(\d{1,9})")  # no file: the sidecar of a checkpoint says which epoch it has ended
STATE: Final = "state.json"
FOLDER: Final = "checkpoints"  # in that of a run

# full: a run can go on from it. weights: weights alone. later: a run or folder that has none yet.
Found = Literal["full", "weights", "later", "missing", "other"]


def look_at(path: Path) -> Found:
    """What there is at a path that means a checkpoint: itself, a pointer, a folder of checkpoints or a run."""
    try:
        if not path.exists():
            return look_at(path.parent) if EPOCH.fullmatch(path.name) else "missing"
        if path.is_file():
            return _file(path)
        names = [each.name for each in path.iterdir()]
        if FULL.fullmatch(path.name) or WEIGHTS.fullmatch(path.name):
            return _kind([path.name]) if names else "later"
        inside = [each.name for each in (path / FOLDER).iterdir()] if FOLDER in names else []
        found = _kind([*names, *inside])
        return "later" if found == "other" and (not names or FOLDER in names or "plan.json" in names) else found
    except (OSError, ValueError):  # of it nothing can be said here
        return "missing"


def _file(path: Path) -> Found:
    if path.suffix == ALIAS:
        return _kind([path.parent.name]) if path.stem not in POINTERS else _pointed(path.with_suffix(""))
    return _pointed(path) if path.name in POINTERS else "other"


def _pointed(pointer: Path) -> Found:
    return _kind([read_regular(pointer, 1000).decode(errors="replace").strip()]) if pointer.is_file() else "other"


def _kind(names: list[str]) -> Found:
    """Of the best of what is there."""
    if any(FULL.fullmatch(name) for name in names):
        return "full"
    return "weights" if any(WEIGHTS.fullmatch(name) for name in names) else "other"
