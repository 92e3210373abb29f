"""Protocol Buffers of the wire. Tensors are dense, or sparse by rows (CSR), little-endian."""

from math import prod
from typing import Any, Final

import numpy as np
from attrs import frozen
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from xtrain.server.engine_interface import Array, Candidates, PassResult, SampleResult

MEDIA_TYPE: Final = "application/x-protobuf"
NO_LOGPROB: Final = -99999.0  # for a cell without a candidate
MOST_FIELDS: Final = 2**20

# Message → its fields: type (`*`: repeated), name and number.
_FIELDS: Final = {
    "SparseCsr": "bytes values 1, bytes crow 2, bytes col 3",
    "Tensor": "bytes dense 1, SparseCsr csr 2, uint64 dtype 3, uint64* shape 4",
    "EncodedTextChunk": "bytes tokens 1",
    "Chunk": "EncodedTextChunk text 1, bytes image 2, bytes dmel 3",
    "LossFnInputsEntry": "string key 1, Tensor value 2",
    "Datum": "Chunk* chunks 1, LossFnInputsEntry* inputs 2, bytes spans 3, bytes input_spans 4",
    "LossFnConfigEntry": "string key 1, double value 2",
    "LossConfigValue": "double number 1, string text 2",
    "LossFnConfigV2Entry": "string key 1, LossConfigValue value 2",
    "ForwardBackwardRequest": "string model_id 1, uint64 seq_id 2, Datum* data 3, string loss_fn 4, "
    "LossFnConfigEntry* numbers 5, bool forward_only 6, LossFnConfigV2Entry* settings 7",
    "BatchedTensor": "bytes data 1, bytes offsets 2, uint64 dtype 3, uint64* shape 4",
    "FieldsEntry": "string key 1, BatchedTensor value 2",
    "ArrayRecord": "FieldsEntry* fields 2, uint64 rows 3",
    "MetricsEntry": "string key 1, double value 2",
    "ForwardBackwardOutput": "string type 1, ArrayRecord* records 2, MetricsEntry* metrics 3",
    "TopkLogprobs": "bytes ids 1, bytes logprobs 2, uint64 k 3, uint64 n 4",
    "SampledSequence": "uint64 stop 1, bytes tokens 2, bytes logprobs 3, TopkLogprobs top 4",
    "SampleResponse": "SampledSequence* samples 1, bytes prompt 2, TopkLogprobs prompt_top 3",
}
_SCHEMA: Final = {
    message: {int(number): (kind, name) for kind, name, number in map(str.split, fields.split(", "))}
    for message, fields in _FIELDS.items()
}


def _classes() -> dict[str, Any]:
    """Return the class of each message."""
    file = FileDescriptorProto(name="xtrain.proto", package="xtrain", syntax="proto2")
    for message, fields in _SCHEMA.items():
        made = file.message_type.add(name=message)
        for number, (kind, name) in fields.items():
            label = "LABEL_REPEATED" if kind.endswith("*") else "LABEL_OPTIONAL"
            field = made.field.add(name=name, number=number, label=label)
            if (single := kind.rstrip("*")) in _SCHEMA:
                field.type_name = single
            else:
                field.type = FieldDescriptorProto.Type.Value(f"TYPE_{single.upper()}")
                field.options.packed = kind == "uint64*"
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"xtrain.{name}")) for name in _SCHEMA}


MESSAGES: Final = _classes()
VARINT, FIXED64, BYTES = 0, 1, 2
_WIRES: Final = {"double": (FIXED64,), "bool": (VARINT,), "uint64": (VARINT,), "uint64*": (VARINT, BYTES)}


class Malformed(ValueError):
    """Invalid bytes of a message. Its text has places and numbers, and no content."""


def read(raw: bytes, name: str) -> Any:
    """Parse a message. Raises Malformed."""
    _check(memoryview(raw), name, MOST_FIELDS)
    try:
        return MESSAGES[name].FromString(raw)
    except DecodeError:
        raise Malformed(f"the body is not a {name}") from None


def _check(data: memoryview, message: str, left: int) -> int:
    """Check the fields of a message, of which there may be `left`; return how many are left.

    The library would skip unknown fields, and take 1 GB for 64 MB of empty ones.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at, message)
        number, wire = tag >> 3, tag & 7
        if number not in _SCHEMA[message]:
            raise Malformed(f"{message} has a field {number}, which is unknown")
        kind, name = _SCHEMA[message][number]
        if wire not in _WIRES.get(kind, (BYTES,)):
            raise Malformed(f"{name} of {message} has wire type {wire}")
        left -= 1
        size, at = (8, at) if wire == FIXED64 else _varint(data, at, message)
        if wire != VARINT:
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise Malformed(f"{name} of {message} is cut off")
            if kind.rstrip("*") in _SCHEMA:
                left = _check(value, kind.rstrip("*"), left)
            elif kind == "uint64*":
                left -= size
            elif kind == "string":
                try:
                    str(value, "utf-8")
                except UnicodeDecodeError:
                    raise Malformed(f"{name} is not UTF-8") from None
        if left < 0:
            raise Malformed(f"there are more than {MOST_FIELDS} fields")
    return left


def _varint(data: memoryview, at: int, message: str) -> tuple[int, int]:
    """Return an unsigned number of at most 64 bits, and the position after it."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128 and value < 2**64:
            return value, at + place + 1
    raise Malformed(f"a number of {message} is cut off or has more than 64 bits")


FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
STORED: Final = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4", BFLOAT16: "<u2"}
# Limit over all tensors of a request: a sparse matrix of a few bytes can stand for a dense one of any size.
MOST_NUMBERS: Final = 2**24


def read_tensor(tensor: Any, most: int = MOST_NUMBERS) -> Array:
    """Return a `Tensor`, float32 or int64, with the dims of its shape; without a shape one dim. most: maximum of
    numbers. Raises Malformed."""
    dtype, shape = tensor.dtype, list(tensor.shape)
    if dtype not in STORED:
        raise Malformed(f"dtype {dtype}; known are {', '.join(map(str, STORED))}")
    if len(shape) > 2:
        raise Malformed(f"a shape of {len(shape)} dims; there may be two")
    if max(shape, default=0) > most or prod(shape) > most:
        raise Malformed(f"more than {MOST_NUMBERS} numbers in the tensors of a request")
    if tensor.HasField("csr"):
        return _dense_of(tensor.csr, dtype, shape)
    flat = _numbers(tensor.dense, dtype)
    if shape and prod(shape) != flat.size:
        raise Malformed(f"{flat.size} numbers for a shape {shape}")
    return flat.reshape(shape) if shape else flat


def _dense_of(csr: Any, dtype: int, shape: list[int]) -> Array:
    if len(shape) != 2:
        raise Malformed("a sparse tensor without a shape of two dims")
    values = _numbers(csr.values, dtype)
    starts, columns = _numbers(csr.crow, INT64), _numbers(csr.col, INT64)
    rows, width = shape
    fits = (
        starts.size == rows + 1
        and starts[0] == 0
        and starts[-1] == values.size == columns.size
        and bool((starts[:-1] <= starts[1:]).all())
        and bool(((columns >= 0) & (columns < width)).all())
    )
    if not fits:
        raise Malformed("rows and columns of a sparse tensor that do not fit its shape and values")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(rows), np.diff(starts)), columns] = values
    return dense


def _numbers(raw: bytes, dtype: int) -> Array:
    stored = np.dtype(STORED[dtype])
    if len(raw) % stored.itemsize:
        raise Malformed(f"{len(raw)} bytes for numbers of {stored.itemsize}")
    numbers = np.frombuffer(raw, stored)
    if dtype == BFLOAT16:  # the upper half of a float32
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.int64) if dtype == INT32 else numbers


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
    found = read(raw, "ForwardBackwardRequest")
    settings: dict[str, float | str] = {entry.key: entry.value for entry in found.numbers}
    for entry in found.settings:  # the newer form, preferred if both are present
        settings[entry.key] = entry.value.text if entry.value.HasField("text") else entry.value.number
    rows, room = [], MOST_NUMBERS
    for number, datum in enumerate(found.data):
        rows.append(_row(number, datum, room))
        room -= sum(each.size for each in rows[-1].inputs.values())
    return ForwardBackward(
        model_id=found.model_id,
        seq_id=found.seq_id,
        rows=tuple(rows),
        loss=found.loss_fn,
        settings=settings,
        forward_only=found.forward_only,
    )


def _row(number: int, datum: Any, room: int) -> DatumRow:
    """Return the row of a datum. room: maximum of numbers in its tensors."""
    inputs: dict[str, Array] = {}
    for entry in datum.inputs:
        try:
            inputs[entry.key] = read_tensor(entry.value, room)
            room -= inputs[entry.key].size
        except Malformed as error:
            raise Malformed(f"data[{number}].loss_fn_inputs: {error}") from None
    if not all(chunk.HasField("text") for chunk in datum.chunks):
        return DatumRow(None, inputs)
    texts = [chunk.text.tokens for chunk in datum.chunks]
    if any(len(text) % 4 for text in texts):
        raise Malformed(f"data[{number}].model_input: tokens are not four bytes each")
    return DatumRow(np.frombuffer(b"".join(texts), "<i4"), inputs)


# writing --------------------------------------------------------------------------------------------------------------


def forward_backward_output(result: PassResult) -> bytes:
    """Return `ForwardBackwardOutput`: a record for each run of rows whose outputs agree in all dims after the first."""
    out = MESSAGES["ForwardBackwardOutput"](type="ArrayRecord")
    for rows in _rectangular(result):
        record = out.records.add(rows=len(rows))
        for name in rows[0]:
            parts = [np.ascontiguousarray(row[name], "<f4") for row in rows]
            offsets = np.cumsum([0, *(part.nbytes for part in parts)], dtype="<i8").tobytes()
            data, shape = b"".join(part.tobytes() for part in parts), parts[0].shape[1:]
            record.fields.add(key=name, value={"data": data, "offsets": offsets, "dtype": FLOAT32, "shape": shape})
    for name, value in result.metrics.items():
        out.metrics.add(key=name, value=float(value))
    return out.SerializeToString()


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
    out = MESSAGES["SampleResponse"]()
    for sample in result.samples:
        out.samples.add(
            stop=0 if sample.stopped else 1,
            tokens=np.asarray(sample.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sample.logprobs, "<f4").tobytes(),
            top=sample.top and _candidates(sample.top),
        )
    if result.prompt_logprobs is not None:
        out.prompt = np.asarray(result.prompt_logprobs, "<f4").tobytes()
    if (top := result.prompt_top) is not None:  # the protocol also has a row for the first token, without predecessor
        width = top.tokens.shape[1]
        tokens = np.concatenate([np.zeros((1, width), "<i4"), top.tokens])
        logprobs = np.concatenate([np.full((1, width), NO_LOGPROB, "<f4"), top.logprobs])
        out.prompt_top.MergeFrom(_candidates(Candidates(tokens=tokens, logprobs=logprobs)))
    return out.SerializeToString()


def _candidates(top: Candidates) -> Any:
    n, k = top.tokens.shape
    ids, logprobs = np.asarray(top.tokens, "<i4").tobytes(), np.asarray(top.logprobs, "<f4").tobytes()
    return MESSAGES["TopkLogprobs"](ids=ids, logprobs=logprobs, k=k, n=n)
