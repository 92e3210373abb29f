"""JSON requests of the wire, read into values, and the JSON forms of passes and samples."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, get_origin

import msgspec
import numpy as np
from attrs import define
from msgspec import Meta, Struct

from xtrain.server.engine_interface import Array, Candidates, PassResult, SampleResult
from xtrain.server.messages import DatumRow, ForwardBackward


@define(auto_exc=True)
class Refusal(Exception):
    """A refusal: an HTTP status and a sentence. after: seconds until a retry. Statuses 400 to 422 end a client's call;
    429 and 503 make the client retry the same request."""

    status: int
    message: str
    after: float | None = None

    def __str__(self) -> str:
        return self.message


NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

LONG_VALUE: Final = re.compile(r"'[^']{81,}'")
MOST_SEQ: Final = 2**53
# representable in float32; with a smaller eps, parameters without a gradient would be updated by 0 / 0
LEAST_EPS: Final = 1e-30
MOST_SINGLE: Final = 3e38  # float32 has nothing above
MOST_METADATA: Final = 2**16  # bytes; kept as long as its owner
MOST_NESTING: Final = 32  # levels of metadata; writing it as text recurses once per level
MOST_STOPS: Final = 64  # each is searched for at every token
MOST_VALUES: Final = 2**21  # per body: a prompt may have 2²⁰ tokens
MOST_NUMBERS: Final = 2**23  # per body with rows: about five for each of 2²⁰ tokens
CONTAINERS: Final = 8  # values that may be a list or an object
MOST_NOTHING: Final = 16  # bytes of an empty value

Id = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Seq = Annotated[int, Meta(ge=0, le=MOST_SEQ)]
Token = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Single = Annotated[float, Meta(ge=-MOST_SINGLE, le=MOST_SINGLE)]
Metadata = Annotated[dict[Text, Any], Meta(max_length=64)]


class CreateSession(Struct):
    sdk_version: Text = ""
    user_metadata: Metadata | None = None
    project_id: Text | None = None
    display_name: Text | None = None


class SessionHeartbeat(Struct):
    session_id: Id


class OptimizerKind(Struct, frozen=True):
    type: str = "adamw"


class LoraConfig(Struct):
    rank: Seq
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Struct):
    session_id: Id
    model_seq_id: Seq
    base_model: Text
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerKind = OptimizerKind()
    type: str = ""


class GetInfo(Struct):
    model_id: Id


class AdamParams(Struct, frozen=True):
    learning_rate: Single = 1e-4
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Meta(ge=LEAST_EPS, le=MOST_SINGLE)] = 1e-12
    weight_decay: Single = 0.0
    grad_clip_norm: Single = 0.0


class OptimStep(Struct):
    model_id: Id
    seq_id: Seq
    adam_params: AdamParams = AdamParams()
    optimizer_params: dict[str, Any] | None = None
    reduction: Literal["sum", "mean"] = "sum"
    type: str = ""


class SaveWeights(Struct):
    model_id: Id
    seq_id: Seq
    path: str | None = None
    ttl_seconds: Annotated[int, Meta(ge=1, le=10 * 366 * 86400)] | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    type: str = ""


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: Seq | None = None
    kind: str = "snapshot"


class LoadWeights(Struct):
    path: Text
    optimizer: bool
    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    base_model: Text | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerKind | None = None
    weights_access_token: str | None = None
    type: str = ""


class CreateSamplingSession(Struct):
    session_id: Id
    sampling_session_seq_id: Seq
    base_model: Text | None = None
    model_path: Text | None = None
    type: str = ""


class Chunk(Struct):
    type: str = "encoded_text"
    tokens: list[Token] = []


class PromptBody(Struct):
    chunks: list[Chunk] = []


class SamplingParams(Struct):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | list[Annotated[str, Meta(max_length=64)]] | None = None
    """Or a text for each sample."""
    stop: Text | Annotated[list[Token | Text], Meta(max_length=MOST_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class SampleBody(Struct):
    prompt: PromptBody
    sampling_params: SamplingParams
    sampling_session_id: Id | None = None
    seq_id: Seq | None = None
    num_samples: Annotated[int, Meta(ge=1, le=2**14)] = 1
    base_model: Text | None = None
    model_path: Text | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Seq = 0
    topk_sample_logprobs: Seq = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: Seq = 0
    prompt_logprobs_last_n: Seq | None = None
    record_stability_info: bool | None = None
    format: Literal["protobuf", "json"] = "protobuf"
    type: str = ""


class Retrieve(Struct):
    request_id: Id
    allow_metadata_only: bool = False


class WeightsInfo(Struct):
    tinker_path: Text


class Ttl(Struct):
    ttl_seconds: Annotated[int, Meta(ge=1, le=10 * 366 * 86400)] | None = None


_LOOSE: Final = (CreateSession, SessionHeartbeat, GetInfo, Retrieve, WeightsInfo, Ttl)
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NOTHING: Final = (None, False, 0, "", [], {})
R = TypeVar("R", bound=Struct)


def read_json(raw: bytes, kind: type[R], most: int = MOST_VALUES) -> R:
    """Parse a JSON request. most: maximum of values. Raises Refusal 422, which names the field but not its value."""
    if raw.count(b",") > most or raw.count(b"[") + raw.count(b"{") > most // CONTAINERS:
        raise Refusal(422, f"the body has more than {most} values, or {most // CONTAINERS} lists and objects")
    try:
        _check_fields(raw or b"{}", kind, "")
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(422, LONG_VALUE.sub("'…'", f"the body is invalid: {error}")) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refusal(422, "the body is not a JSON object") from None


def _check_fields(raw: bytes | msgspec.Raw, kind: type[Struct], where: str) -> None:
    """Refuse unknown fields, and large or deep values of free form, before they become objects."""
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in _OBJECT.decode(raw).items():
        content = memoryview(value)
        if name not in known:
            small = len(content) <= MOST_NOTHING
            if kind not in _LOOSE and not (small and msgspec.json.decode(value) in _NOTHING):
                raise Refusal(422, f"field {_shown(where + name)} is unknown")
        elif Any in (types := _types_in(known[name])) or any(get_origin(each) is dict for each in types):
            _check_free(where + name, value)
        elif content[:1] == b"{" and (inner := _struct_in(known[name])) is not None:
            _check_fields(value, inner, f"{where}{name}.")


def _check_free(name: str, raw: msgspec.Raw) -> None:
    """Check a value of free form, such as `user_metadata`."""
    if len(memoryview(raw)) > MOST_METADATA:
        raise Refusal(422, f"{name} is larger than {MOST_METADATA} bytes")
    level = [msgspec.json.decode(raw)]
    for _ in range(MOST_NESTING):
        level = [each for one in level for each in _parts(one)]
    if level:
        raise Refusal(422, f"{name} is nested deeper than {MOST_NESTING} levels")


def _parts(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _types_in(kind: Any) -> set[Any]:
    return {kind}.union(*map(_types_in, getattr(kind, "__args__", ())))


def _struct_in(kind: Any) -> type[Struct] | None:
    options = getattr(kind, "__args__", (kind,))
    return next((one for one in options if isinstance(one, type) and issubclass(one, Struct)), None)


def _shown(name: str) -> str:
    """Return a client's name escaped for an answer."""
    return f"`{''.join(letter if letter.isprintable() and letter != '`' else '?' for letter in name[:80])}`"


def plain_text(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return a client's metadata as texts."""
    return {key: str(value) for key, value in metadata.items()} if metadata else None


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
