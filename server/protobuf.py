"""Protocol Buffers, as much of the format as a few messages need (protobuf.dev/programming-guides/encoding).

A message is a table of its fields. What is read is bounded by the tables: a message nests as deep as they do, and the
fields of a body are counted. Whatever is not in a table is refused by its number, since it may change a result.
"""

import struct
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from attrs import define, frozen

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MOST_FIELDS: Final = 2**20

Kind = Literal["int", "bool", "double", "text", "bytes", "ints"]
WIRE: Final[Mapping[str, int]] = {"int": VARINT, "bool": VARINT, "double": FIXED64, "text": BYTES, "bytes": BYTES}


class Malformed(ValueError):
    """Invalid bytes of a message. Its text has places and numbers, and no content."""


@frozen
class ProtoMessage:
    """A message type: field number → field."""

    name: str
    fields: Mapping[int, "ProtoField"]


@frozen
class ProtoField:
    """A field. kind: type of its values, or a message. repeated: a list of all values; otherwise the last value
    counts."""

    name: str
    kind: "Kind | ProtoMessage"
    repeated: bool = False


@define
class FieldCount:
    """Number of fields of a body that may still be read, so that a small body cannot take long."""

    left: int = MOST_FIELDS

    def take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Malformed(f"there are more than {MOST_FIELDS} fields")


def read(data: memoryview, message: ProtoMessage, count: FieldCount | None = None) -> dict[str, Any]:
    """Return the fields of a message by name, nested messages as dicts. Raises Malformed."""
    count = count or FieldCount()
    found: dict[str, Any] = {}
    at = 0
    while at < len(data):
        count.take()
        tag, at = _varint(data, at, message)
        number, wire = tag >> 3, tag & 7
        value: int | memoryview
        if wire == VARINT:
            value, at = _varint(data, at, message)
        else:
            if wire not in (FIXED64, BYTES, FIXED32):
                raise Malformed(f"{message.name} has a field of wire type {wire}")
            size, at = _varint(data, at, message) if wire == BYTES else (8 if wire == FIXED64 else 4, at)
            if size > len(data) - at:
                raise Malformed(f"field {number} of {message.name} is cut off")
            value, at = data[at : at + size], at + size
        field = message.fields.get(number)
        if field is None:
            raise Malformed(f"{message.name} has a field {number}, which is not known here")
        _put(found, field, wire, value, message, count)
    return found


def _put(
    found: dict[str, Any],
    field: ProtoField,
    wire: int,
    value: int | memoryview,
    message: ProtoMessage,
    count: FieldCount,
) -> None:
    if field.kind == "ints":  # one number, or several packed ones
        numbers = found.setdefault(field.name, [])
        if isinstance(value, int):
            numbers.append(value)
        elif wire == BYTES:
            at = 0
            while at < len(value):
                count.take()
                number, at = _varint(value, at, message)
                numbers.append(number)
        else:
            raise Malformed(f"{field.name} of {message.name} has wire type {wire}")
        return
    if wire != (BYTES if isinstance(field.kind, ProtoMessage) else WIRE[field.kind]):
        raise Malformed(f"{field.name} of {message.name} has wire type {wire}")
    read_value = _value(field.kind, value, field, count)
    if field.repeated:
        found.setdefault(field.name, []).append(read_value)
    else:
        found[field.name] = read_value


def _value(kind: "Kind | ProtoMessage", value: int | memoryview, field: ProtoField, count: FieldCount) -> Any:
    if isinstance(value, int):
        return bool(value) if kind == "bool" else value
    if isinstance(kind, ProtoMessage):
        return read(value, kind, count)
    if kind == "double":
        return struct.unpack("<d", value)[0]
    if kind == "text":
        try:
            return str(value, "utf-8")
        except UnicodeDecodeError:
            raise Malformed(f"{field.name} is not UTF-8") from None
    return value


def _varint(data: memoryview, at: int, message: ProtoMessage) -> tuple[int, int]:
    """Return an unsigned number of at most 64 bits, and the position after it."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if value >= 2**64:
                break
            return value, at
        shift += 7
        if shift > 63:
            break
    raise Malformed(f"a number of {message.name} is cut off or has more than 64 bits")


# writing --------------------------------------------------------------------------------------------------------------


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
