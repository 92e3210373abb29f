"""The JSON forms of passes and samples, for clients without Protocol Buffers; the rest of the wire is JSON anyway.

A number that is not finite is null.
"""

from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from xtrain.server.engine import Array, Candidates, PassResult, SampleResult
from xtrain.server.messages import DatumRow, ForwardBackward
from xtrain.server.requests import MOST_NUMBERS, Finite, Id, Seq, Text, Token, read_json

OPENS: Final = b"{"  # a JSON body begins with it, and no Protocol Buffers message here does (it would be a group)


class RowBody(Struct, forbid_unknown_fields=True):
    """A row of T tokens: lists of T numbers. targets: a token id each, or -100 without a loss."""

    tokens: list[Token]
    targets: list[Token]
    weights: list[Finite] | None = None
    logprobs: list[Finite] | None = None
    advantages: list[Finite] | None = None


class PassBody(Struct):
    """`forward_backward`, as JSON. loss: its name. settings: of the loss."""

    model_id: Id
    seq_id: Seq
    rows: list[RowBody]
    loss: Text = "cross_entropy"
    settings: dict[str, Finite | Text] = {}
    forward_only: bool = False


def read_json_pass(raw: bytes) -> ForwardBackward:
    """Parse a JSON request. Raises Refusal. Does not check whether it can be executed."""
    body = read_json(raw, PassBody, MOST_NUMBERS)
    return ForwardBackward(
        model_id=body.model_id,
        seq_id=body.seq_id,
        rows=tuple(_row(row) for row in body.rows),
        loss=body.loss,
        settings=dict(body.settings),
        forward_only=body.forward_only,
        json=True,
    )


def _row(row: RowBody) -> DatumRow:
    inputs: dict[str, Array] = {"target_tokens": np.array(row.targets, np.int64)}
    for name in ("weights", "logprobs", "advantages"):
        numbers = getattr(row, name)
        if numbers is not None:
            with np.errstate(over="ignore"):  # numbers outside of float32 are refused as not finite
                inputs[name] = np.array(numbers, np.float32)
    return DatumRow(np.array(row.tokens, np.int32), inputs)


def json_pass_result(result: PassResult, tokens: int) -> bytes:
    """Return the JSON result of a pass. tokens: targets with a loss."""
    logprobs = [output["logprobs"].tolist() for output in result.outputs]
    return msgspec.json.encode(
        {"type": "forward_backward", "metrics": dict(result.metrics), "tokens": tokens, "logprobs": logprobs}
    )


def json_samples(result: SampleResult) -> bytes:
    samples = [
        {
            "tokens": np.asarray(sample.tokens).tolist(),
            "logprobs": np.asarray(sample.logprobs, np.float64).tolist(),
            "stopped": bool(sample.stopped),
            "top": _candidates(sample.top),
        }
        for sample in result.samples
    ]
    prompt = None if result.prompt_logprobs is None else np.asarray(result.prompt_logprobs, np.float64).tolist()
    about = {"prompt_logprobs": prompt, "prompt_top": _candidates(result.prompt_top)}
    return msgspec.json.encode({"type": "asample", "samples": samples} | about)


def _candidates(top: Candidates | None) -> dict[str, Any] | None:
    """Return the likeliest tokens at each position, and their log-probabilities."""
    if top is None:
        return None
    return {"tokens": np.asarray(top.tokens).tolist(), "logprobs": np.asarray(top.logprobs, np.float64).tolist()}
