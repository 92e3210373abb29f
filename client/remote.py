"""A server, its models and its samplers as a program sees them, with the rows they take and return."""

import hashlib
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec
import numpy as np
from attrs import frozen

from xtrain.client.http import LONGEST_PAUSE, HttpClient, Pending, ServerRefused, ServerUnreachable

IGNORED: Final = -100  # a target without a loss


@frozen(kw_only=True)
class TrainingRow:
    """A training row. tokens: [T]. targets: the token to predict after each token, or IGNORED, [T]. weights: of each
    target, any sign; default 1. logprobs, advantages: for policy losses; ignored where the target is."""

    tokens: Sequence[int]
    targets: Sequence[int]
    weights: Sequence[float] | None = None
    logprobs: Sequence[float] | None = None
    advantages: Sequence[float] | None = None

    @classmethod
    def of_text(cls, tokens: Sequence[int], prompt: int = 1) -> "TrainingRow":
        """Return a row of a text whose tokens after the first `prompt` are learned."""
        return cls(tokens=tokens[:-1], targets=[IGNORED] * (prompt - 1) + list(tokens[prompt:]))

    @classmethod
    def of_answer(cls, prompt: Sequence[int], answer: "WrittenText", advantage: float) -> "TrainingRow":
        """Return a row of an answer to a prompt, for a policy loss: each token of the answer has the same advantage."""
        row, before = cls.of_text([*prompt, *answer.tokens], len(prompt)), len(prompt) - 1
        return cls(
            tokens=row.tokens,
            targets=row.targets,
            logprobs=[0.0] * before + list(answer.logprobs),
            advantages=[0.0] * before + [advantage] * len(answer.tokens),
        )

    def body(self) -> dict[str, Any]:
        names = ("tokens", "targets", "weights", "logprobs", "advantages")
        return {name: _numbers(getattr(self, name)) for name in names if getattr(self, name) is not None}


def _numbers(values: Sequence[Any]) -> list[Any]:
    return np.asarray(values).tolist()


@frozen(kw_only=True, eq=False)
class PassOutcome:
    """Result of a pass. loss: sum over targets. tokens: number of targets with a loss. logprobs: of the targets of each
    row, [T]; 0 where ignored."""

    loss: float
    tokens: int
    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]

    @property
    def mean(self) -> float:
        return self.loss / max(1, self.tokens)


@frozen(kw_only=True)
class WrittenText:
    """A sampled text. tokens: [N]. logprobs: of each token in the distribution it was drawn from, [N]. stopped: it
    ended before the maximum length."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool


def outcome(answers: Sequence[Mapping[str, Any]]) -> PassOutcome:
    """Combine the answers of a pass that was sent in parts."""
    metrics: dict[str, float] = {}
    for answer in answers:
        for name, value in answer["metrics"].items():
            if name.endswith(":sum"):
                metrics[name] = metrics.get(name, 0.0) + _number(value)
    return PassOutcome(
        loss=metrics["loss:sum"],
        tokens=sum(answer["tokens"] for answer in answers),
        logprobs=[np.array([_number(each) for each in row]) for answer in answers for row in answer["logprobs"]],
        metrics=metrics,
    )


def written(answers: Sequence[Mapping[str, Any]]) -> list[WrittenText]:
    return [
        WrittenText(
            tokens=sample["tokens"],
            logprobs=[_number(each) for each in sample["logprobs"]],
            stopped=sample["stopped"],
        )
        for answer in answers
        for sample in answer["samples"]
    ]


def _number(value: float | None) -> float:
    """Return a number from JSON, where null means not finite."""
    return float("nan") if value is None else float(value)


TAR_END: Final = bytes(1024)
HEARTBEAT: Final = 20.0  # seconds; without heartbeats the server unloads models after some time
LossOfLogprobs = Callable[[list[np.ndarray]], tuple[float, list[np.ndarray]]]
"""log-probabilities of the targets of each row, [T] → the loss, and its derivatives by each of them."""


class Server:
    """A connection to a server. key: required by a server with `serve { key }`. patience: seconds for which requests
    are retried while the server is away or busy; a retried request is executed once.

    Raises ServerRefused for a wrong key, and ServerUnreachable. Several threads may use a server; a model only one at a
    time.
    """

    def __init__(self, url: str, *, key: str | None = None, name: str = "", patience: float = 300.0) -> None:
        self.http = HttpClient(url, key, patience)
        served = self.http.ask("GET", "get_server_capabilities")["supported_models"]
        self.model_name: str = served[0]["model_name"]
        self.max_tokens: int = served[0]["max_context_length"]
        self.max_rows: int = self.http.ask("POST", "client/config", {})["fwdbwd_max_chunk_len"]
        self.session: str = self.http.ask("POST", "create_session", {"display_name": name or None})["session_id"]
        self._models = self._samplers = 0
        self._unmade: dict[tuple[str, bytes], int] = {}  # numbers of models whose creation had no answer
        self._numbering = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the session: its models are unloaded. Saved files remain."""
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
        """Create a model with a new adapter of a rank; without a rank, the whole model if the server trains it. layers:
        `train_attn`, `train_mlp`: whether these get an adapter."""
        lora = None if rank is None else {"rank": rank, "seed": seed, **layers}
        body = {"base_model": self.model_name, "lora_config": lora}
        return self._made("create_model", {name: each for name, each in body.items() if each is not None})

    def load_model(self, path: str, *, optimizer: bool = True) -> "RemoteModel":
        """Create a model from a `save` path; without `optimizer`, its moments start from zero."""
        return self._made("load_weights", {"path": path, "optimizer": optimizer})

    def _made(self, request: str, body: dict[str, Any]) -> "RemoteModel":
        call = (request, msgspec.json.encode(body))
        with self._numbering:
            number = self._unmade.pop(call, self._models)
            self._models = max(self._models, number + 1)
        try:
            promise = self.http.ask("POST", request, {"session_id": self.session, "model_seq_id": number, **body})
            pending = Pending(self.http, [promise["request_id"]], lambda answers: answers[0]["model_id"])
            return RemoteModel(self, pending.result())
        except ServerUnreachable:
            self._unmade[call] = number  # the same call again makes the same model
            raise

    def sampler(self, path: str | None = None) -> "RemoteSampler":
        """Create a sampler of a `save_for_sampler` path; without a path, of the base model."""
        with self._numbering:
            number, self._samplers = self._samplers, self._samplers + 1
        weights = {"base_model": self.model_name} if path is None else {"model_path": path}
        body = {"session_id": self.session, "sampling_session_seq_id": number, **weights}
        found = self.http.ask("POST", "create_sampling_session", body)
        return RemoteSampler(self.http, found["sampling_session_id"])

    def upload(self, folder: Path, number: int | None = None) -> "RemoteSampler":
        """Create a sampler of the weights in a folder, of an adapter for PEFT or of a model for transformers.

        number: of the sampler in this session, so that the same call again gives the same one; None: the next.
        """
        if number is None:
            with self._numbering:
                number, self._samplers = self._samplers, self._samplers + 1
        archive = folder.with_name(f"{folder.name}.{number}.tar")
        try:
            with tarfile.open(archive, "w:") as tar:
                for file in sorted(each for each in folder.iterdir() if each.is_file()):
                    tar.add(file, file.name)
            with archive.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            path = f"sessions/{self.session}/samplers/{number}?sha256={digest}"
            found = self.http.send("PUT", path, archive)
        finally:
            archive.unlink(missing_ok=True)
        return RemoteSampler(self.http, found["sampling_session_id"])

    def checkpoints(self) -> list[Mapping[str, Any]]:
        return self.http.ask("GET", "checkpoints")["checkpoints"]

    def delete(self, path: str) -> None:
        try:
            self.http.ask("DELETE", _of_checkpoint(path))
        except ServerRefused as error:
            if not (error.status == 404 and error.repeated):  # a repeated removal finds nothing
                raise

    def download(self, path: str, file: Path) -> None:
        """Download a checkpoint as a tar. The file appears once complete; an interrupted download starts again."""
        until, partial = time.monotonic() + self.http.patience, file.with_name(f"{file.name}.partial")
        while True:
            with partial.open("wb") as to:
                tail = b""
                try:
                    for piece in self.http.download(_of_checkpoint(path) + "/archive"):
                        to.write(piece)
                        tail = (tail + piece)[-len(TAR_END) :]
                    if tail != TAR_END:
                        raise ServerUnreachable(f"the archive of {path} was cut off")
                    break
                except ServerUnreachable:
                    if time.monotonic() > until:
                        raise
            time.sleep(LONGEST_PAUSE / 10)
        partial.replace(file)


def _of_checkpoint(path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{kind}/{name}"


class CallUnanswered(Exception):
    """The previous call had no answer, so its number may be used: call `RemoteModel.repeat` first."""


class RemoteModel:
    """A model in training.

    Its requests are executed in the order of the calls, without waiting for results: make them first and read results
    later. A call without an answer (ServerUnreachable) may have been accepted. `repeat` sends it again, and so does an
    equal call; any other call before that raises CallUnanswered.
    """

    def __init__(self, server: Server, id: str) -> None:
        self._http, self._max_rows, self.id = server.http, server.max_rows, id
        self._seq = 0
        self._unanswered: _Call | None = None

    def forward_backward(
        self, rows: Sequence[TrainingRow], loss: str = "cross_entropy", **settings: float
    ) -> Pending[PassOutcome]:
        """Add the gradient of a loss, summed over targets, to the model's gradient; a step may have any number of
        calls."""
        return self._pass(rows, loss, settings, forward_only=False)

    def forward(
        self, rows: Sequence[TrainingRow], loss: str = "cross_entropy", **settings: float
    ) -> Pending[PassOutcome]:
        """Compute loss and log-probabilities without a gradient."""
        return self._pass(rows, loss, settings, forward_only=True)

    def forward_backward_custom(self, rows: Sequence[TrainingRow], loss: LossOfLogprobs) -> float:
        """Add the gradient of a loss that this program computes from log-probabilities, and return its value.

        It takes two passes: the first returns log-probabilities, the second uses the derivatives as weights. The loss
        is not divided again: call `optim_step` with `reduction="sum"`.
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
        """Take a step of AdamW and clear the gradient; the metrics include its norm, `grad_norm`.

        reduction: `mean` divides once by the number of targets of all calls since the last step. adam: `beta1`,
        `beta2`, `eps`, `weight_decay`, `grad_clip_norm`.
        """
        body = {"adam_params": {"learning_rate": learning_rate, **adam}, "reduction": reduction}
        return self._one("optim_step", body, lambda answer: answer["metrics"])

    def save(self, name: str, *, overwrite: bool = False) -> Pending[str]:
        """Save weights and moments by name; the path is an argument of `load_model`."""
        return self._one("save_weights", {"path": name, "overwrite": overwrite}, lambda answer: answer["path"])

    def save_for_sampler(self, name: str, *, overwrite: bool = False) -> Pending[str]:
        """Save weights for sampling by name; the path is an argument of the server's `sampler`."""
        body = {"path": name, "overwrite": overwrite}
        return self._one("save_weights_for_sampler", body, lambda answer: answer["path"])

    def sampler(self) -> "RemoteSampler":
        """Create a sampler of the present weights; later steps do not change them."""
        pending = self._one("save_weights_for_sampler", {}, lambda answer: answer["sampling_session_id"])
        return RemoteSampler(self._http, pending.result())

    def _pass(
        self, rows: Sequence[TrainingRow], loss: str, settings: Mapping[str, float], *, forward_only: bool
    ) -> Pending[PassOutcome]:
        most, about = self._max_rows, {"loss": loss, "settings": settings, "forward_only": forward_only}
        parts = [rows[first : first + most] for first in range(0, max(1, len(rows)), most)]
        bodies = [{"rows": [row.body() for row in part], **about} for part in parts]
        return self._post("forward_backward", bodies, outcome)

    def _one(self, request: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Any]) -> Pending[Any]:
        return self._post(request, [body], lambda answers: read(answers[0]))

    def repeat(self) -> Pending[Any]:
        """Send the last unanswered call again with the same body; it is executed once. Return its result. Raises the
        call's errors, and ValueError if all calls were answered."""
        call = self._unanswered
        if call is None:
            raise ValueError(f"all calls of {self.id} were answered")
        ids = []
        try:
            for body in call.bodies:
                taken = self._http.send("POST", call.request, body)
                ids.append(taken["request_id"])
        except ServerUnreachable as error:
            raise ServerUnreachable(f"{error}; `repeat()` of the model sends this {call.request} again") from error
        except ServerRefused as error:
            self._seq += len(ids)
            self._unanswered = None
            if ids:
                message = f"part {len(ids) + 1} of {len(call.bodies)} of {call.request}; the parts before it were taken"
                raise ServerRefused(error.status, f"{message}: {error.message}") from None
            raise
        self._seq += len(ids)
        self._unanswered = None
        return Pending(self._http, ids, call.read)

    def _post(
        self, request: str, bodies: Sequence[dict[str, Any]], read: Callable[[list[dict[str, Any]]], Any]
    ) -> Pending[Any]:
        numbered = (
            {"model_id": self.id, "seq_id": number, **body} for number, body in enumerate(bodies, start=self._seq + 1)
        )
        call = _Call(request, tuple(map(msgspec.json.encode, numbered)), read)
        before = self._unanswered
        if before is not None and (before.request, before.bodies) != (call.request, call.bodies):
            raise CallUnanswered(
                f"the previous {before.request}, with seq_id {self._seq + 1}, had no answer and may have been "
                "executed: call `repeat()` of the model, which sends it again and returns its result, before you "
                "continue"
            )
        self._unanswered = call
        return self.repeat()


@frozen
class _Call:
    """A call of a model: its bodies, one per part, and the reader of the answers."""

    request: str
    bodies: tuple[bytes, ...]
    read: Callable[[list[dict[str, Any]]], Any]


class RemoteSampler:
    """Samples from weights that never change."""

    def __init__(self, http: HttpClient, id: str, seq: int = 0) -> None:
        self._http, self.id, self._seq = http, id, seq

    def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        count: int = 1,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | Sequence[str] | None = None,
        stop: str | Sequence[str | int] | None = None,
    ) -> Pending[list[WrittenText]]:
        """Sample continuations of a prompt. temperature: 0 is greedy. seed: or a text for each
        continuation. stop: ends a text, in addition to the tokenizer's
        end of text; an empty list continues after the end of text."""
        params = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        body = {
            "sampling_session_id": self.id,
            "seq_id": self._seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": np.asarray(prompt, np.int64).tolist()}]},
            "sampling_params": {**params, "stop": stop if stop is None or isinstance(stop, str) else list(stop)},
            "num_samples": count,
            "format": "json",
        }
        self._seq += 1  # also if no answer comes: skipped numbers do no harm
        found = self._http.ask("POST", "asample", body)
        return Pending(self._http, [found["request_id"]], written)
