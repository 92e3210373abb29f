"""The body of a request: read up to a limit, unpacked up to the same, and of the media type that it must have."""

import asyncio
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from xtrain.server.refusal import Refusal

READING: Final = 60.0  # time limit for receiving a body, in seconds
ZSTD_WINDOW: Final = 2**26  # maximum bytes of memory for unpacking
MOST_RATIO: Final = 256  # maximum ratio of unpacked to packed bytes above `SMALL`; batches of training rows stay below
SMALL: Final = 2**20
PIECE: Final = 2**11  # bytes unpacked at a time: at most 64 MB of output


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
        for at in range(0, len(raw), PIECE):
            if frame.eof:
                raise Refusal(422, "the body has more than one zstd frame")
            out += frame.decompress(raw[at : at + PIECE])
            if len(out) > most:
                raise Refusal(
                    413, f"the body has more than {most} bytes when it is unpacked; send less, or send it uncompressed"
                )
    except zstandard.ZstdError:
        raise Refusal(422, "the body is no zstd frame") from None
    if not frame.eof:
        raise Refusal(422, "the zstd frame of the body is cut off")
    if frame.unused_data:
        raise Refusal(422, "the body has more than one zstd frame")
    return bytes(out)
