"""Protocol Buffers by hand, for messages that the library would not write."""

import struct
from typing import Self

VARINT, FIXED64, BYTES = 0, 1, 2


class Writer:
    """The bytes of a message, field by field."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def integer(self, number: int, value: int) -> Self:
        self._parts += (_encoded(number << 3 | VARINT), _encoded(value))
        return self

    def double(self, number: int, value: float) -> Self:
        self._parts += (_encoded(number << 3 | FIXED64), struct.pack("<d", value))
        return self

    def content(self, number: int, value: "bytes | str | Writer") -> Self:
        """Write a field of bytes, text or another message."""
        raw = bytes(value) if isinstance(value, Writer) else value.encode() if isinstance(value, str) else value
        self._parts += (_encoded(number << 3 | BYTES), _encoded(len(raw)), raw)
        return self

    def integers(self, number: int, values: list[int]) -> Self:
        return self.content(number, b"".join(map(_encoded, values)))

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
