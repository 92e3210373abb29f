"""Bodies of all kinds: messages and tensors, hostile ones, and what is refused before anything is read."""

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from proto_writer import Writer
from server_client import KEY, MODEL, PROTOBUF, Client, Served, datum, outputs, row

from xtrain.server.access import Keys, ServerLimits
from xtrain.server.engine_interface import Candidates, DrawnSample, PassResult, SampleResult
from xtrain.server.messages import (
    MESSAGES,
    MOST_FIELDS,
    Malformed,
    forward_backward_output,
    read_forward_backward,
    read_tensor,
    sample_response,
)

JSON_PASS = b'{"model_id": "a:train:0", "seq_id": 1, "rows": [{"targets": [1], %s}]}'
JSON_ZSTD = {"content-type": "application/json", "content-encoding": "zstd"}
POSTS = (
    "client/config", "create_session", "session_heartbeat", "create_model", "get_info", "forward_backward",
    "optim_step", "save_weights", "save_weights_for_sampler", "load_weights", "create_sampling_session",
    "asample", "retrieve_future", "weights_info", "telemetry",
)  # fmt: skip


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, limits=ServerLimits(poll=0.05, body=2**20)) as one:
        yield one


# messages


def request(*rows: bytes, **settings: float | str) -> bytes:
    out = Writer().content(1, "a:train:0").integer(2, 3)
    for one in rows:
        out.content(3, one)
    for name, value in settings.items():
        entry = Writer().content(2, value) if isinstance(value, str) else Writer().double(1, value)
        out.content(7, Writer().content(1, name).content(2, entry))
    out.content(5, Writer().content(1, "low").double(2, 0.25))
    return bytes(out.content(4, "ppo").integer(6, 1))


def test_a_request_is_read() -> None:
    found = read_forward_backward(request(row(3, 4), row(4, 6), high=1.5, mode="x"))
    assert (found.model_id, found.seq_id, found.loss, found.forward_only) == ("a:train:0", 3, "ppo", True)
    assert found.settings == {"low": 0.25, "high": 1.5, "mode": "x"}
    assert found.num_tokens == 10 and found.rows[0].inputs["weights"].dtype == np.float32
    np.testing.assert_array_equal(found.rows[1].tokens, np.random.default_rng(4).integers(1, 60, 7)[:-1])


def test_chunks_of_text_are_put_together_and_others_are_left_to_the_checks() -> None:
    text = Writer().content(1, Writer().content(1, np.arange(3, dtype="<i4").tobytes()))
    image = Writer().content(2, b"x")
    whole = read_forward_backward(bytes(Writer().content(3, Writer().content(1, text).content(1, text))))
    assert whole.rows[0].tokens is not None and whole.rows[0].tokens.tolist() == [0, 1, 2, 0, 1, 2]
    assert read_forward_backward(bytes(Writer().content(3, Writer().content(1, image)))).rows[0].tokens is None


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_malformed(raw: bytes) -> None:
    try:
        read_forward_backward(raw)
    except Malformed as error:
        assert len(str(error)) < 300


@given(st.integers(0, 2**32), st.data())
def test_a_message_that_is_cut_or_changed_is_read_or_malformed(seed: int, data: st.DataObject) -> None:
    raw = bytearray(request(row(seed % 100, 5), high=2.0))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with suppress(Malformed):
        read_forward_backward(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


def test_fields_are_counted_and_unknown_ones_refused() -> None:
    packed = Writer().content(1, "x").content(2, Writer().content(4, bytes(MOST_FIELDS)))
    for raw, words in {
        b"\x1a\x00" * (MOST_FIELDS + 1): "more than",
        b"\x1a\x02\x0a\x00" * (MOST_FIELDS // 2 + 1): "more than",
        bytes(Writer().content(3, Writer().content(2, packed))): "more than",
        bytes(Writer().integer(9, 1)): "a field 9",
        bytes(Writer().content(3, Writer().integer(8, 1))): "Datum has a field 8",
        bytes(Writer().integer(1, 1)): "model_id of ForwardBackwardRequest has wire type 0",
        bytes(Writer().content(2, b"1")): "seq_id of ForwardBackwardRequest has wire type 2",
        b"\x10" + b"\xff" * 9 + b"\x02": "64 bits",
        b"\x0a\x02\xff\xfe": "model_id is not UTF-8",
        b"\x0a\x09abc": "model_id of ForwardBackwardRequest is cut off",
    }.items():
        with pytest.raises(Malformed, match=words):
            read_forward_backward(raw)


def tensor_of(fields: dict[str, Any]) -> Any:
    return MESSAGES["Tensor"](**fields)


def csr(shape: list[int], starts: list[int], columns: list[int], values: int) -> dict[str, Any]:
    stored = {"values": np.ones(values, "<f4").tobytes()}
    stored |= {"crow": np.array(starts, "<i8").tobytes(), "col": np.array(columns, "<i8").tobytes()}
    return {"csr": stored, "dtype": 1, "shape": shape}


def test_tensors_are_dense_sparse_or_of_16_bits() -> None:
    assert read_tensor(tensor_of(csr([2, 3], [0, 1, 2], [2, 0], 2))).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert read_tensor(tensor_of({"dense": struct.pack("<2i", 4, -5), "dtype": 3})).tolist() == [4, -5]
    halves = np.array([1.5, -2.0], "<f4").view(np.uint32) >> 16
    assert read_tensor(tensor_of({"dense": halves.astype("<u2").tobytes(), "dtype": 4})).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("tensor", [
    {"dense": b"123", "dtype": 1},
    {"dense": b"1234", "dtype": 7},
    {"dense": b"1234", "dtype": 1, "shape": [2]},
    {"dense": b"", "dtype": 1, "shape": [0, 2**62]},
    {"dense": b"", "dtype": 1, "shape": [2**40, 2**40]},
    {"dense": b"", "dtype": 1, "shape": [1, 1, 1]},
    csr([2, 3], [0, 1], [2, 0], 2),
    csr([2, 3], [0, 2, 1], [2, 0], 2),
    csr([3, 4], [0, 2**63 - 1, -2, 1], [0], 1),  # whose differences overflow
    csr([2, 3], [0, 1, 2], [3, 0], 2),
    csr([2, 3], [0, 1, 2], [-1, 0], 2),
    csr([2, 3], [0, 1, 2], [1], 2),
    csr([2**20, 2**20], [0, 1, 2], [1, 1], 2),
    csr([6], [0, 1, 2], [1, 1], 2),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_malformed(tensor: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        read_tensor(tensor_of(tensor))


def test_outputs_whose_widths_differ_are_several_records() -> None:
    result = PassResult(
        outputs=[{"logprobs": np.ones((2, 3))}, {"logprobs": np.ones((4, 3))}, {"logprobs": np.ones((2, 5))}],
        metrics={"loss:sum": float("nan")},
    )
    numbers, metrics = outputs(forward_backward_output(result))
    assert numbers.size == 2 * 3 + 4 * 3 + 2 * 5 and np.isnan(metrics["loss:sum"])


def test_candidates_of_a_prompt_have_an_empty_first_row() -> None:
    top = Candidates(tokens=np.array([[5, 6]]), logprobs=np.array([[-1.0, -2.0]]))
    sample = DrawnSample(tokens=np.array([1]), logprobs=np.array([-0.5]), stopped=True)
    raw = sample_response(SampleResult(samples=[sample], prompt_logprobs=np.array([np.nan, -1.0]), prompt_top=top))
    assert np.array([0, 0, 5, 6], "<i4").tobytes() in raw
    assert np.array([-99999, -99999, -1, -2], "<f4").tobytes() in raw


# what is refused before anything is read


@pytest.mark.parametrize("key", ["", "tml-wrong", KEY + "x", KEY[:-1], "ä" * 20])
def test_a_wrong_key_is_refused_before_the_body(served: Served, key: str) -> None:
    for path in POSTS:
        found = served.call("POST", path, key.encode("latin-1"), content=b"{" * 1000)  # pyright: ignore[reportArgumentType]
        assert found.status_code == 401 and "key" in found.json()["error"]
    assert served.call("GET", "training_runs", "x").status_code == 401
    assert served.http.get("/api/v1/healthz").json() == {"status": "ok"}


def test_a_bearer_token_is_a_key(served: Served) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    assert served.http.get("/api/v1/sessions", headers=headers).status_code == 200


def test_keys_are_of_one_owner_or_of_several() -> None:
    assert Keys.read(" tml-a\n").of == {"owner": "tml-a"}
    assert Keys.read("ann=tml-a  bob=tml=b").of == {"ann": "tml-a", "bob": "tml=b"}
    for text, words in {
        "": "empty",
        "tml-a tml-b": "word 1 of 2",
        "ann=": "word 1",
        "ann=tml-a ann=tml-b": "word 2",
        "ann=tml-a bob=tml-a": "word 2",
        "tml-\udcff": "word 1 of 1 contains a character",  # a byte of the environment that is not UTF-8
        "ann=tml-a bob=tml-ä": "word 2 of 2 contains a character",
        "änn=tml-a": "word 1 of 1 contains a character",
    }.items():
        with pytest.raises(ValueError, match=words) as refused:
            Keys.read(text)
        assert "tml-" not in str(refused.value)


def test_what_is_someone_elses_is_not_there(tmp_path: Path) -> None:
    with Served(tmp_path, keys=Keys({"me": "tml-a", "you": "tml-b"})) as served:
        mine = served.model(key="tml-a")
        path = mine.result(mine.send("save_weights", path="one"))["path"]
        promise = mine.step()
        thief = Client(served, mine.id, "tml-b", seq=mine.seq)
        body = {"model_id": mine.id, "seq_id": 3, "adam_params": {}}
        refused = [
            served.call("POST", "optim_step", "tml-b", json=body),
            served.call("POST", "retrieve_future", "tml-b", json={"request_id": promise["request_id"]}),
            served.call("POST", "get_info", "tml-b", json={"model_id": mine.id}),
            served.call("POST", "session_heartbeat", "tml-b", json={"session_id": mine.session}),
            served.call("POST", "weights_info", "tml-b", json={"tinker_path": path}),
            served.call("GET", f"training_runs/{mine.id}/checkpoints", "tml-b"),
            served.call("DELETE", f"training_runs/{mine.id}/checkpoints/weights/one", "tml-b"),
        ]
        assert {found.status_code for found in refused} == {404}
        assert served.call("GET", "training_runs", "tml-b").json()["training_runs"] == []
        other = served.session("tml-b")
        create = {"path": path, "optimizer": True, "session_id": other, "model_seq_id": 0}
        assert "no checkpoint" in served.result(served.post("load_weights", "tml-b", **create), "tml-b")["error"]
        publish = f"training_runs/{mine.id}/checkpoints/weights/one/publish"
        assert served.call("POST", publish, "tml-a").status_code == 204
        create["model_seq_id"] = 1
        found = served.result(served.post("load_weights", "tml-b", **create), "tml-b")
        assert found["model_id"] == f"{other}:train:1"
        assert thief.key == "tml-b"


@pytest.mark.parametrize(("path", "headers", "content", "status"), [
    ("optim_step", {"content-type": "text/plain"}, b"{}", 415),
    ("forward_backward", {"content-type": "text/plain"}, b"{}", 415),
    ("forward_backward", {"content-type": "application/json"}, b"{}", 422),
    ("forward_backward", {"content-type": "application/json"}, b"[]", 422),
    ("forward_backward", {"content-type": "application/json"}, JSON_PASS % b'"tokens": [1], "mask": [1]', 422),
    ("forward_backward", {"content-type": "application/json"}, JSON_PASS % b'"tokens": [4294967296]', 422),
    ("forward_backward", {"content-type": PROTOBUF, "content-encoding": "gzip"}, b"", 415),
    ("forward_backward", {"content-type": PROTOBUF}, b"\x0a\xff", 422),
    ("optim_step", {"content-type": "application/json"}, b"{", 422),
    ("optim_step", {"content-type": "application/json"}, b"[" * 100_000, 422),
    ("optim_step", {"content-type": "application/json"}, b'{"a":' * 100_000, 422),
    ("optim_step", {"content-type": "application/json"}, b'{"model_id": "\xff"}', 422),
    ("optim_step", {"content-type": "application/json"}, b'{"model_id": 1, "seq_id": NaN}', 422),
    ("asample", {"content-type": "application/json"}, b" " * 2**21, 413),
    ("forward_backward", {"content-type": PROTOBUF, "content-encoding": "zstd"}, b"no frame", 422),
    ("no/such/path", {}, b"", 404),
    ("create_session", {}, b"", 415),
    ("client/config", {}, b"", 415),
    ("telemetry", {"content-type": "text/plain"}, b"{}", 415),
    ("sessions/x/finish", {"content-type": "application/x-www-form-urlencoded"}, b"", 415),
    ("create_session", JSON_ZSTD, zstandard.compress(b"{}")[:-1], 422),
    ("create_session", JSON_ZSTD, zstandard.compress(b"{}") * 2, 422),
    ("create_session", JSON_ZSTD, b"", 422),
    ("create_session", JSON_ZSTD, zstandard.compress(b'{"user_metadata": {"a": "%s"}}' % (b"x" * 2**20)), 413),
])  # fmt: skip
def test_bodies_that_cannot_be_taken(
    served: Served, path: str, headers: dict[str, str], content: bytes, status: int
) -> None:
    """open-rl#245: a binary body crashed the error handler itself."""
    found = served.call("POST", path, headers=headers, content=content)
    assert found.status_code == status and set(found.json()) == {"error"}


def test_a_compressed_body_is_read_up_to_a_limit(served: Served) -> None:
    client = served.model()
    client.seq = 1
    headers = {"content-type": PROTOBUF, "content-encoding": "zstd"}
    raw = zstandard.compress(client.body([row(1)]))
    found = served.call("POST", "forward_backward", headers=headers, content=raw)
    assert isinstance(client.result(found.json()), bytes)
    bomb = zstandard.compress(bytes(2**26))
    assert served.call("POST", "forward_backward", headers=headers, content=bomb).status_code == 413


def test_unknown_fields_are_refused_by_name_unless_they_ask_for_nothing(served: Served) -> None:
    client = served.model()
    body = {"model_id": client.id, "seq_id": 1, "adam_params": {"learning_rate": 0.1, "amsgrad": True}}
    found = served.call("POST", "optim_step", json=body)
    assert found.status_code == 422 and "`adam_params.amsgrad`" in found.text
    body["adam_params"] = {"learning_rate": 0.1, "amsgrad": False}
    assert served.call("POST", "optim_step", json=body | {"note": None}).status_code == 200


def test_small_requests_do_not_ask_for_much_memory(served: Served) -> None:
    """Ids of samples are made before a request waits, and metadata is kept for long."""
    ask = {"prompt": {"chunks": []}, "sampling_params": {}, "sampling_session_id": "x", "seq_id": 0}
    found = served.call("POST", "asample", json=ask | {"num_samples": 10**15})
    assert found.status_code == 422 and "num_samples" in found.text
    found = served.call("POST", "create_session", json={"user_metadata": {"a": "x" * 2**17}})
    assert found.status_code == 422 and "user_metadata" in found.text


def test_a_full_queue_says_when_to_come_again_and_takes_what_others_wait_for(tmp_path: Path) -> None:
    with Served(tmp_path, limits=ServerLimits(queue=3, poll=0.05)) as served:
        client, other = served.model(number=0), served.model(number=1)
        late = [client.pass_([row(1)], seq=seq) for seq in (2, 3, 4)]
        found = served.call("POST", "optim_step", json={"model_id": other.id, "seq_id": 1, "adam_params": {}})
        assert found.status_code == 429 and float(found.headers["retry-after"]) > 0
        client.pass_([row(1)], seq=1)
        for promise in late:
            assert isinstance(client.result(promise), bytes)
        assert served.call("POST", "optim_step", json={"model_id": other.id, "seq_id": 1, "adam_params": {}}).is_success


def test_limits_of_tokens_rank_samples_and_sessions_are_named(tmp_path: Path) -> None:
    limits = ServerLimits(tokens=20, samples=2, sessions=2)
    with Served(tmp_path, limits=limits) as served:
        client = served.model()
        assert "may have 20" in client.result(client.pass_([row(1), row(2), row(3)]))["error"]
        create = {"session_id": client.session, "model_seq_id": 5, "base_model": MODEL, "lora_config": {"rank": 33}}
        assert "outside 1..32" in served.result(served.post("create_model", **create))["error"]
        id = served.post(
            "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model=MODEL
        )["sampling_session_id"]
        ask = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 2}, "num_samples": 3}
        assert "may have 2" in served.result(served.post("asample", sampling_session_id=id, seq_id=0, **ask))["error"]
        served.session()
        assert served.call("POST", "create_session", json={}).status_code == 429


def test_bodies_are_not_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "xtrain")
    client = served.model()
    client.train([row(1)])
    client.result(client.pass_([datum(np.array([5]), {"secret-input": np.ones(1, "<f4")})]))
    assert "secret-input" not in caplog.text and KEY not in caplog.text
