"""Environments of the user: the object of an episode in its process (`setup.environment`)."""

import inspect
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Final

from attrs import define, field, frozen

from xtrain.dsl.user_parts.kinds import RANDOM
from xtrain.plan.plan import Plan
from xtrain.runtime.base.bounded import BeyondBounds, Bounded, CallLimits
from xtrain.runtime.base.fork_server import ForkServer
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.user_parts import PartFailed, UserPart, failures_of, part_of, spec_folder
from xtrain.runtime.feed.chat.calls import ToolCall, fault_of
from xtrain.runtime.feed.records import Message

ANSWER: Final = 1 << 20
"""Bytes of an answer of an environment at most."""
ENVIRONMENTS: Final = "environments"


@frozen(kw_only=True, eq=False)
class OpenedEnvironment:
    """An environment of the plan. tools: definitions of the functions that the model may call."""

    part: UserPart
    tools: Sequence[Mapping[str, Any]]
    server: ForkServer

    def episode(self) -> "EpisodeProcess":
        """Return the process of a new episode."""
        return EpisodeProcess(self, self.server.bounded())


@op("setup.environment", traced=False)
def open_environment(
    plan: Plan,
    resources: dict[str, Any],
    name: str,
    user: dict[str, Any],
    seconds: float,
    wait: float,
    memory: int,
    tools: list[dict[str, Any]] | None = None,
) -> None:
    """Load the class of an environment, and keep it by its name. Raises PartChanged if it differs from the planned one,
    PartFailed if its module fails."""
    part = part_of("environment", user, spec_folder(plan.spec))
    part.load()
    bounds = CallLimits(seconds=seconds, memory=memory, wait=wait, answer=ANSWER)
    opened = OpenedEnvironment(part=part, tools=tools or [], server=ForkServer(EpisodeHost(part), bounds))
    resources[ENVIRONMENTS] = {**resources.get(ENVIRONMENTS, {}), name: opened}


@frozen
class Reply:
    """Answer of an environment. messages: of the environment; None: the episode ends. reward: of the turn."""

    messages: list[Message] | None
    reward: float = 0.0


@define(eq=False)
class EpisodeProcess:
    """An episode in its process. Calls are sent first, and answered when `reply` asks. Each raises BeyondBounds if a
    call exceeds its limits or ends the process, and PartFailed if the user's class does something invalid."""

    environment: OpenedEnvironment
    _process: Bounded[Any, Any]
    _calls: Sequence[ToolCall] = ()
    _texts: dict[int, str] = field(factory=dict)

    def reset(self, key: str, begin: str, task: Mapping[str, Any]) -> None:
        """Begin the episode. key: seed of random numbers of this episode. begin: seed of those that `reset` gets."""
        self._process.send([("reset", key, begin, dict(task))])

    def step(self, key: str, text: str) -> None:
        """Send a text of the model to `step`."""
        self._calls = ()
        self._process.send([("step", key, text)])

    def call(self, key: str, calls: Sequence[ToolCall]) -> None:
        """Call tools, one after another."""
        self._calls, self._texts = calls, {}
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.environment.tools}
        asked = []
        for number, call in enumerate(calls):
            known = f"there is no tool `{call.name}`; tools: {', '.join(schemas)}" if call.name not in schemas else ""
            problem = call.problem or known or fault_of(call.arguments, schemas[call.name])
            if problem:
                self._texts[number] = f"error: {problem}"
            else:
                asked.append(("call", f"{key} {number}", call.name, call.arguments))
        self._process.send(asked)

    def finish(self, key: str) -> None:
        """Ask for the reward of the episode."""
        self._process.send([("finish", key)])

    def opening(self) -> list[Message]:
        """Return the messages of `reset`."""
        return self._answers("messages")[0]["messages"]

    def reply(self) -> Reply:
        """Return the reply to a turn."""
        if not self._calls:
            (answer,) = self._answers("reply", "reward")
            return Reply(answer["reply"], answer["reward"])
        given = iter(self._answers("text"))
        texts = [self._texts.get(n) or next(given)["text"] for n in range(len(self._calls))]
        return Reply(
            [
                {"role": "tool", "name": call.name, "tool_call_id": f"{number:09d}", "content": text}
                for number, (call, text) in enumerate(zip(self._calls, texts, strict=True))
            ]
        )

    def reward(self) -> float:
        """Return the reward of `finish`."""
        return self._answers("reward")[0]["reward"]

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _answers(self, *names: str) -> list[Any]:
        """Return answers with these fields, which code of the model may have written into the pipe instead."""
        answers = self._process.receive()
        if not all(_is_answer(answer, names) for answer in answers):
            self._process.close()
            raise BeyondBounds("answers with something else than its result")
        failed = next((answer["failed"] for answer in answers if "failed" in answer), None)
        if failed is not None:
            raise PartFailed(failed["message"], path=failed["path"], line=failed["line"])
        return answers


class EpisodeHost:
    """The user's object of one episode, called in its process."""

    def __init__(self, part: UserPart) -> None:
        self._part: UserPart = part
        self._object: Any = None

    def prepare(self) -> None:
        """Load the class, once for all episodes."""
        self._part.load()

    def __call__(self, call: tuple[Any, ...]) -> dict[str, Any]:
        """Answer a call as JSON: (name, seed, arguments)."""
        name, key, *arguments = call
        if sys.platform.startswith("linux"):  # else the call is in the process of the rank
            _seed(key)
        try:
            with failures_of(self._part):
                try:
                    return getattr(self, f"_{name}")(*arguments)
                except MemoryError:  # a limit, not a fault of the code
                    pass
        except PartFailed as failed:
            path = None if failed.path is None else str(failed.path)
            return {"failed": {"message": failed.message, "path": path, "line": failed.line}}
        raise MemoryError

    def _reset(self, begin: str, task: dict[str, Any]) -> dict[str, Any]:
        kind: Any = self._part.load()
        self._object = kind()
        filled = {RANDOM: random.Random(begin)} if RANDOM in inspect.signature(kind.reset).parameters else {}
        said = self._object.reset(task, **self._part.arguments, **filled)
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if not _are_messages(messages) or messages[-1]["role"] == "assistant":
            raise self._part.failed(f"gave {_short(said)} in `reset`, not a text or a list of messages")
        return {"messages": messages}

    def _step(self, text: str) -> dict[str, Any]:
        given = self._object.step(text)
        reply, reward = given if isinstance(given, tuple) and len(given) == 2 else (given, 0.0)
        if isinstance(reply, Real) and not isinstance(given, tuple):
            reply, reward = None, reply
        if reply is not None and not isinstance(reply, str):
            raise self._part.failed(f"gave {_short(given)} in `step`, not a reply, a reward, or both")
        messages = None if reply is None else [{"role": "user", "content": reply}]
        return {"reply": messages, "reward": self._number(reward, "step")}

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            given = getattr(self._object, name)(**arguments)
            return {"text": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)}
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # the model is told what its call did
            return {"text": f"error: {type(error).__name__}: {error}"}

    def _finish(self) -> dict[str, Any]:
        finish = getattr(self._object, "finish", None)
        return {"reward": 0.0 if finish is None else self._number(finish(), "finish")}

    def _number(self, given: Any, method: str) -> float:
        number = float(given) if isinstance(given, Real) else math.nan
        if not math.isfinite(number):
            raise self._part.failed(f"gave {_short(given)} in `{method}`, and a reward is a finite number")
        return number


def _are_messages(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(map(_is_message, given))


def _is_message(message: Any) -> bool:
    good = isinstance(message, dict) and isinstance(message.get("content"), str)
    return good and message.get("role") in ("system", "user", "assistant")


_FIELDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "messages": _are_messages,
    "reply": lambda given: given is None or _are_messages(given),
    "reward": lambda given: isinstance(given, float) and math.isfinite(given),
    "text": lambda given: isinstance(given, str),
    "failed": lambda given: (
        isinstance(given, dict)
        and isinstance(given.get("message"), str)
        and isinstance(given.get("path"), str | None)
        and isinstance(given.get("line"), int | None)
    ),
}


def _is_answer(answer: Any, names: Sequence[str]) -> bool:
    wanted = ("failed",) if isinstance(answer, dict) and "failed" in answer else names
    return isinstance(answer, dict) and {*answer} == {*wanted} and all(_FIELDS[name](answer[name]) for name in wanted)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _seed(key: str) -> None:
    """Seed the random numbers of Python, numpy and torch, as far as they are loaded."""
    random.seed(key)
    number = random.getrandbits(32)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        torch.set_num_threads(1)  # threads of the parent do not exist here
        torch.random.default_generator.manual_seed(number)
