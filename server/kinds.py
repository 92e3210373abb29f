"""What a request that is executed in order must define, and how its result is written."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from xtrain.server.engine import UserError
from xtrain.server.entries import Accepted, Change, Done
from xtrain.server.models_in_memory import ModelDamaged, ModelsInMemory
from xtrain.server.refusal import Refusal
from xtrain.server.requests import MOST_SEQ, NAME
from xtrain.server.state import QueuedWork

JSON = "application/json"


class Kind(ABC):
    """A kind of request. name: its path under /api/v1 and its name in rows. media: media types of its body.

    ordered: requests of a model are executed one at a time in the order of their seq_ids. together: number of requests
    of different models executed at a time; 1: one by one.
    """

    name: ClassVar[str]
    media: ClassVar[tuple[str, ...]] = (JSON,)
    ordered: ClassVar[bool] = True
    together: ClassVar[int] = 1

    @abstractmethod
    def read(self, raw: bytes) -> Any:
        """Parse a body. Raises Refusal or Malformed."""

    @abstractmethod
    def address(self, request: Any) -> tuple[str, int]:
        """Return the idempotency key: the model or sampler, and the seq_id; 0 creates a model. Raises Refusal."""

    @abstractmethod
    def run(self, works: Sequence[QueuedWork], memory: ModelsInMemory) -> None:
        """Execute requests of different models, and finish each of them. Raises EngineLost."""

    def repeat(self, entry: Accepted, memory: ModelsInMemory) -> None:
        """Repeat the request's change of the model. Raises UserError and EngineLost."""
        raise NotImplementedError(f"{self.name} is never repeated")

    def promised(self, work: QueuedWork, request: Any) -> dict[str, Any]:
        """Return the fields of the POST's answer in addition to `request_id`."""
        return {"model_id": work.entry.queue}


class SingleKind(Kind):
    """A kind whose requests are executed one by one. repeated: see `Done`; also for client errors."""

    repeated: ClassVar[bool] = False

    @abstractmethod
    def outcome(self, work: QueuedWork, memory: ModelsInMemory) -> tuple[dict[str, Any], list[Change]]:
        """Execute a request: return the JSON of its result, and new entries. Raises UserError, ModelDamaged and
        EngineLost."""

    def run(self, works: Sequence[QueuedWork], memory: ModelsInMemory) -> None:
        (work,) = works
        try:
            answer, changes = self.outcome(work, memory)
        except (UserError, ModelDamaged) as error:
            fail(memory, work, error, repeated=self.repeated and isinstance(error, UserError))
        else:
            body = msgspec.json.encode({"type": self.name} | answer)
            finish(memory, work, body, changes=changes, repeated=self.repeated)
            self.after(work, memory)

    def after(self, work: QueuedWork, memory: ModelsInMemory) -> None:
        """Follow up after the work is finished."""


def finish(
    memory: ModelsInMemory,
    work: QueuedWork,
    body: bytes,
    *,
    media: str = JSON,
    changes: list[Change] | None = None,
    repeated: bool = False,
) -> None:
    store = memory.store
    store.finish(work, Done(work.id, store.clock(), False, media, body, changes or [], repeated))


def fail(memory: ModelsInMemory, work: QueuedWork, error: Exception, *, repeated: bool = False) -> None:
    """Store an error as the result of a request: the client reads it once, with whether the client or the server is at
    fault."""
    category = "user" if isinstance(error, UserError) else "server"
    store = memory.store
    store.finish(work, Done(work.id, store.clock(), True, JSON, error_body(str(error), category), [], repeated))


def error_body(message: str, category: str) -> bytes:
    return msgspec.json.encode({"error": message, "category": category})


def finite(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return metrics for JSON, which cannot express values that are not finite: they are left out, counted, named."""
    odd = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    found: dict[str, Any] = {"metrics": {name: float(value) for name, value in metrics.items() if name not in odd}}
    if odd:
        found["metrics"]["nonfinite"] = float(len(odd))
        found["nonfinite"] = odd
    return found


def numbered(seq_id: int) -> int:
    """Return the seq_id of a request for an existing model. Raises Refusal."""
    if seq_id < 1:
        raise Refusal(400, "seq_id is missing; those of a model begin with 1")
    if seq_id > MOST_SEQ:
        raise Refusal(400, f"seq_id is above {MOST_SEQ}")
    return seq_id


def required(value: Any, name: str) -> Any:
    if value is None:
        raise Refusal(422, f"{name} is missing")
    return value


def check_name(name: str) -> str:
    """Check the name of a checkpoint, which becomes a part of its path. Raises UserError."""
    if NAME.fullmatch(name) is None:
        raise UserError(
            f"{name[:80]!r} is no name for a checkpoint: letters, digits, '_', '-' and '.', at most 128, "
            "and the first a letter or digit"
        )
    return name
