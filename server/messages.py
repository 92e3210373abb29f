"""The three messages of the wire that are Protocol Buffers, between bytes and values.

Field numbers are those of the Tinker SDK. Provenance of tokens (fields 3 and 4 of a datum) is read past: no loss here
reads it.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from attrs import frozen

from xtrain.server.engine import Array, Candidates, PassResult, SampleResult
from xtrain.server.protobuf import Malformed, ProtoField, ProtoMessage, Writer, read
from xtrain.server.tensors import FLOAT32, MOST_NUMBERS, read_tensor

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
        raise Malformed(f"data[{number}].model_input: tokens are not of four bytes each")
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
