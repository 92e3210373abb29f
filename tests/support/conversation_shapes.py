"""Conversations of twenty shapes, whose texts are words of their own: to see what a chat template makes of each."""

from collections.abc import Iterator
from typing import Any

from attrs import frozen

Message = dict[str, Any]


@frozen
class Shape:
    """A conversation, and the tools that its assistant may call."""

    messages: list[Message]
    tools: list[Any] | None = None


def _call(name: str, number: int, **arguments: Any) -> Message:
    return {"type": "function", "id": f"abcdefg{number:02}", "function": {"name": name, "arguments": arguments}}


def _said(role: str, content: Any = None, **more: Any) -> Message:
    return {"role": role, **({} if content is None else {"content": content}), **more}


def _result(content: str, name: str, number: int) -> Message:
    return _said("tool", content, name=name, tool_call_id=f"abcdefg{number:02}")


def _tool(name: str, about: str, **properties: Any) -> Message:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


_ASK, _ANSWER = _said("user", "askone"), _said("assistant", "answerone")
_MORE, _LAST = _said("user", "asktwo"), _said("assistant", "answertwo")
_SYSTEM = _said("system", "systemone")
_TOOLS = [
    _tool("weather", "aboutweather", city={"type": "string", "description": "aboutcity"}),
    _tool("currency", "aboutcurrency", amount={"type": "number", "description": "aboutamount"}),
]
_CALL, _RESULT = _call("weather", 1, city="Lisbon"), _result("sunnyresult", "weather", 1)
_SECOND, _SECOND_RESULT = _call("currency", 2, amount=17, unit="guilder"), _result("dearresult", "currency", 2)
_ALL_TYPES = _call(
    "weather", 1, city='Köln "am" Rhein\nwest', nested={"deep": ["inner", 41, 2.5]}, flag=True, none=None, many=[1, 2]
)

SHAPES = {
    "one turn": Shape([_ASK, _ANSWER]),
    "two turns": Shape([_ASK, _ANSWER, _MORE, _LAST]),
    "a system": Shape([_SYSTEM, _ASK, _ANSWER, _MORE, _LAST]),
    "a developer": Shape([_said("developer", "developerone"), _ASK, _ANSWER]),
    "a second system": Shape([_SYSTEM, _ASK, _ANSWER, _said("system", "systemtwo"), _MORE, _LAST]),
    "the user last": Shape([_ASK, _ANSWER, _MORE]),
    "the assistant first": Shape([_ANSWER, _ASK, _LAST]),
    "two answers": Shape([_ASK, _ANSWER, _LAST, _MORE, _said("assistant", "answerthree")]),
    "white space": Shape([_said("user", " askone\n"), _said("assistant", "\n answerone "), _MORE, _LAST]),
    "parts": Shape([_said("user", [{"type": "text", "text": "askone "}, {"type": "text", "text": "askmore"}]),
            _said("assistant", [{"type": "text", "text": "answerone"}])]),
    "reasoning": Shape(
        [_ASK, {**_ANSWER, "reasoning_content": "thoughtone"}, _MORE, {**_LAST, "reasoning_content": "thoughttwo"}]),
    "reasoning as thinking": Shape([_ASK, {**_ANSWER, "thinking": "thoughtone"}]),
    "reasoning in the content": Shape([_ASK, _said("assistant", "<think>\nthoughtone\n</think>\n\nanswerone"), _MORE,
            _said("assistant", "<think>\nthoughttwo\n</think>\n\nanswertwo")]),
    "a call": Shape([_ASK, _said("assistant", tool_calls=[_CALL]), _RESULT, _ANSWER], _TOOLS),
    "a call last": Shape([_ASK, _said("assistant", tool_calls=[_CALL])], _TOOLS),
    "text and a call": Shape(
        [_ASK, {**_ANSWER, "tool_calls": [_CALL]}, _RESULT, _LAST, _MORE, _said("assistant", "answerthree")], _TOOLS),
    "reasoning and a call": Shape([_ASK, _said("assistant", reasoning_content="thoughtone", tool_calls=[_CALL]),
            _RESULT, {**_ANSWER, "reasoning_content": "thoughttwo"}], _TOOLS),
    "two calls at once": Shape(
        [_ASK, _said("assistant", tool_calls=[_CALL, _SECOND]), _RESULT, _SECOND_RESULT, _ANSWER], _TOOLS),
    "two calls in a row": Shape([_ASK, _said("assistant", tool_calls=[_CALL]), _RESULT,
            _said("assistant", tool_calls=[_SECOND]), _SECOND_RESULT, _ANSWER], _TOOLS),
    "arguments of all types": Shape([_ASK, _said("assistant", tool_calls=[_ALL_TYPES]), _RESULT, _ANSWER], _TOOLS),
}  # fmt: skip


def words(shape: Shape) -> Iterator[tuple[str, str]]:
    """Each word of a conversation that stands in one place of it alone, and who says it: a role, or `tools`."""
    for message in shape.messages:
        for word in _words({key: value for key, value in message.items() if key not in ("role", "name")}):
            yield word, message["role"]
    for word in _words(shape.tools or []):
        if word.startswith("about"):
            yield word, "tools"


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("type", "id", "name", "tool_call_id"):
                yield from _words(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _words(inner)
    elif isinstance(value, str):
        yield from (word for word in value.replace('"', " ").split() if "<" not in word and len(word) > 3)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value > 9:
        yield str(value)


def word_faults(shape: Shape, text: str, said: str, lost: tuple[str, ...]) -> list[str]:
    """Say what is wrong with a conversation that is written as `text` and trained on `said`: words of others that are
    trained, words of the assistant that are not, and words that are missing although nothing is reported as lost."""
    found = []
    missing = [word for word, _ in words(shape) if word not in text]
    if missing and not lost:
        found.append(f"lost in silence: {', '.join(missing)}")
    if lost and not missing:
        found.append(f"reported as lost, and is not: {', '.join(lost)}")
    for word, who in words(shape):
        if word in text and (word in said) != (who == "assistant"):
            found.append(f"{word} of {who} is {'' if word in said else 'not '}trained")
    return found
