"""A folder of weights as a tar stream."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PIECE: Final = 2**20
BLOCK: Final = 512


def tar_of(folder: Path, name: str) -> tuple[int, Iterator[bytes]]:
    """Return the number of bytes, and the files as pieces under `name`. Links are left out."""
    files: list[tuple[Path, bytes, int]] = []
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink() and path.is_file():
            head = tarfile.TarInfo(f"{name}/{path.relative_to(folder).as_posix()}")
            head.size, head.mode = path.stat().st_size, 0o644
            files.append((path, head.tobuf(tarfile.PAX_FORMAT), head.size))
    total = sum(len(head) + size + -size % BLOCK for _, head, size in files) + 2 * BLOCK
    return total, _pieces(files)


def _pieces(files: list[tuple[Path, bytes, int]]) -> Iterator[bytes]:
    for path, head, size in files:
        yield head
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece
        yield bytes(-size % BLOCK)
    yield bytes(2 * BLOCK)
