"""A folder of weights as a tar stream."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PIECE: Final = 2**20
BLOCK: Final = 512


def tar_of(folder: Path, name: str) -> Iterator[bytes]:
    """Its files under `name`, piece by piece. Links are left out."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            head = tarfile.TarInfo(f"{name}/{path.relative_to(folder).as_posix()}")
            head.size, head.mode = path.stat().st_size, 0o644
            yield head.tobuf(tarfile.PAX_FORMAT)
            while piece := file.read(PIECE):
                yield piece
            yield bytes(-head.size % BLOCK)
    yield bytes(2 * BLOCK)
