"""HTTP paths of a training server, as the Tinker SDK calls them, with request bodies and tar streams."""

import asyncio
import logging
import tarfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from xtrain.server import state as views
from xtrain.server.access import Keys
from xtrain.server.connections import BASE, guard
from xtrain.server.database import StoreFailed
from xtrain.server.json_wire import (
    CreateSamplingSession,
    CreateSession,
    GetInfo,
    R,
    Refusal,
    Retrieve,
    SessionHeartbeat,
    Ttl,
    WeightsInfo,
    read_json,
)
from xtrain.server.kinds import JSON, Kind
from xtrain.server.messages import Malformed
from xtrain.server.server import KINDS, TrainingServer
from xtrain.server.state import Removed, SavedEntry
from xtrain.server.taking import take_weights

READING: Final = 60.0  # time limit for receiving a body, in seconds
ZSTD_WINDOW: Final = 2**26  # maximum bytes of memory for unpacking
MOST_RATIO: Final = 256  # maximum ratio of unpacked to packed bytes above `SMALL`; batches of training rows stay below
SMALL: Final = 2**20
UNPACKED_PIECE: Final = 2**11  # bytes unpacked at a time: at most 64 MB of output


async def body_of(request: Request, most: int, *media: str) -> bytes:
    """Read and unpack a body. media: accepted types. Raises Refusal: 413 if it is too large, 415 for another type, 408
    if it does not arrive in time."""
    given = (request.headers.get("content-type") or "").partition(";")[0].strip().lower()
    if given not in media:
        raise Refusal(415, f"this path takes {' or '.join(media)}: the Content-Type is {given[:80] or 'missing'}")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > most:
        raise Refusal(413, f"the body is larger than {most} bytes")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "zstd"):
        raise Refusal(415, "content-encoding may be zstd")
    raw = bytearray()
    try:
        async with asyncio.timeout(READING):
            async for piece in request.stream():
                raw += piece
                if len(raw) > most:
                    raise Refusal(413, f"the body is larger than {most} bytes")
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {READING:.0f} s") from None
    except ClientDisconnect:
        raise Refusal(400, "the body was cut off") from None
    return await run_in_threadpool(unpacked, bytes(raw), most) if encoding == "zstd" else bytes(raw)


def unpacked(raw: bytes, most: int) -> bytes:
    """Unpack the one zstd frame of a body. Raises Refusal."""
    try:
        import zstandard
    except ImportError:
        raise Refusal(415, "content-encoding zstd needs the package zstandard on the server") from None
    most = min(most, max(SMALL, MOST_RATIO * len(raw)))
    out, frame = bytearray(), zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()
    try:
        for at in range(0, len(raw), UNPACKED_PIECE):
            if frame.eof:
                raise Refusal(422, "the body has more than one zstd frame")
            out += frame.decompress(raw[at : at + UNPACKED_PIECE])
            if len(out) > most:
                raise Refusal(
                    413, f"the body has more than {most} bytes when it is unpacked; send less, or send it uncompressed"
                )
    except zstandard.ZstdError:
        raise Refusal(422, "the body is not a zstd frame") from None
    if not frame.eof:
        raise Refusal(422, "the zstd frame of the body is cut off")
    if frame.unused_data:
        raise Refusal(422, "the body has more than one zstd frame")
    return bytes(out)


TAR_PIECE: Final = 2**20
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
            while piece := file.read(TAR_PIECE):
                yield piece
        yield bytes(-size % BLOCK)
    yield bytes(2 * BLOCK)


LOG = logging.getLogger(__name__)

RUN: Final = "/training_runs/{run}"
CHECKPOINT: Final = RUN + "/checkpoints/{kind}/{name}"
PAGE: Final = 1000
LARGE: Final = 2**12  # bytes of a body that is read in a thread

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class Paths:
    """The endpoints."""

    def __init__(self, server: TrainingServer) -> None:
        self._server = server
        self._state, self._limits = server.store.state, server.limits
        self._reading: defaultdict[str, asyncio.Semaphore] = defaultdict(asyncio.Semaphore)

    def routes(self) -> list[Route]:
        posts: dict[str, Endpoint] = {
            "/client/config": self._config,
            "/create_session": self._create_session,
            "/session_heartbeat": self._heartbeat,
            "/sessions/{session}/finish": self._finish,
            "/get_info": self._info,
            "/create_sampling_session": self._create_sampler,
            "/retrieve_future": self._retrieve,
            "/weights_info": self._weights_info,
            "/telemetry": self._telemetry,
            CHECKPOINT + "/publish": self._publish(True),
        }
        gets: dict[str, Endpoint] = {
            "/healthz": self._health,
            "/get_server_capabilities": self._capabilities,
            "/sessions": self._sessions,
            "/sessions/{session}": self._session,
            "/samplers/{sampler}": self._sampler,
            "/training_runs": self._runs,
            RUN: self._run,
            RUN + "/checkpoints": self._run_checkpoints,
            "/checkpoints": self._checkpoints,
            CHECKPOINT + "/archive": self._archive,
        }
        deletes: dict[str, Endpoint] = {
            CHECKPOINT: self._delete,
            CHECKPOINT + "/publish": self._publish(False),
            "/samplers/{sampler}": self._end_sampler,
        }
        puts: dict[str, Endpoint] = {
            CHECKPOINT + "/ttl": self._ttl,
            "/sessions/{session}/samplers/{number:int}": self._take_weights,
        }
        posts |= {f"/{kind.name}": self._accept(kind) for kind in KINDS.values()}
        tables = {"POST": posts, "GET": gets, "DELETE": deletes, "PUT": puts}
        return [
            Route(BASE + path, endpoint, methods=[method])
            for method, table in tables.items()
            for path, endpoint in table.items()
        ]

    async def _json(self, request: Request, kind: type[R]) -> R:
        return await self._read(_owner(request), read_json, await body_of(request, self._limits.body, JSON), kind)

    async def _read(self, owner: str, read: Callable[..., T], raw: bytes, *more: Any) -> T:
        """Read a body; large ones in a thread, one at a time per owner."""
        if len(raw) < LARGE:
            return read(raw, *more)
        async with self._reading[owner]:
            return await run_in_threadpool(read, raw, *more)

    # work

    def _accept(self, kind: Kind) -> Endpoint:
        async def accept(request: Request) -> Response:
            raw, owner = await body_of(request, self._limits.body, *kind.media), _owner(request)
            asked = await self._read(owner, kind.read, raw)
            work, promised = await run_in_threadpool(self._server.accept, owner, kind, raw, asked)
            await asyncio.wrap_future(work.lasting)
            return _answer({"request_id": work.id} | promised)

        return accept

    async def _retrieve(self, request: Request) -> Response:
        body = await self._json(request, Retrieve)
        result = await self._server.result(_owner(request), body.request_id)
        if result is None:
            return _answer(
                {"type": "try_again", "request_id": body.request_id, "queue_state": self._server.queue_state}
            )
        return Response(result.body, media_type=result.media)

    # clients and sessions

    async def _config(self, request: Request) -> Response:
        await body_of(request, self._limits.body, JSON)
        return _answer(
            {
                "fwdbwd_max_chunk_len": self._limits.rows,
                "fwdbwd_max_chunk_bytes_count": min(5_000_000, self._limits.body // 2),
                "proto_compress_fwdbwd": False,
                "parallel_fwdbwd_chunks": True,
                "pjwt_auth_enabled": False,
                "sample_use_retrieve_futures": False,
                "custom_loss_server_side": False,
                "use_pyqwest_transport": False,
            }
        )

    async def _create_session(self, request: Request) -> Response:
        session, lasting = self._server.open_session(_owner(request), await self._json(request, CreateSession))
        await asyncio.wrap_future(lasting)
        return _answer({"type": "create_session", "session_id": session.id})

    async def _heartbeat(self, request: Request) -> Response:
        self._server.beat(_owner(request), (await self._json(request, SessionHeartbeat)).session_id)
        return _answer({"type": "session_heartbeat"})

    async def _finish(self, request: Request) -> Response:
        await body_of(request, self._limits.body, JSON)
        await asyncio.wrap_future(self._server.end_session(_owner(request), request.path_params["session"]))
        return _answer({})

    async def _telemetry(self, request: Request) -> Response:
        await body_of(request, self._limits.body, JSON)  # nothing of it is stored
        return _answer({"status": "accepted"})

    async def _sessions(self, request: Request) -> Response:
        offset, limit = _page(request)
        with self._server.store.changed:
            own = [one.id for one in reversed(self._state.sessions.values()) if one.owner == _owner(request)]
        return _answer({"sessions": own[offset : offset + limit]})

    async def _session(self, request: Request) -> Response:
        found = self._server.owned(self._state.sessions, request.path_params["session"], _owner(request), "session")
        with self._server.store.changed:
            models = [one.id for one in self._state.models.values() if one.session == found.id]
            samplers = [one.id for one in self._state.samplers.values() if one.session == found.id]
        about = {"user_metadata": found.metadata, "display_name": found.name}
        return _answer({"training_run_ids": models, "sampler_ids": samplers} | about)

    # models and samplers

    async def _health(self, request: Request) -> Response:
        if self._server.failure is not None:
            return _answer({"status": "failed"}, 503)
        return _answer({"status": "ok"})

    async def _capabilities(self, request: Request) -> Response:
        return _answer(views.capabilities(self._server.capabilities))

    async def _info(self, request: Request) -> Response:
        id = (await self._json(request, GetInfo)).model_id
        model = self._server.owned(self._state.models, id, _owner(request), "model")
        return _answer(views.info(model, self._server.capabilities))

    async def _create_sampler(self, request: Request) -> Response:
        body = await self._json(request, CreateSamplingSession)
        id, lasting = self._server.open_sampler(_owner(request), body)
        await asyncio.wrap_future(lasting)
        return _answer({"type": "create_sampling_session", "sampling_session_id": id})

    async def _sampler(self, request: Request) -> Response:
        id = request.path_params["sampler"]
        found = self._server.owned(self._state.samplers, id, _owner(request), "sampling session")
        return _answer({"sampler_id": id, "base_model": found.base, "model_path": found.path})

    async def _take_weights(self, request: Request) -> Response:
        owner, session, number = _owner(request), request.path_params["session"], request.path_params["number"]
        id, lasting = await take_weights(request, self._server, owner, session, number)
        await asyncio.wrap_future(lasting)
        return _answer({"type": "create_sampling_session", "sampling_session_id": id})

    async def _end_sampler(self, request: Request) -> Response:
        id = request.path_params["sampler"]
        found = self._server.owned(self._state.samplers, id, _owner(request), "sampling session")
        await asyncio.wrap_future(self._server.change(Removed("SamplerEntry", found.id)))
        return Response(status_code=204)

    async def _runs(self, request: Request) -> Response:
        offset, limit = _page(request)
        with self._server.store.changed:
            own = [one for one in reversed(self._state.models.values()) if one.owner == _owner(request)]
            found = [views.training_run(one, self._state) for one in own]
        return _answer(views.page("training_runs", found, offset, limit))

    async def _run(self, request: Request) -> Response:
        model = self._server.owned(self._state.models, request.path_params["run"], _owner(request), "training run")
        with self._server.store.changed:
            return _answer(views.training_run(model, self._state))

    # checkpoints

    async def _run_checkpoints(self, request: Request) -> Response:
        model = self._server.owned(self._state.models, request.path_params["run"], _owner(request), "training run")
        with self._server.store.changed:
            own = [views.checkpoint(one) for one in self._state.checkpoints.values() if one.model == model.id]
        return _answer({"checkpoints": own})

    async def _checkpoints(self, request: Request) -> Response:
        offset, limit = _page(request)
        with self._server.store.changed:
            own = [one for one in reversed(self._state.checkpoints.values()) if one.owner == _owner(request)]
        return _answer(views.page("checkpoints", [views.checkpoint(one) for one in own], offset, limit))

    async def _weights_info(self, request: Request) -> Response:
        path = (await self._json(request, WeightsInfo)).tinker_path
        return _answer(views.weights_info(self._server.checkpoint(_owner(request), path)))

    async def _delete(self, request: Request) -> Response:
        await asyncio.wrap_future(self._server.change(Removed("SavedEntry", self._own(request).id)))
        return Response(status_code=204)

    def _publish(self, public: bool) -> Endpoint:
        async def publish(request: Request) -> Response:
            await asyncio.wrap_future(self._server.change(replace(self._own(request), public=public)))
            return Response(status_code=204)

        return publish

    async def _ttl(self, request: Request) -> Response:
        seconds = (await self._json(request, Ttl)).ttl_seconds
        expires = None if seconds is None else self._server.store.clock() + seconds
        await asyncio.wrap_future(self._server.change(replace(self._own(request), expires=expires)))
        return Response(status_code=204)

    async def _archive(self, request: Request) -> Response:
        found = self._server.checkpoint(_owner(request), _path(request))
        size, files = tar_of(self._server.store.weights(found.folder), found.name)
        return StreamingResponse(files, headers={"Content-Length": str(size)}, media_type="application/x-tar")

    def _own(self, request: Request) -> SavedEntry:
        return self._server.owned(self._state.checkpoints, _path(request), _owner(request), "checkpoint")


def app_of(server: TrainingServer, keys: Keys, hosts: Collection[str] = (), origins: Collection[str] = ()) -> Starlette:
    """Return the application; the caller stops the server. hosts, origins: see `guard`."""
    app = Starlette(
        routes=Paths(server).routes(),
        exception_handlers={
            Refusal: _refused,
            Malformed: _malformed,
            StoreFailed: _ending,
            HTTPException: _no_path,
            Exception: _failed,
        },
    )
    guard(app, keys, hosts, origins)
    return app


def _owner(request: Request) -> str:
    return request.state.owner


def _path(request: Request) -> str:
    return "tinker://{run}/{kind}/{name}".format(**request.path_params)


def _page(request: Request) -> tuple[int, int]:
    found = []
    for name, default in (("offset", 0), ("limit", PAGE)):
        value = request.query_params.get(name, str(default))
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise Refusal(422, f"{name} must be a number")
        found.append(int(value))
    return found[0], min(found[1], PAGE)


def _answer(found: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(found), status, media_type=JSON)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = None if error.after is None else {"Retry-After": f"{error.after:.0f}"}
    return _error(error.status, error.message, headers)


async def _malformed(request: Request, error: Exception) -> Response:
    return _error(422, f"the body cannot be read: {error}")


async def _ending(request: Request, error: Exception) -> Response:
    return _error(503, "the server is ending; come again", {"Retry-After": "2"})


async def _no_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


async def _failed(request: Request, error: Exception) -> Response:
    LOG.error("%s failed", request.scope["route"].path, exc_info=error)
    return _error(500, "the server has made a mistake")
