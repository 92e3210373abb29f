"""Checksums of the files of a checkpoint: a CRC-32 of every piece, which threads compute side by side.

They are to find damage, not forgery: a piece that was damaged keeps its CRC once in four billion times, and a CRC is
computed some times as fast as a cryptographic digest, so that all of a state can be read through before it is trusted.
The checksum of a file is the BLAKE2b of those of its pieces in order; one large file keeps all threads busy.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

PIECE_BYTES = 4 * 2**20
DIGEST_BYTES = 16
MOST_THREADS = 8  # a disk gives no more, and other work wants cores too


def file_checksums(paths: Iterable[Path], threads: int | None = None) -> dict[str, str]:
    """Name → checksum in hex, of each file. Raises OSError for one that cannot be read.

    threads: None takes this process's share of the cores.
    """
    spans = {path: range(0, max(path.stat().st_size, 1), PIECE_BYTES) for path in paths}
    with ThreadPoolExecutor(threads or share_of_cores()) as pool:
        pieces = {path: [pool.submit(_piece, path, start) for start in starts] for path, starts in spans.items()}
        return {path.name: _join(piece.result() for piece in each) for path, each in pieces.items()}


def share_of_cores() -> int:
    """Threads for this process, of which there is one for each rank of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _piece(path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left, sum = PIECE_BYTES, 0
        while left and (read := file.read(left)):
            sum = crc32(read, sum)  # without the lock of the interpreter
            left -= len(read)
    return sum.to_bytes(4)


def _join(pieces: Iterable[bytes]) -> str:
    return blake2b(b"".join(pieces), digest_size=DIGEST_BYTES).hexdigest()
