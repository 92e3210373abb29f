"""Power cuts: what of a folder is on the disk at each moment of a change.

    with PowerCut(folder) as cut:
        change()
    for image in cut.images(tmp_path): ...   # folders as they may be found after the power has come back

A file is on the disk as it was when it was last synced; of what was not, `EMPTY` or `ZEROS` is found. A name is there
either at once or not before its folder was synced. The disk keeps the order of nothing else.
"""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("fsync", "fdatasync", "rename", "replace", "link", "unlink", "remove", "rmdir", "mkdir", "ftruncate")
EMPTY, ZEROS = "empty", "zeros"  # as ext4 and XFS leave a file that was renamed before its blocks were allocated

Image = dict[str, bytes | None]  # path → content; None for a folder


class PowerCut:
    """Follows the changes of a folder by this process, as a context manager; what is there before is on the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[int, Any] = {}  # by inode: the content on the disk, or names → files and folders
        self._found: dict[tuple[tuple[str, bytes | None], ...], None] = {}
        self._last: list[Image] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "PowerCut":
        self._sync_all(self.root)
        for name in CHANGES:
            self._patch.setattr(os, name, self._watched(name, getattr(os, name)))
        return self

    def __exit__(self, *raised: object) -> None:
        self._patch.undo()
        self._note()

    def images(self, folder: Path) -> Iterator[Path]:
        """Make a folder for each state that a cut during the change may leave, the earliest first."""
        yield from self._made(folder / "cuts", [dict(found) for found in self._found])

    def images_after(self, folder: Path) -> Iterator[Path]:
        """Make a folder for each state that a cut after the change may leave."""
        yield from self._made(folder / "after", self._last)

    def _made(self, folder: Path, images: list[Image]) -> Iterator[Path]:
        for number, image in enumerate(images):
            there = folder / str(number)
            there.mkdir(parents=True)
            for path, content in image.items():
                (there / path).parent.mkdir(parents=True, exist_ok=True)
                (there / path).mkdir(exist_ok=True) if content is None else (there / path).write_bytes(content)
            yield there

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **rest: Any) -> Any:
            self._note()
            gone = self._replaced(name, args)
            answer = call(*args, **rest)
            for inode in gone:
                self._files.pop(inode, None)  # the number may be given again
            if name in ("fsync", "fdatasync"):
                self._sync(Path(f"/proc/self/fd/{int(args[0])}").resolve())
            self._note()
            return answer

        return run

    def _replaced(self, name: str, args: tuple[Any, ...]) -> list[int]:
        """Return the inode whose last name a call takes away."""
        taken = args[1] if name in ("rename", "replace") else args[0] if name in ("unlink", "remove", "rmdir") else None
        if taken is None or not os.path.lexists(taken):
            return []
        found = os.lstat(taken)
        return [found.st_ino] if found.st_nlink == 1 or stat.S_ISDIR(found.st_mode) else []

    def _sync_all(self, path: Path) -> None:
        for below in path.iterdir() if path.is_dir() and not path.is_symlink() else ():
            self._sync_all(below)
        self._sync(path)

    def _sync(self, path: Path) -> None:
        if not path.exists():
            return
        if not path.is_dir():
            self._files[path.stat().st_ino] = [path.read_bytes()]
            return
        names = self._files.setdefault(path.stat().st_ino, {})
        names.clear()
        for below in path.iterdir():
            names[below.name] = self._of(below)

    def _of(self, path: Path) -> Any:
        return self._files.setdefault(path.stat().st_ino, {} if path.is_dir() else [b""])

    def _note(self) -> None:
        """Keep the states that a cut would leave now."""
        at_once = [self._live(lost) for lost in (EMPTY, ZEROS)]
        late: Image = {}
        self._durable(self._files.get(self.root.stat().st_ino, {}), "", late)
        self._last = [*at_once, late]
        self._found.update(dict.fromkeys(tuple(sorted(image.items())) for image in self._last))

    def _live(self, lost: str) -> Image:
        """Every name that is there, with what is on the disk of its file."""
        image: Image = {}
        for path in sorted(self.root.rglob("*")):
            name = path.relative_to(self.root).as_posix()
            if path.is_dir():
                image[name] = None
                continue
            found = self._files.get(path.stat().st_ino, [b""])[0]
            image[name] = found.ljust(path.stat().st_size, b"\0") if lost == ZEROS else found
        return image

    def _durable(self, names: dict[str, Any], before: str, image: Image) -> None:
        for name, found in names.items():
            image[before + name] = None if isinstance(found, dict) else found[0]
            if isinstance(found, dict):
                self._durable(found, f"{before}{name}/", image)
