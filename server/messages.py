"""Protocol Buffers of the wire: as much of the format as three messages need, between bytes and values.

The format: protobuf.dev/programming-guides/encoding. Tensors are dense, or sparse by rows (CSR), little-endian.
"""

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, Literal, Self

import numpy as np
from attrs import define, frozen

from xtrain.server.engine_interface import Array, Candidates, PassResult, SampleResult

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
            raise Malformed(f"{message.name} has a field {number}, which is unknown")
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


FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
STORED: Final = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4", BFLOAT16: "<u2"}
# Limit over all tensors of a request: a sparse matrix of a few bytes can stand for a dense one of any size.
MOST_NUMBERS: Final = 2**24


def read_tensor(tensor: dict[str, Any], most: int = MOST_NUMBERS) -> Array:
    """Return a tensor, float32 or int64, with the dims of its shape; without a shape one dim. most: maximum of numbers.
    Raises Malformed."""
    dtype, shape = tensor.get("dtype", 0), tensor.get("shape", [])
    if dtype not in STORED:
        raise Malformed(f"dtype {dtype}; known are {', '.join(map(str, STORED))}")
    if len(shape) > 2:
        raise Malformed(f"a shape of {len(shape)} dims; there may be two")
    if max(shape, default=0) > most or prod(shape) > most:
        raise Malformed(f"more than {MOST_NUMBERS} numbers in the tensors of a request")
    if "csr" in tensor:
        return _dense_of(tensor["csr"], dtype, shape)
    flat = _numbers(tensor.get("dense", b""), dtype)
    if shape and prod(shape) != flat.size:
        raise Malformed(f"{flat.size} numbers for a shape {shape}")
    return flat.reshape(shape) if shape else flat


def _dense_of(csr: dict[str, Any], dtype: int, shape: list[int]) -> Array:
    if len(shape) != 2:
        raise Malformed("a sparse tensor without a shape of two dims")
    values = _numbers(csr.get("values", b""), dtype)
    starts, columns = (_numbers(csr.get(name, b""), INT64) for name in ("crow", "col"))
    rows, width = shape
    fits = (
        starts.size == rows + 1
        and starts[0] == 0
        and starts[-1] == values.size == columns.size
        and bool((np.diff(starts) >= 0).all())
        and bool(((columns >= 0) & (columns < width)).all())
    )
    if not fits:
        raise Malformed("rows and columns of a sparse tensor that do not fit its shape and values")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(rows), np.diff(starts)), columns] = values
    return dense


def _numbers(raw: bytes | memoryview, dtype: int) -> Array:
    stored = np.dtype(STORED[dtype])
    if len(raw) % stored.itemsize:
        raise Malformed(f"{len(raw)} bytes for numbers of {stored.itemsize}")
    numbers = np.frombuffer(raw, stored)
    if dtype == BFLOAT16:  # the upper half of a float32
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.int64) if dtype == INT32 else numbers


MEDIA_TYPE: Final = "application/x-protobuf"
NO_LOGPROB: Final = -99999.0  # for a cell without a candidate

_CSR = ProtoMessage(
    "SparseCsr", {1: ProtoField("values", "bytes"), 2: ProtoField("crow", "bytes"), 3: ProtoField("col", "bytes")}
)
_TENSOR = ProtoMessage(
    "Tensor",
    {
        1: ProtoField("dense", "bytes"),
        2: ProtoField("csr", _CSR),
        3: ProtoField("dtype", "int"),
        4: ProtoField("shape", "ints"),
    },
)
_TEXT_CHUNK = ProtoMessage("EncodedTextChunk", {1: ProtoField("tokens", "bytes")})
_CHUNK = ProtoMessage(
    "Chunk", {1: ProtoField("text", _TEXT_CHUNK), 2: ProtoField("image", "bytes"), 3: ProtoField("dmel", "bytes")}
)
_INPUT = ProtoMessage("LossFnInputsEntry", {1: ProtoField("key", "text"), 2: ProtoField("value", _TENSOR)})
_DATUM = ProtoMessage(
    "Datum",
    {
        1: ProtoField("chunks", _CHUNK, repeated=True),
        2: ProtoField("inputs", _INPUT, repeated=True),
        3: ProtoField("spans", "bytes"),
        4: ProtoField("input_spans", "bytes"),
    },
)
_NUMBER = ProtoMessage("LossFnConfigEntry", {1: ProtoField("key", "text"), 2: ProtoField("value", "double")})
_SETTING = ProtoMessage("LossConfigValue", {1: ProtoField("number", "double"), 2: ProtoField("text", "text")})
_SETTING_ENTRY = ProtoMessage("LossFnConfigV2Entry", {1: ProtoField("key", "text"), 2: ProtoField("value", _SETTING)})
_REQUEST = ProtoMessage(
    "ForwardBackwardRequest",
    {
        1: ProtoField("model_id", "text"),
        2: ProtoField("seq_id", "int"),
        3: ProtoField("data", _DATUM, repeated=True),
        4: ProtoField("loss_fn", "text"),
        5: ProtoField("numbers", _NUMBER, repeated=True),
        6: ProtoField("forward_only", "bool"),
        7: ProtoField("settings", _SETTING_ENTRY, repeated=True),
    },
)


@frozen(eq=False)
class DatumRow:
    """A row. tokens: int32; None: a chunk is not text. inputs: float32 or int64."""

    tokens: Array | None
    inputs: dict[str, Array]


@frozen(eq=False)
class ForwardBackward:
    """A pass request. json: it came as JSON, so its result is JSON, and targets may be ignored."""

    model_id: str
    seq_id: int
    rows: tuple[DatumRow, ...]
    loss: str
    settings: dict[str, float | str]
    forward_only: bool
    json: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.tokens.size for row in self.rows if row.tokens is not None)


def read_forward_backward(raw: bytes) -> ForwardBackward:
    """Parse a protobuf request. Raises Malformed. Does not check whether it can be executed."""
    found = read(memoryview(raw), _REQUEST)
    settings: dict[str, float | str] = {
        entry.get("key", ""): entry.get("value", 0.0) for entry in found.get("numbers", ())
    }
    for entry in found.get("settings", ()):  # the newer form, preferred if both are present
        value = entry.get("value", {})
        settings[entry.get("key", "")] = value["text"] if "text" in value else value.get("number", 0.0)
    return ForwardBackward(
        model_id=found.get("model_id", ""),
        seq_id=found.get("seq_id", 0),
        rows=_rows(found.get("data", ())),
        loss=found.get("loss_fn", ""),
        settings=settings,
        forward_only=found.get("forward_only", False),
    )


def _rows(data: Sequence[dict[str, Any]]) -> tuple[DatumRow, ...]:
    rows, room = [], MOST_NUMBERS
    for number, datum in enumerate(data):
        rows.append(_row(number, datum, room))
        room -= sum(each.size for each in rows[-1].inputs.values())
    return tuple(rows)


def _row(number: int, datum: dict[str, Any], room: int) -> DatumRow:
    """Return the row of a datum. room: maximum of numbers in its tensors."""
    chunks = datum.get("chunks", ())
    inputs: dict[str, Array] = {}
    for entry in datum.get("inputs", ()):
        name = entry.get("key", "")
        try:
            inputs[name] = read_tensor(entry.get("value", {}), room)
            room -= inputs[name].size
        except Malformed as error:
            raise Malformed(f"data[{number}].loss_fn_inputs: {error}") from None
    if any("text" not in chunk for chunk in chunks):
        return DatumRow(None, inputs)
    texts = [chunk["text"].get("tokens", b"") for chunk in chunks]
    if any(len(text) % 4 for text in texts):
        raise Malformed(f"data[{number}].model_input: tokens are not four bytes each")
    tokens = [np.frombuffer(text, "<i4") for text in texts]
    return DatumRow(np.concatenate(tokens) if tokens else np.zeros(0, "<i4"), inputs)


# writing --------------------------------------------------------------------------------------------------------------


def forward_backward_output(result: PassResult) -> bytes:
    """Return `ForwardBackwardOutput`: a record for each run of rows whose outputs agree in all dims after the first."""
    out = Writer().content(1, "ArrayRecord")
    for rows in _rectangular(result):
        record = Writer()
        for name in rows[0]:
            parts = [np.ascontiguousarray(row[name], "<f4") for row in rows]
            offsets = np.cumsum([0, *(part.nbytes for part in parts)], dtype="<i8")
            tensor = Writer().content(1, b"".join(part.tobytes() for part in parts))
            tensor.content(2, offsets.tobytes()).integer(3, FLOAT32)
            if parts[0].ndim > 1:
                tensor.integers(4, list(parts[0].shape[1:]))
            record.content(2, Writer().content(1, name).content(2, tensor))
        out.content(2, record.integer(3, len(rows)))
    for name, value in result.metrics.items():
        out.content(3, Writer().content(1, name).double(2, float(value)))
    return bytes(out)


def _rectangular(result: PassResult) -> list[list[Any]]:
    groups: list[list[Any]] = []
    last = None
    for row in result.outputs:
        dims = {name: array.shape[1:] for name, array in row.items()}
        if dims != last:
            groups.append([])
        groups[-1].append(row)
        last = dims
    return groups


def sample_response(result: SampleResult) -> bytes:
    """Return `SampleResponse`: the samples and the requested values of the prompt."""
    out = Writer()
    for sample in result.samples:
        one = Writer().integer(1, 0 if sample.stopped else 1)
        one.content(2, np.asarray(sample.tokens, "<i4").tobytes())
        one.content(3, np.asarray(sample.logprobs, "<f4").tobytes())
        if sample.top is not None:
            one.content(4, _candidates(sample.top))
        out.content(1, one)
    if result.prompt_logprobs is not None:
        out.content(2, np.asarray(result.prompt_logprobs, "<f4").tobytes())
    if result.prompt_top is not None:  # the protocol also has a row for the first token, which has no predecessor
        width = result.prompt_top.tokens.shape[1]
        first = Candidates(tokens=np.zeros((1, width), "<i4"), logprobs=np.full((1, width), NO_LOGPROB, "<f4"))
        out.content(
            3,
            _candidates(
                Candidates(
                    tokens=np.concatenate([first.tokens, result.prompt_top.tokens]),
                    logprobs=np.concatenate([first.logprobs, result.prompt_top.logprobs]),
                )
            ),
        )
    return bytes(out)


def _candidates(top: Candidates) -> Writer:
    length, width = top.tokens.shape
    out = Writer().content(1, np.asarray(top.tokens, "<i4").tobytes())
    return out.content(2, np.asarray(top.logprobs, "<f4").tobytes()).integer(3, width).integer(4, length)
