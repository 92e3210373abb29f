"""A client of the training server for tests: the wire by hand, without a network and without the SDK."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy_engine import NumpyEngine
from proto_writer import Writer
from starlette.testclient import TestClient

from xtrain.server.access import Keys, ServerLimits
from xtrain.server.app import app_of
from xtrain.server.messages import read
from xtrain.server.server import TrainingServer

KEY = "tml-test"
ADDRESS = "http://127.0.0.1:8000"
PROTOBUF = "application/x-protobuf"
MODEL = "tiny/numpy"


class Served:
    """A server on a folder, and a client of it. `clock` is seconds since it was made, and moves as a test wants. name:
    of the model that is served."""

    def __init__(
        self,
        folder: Path,
        engine: NumpyEngine | None = None,
        limits: ServerLimits | None = None,
        keys: Keys | None = None,
        clock: list[float] | None = None,
        name: str = MODEL,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
    ) -> None:
        self.engine, self.name = engine or NumpyEngine(), name
        self.clock = clock or [1e9]
        self.ended: list[str | None] = []
        self.server = TrainingServer(
            self.engine, folder, limits or ServerLimits(poll=5.0), clock=lambda: self.clock[0], ended=self.ended.append
        )
        self.http = TestClient(
            app_of(self.server, keys or Keys({"me": KEY}), hosts, origins), ADDRESS, raise_server_exceptions=False
        )
        self.http.__enter__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.server.stop()
        self.http.__exit__(None, None, None)

    def later(self, seconds: float) -> None:
        """Let time pass, and the server look at what has got too old."""
        self.clock[0] += seconds
        self.server._execution._last_idle = 0.0
        with self.server.store.changed:
            self.server.store.changed.notify_all()

    # requests

    def call(self, method: str, path: str, key: str = KEY, **more: Any) -> Any:
        headers = {"x-api-key": key} | more.pop("headers", {})
        return self.http.request(method, "/api/v1/" + path, headers=headers, **more)

    def post(self, request: str, key: str = KEY, /, **body: Any) -> Any:
        """The JSON of an answer that must be 200."""
        found = self.call("POST", request, key, json=body)
        assert found.status_code == 200, f"{request}: {found.status_code} {found.text[:300]}"
        return found.json()

    def session(self, key: str = KEY) -> str:
        return self.post("create_session", key, sdk_version="0.38.0", type="create_session")["session_id"]

    def result(self, promise: dict[str, Any] | str, key: str = KEY) -> Any:
        """What came of a request: JSON, or the bytes of a message."""
        id = promise if isinstance(promise, str) else promise["request_id"]
        for _ in range(20):
            found = self.call("POST", "retrieve_future", key, json={"request_id": id})
            assert found.status_code == 200, f"{found.status_code} {found.text[:300]}"
            if found.headers["content-type"] == PROTOBUF:
                return found.content
            if found.json().get("type") != "try_again":
                return found.json()
        raise AssertionError("no result came")

    def model(self, session: str | None = None, number: int = 0, key: str = KEY, **lora: Any) -> "Client":
        session = session or self.session(key)
        config = {"rank": 8, "seed": 3} | lora
        promise = self.post(
            "create_model", key, session_id=session, model_seq_id=number, base_model=self.name, lora_config=config
        )
        found = self.result(promise, key)
        assert "error" not in found, found
        return Client(self, found["model_id"], key)


class Client:
    """A model of a server, as its client sees it. seq: of the last request."""

    def __init__(self, served: Served, id: str, key: str = KEY, seq: int = 0) -> None:
        self.served, self.id, self.key, self.seq = served, id, key, seq

    @property
    def session(self) -> str:
        return self.id.partition(":")[0]

    def send(self, request: str, /, *, seq: int | None = None, **body: Any) -> dict[str, Any]:
        """Post a request; what it promises."""
        self.seq = self.seq + 1 if seq is None else seq
        return self.served.post(request, self.key, model_id=self.id, seq_id=self.seq, **body)

    def body(self, rows: Sequence[bytes], loss: str = "cross_entropy", *, forward: bool = False) -> bytes:
        return body_of(self.id, self.seq, rows, loss, forward=forward)

    def pass_(
        self, rows: Sequence[bytes], loss: str = "cross_entropy", *, forward: bool = False, seq: int | None = None
    ) -> Any:
        self.seq = self.seq + 1 if seq is None else seq
        found = self.served.call(
            "POST",
            "forward_backward",
            self.key,
            content=self.body(rows, loss, forward=forward),
            headers={"content-type": PROTOBUF},
        )
        assert found.status_code == 200, f"{found.status_code} {found.text[:300]}"
        return found.json()

    def step(self, rate: float = 0.05, **params: float) -> dict[str, Any]:
        return self.send("optim_step", adam_params={"learning_rate": rate} | params)

    def result(self, promise: dict[str, Any]) -> Any:
        return self.served.result(promise, self.key)

    def train(self, rows: Sequence[bytes], steps: int = 1) -> None:
        for _ in range(steps):
            promises = self.pass_(rows), self.step()
            for promise in promises:
                found = self.result(promise)
                assert not isinstance(found, dict) or "error" not in found, found

    def logprobs(self, rows: Sequence[bytes]) -> np.ndarray:
        """Of all targets of the rows, one after the other."""
        return outputs(self.result(self.pass_(rows, forward=True)))[0]


def body_of(
    model: str, seq: int, rows: Sequence[bytes], loss: str = "cross_entropy", *, forward: bool = False
) -> bytes:
    """The message of a pass."""
    out = Writer().content(1, model).integer(2, seq)
    for one in rows:
        out.content(3, one)
    return bytes(out.content(4, loss).integer(6, int(forward)))


def row(seed: int = 0, length: int = 9, **inputs: np.ndarray | None) -> bytes:
    """A datum of made-up tokens. inputs: others beside targets and weights; None: leave one out."""
    tokens = np.random.default_rng(seed).integers(1, 60, length + 1)
    tensors: dict[str, np.ndarray | None] = {
        "target_tokens": tokens[1:].astype("<i8"),
        "weights": np.linspace(-0.5, 1.0, length, dtype="<f4"),
    }
    return datum(tokens[:-1], {name: one for name, one in (tensors | inputs).items() if one is not None})


def datum(tokens: np.ndarray, inputs: dict[str, np.ndarray]) -> bytes:
    out = Writer().content(1, Writer().content(1, Writer().content(1, tokens.astype("<i4").tobytes())))
    for name, values in inputs.items():
        number = 2 if values.dtype.kind == "i" else 1
        tensor = Writer().content(1, values.tobytes()).integer(3, number).integers(4, list(values.shape))
        out.content(2, Writer().content(1, name).content(2, tensor))
    return bytes(out)


def outputs(raw: Any) -> tuple[np.ndarray, dict[str, float]]:
    """The log-probabilities of all rows, one after the other, and the metrics."""
    assert isinstance(raw, bytes), raw
    found = read(raw, "ForwardBackwardOutput")
    fields = [field.value.data for record in found.records for field in record.fields]
    metrics = {entry.key: entry.value for entry in found.metrics}
    return np.concatenate([np.frombuffer(data, "<f4") for data in fields]), metrics


def samples(raw: Any) -> dict[str, Any]:
    """The message of samples, by names; numbers as arrays."""
    assert isinstance(raw, bytes), raw
    message = read(raw, "SampleResponse")
    found = {field.name: value for field, value in message.ListFields()}
    found["samples"] = [{field.name: value for field, value in one.ListFields()} for one in message.samples]
    for one in found["samples"]:
        one["tokens"] = np.frombuffer(one["tokens"], "<i4").tolist()
        one["logprobs"] = np.frombuffer(one["logprobs"], "<f4")
    return found | {"prompt": np.frombuffer(message.prompt, "<f4")}


class Sampling:
    """A sampling session, and the number of its last request."""

    def __init__(self, served: Served, id: str) -> None:
        self.served, self.id, self.seq = served, id, -1

    def ask(self, tokens: list[int], more: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
        self.seq += 1
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        body = {"prompt": prompt, "sampling_params": {"max_tokens": 6} | params} | (more or {})
        return self.served.post("asample", sampling_session_id=self.id, seq_id=self.seq, **body)

    def draw(self, tokens: list[int], more: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
        return samples(self.served.result(self.ask(tokens, more, **params)))

    def error(self, tokens: list[int], more: dict[str, Any] | None = None, **params: Any) -> str:
        found = self.served.result(self.ask(tokens, more, **params))
        assert found["category"] == "user"
        return found["error"]


def unnamed_of(client: Client, number: int) -> Sampling:
    found = client.result(client.send("save_weights_for_sampler", sampling_session_seq_id=number))
    return Sampling(client.served, found["sampling_session_id"])
