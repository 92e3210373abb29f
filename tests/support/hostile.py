"""Requests that a server must refuse: written by hand, and drawn from good ones by changing them."""

import copy
import json
import random
import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from attrs import frozen
from proto_writer import Writer
from server_client import MODEL, PROTOBUF, Client, datum, row

MISSING: Final = object()
HUGE: Final = json.loads("1" + "0" * 400)
JSON: Final = "application/json"


def _nested(depth: int) -> Any:
    found: Any = 1
    for number in range(depth):
        found = [found] if number % 2 else {"a": found}
    return found


_IDS: Final = (MISSING, None, 1, True, [], {}, "", "nobody", "x" * 257, "../../etc", "\0", "\ud800", "a:train:99")
_SEQS: Final = (MISSING, None, -1, 1.5, "1", True, [], 2**53 + 1, 2**64, HUGE)
_NAMES: Final = (
    "", ".", "..", "../up", "/etc/passwd", "a/b", "a\\b", "a\0b", "x" * 129, "ä", "\u202eexe", "-rf", " a", "a\n",
    "a%2fb", "~", "C:a", 1, [],
)  # fmt: skip

# Path → field → values that are wrong there, all else being right.
WRONG: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "optim_step": {
        "model_id": _IDS,
        "seq_id": (*_SEQS, 0, 1),
        "adam_params": (None, [], 1, "x", {"learning_rate": None}),
        "adam_params.learning_rate": ("0.1", [], 1e301, -1e301, 1e39, -1e39),
        "adam_params.beta1": (-0.1, 1, 1.5, "x"),
        "adam_params.beta2": (-1e-9, 1.0, None),
        "adam_params.eps": (-1e-12, "x", 0, 1e-46, 1e39),
        "adam_params.weight_decay": ("x", {}, 1e39),
        "adam_params.grad_clip_norm": ([], 1e301, 1e39),
        "adam_params.amsgrad": (True,),
        "optimizer_params": ({"type": "dimuon"}, [], 1),
        "unknown": (1, "x", [0], {"a": 1}),
    },
    "create_model": {
        "session_id": _IDS[:9],
        "model_seq_id": _SEQS[:8],
        "base_model": (MISSING, None, 1, "", "gpt-9", "x" * 5000, "../../model"),
        "lora_config": (MISSING, None, [], 8, {}),
        "lora_config.rank": (0, -1, 33, 1.5, "8", HUGE),
        "lora_config.seed": (2**63, -(2**63) - 1, "x", 0.5),
        "lora_config.train_mlp": ("yes", 2),
        "lora_config.alpha": (16,),
        "user_metadata": ([], "x", {"a": "x" * 2**17}, {str(n): 1 for n in range(65)}, {"a": _nested(40)}),
        "optimizer_config": ({"type": "sgd"}, [], {"type": 1}),
    },
    "save_weights": {"model_id": _IDS[:6], "seq_id": _SEQS[:5], "path": _NAMES,
        "ttl_seconds": (0, -1, 1.5, "x", 10**12), "overwrite": ("yes", 2, [])},
    "save_weights_for_sampler": {"path": _NAMES[:6], "kind": ("inflight", "", 1),
        "sampling_session_seq_id": (-1, "x", 2**60)},
    "load_weights": {
        "path": (MISSING, None, "", "x", "tinker://x/weights/y", "file:///etc/passwd", "../../../etc/passwd", 1),
        "optimizer": (MISSING, None, "yes", 1), "model_id": (MISSING, 1), "weights_access_token": ("secret",)},
    "create_sampling_session": {"session_id": _IDS[:9], "sampling_session_seq_id": _SEQS[:5],
        "base_model": (MISSING, None, "gpt-9", 1),
        "model_path": ("", "tinker://x/sampler_weights/y", "/etc/passwd", 1)},
    "asample": {
        "sampling_session_id": _IDS[:9],
        "seq_id": _SEQS[:8],
        "prompt": (MISSING, None, [], "text", {"chunks": None}, {"chunks": [1]}, {"chunks": []}),
        "prompt.chunks": (
            [{"type": "encoded_text", "tokens": []}],
            [{"tokens": [-1]}],
            [{"tokens": [64]}],
            [{"tokens": [2**31]}],
            [{"tokens": [1.5]}],
            [{"tokens": ["1"]}],
            [{"tokens": [None]}],
            [{"type": "image", "tokens": [1]}],
            [{"tokens": [1] * 300}],
        ),
        "sampling_params": (MISSING, None, [], 1),
        "sampling_params.max_tokens": (0, -1, 1.5, "x", 10**9, 256),
        "sampling_params.temperature": (-1, 1e7, "x", None),
        "sampling_params.top_k": (0, -2, 1.5, 2**32),
        "sampling_params.top_p": (0, -0.5, 1.1, "x"),
        "sampling_params.seed": ("x", 2**63, 0.5),
        "sampling_params.stop": ("text", ["text"], {}, [[]], [None], [1.5], [2**31], [HUGE], [1] * 65, ["x" * 4097]),
        "num_samples": (0, -1, 1.5, "x", 257, 10**6, HUGE),
        "topk_prompt_logprobs": (-1, 21, "x"),
        "topk_sample_logprobs": (-1, 65, None),
        "target_prompt_logprobs": ([1],),
        "prompt_alt_tokens_k": (3,),
        "prompt_logprobs_last_n": (2,),
        "record_stability_info": (True,),
        "base_model": (MODEL,),
        "model_path": ("x",),
    },
    "retrieve_future": {"request_id": _IDS[:9]},
    "get_info": {"model_id": _IDS[:9]},
    "session_heartbeat": {"session_id": _IDS[:9]},
    "weights_info": {"tinker_path": (*_IDS[:7], "tinker://x/weights/y")},
}  # fmt: skip

# Method, path, status: what no path or no query is.
ELSEWHERE: Final = (
    ("GET", "optim_step", 405),
    ("PUT", "asample", 405),
    ("DELETE", "training_runs", 405),
    ("PATCH", "sessions", 405),
    ("GET", "training_runs?limit=-1", 422),
    ("GET", "training_runs?limit=x", 422),
    ("GET", "checkpoints?offset=1e3", 422),
    ("GET", "sessions?limit=%EF%BC%91", 422),
    ("GET", "sessions?offset=99999999999", 422),
    ("GET", "sessions/nobody", 404),
    ("GET", "samplers/nobody", 404),
    ("GET", "training_runs/nobody", 404),
    ("GET", "training_runs/nobody/checkpoints", 404),
    ("GET", "training_runs/../../../etc/passwd", 404),
    ("GET", "training_runs/%2e%2e/checkpoints/weights/x/archive", 404),
    ("GET", "training_runs/a/checkpoints/%2e%2e/%2e%2e/archive", 404),
    ("GET", "training_runs/%00/checkpoints", 404),
    ("DELETE", "training_runs/nobody/checkpoints/weights/x", 404),
    ("GET", "training_runs/a/checkpoints/weights/..%2f..", 404),
    ("POST", "training_runs/nobody/checkpoints/weights/x/publish", 404),
    ("GET", "%ff%fe", 404),
    ("GET", "x" * 5000, 404),
    ("POST", "sessions/nobody/finish", 415),
    ("GET", "archive", 404),
    ("HEAD", "optim_step", 405),
    ("GET", ".git/config", 404),
)


@frozen(kw_only=True)
class Asked:
    """A request: `content` is its body, `what` says what is wrong with it."""

    path: str
    content: bytes
    media: str = JSON
    what: str = ""
    encoding: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": self.media} | ({"content-encoding": self.encoding} if self.encoding else {})


def good(client: Client, sampler: str) -> dict[str, dict[str, Any]]:
    """A body of every path that can be done, with the numbers that are next."""
    named = {"model_id": client.id, "seq_id": client.seq + 1}
    chunk = {"type": "encoded_text", "tokens": [1, 2]}
    return {
        "optim_step": named | {"adam_params": {"learning_rate": 0.1, "beta1": 0.9}, "type": "optim_step"},
        "create_model": {"session_id": client.session, "model_seq_id": 900 + client.seq, "base_model": MODEL}
        | {"lora_config": {"rank": 8, "seed": 1}, "user_metadata": {"a": "b"}},
        "save_weights": named | {"path": f"name-{client.seq}", "ttl_seconds": 60},
        "save_weights_for_sampler": named | {"path": f"name-{client.seq}", "kind": "snapshot"},
        "load_weights": named | {"path": "tinker://nobody/weights/nothing", "optimizer": True},
        "create_sampling_session": {"session_id": client.session, "sampling_session_seq_id": 900 + client.seq}
        | {"base_model": MODEL},
        "asample": {"sampling_session_id": sampler, "seq_id": client.seq, "prompt": {"chunks": [chunk]}}
        | {"sampling_params": {"max_tokens": 2, "temperature": 1.0, "stop": [3], "top_k": 9, "seed": 1}}
        | {"num_samples": 2, "topk_sample_logprobs": 1, "format": "json"},
        "retrieve_future": {"request_id": "nothing"},
        "get_info": {"model_id": client.id},
        "session_heartbeat": {"session_id": client.session},
        "weights_info": {"tinker_path": f"tinker://{client.id}/weights/nothing"},
    }


def changed(body: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    found = at = copy.deepcopy(body)
    *before, last = field.split(".")
    for name in before:
        at = at[name]
    if value is MISSING:
        at.pop(last, None)
    else:
        at[last] = value
    return found


def by_hand(client: Client, sampler: str) -> Iterator[Asked]:
    """Requests of JSON that are wrong in one place, each made when it is asked for, since seq_ids are used up."""
    for path, fields in WRONG.items():
        for field, values in fields.items():
            for value in values:
                body = changed(good(client, sampler)[path], field, value)
                yield Asked(path=path, content=json.dumps(body).encode(), what=f"{field} = {value!r}"[:80])


def wrong_messages(client: Client) -> Iterator[Asked]:
    """Messages of `forward_backward` that are wrong in one place."""

    def asked(what: str, content: bytes, encoding: str | None = None) -> Asked:
        return Asked(path="forward_backward", content=content, media=PROTOBUF, what=what, encoding=encoding)

    def rows(what: str, *data: bytes, loss: str = "cross_entropy", settings: bytes = b"") -> Asked:
        client.seq += 1
        content = client.body(data, loss) + settings
        client.seq -= 1
        return asked(what, content)

    tokens = np.arange(1, 5)
    ones = np.ones(4, "<f4")
    targets = tokens.astype("<i8")

    def tensor(dtype: int, shape: list[int], dense: bytes = b"", csr: Writer | None = None) -> bytes:
        one = Writer().content(1, dense) if csr is None else Writer().content(2, csr)
        one.integer(3, dtype).integers(4, shape)
        text = Writer().content(1, Writer().content(1, Writer().content(1, tokens.astype("<i4").tobytes())))
        return bytes(text.content(2, Writer().content(1, "target_tokens").content(2, one)))

    def csr(starts: list[int], columns: list[int]) -> Writer:
        return Writer().content(1, bytes(8 * len(columns))).content(2, np.array(starts, "<i8").tobytes()).content(
            3, np.array(columns, "<i8").tobytes()
        )  # fmt: skip

    whole = {"target_tokens": targets, "weights": ones}
    yield asked("nothing at all", b"")
    yield asked("a zero", b"\0")
    yield asked("a tag of 11 bytes", b"\xff" * 11)
    yield asked("a length without end", b"\x0a" + b"\xff" * 9 + b"\x01")
    yield asked("a group", b"\x1b\x1c")
    yield asked("a field of another kind", b"\x08\x01")
    yield asked("an unknown field", bytes(Writer().content(99, "x")))
    yield asked("text that is not UTF-8", b"\x0a\x02\xff\xfe")
    yield asked("cut off", client.body([row(1)])[:-3])
    yield asked("no model", bytes(Writer().integer(2, 1).content(4, "cross_entropy")))
    yield asked("another model", bytes(Writer().content(1, "nobody").integer(2, 1).content(4, "cross_entropy")))
    yield asked("no seq_id", bytes(Writer().content(1, client.id).content(3, row(1)).content(4, "cross_entropy")))
    yield asked("a seq_id of 64 bits", bytes(Writer().content(1, client.id).integer(2, 2**64 - 1).content(3, row(1))))
    yield asked("no zstd frame", b"abc", "zstd")
    yield asked("gzip", b"abc", "gzip")
    yield rows("no rows")
    yield rows("no loss", row(1), loss="")
    yield rows("unknown loss", row(1), loss="custom")
    yield rows("a row of nothing", b"")
    yield rows("no tokens", datum(tokens[:0], {"target_tokens": targets[:0], "weights": ones[:0]}))
    yield rows("tokens of three bytes", bytes(Writer().content(1, Writer().content(1, Writer().content(1, b"abc")))))
    yield rows("an image", bytes(Writer().content(1, Writer().content(2, b"png"))))
    yield rows("sound", bytes(Writer().content(1, Writer().content(3, b"wav"))))
    yield rows("a negative token", datum(tokens - 9, whole))
    yield rows("a token beyond the vocabulary", datum(tokens + 60, whole))
    yield rows("too many tokens", row(1, 257))
    yield rows("no targets", datum(tokens, {"weights": ones}))
    yield rows("an input that is not known", datum(tokens, whole | {"rewards": ones}))
    yield rows("targets of another length", datum(tokens, whole | {"target_tokens": targets[:3]}))
    yield rows("weights of another length", datum(tokens, whole | {"weights": ones[:3]}))
    yield rows("targets beyond the vocabulary", datum(tokens, whole | {"target_tokens": targets + 60}))
    yield rows("negative targets", datum(tokens, whole | {"target_tokens": -targets}))
    yield rows("targets that are no integers", datum(tokens, whole | {"target_tokens": ones}))
    yield rows("weights that are NaN", datum(tokens, whole | {"weights": ones * np.float32("nan")}))
    yield rows("weights that are infinite", datum(tokens, whole | {"weights": -ones * np.float32("inf")}))
    yield rows("weights that float32 has not", datum(tokens, whole | {"weights": targets + 2**40}))
    yield rows("the least integer", datum(tokens, whole | {"weights": np.full(4, -(2**63))}))
    yield rows("three dims", tensor(2, [1, 2, 2], targets.tobytes()))
    yield rows("two dims where there may be one", datum(tokens, {k: v[:, None] for k, v in whole.items()}), loss="ppo")
    yield rows("an unknown dtype", tensor(9, [4], targets.tobytes()))
    yield rows("numbers that do not fill", tensor(2, [4], targets.tobytes()[:-1]))
    yield rows("another shape", tensor(2, [5], targets.tobytes()))
    yield rows("a huge shape", tensor(2, [2**32, 2**32], b""))
    empty = csr([0] * 5, [])  # a hundred bytes that stand for 2²² numbers
    yield rows("sparse tensors that are huge together", *[tensor(2, [4, 2**20], csr=empty)] * 5)
    yield rows("a huge shape without rows", tensor(2, [0, 2**62], b""))
    yield rows("a sparse row without an end", tensor(2, [4, 3], csr=csr([0, 1, 1, 1], [0])))
    yield rows("sparse rows that go back", tensor(2, [4, 3], csr=csr([0, 2, 1, 1, 1], [0])))
    yield rows("sparse columns beyond", tensor(2, [4, 3], csr=csr([0, 1, 1, 1, 1], [3])))
    yield rows("sparse columns before", tensor(2, [4, 3], csr=csr([0, 1, 1, 1, 1], [-1])))
    yield rows("sparse without dims", tensor(2, [], csr=csr([0], [])))
    for name, value in (
        ("temperature", 1.0), ("clip_low_threshold", float("nan")), ("clip_high_threshold", "x"),
        ("clip_high_threshold", 1e39), ("clip_low_threshold", -1e300),
    ):  # fmt: skip
        entry = Writer().content(2, value) if isinstance(value, str) else Writer().double(1, value)
        setting = bytes(Writer().content(7, Writer().content(1, name).content(2, entry)))
        policy = whole | {"logprobs": -ones, "advantages": ones}
        yield rows(f"{name} = {value}", datum(tokens, policy), loss="ppo", settings=setting)


# drawn ----------------------------------------------------------------------------------------------------------------

_VALUES: Final = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, HUGE, 0.5, -0.0, 1e300, 1e-320, "", "x", "\0", "\ud800", "ä" * 99,
    [], {}, [None], [[]], {"": 0}, [1] * 500, "x" * 5000, "../..",
)  # fmt: skip
_BYTES: Final = b'{}[]",:0-9eE\\\x00\xff\x7f\x80'


def drawn(rng: random.Random, client: Client, sampler: str) -> Asked:
    """A good request, changed in its values, its bytes or both."""
    bodies = good(client, sampler)
    path = rng.choice([*bodies, "forward_backward", "create_session", "telemetry", "client/config"])
    if path == "forward_backward" and rng.random() < 0.3:
        one = {"tokens": [1, 2], "targets": [-100, 3], "weights": [1, -0.5]}
        named = {"model_id": client.id, "seq_id": client.seq + 1}
        body = _values(rng, named | {"rows": [one], "loss": "cross_entropy", "settings": {}, "forward_only": True})
        return Asked(path=path, content=json.dumps(body).encode(), what="drawn")
    if path == "forward_backward":
        client.seq += 1
        message = client.body([row(rng.randrange(9), rng.randint(1, 12)) for _ in range(rng.randint(1, 3))])
        client.seq -= 1
        return Asked(path=path, content=_bytes(rng, message), media=PROTOBUF, what="drawn")
    body: Any = bodies.get(path, {"sdk_version": "1", "user_metadata": {"a": "b"}})
    for _ in range(rng.randint(0, 3)):
        body = _values(rng, body)
    content = json.dumps(body).encode()
    if rng.random() < 0.4:
        content = _bytes(rng, content)
    return Asked(path=path, content=content, what="drawn")


def _values(rng: random.Random, value: Any) -> Any:
    """Somewhere in it something else, less or more."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        found = dict(value)
        how = rng.random()
        if how < 0.15:
            del found[name]
        elif how < 0.25:
            found[rng.choice(("unknown", "", "__class__", name + " ", "type"))] = rng.choice(_VALUES)
        else:
            found[name] = _values(rng, value[name])
        return found
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], _values(rng, value[at]), *value[at + 1 :]]
    nested: Any = rng.choice(_VALUES)
    for _ in range(rng.choice((0, 0, 0, 3, 50, 320))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def _bytes(rng: random.Random, content: bytes) -> bytes:
    raw = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(raw) + 1)
        how = rng.randrange(6)
        if how == 0:
            del raw[at : at + rng.randint(1, 8)]
        elif how == 1:
            raw[at:at] = raw[at : at + rng.randint(1, 30)]
        elif how == 2:
            raw[at:at] = struct.pack("<Q", rng.getrandbits(64))[: rng.randint(1, 8)]
        elif how == 3 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        else:
            raw[at : at + 1] = bytes([rng.choice(_BYTES)])
    return bytes(raw[: rng.randrange(len(raw) + 1)]) if rng.random() < 0.2 else bytes(raw)
