"""The folder of checkpoints: immutable entries, a pointer to the latest, published only when durable."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from attrs import frozen

STATE = "state.json"
LATEST = "latest"
FORMAT = 1
_NAME = re.compile(r"ckpt-s(\d{12})")


@frozen
class Entry:
    """One published checkpoint."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        return json.loads((self.path / STATE).read_text())


@frozen
class CheckpointFolder:
    """`checkpoints/` of a run."""

    root: Path

    def path(self, step: int) -> Path:
        return self.root / f"ckpt-s{step:012d}"

    def partial(self, step: int) -> Path:
        """Where a checkpoint is written before it is published."""
        return self.root / f"ckpt-s{step:012d}.partial"

    def entries(self) -> list[Entry]:
        """Published checkpoints that look whole, oldest first."""
        if not self.root.is_dir():
            return []
        found = [(entry, _NAME.fullmatch(entry.name)) for entry in self.root.iterdir()]
        whole = [Entry(path, int(match[1])) for path, match in found if match and is_whole(path)]
        return sorted(whole, key=lambda entry: entry.step)

    def named(self) -> str:
        """The name in the pointer; empty where there is none."""
        try:
            return (self.root / LATEST).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def latest(self) -> Entry | None:
        """The checkpoint the pointer names, or the newest whole one where that is missing or damaged."""
        entries, named = self.entries(), self.named()
        return next((e for e in entries if e.path.name == named), entries[-1] if entries else None)

    def sweep(self) -> None:
        """Remove what saves that were cut off have left; nobody may be saving here."""
        for partial in self.root.glob("*.partial"):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()

    def begin(self, step: int) -> Path:
        """An empty folder to write into; what an earlier attempt left half-made is removed."""
        partial = self.partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def publish(self, step: int, state: dict[str, Any]) -> Path:
        """Make the written checkpoint durable, give it its name, and point `latest` at it, in that order."""
        partial, final = self.partial(step), self.path(step)
        files = {file.name: file.stat().st_size for file in partial.iterdir()}
        (partial / STATE).write_text(json.dumps({"format": FORMAT, **state, "files": files}, indent=1))
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        if final.exists():
            shutil.rmtree(final)  # the same step, saved again
        partial.rename(final)
        pointer = self.root / f"{LATEST}.partial"
        pointer.write_text(final.name + "\n")
        _sync(pointer)
        pointer.rename(self.root / LATEST)
        _sync(self.root)
        return final

    def retain(self, keep: int | None) -> list[Path]:
        """Remove all but the newest `keep` checkpoints, never the latest; returns what was removed."""
        if keep is None:
            return []
        latest = self.latest()
        old = [e.path for e in self.entries()[:-keep] if latest is None or e.path != latest.path]
        for path in old:
            shutil.rmtree(path)
        return old


def is_whole(path: Path) -> bool:
    """Whether every file that was published is there in its full size."""
    try:
        files = json.loads((path / STATE).read_bytes())["files"]
        return ".metadata" in files and all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
