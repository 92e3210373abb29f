"""Weights that a client sends for sampling: `PUT sessions/SESSION/samplers/NUMBER`, a tar of an exported folder."""

import asyncio
import hashlib
import os
import re
import shutil
import tarfile
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from xtrain.server.json_wire import Refusal
from xtrain.server.models_in_memory import new_name
from xtrain.server.server import TrainingServer

FILES: Final = 1024  # of an archive
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
PAUSE: Final = 60.0  # seconds between two pieces of a body
PIECE: Final = 2**20


async def take_weights(
    request: Request, server: TrainingServer, owner: str, session: str, number: int
) -> "tuple[str, Future[None]]":
    """Take the weights of a sampling session, and return its id. The same weights again are the same session.

    The query has `sha256` of the body, so that weights of another version are refused. Raises Refusal.
    """
    digest, size = request.query_params.get("sha256", ""), request.headers.get("content-length", "")
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise Refusal(422, "the query needs `sha256`, the SHA-256 of the body")
    if not (size.isascii() and size.isdigit()):
        raise Refusal(422, "the body needs a Content-Length")
    if (known := server.taken(owner, session, number, digest)) is not None:
        return known
    if shutil.disk_usage(server.store.folder).free - 2 * int(size[:20]) < server.limits.free:
        raise Refusal(413, "the disk of the server has no room for these weights")
    name = new_name()
    folder = server.store.weights(name)
    try:
        archive = folder.with_name(f"{name}.tar")
        folder.mkdir(parents=True)
        found = await _written(request, archive, int(size[:20]))
        if found != digest:
            raise Refusal(422, f"the body has the SHA-256 {found}, not {digest}: these are other weights")
        await run_in_threadpool(_unpack, archive, folder)
        return server.take(owner, session, number, digest, name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        folder.with_name(f"{name}.tar").unlink(missing_ok=True)


async def _written(request: Request, to: Path, size: int) -> str:
    """Write a body to a file, and return its SHA-256."""
    digest, length = hashlib.sha256(), 0
    with to.open("xb") as file:
        pieces = request.stream().__aiter__()
        while True:
            try:
                piece = await asyncio.wait_for(pieces.__anext__(), PAUSE)
            except StopAsyncIteration:
                break
            except TimeoutError:
                raise Refusal(408, f"nothing of the body came for {PAUSE:.0f} s") from None
            except ClientDisconnect:
                raise Refusal(400, "the body was cut off") from None
            length += len(piece)
            if length > size:
                raise Refusal(413, f"the body is larger than its Content-Length of {size} bytes")
            digest.update(piece)
            await run_in_threadpool(file.write, piece)
    return digest.hexdigest()


def _unpack(archive: Path, folder: Path) -> None:
    """Write the files of an archive into a folder, durably. Raises Refusal."""
    try:
        with tarfile.open(archive, "r:") as tar:
            for number, member in enumerate(tar):
                if not member.isreg() or not NAME.fullmatch(member.name) or number >= FILES:
                    raise Refusal(
                        422, f"the archive has more than {FILES} files, or {member.name[:80]!r}: names of files"
                    )
                source = tar.extractfile(member)
                assert source is not None
                with (folder / member.name).open("xb") as to:
                    _copy(source, to)
    except (tarfile.TarError, FileExistsError, EOFError) as error:
        raise Refusal(422, f"the body is no archive of files: {type(error).__name__}") from None
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _copy(source: IO[bytes], to: IO[bytes]) -> None:
    shutil.copyfileobj(source, to, PIECE)
    to.flush()
    os.fsync(to.fileno())
