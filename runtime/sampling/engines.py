"""Engines of other programs that sample: what they are asked, and the faults that are tolerated.

The module `…_run` next to an engine's component has a function `connect(url, key, patience)`, which returns an
`EngineConnection`. Requests are repeated while an engine is away; weights that it has lost are given to it again, so
that an engine may be restarted at any time.
"""

import fcntl
import importlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
from attrs import define, field, frozen

from xtrain.client.http import HttpClient, ServerRefused, ServerUnreachable
from xtrain.dsl.schema.policy import ENGINES
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.texts import Continuation, TextEnds

T = TypeVar("T")
WRONG: Final = 3  # wrong answers to a request until the run ends; a further one would be wrong as well
LOST: Final = 10  # times that an engine may have lost the weights of a request
THREADS: Final = 64  # requests of a rank at once


class WeightsLost(Exception):
    """The engine does not have the weights of a request, or has others: it was restarted, or somebody changed them."""


class WrongAnswer(Exception):
    """An answer that does not fit its request."""


class EngineFailed(EnvironmentFault):
    """An engine cannot sample; every rank has the same reason."""

    agreed = True

    def __init__(self, message: str) -> None:
        super().__init__("X743", message)


@frozen(kw_only=True)
class SampleAsked:
    """Continuations of a prompt to ask an engine for.

    prompt: its tokens. keys: of the random numbers of each continuation. most: tokens of each. ends: what ends them.
    """

    prompt: tuple[int, ...]
    keys: tuple[str, ...]
    most: int
    ends: TextEnds
    temperature: float


@frozen
class SampledText:
    """A continuation: its tokens with the end token, and the log-probability of each."""

    tokens: Sequence[int]
    logprobs: Sequence[float]


@frozen(kw_only=True)
class EngineNeeds:
    """Needs of a run. context: tokens of a prompt with its completion. rank: of the adapter; 0: the
    weights of the model are replaced."""

    vocabulary: int
    context: int
    rank: int


class EngineConnection(Protocol):
    """Connection of a process to an engine, used by several of its threads.

    Methods raise ServerRefused, ServerUnreachable, WeightsLost and WrongAnswer.
    """

    def check(self, needs: EngineNeeds) -> None:
        """Raise EngineFailed unless the engine can sample for a run."""
        ...

    def put(self, folder: Path, name: str) -> str:
        """Give the engine the weights of a folder, and return the name under which it has them. Whole models replace
        each other in an engine without `keeps_models`: no request may be open then."""
        ...

    def sample(self, weights: str, asked: SampleAsked) -> list[SampledText]:
        """Return the continuations, by exactly these weights."""
        ...

    def drop(self, weights: str) -> None:
        """Remove weights that are not needed any more."""
        ...


class EngineHttp(HttpClient):
    """HTTP of an engine: its answers are bytes that may be no JSON."""

    def __init__(self, url: str, key: str | None, patience: float) -> None:
        super().__init__(url, key, patience, base="/", reply=patience)

    def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of an answer. Raises WrongAnswer if it is none."""
        raw = self.raw(method, path, None if body is None else msgspec.json.encode(body))
        try:
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise WrongAnswer(f"the answer to {path} is no JSON: {_shown(raw)}") from None

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Return the bytes of an answer."""
        return self.raw("POST", path, msgspec.json.encode(body))


def _shown(raw: bytes) -> str:
    return repr(raw[:80].decode("utf-8", "replace"))


def numbers_of(given: Any, what: str, kind: type[T]) -> list[T]:
    """Return a list of numbers of an answer. Raises WrongAnswer for anything else; an integer counts as a float."""
    allowed = (int, float) if kind is float else (int,)
    if not isinstance(given, list) or not all(type(each) in allowed for each in given):
        raise WrongAnswer(f"it has no {what}, a list of numbers")
    return [kind(each) for each in given]  # type: ignore[call-arg]


def seed_of(key: str) -> int:
    """Return a seed in 0 … 2³¹ for a key of random numbers, for engines whose seeds are integers."""
    return int.from_bytes(sha256(key.encode()).digest()[:4]) >> 1


def lock_of(folder: Path) -> Path:
    """Return the file that is locked while an engine is given the weights of a folder."""
    return folder.with_name(f"{folder.name}.lock")


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep other ranks from giving an engine the weights of a folder inside the block."""
    with lock_of(folder).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def connect(kind: str, url: str, key: str | None, patience: float) -> EngineConnection:
    """Return a connection. key: the key itself."""
    return importlib.import_module(ENGINES[kind].run_module()).connect(url.rstrip("/"), key, patience)


@frozen(kw_only=True, eq=False)
class HeldWeights:
    """Weights of a step in their folder, which an engine can be given again. name: for the engine; at: the name under
    which it has them."""

    step: int
    folder: Path
    name: str
    at: dict[str, str] = field(factory=lambda: {"name": ""})


@define(eq=False)
class EngineClient:
    """Client of an engine that samples for this rank; it tolerates losses within `patience`.

    title: for messages. remarks: what the user should know, since they were taken.
    """

    connection: EngineConnection
    title: str
    patience: float
    tokenizer: TextTokenizer
    remarks: dict[str, None] = field(factory=dict)
    _work: "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]" = field(factory=queue.SimpleQueue, init=False)
    _threads: int = field(default=0, init=False)
    _putting: threading.Lock = field(factory=threading.Lock, init=False)

    def check(self, needs: EngineNeeds) -> None:
        """Raise EngineFailed unless the engine is there and can sample for a run."""
        self._tried("", lambda: self.connection.check(needs))

    def put(self, weights: HeldWeights) -> None:
        """Give the engine weights. Raises EngineFailed."""
        weights.at["name"] = self._tried("", lambda: self.connection.put(weights.folder, weights.name))

    def submit(self, weights: HeldWeights, asked: SampleAsked) -> "Future[list[SampledText]]":
        """Ask for continuations; the future raises EngineFailed."""
        future: Future[list[SampledText]] = Future()
        self._work.put((future, lambda: self._sampled(weights, asked)))
        if self._threads < THREADS:
            self._threads += 1
            threading.Thread(target=self._run, name="engine", daemon=True).start()
        return future

    def drop(self, weights: HeldWeights) -> None:
        """Remove weights; a fault here changes nothing."""
        try:
            self.connection.drop(weights.at["name"])
        except (ServerRefused, ServerUnreachable, WeightsLost, WrongAnswer):
            return

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def _sampled(self, weights: HeldWeights, asked: SampleAsked) -> list[SampledText]:
        """Return continuations whose form was checked; weights that the engine has lost are given to it again."""
        for _ in range(LOST):
            name = weights.at["name"]
            try:
                return self._tried(
                    f"; asked for {len(asked.keys)} continuations of {len(asked.prompt)} tokens",
                    lambda name=name: self._checked(self.connection.sample(name, asked), asked),
                )
            except WeightsLost as lost:
                message = (
                    f"{self.title} did not have the weights of step {weights.step} ({lost}): it was given them again"
                )
                self.remarks[message] = None
                with self._putting:
                    if weights.at["name"] == name:
                        self.put(weights)
        raise EngineFailed(f"{self.title} has lost the weights of step {weights.step} {LOST} times")

    def _checked(self, texts: Sequence[SampledText], asked: SampleAsked) -> list[SampledText]:
        """Return continuations up to their end. Raises WrongAnswer for those that do not fit the request."""
        if len(texts) != len(asked.keys):
            raise WrongAnswer(f"it has {len(texts)} continuations where {len(asked.keys)} were asked for")
        return [self._ended(text, asked) for text in texts]

    def _ended(self, text: SampledText, asked: SampleAsked) -> SampledText:
        if len(text.tokens) != len(text.logprobs):
            raise WrongAnswer(f"it has {len(text.logprobs)} log-probabilities of {len(text.tokens)} tokens")
        said = Continuation(self.tokenizer, asked.prompt, asked.ends, asked.most)
        for number, (token, logprob) in enumerate(zip(text.tokens, text.logprobs, strict=True), start=1):
            if not 0 <= token < self.tokenizer.vocab_size:
                raise WrongAnswer(f"it has the token {token} of a vocabulary of {self.tokenizer.vocab_size}")
            if not (math.isfinite(logprob) and logprob <= LARGEST):
                raise WrongAnswer(f"it has the log-probability {logprob}")
            said.add(token)
            if said.done:  # engines find the end of a text by tokens of their own length
                return SampledText(text.tokens[:number], text.logprobs[:number])
        raise WrongAnswer(f"it ends after {len(text.tokens)} of {asked.most} tokens without an end")

    def _tried(self, about: str, action: Callable[[], T]) -> T:
        """Return what an action gives, tried again after a wrong answer. Raises EngineFailed, WeightsLost."""
        wrong: list[str] = []
        while len(wrong) < WRONG:
            try:
                return action()
            except WrongAnswer as error:
                wrong.append(str(error))
                self.remarks[f"{self.title} gave a wrong answer, and was asked again: {error}{about}"] = None
                time.sleep(0.1 * len(wrong))
            except ServerRefused as error:
                raise EngineFailed(f"{self.title} refuses: {error}{about}") from error
            except ServerUnreachable as error:
                message = f"{self.title} gave no answer for {self.patience:.0f} s: {error}{about}"
                raise EngineFailed(message) from error
        raise EngineFailed(f"{self.title} gave {WRONG} wrong answers, the last: {wrong[-1]}{about}")


LARGEST: Final = 1e-4  # of a log-probability, which rounding may put above 0
