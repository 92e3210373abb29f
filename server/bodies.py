"""The body of a request: read up to a limit, unpacked up to the same, and of the media type that it must have."""

import asyncio
from typing import Final

from starlette.requests import ClientDisconnect, Request

from .refusal import Refusal

READING: Final = 60.0  # seconds in which a body must have come
ZSTD_WINDOW: Final = 2**26  # bytes of memory that unpacking may take


async def body_of(request: Request, most: int, *media: str) -> bytes:
    """media: the types that it may have; without any all are taken.

    Raises Refusal: 413 where it is too large, 415 where it is of another type, 408 where it does not come.
    """
    given = (request.headers.get("content-type") or "").partition(";")[0].strip().lower()
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
    if media and given not in media and (raw or given):
        raise Refusal(415, f"this path takes {' or '.join(media)}")
    return unpacked(bytes(raw), most) if encoding == "zstd" else bytes(raw)


def unpacked(raw: bytes, most: int) -> bytes:
    """The content of a zstd frame. Raises Refusal."""
    try:
        import zstandard
    except ImportError:
        raise Refusal(415, "content-encoding zstd needs the package zstandard on the server") from None
    out = bytearray()
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).stream_reader(raw)
        while piece := reader.read(2**20):
            out += piece
            if len(out) > most:
                raise Refusal(413, f"the unpacked body is larger than {most} bytes")
    except zstandard.ZstdError:
        raise Refusal(422, "the body is no zstd frame") from None
    return bytes(out)
