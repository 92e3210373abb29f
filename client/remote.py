"""A server, its models and its samplers, as a program sees them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy as np

from .http import HttpClient, ServerRefused, ServerUnreachable
from .pending import Pending
from .values import PassOutcome, TrainingRow, WrittenText, outcome, written

HEARTBEAT: Final = 20.0  # seconds; without them the server frees the memory of models after some time
LossOfLogprobs = Callable[[list[np.ndarray]], tuple[float, list[np.ndarray]]]
"""log-probabilities of the targets of each row, [T] → the loss, and its derivatives by each of them."""


class Server:
    """A connection to a server. key: as its `serve { key }` asks for one. patience: seconds for which requests are
    repeated while the server is away, or busy; what is repeated is executed once.

    Raises ServerRefused where the key is wrong, and ServerUnreachable. A server may be used by several threads; a
    model by one at a time.
    """

    def __init__(self, url: str, *, key: str | None = None, name: str = "", patience: float = 300.0) -> None:
        self.http = HttpClient(url, key, patience)
        served = self.http.ask("GET", "get_server_capabilities")["supported_models"]
        self.model_name: str = served[0]["model_name"]
        self.max_tokens: int = served[0]["max_context_length"]
        self.max_rows: int = self.http.ask("POST", "client/config", {})["fwdbwd_max_chunk_len"]
        self.session: str = self.http.ask("POST", "create_session", {"display_name": name or None})["session_id"]
        self._models = self._samplers = 0
        self._numbering = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the session: its models leave memory. What was saved stays."""
        self._closed.set()
        self.http.ask("POST", f"sessions/{self.session}/finish", {})

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT):
            try:
                self.http.ask("POST", "session_heartbeat", {"session_id": self.session})
            except ServerUnreachable:
                continue
            except ServerRefused:
                return  # the session has ended

    def create_model(self, rank: int | None = None, *, seed: int | None = None, **layers: bool) -> "RemoteModel":
        """A model with a new adapter of a rank, or without a rank all of the model, where the server trains that.
        layers: `train_attn`, `train_mlp`: whether these have an adapter."""
        lora = None if rank is None else {"rank": rank, "seed": seed, **layers}
        body = {"base_model": self.model_name, "lora_config": lora}
        return self._made("create_model", {name: each for name, each in body.items() if each is not None})

    def load_model(self, path: str, *, optimizer: bool = True) -> "RemoteModel":
        """A new model from what `save` has given; without `optimizer` its moments begin anew."""
        return self._made("load_weights", {"path": path, "optimizer": optimizer})

    def _made(self, request: str, body: dict[str, Any]) -> "RemoteModel":
        with self._numbering:
            number, self._models = self._models, self._models + 1
        promise = self.http.ask("POST", request, {"session_id": self.session, "model_seq_id": number, **body})
        pending = Pending(self.http, [promise["request_id"]], lambda answers: answers[0]["model_id"])
        return RemoteModel(self, pending.result())

    def sampler(self, path: str | None = None) -> "RemoteSampler":
        """Writes texts with the weights that `save_for_sampler` has given; without a path with the model as it is."""
        number = self.next_sampler()
        weights = {"base_model": self.model_name} if path is None else {"model_path": path}
        body = {"session_id": self.session, "sampling_session_seq_id": number, **weights}
        found = self.http.ask("POST", "create_sampling_session", body)
        return RemoteSampler(self.http, found["sampling_session_id"])

    def next_sampler(self) -> int:
        """The number of a new sampler, which the server knows it by."""
        with self._numbering:
            self._samplers += 1
            return self._samplers - 1

    # what was saved

    def checkpoints(self) -> list[Mapping[str, Any]]:
        return self.http.ask("GET", "checkpoints")["checkpoints"]

    def delete(self, path: str) -> None:
        self.http.ask("DELETE", _of_checkpoint(path))

    def download(self, path: str, file: Path) -> None:
        """A checkpoint as a tar."""
        with file.open("wb") as to:
            for piece in self.http.download(_of_checkpoint(path) + "/archive"):
                to.write(piece)


def _of_checkpoint(path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{kind}/{name}"


class RemoteModel:
    """A model that is trained. Its requests are done in the order in which they are made; none waits for the result of
    another, so make them first and ask for results later."""

    def __init__(self, server: Server, id: str) -> None:
        self._server, self._http, self.id = server, server.http, id
        self._seq = 0

    def forward_backward(
        self, rows: Sequence[TrainingRow], loss: str = "cross_entropy", **settings: float
    ) -> Pending[PassOutcome]:
        """Add the gradient of a loss, summed over targets, to that of the model; any number of calls is one step."""
        return self._pass(rows, loss, settings, forward_only=False)

    def forward(
        self, rows: Sequence[TrainingRow], loss: str = "cross_entropy", **settings: float
    ) -> Pending[PassOutcome]:
        """The loss and log-probabilities alone."""
        return self._pass(rows, loss, settings, forward_only=True)

    def forward_backward_custom(self, rows: Sequence[TrainingRow], loss: LossOfLogprobs) -> float:
        """Add the gradient of a loss that this program computes from log-probabilities, and give its value.

        It takes two passes: the first gives the log-probabilities, in the second the derivatives are weights. The loss
        is not divided again: take `optim_step` with `reduction="sum"`.
        """
        found = self.forward(rows).result()
        value, slopes = loss([logprobs.copy() for logprobs in found.logprobs])
        weighted = [
            TrainingRow(tokens=row.tokens, targets=row.targets, weights=list(-np.asarray(slope)))
            for row, slope in zip(rows, slopes, strict=True)
        ]
        self.forward_backward(weighted).result()
        return value

    def optim_step(
        self, learning_rate: float, *, reduction: Literal["mean", "sum"] = "mean", **adam: float
    ) -> Pending[Mapping[str, float]]:
        """Take a step of AdamW with the gradient, which is used up; the metrics have its norm, `grad_norm`.

        reduction: `mean` divides once by the number of targets of all calls since the last step. adam: `beta1`,
        `beta2`, `eps`, `weight_decay`, `grad_clip_norm`.
        """
        body = {"adam_params": {"learning_rate": learning_rate, **adam}, "reduction": reduction}
        return self._one("optim_step", body, lambda answer: answer["metrics"])

    def save(self, name: str, *, overwrite: bool = False) -> Pending[str]:
        """Keep weights and moments by a name; the path is what `load_model` takes."""
        return self._one("save_weights", {"path": name, "overwrite": overwrite}, lambda answer: answer["path"])

    def save_for_sampler(self, name: str, *, overwrite: bool = False) -> Pending[str]:
        """Keep what is sampled from by a name; the path is what `sampler` of the server takes."""
        body = {"path": name, "overwrite": overwrite}
        return self._one("save_weights_for_sampler", body, lambda answer: answer["path"])

    def sampler(self) -> "RemoteSampler":
        """Writes texts with the weights of now; no later step changes them."""
        body = {"sampling_session_seq_id": self._server.next_sampler()}
        pending = self._one("save_weights_for_sampler", body, lambda answer: answer["sampling_session_id"])
        return RemoteSampler(self._http, pending.result())

    def _pass(
        self, rows: Sequence[TrainingRow], loss: str, settings: Mapping[str, float], *, forward_only: bool
    ) -> Pending[PassOutcome]:
        most, about = self._server.max_rows, {"loss": loss, "settings": settings, "forward_only": forward_only}
        parts = [rows[first : first + most] for first in range(0, max(1, len(rows)), most)]
        bodies = [{"rows": [row.body() for row in part], **about} for part in parts]
        return Pending(self._http, self._post("forward_backward", bodies), outcome)

    def _one(self, request: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Any]) -> Pending[Any]:
        return Pending(self._http, self._post(request, [body]), lambda answers: read(answers[0]))

    def _post(self, request: str, bodies: Sequence[dict[str, Any]]) -> list[str]:
        """The ids of requests that were taken. Only when all were are their numbers used up: a call that is made again,
        as no answer came, is the same requests."""
        ids = []
        for number, body in enumerate(bodies, start=self._seq + 1):
            numbered = {"model_id": self.id, "seq_id": number, **body}
            ids.append(self._http.ask("POST", request, numbered)["request_id"])
        self._seq += len(bodies)
        return ids


class RemoteSampler:
    """Writes texts with weights that never change."""

    def __init__(self, http: HttpClient, id: str) -> None:
        self._http, self.id, self._seq = http, id, 0

    def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        count: int = 1,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str | int] | None = None,
    ) -> Pending[list[WrittenText]]:
        """Texts that follow a prompt. temperature: 0 takes the likeliest tokens. stop: what ends a text, beside the end
        of a text of the tokenizer; an empty list lets it go on behind that."""
        params = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        body = {
            "sampling_session_id": self.id,
            "seq_id": self._seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": np.asarray(prompt, np.int64).tolist()}]},
            "sampling_params": {**params, "stop": stop if stop is None or isinstance(stop, str) else list(stop)},
            "num_samples": count,
            "format": "json",
        }
        found = self._http.ask("POST", "asample", body)
        self._seq += 1
        return Pending(self._http, [found["request_id"]], written)
