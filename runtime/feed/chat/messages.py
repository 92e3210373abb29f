"""Conversations in one form, lists of messages with `role` and `content`, from every spelling that records use."""

import json
import re
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from xtrain.runtime.feed.records import Message, Unusable, checked, content_text, described, not_text, strings
from xtrain.runtime.feed.records import as_number as as_number

# Two spellings are in use: {"role", "content"}, and {"from", "value"} with other names for roles.
SPEAKERS = {
    "human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system",
    "chatgpt": "assistant", "model": "assistant", "function_call": "assistant",
    "tool": "tool", "function_response": "tool", "observation": "tool",
}  # fmt: skip
# Role of messages whose text is the JSON of one call or a list of calls, and OpenAI's key of a call before
# `tool_calls`.
_CALLER = "function_call"
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def conversation(value: object, what: str) -> list[Message] | Unusable:
    """Return the messages of a conversation, or why it is invalid; `what` names it.

    Contents that are lists of texts and all further keys are kept for the template, except nulls: tables have nulls
    where another message has a value.
    """
    if not isinstance(value, list | tuple):
        return Unusable(f"{what} is {described(value)}, not a list of messages")
    if not value:
        return Unusable(f"{what} has no messages")
    messages: list[Message] = []
    for place, item in enumerate(value, start=1):
        message = _message(item)
        if isinstance(message, Unusable):
            return Unusable(f"{what}, message {place}: {message.reason}")
        messages.append(message)
    return messages


def pair(prompt: str, response: str) -> list[Message]:
    """Return the conversation of one question and its answer."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def flagged(messages: list[Message], train: str | None, weight: str | None) -> Unusable | None:
    """Return the fault of the keys that say whether, and with which weight, messages are trained on; None
    without one."""
    for place, message in enumerate(messages, start=1):
        flag = message.get(train) if train is not None else None
        if flag is not None and not isinstance(flag, bool):
            return Unusable(f"message {place}: `{train}` is {described(flag)}, neither true nor false")
        if flag and message["role"] != "assistant":
            return Unusable(f"message {place}: `{train}` is true for {message['role']}; only the assistant is trained")
        share = message.get(weight) if weight is not None else None
        if share is None:
            continue
        if isinstance(number := as_number(share, f"message {place}: `{weight}`"), Unusable):
            return number
        if number < 0:
            return Unusable(f"message {place}: `{weight}` is {number:g}, and weights are 0 or more")
    return None


def tool_definitions(value: object, what: str) -> list[Any] | Unusable | None:
    """Return the functions that the assistant may call: a list of objects, or JSON text of it or of each. None without
    any."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return Unusable(f"{what} is not valid JSON")
    if value is None:
        return None
    if isinstance(value, list | tuple):
        try:
            value = [json.loads(item) if isinstance(item, str) else item for item in value]
        except (ValueError, RecursionError):
            return Unusable(f"{what} is not a list of objects")
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        return Unusable(f"{what} is not a list of objects")
    if not _is_plain(value):
        return Unusable(f"{what} has a value that is neither JSON nor a date")
    for text in strings(value):
        if (fault := not_text(text)) is not None:
            return Unusable(f"{what} {fault}")
    return list(value) or None


def parsed_calls(messages: list[Message]) -> list[Message] | Unusable:
    """Return messages whose calls have their arguments as objects.

    Many datasets have arguments as JSON text, which a template would write as a quoted string.
    """
    messages_parsed = []
    for place, message in enumerate(messages, start=1):
        calls = message.get("tool_calls")
        if not calls:
            messages_parsed.append(message)
            continue
        if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
            return Unusable(f"message {place}: `tool_calls` is not a list of objects")
        parsed = [_parsed_call(call) for call in calls]
        if any(call is None for call in parsed):
            return Unusable(f"message {place}: the arguments of a call are not a JSON object")
        messages_parsed.append({**message, "tool_calls": parsed})
    return messages_parsed


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any] | None:
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, Mapping):
        return None
    function = {**function, "arguments": dict(arguments)}
    return {**call, "function": function} if "function" in call else function


def _message(item: object) -> Message | Unusable:
    if not isinstance(item, Mapping):
        return Unusable(f"{described(item)}, not an object")
    if item.get("tool_calls"):
        if isinstance(listed := _calls(item["tool_calls"]), Unusable):
            return listed
        item = {**item, "tool_calls": listed}
    if isinstance(item := _with_calls(item), Unusable):
        return item
    who, said = ("from", "value") if "from" in item and "role" not in item else ("role", "content")
    calls = bool(item.get("tool_calls")) and item.get(who) == "assistant"
    for key in (who, said):
        if key not in item and not (calls and key == said):
            return Unusable(f"no `{key}`")
    role = item[who]
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        return Unusable(f"`{who}` is {role!r:.40}, which is not a role name")
    if who == "from":
        if role not in SPEAKERS:
            return Unusable(f"`from` is {role!r:.40}; valid names are {', '.join(SPEAKERS)}")
        role = SPEAKERS[role]
    # A message that only calls a function often has a null content, or none.
    content = None if calls and item.get(said) is None else _content(item[said], f"`{said}`")
    if isinstance(content, Unusable):
        return content
    message: Message = {"role": role} if content is None else {"role": role, "content": content}
    if role == "assistant" and not content_text(message) and not calls:
        return Unusable("the assistant says nothing")
    rest = {key: value for key, value in item.items() if key not in (who, said) and value is not None}
    if not _is_plain(rest):
        return Unusable("its value is neither JSON nor a date")
    for text in strings(rest):
        if (fault := not_text(text)) is not None:
            return Unusable(fault)
    if calls:
        rest["tool_calls"] = [_as_object(call) for call in item["tool_calls"]]
    return {**message, **rest}


def _calls(value: Any) -> list[Any] | Unusable:
    """Return the calls of a message: a list of objects, or JSON text of it or of each."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
        value = [json.loads(call) if isinstance(call, str) else call for call in value or ()]
    except (ValueError, TypeError, RecursionError):
        return Unusable("`tool_calls` is neither a list of objects nor JSON text of one")
    for place, call in enumerate(value, start=1):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return Unusable(f"call {place} of `tool_calls` is not an object with the name of a function")
    return value


def _as_object(call: Any) -> Any:
    """Parse the arguments of a call if they are JSON text of an object."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    written = isinstance(function, Mapping) and isinstance(function.get("arguments"), str)
    return (_parsed_call(call) or call) if written else call


def _with_calls(item: Mapping[str, Any]) -> Mapping[str, Any] | Unusable:
    """Move calls of functions to `tool_calls`: from the text of a message `from` function_call, or from OpenAI's
    earlier `function_call`, whose answers have the role `function`."""
    if item.get("role") == "function":
        return {**item, "role": "tool"}
    if "role" not in item and item.get("from") == _CALLER:
        try:
            calls = json.loads(item.get("value", ""))
        except (TypeError, ValueError):
            return Unusable(f"the text of {_CALLER} is not valid JSON")
        calls = calls if isinstance(calls, list) else [calls]
        item = {"role": "assistant", **{key: value for key, value in item.items() if key not in ("from", "value")}}
    elif item.get("role") == "assistant" and item.get(_CALLER) and not item.get("tool_calls"):
        calls = [item[_CALLER]]
        item = {key: value for key, value in item.items() if key != _CALLER}
    else:
        return item
    parsed = [_parsed_call(call) if isinstance(call, Mapping) else None for call in calls]
    if not calls or None in parsed:
        return Unusable(f"{_CALLER} is not an object with the name of a function and its arguments")
    return {**item, "tool_calls": [{"type": "function", "function": call} for call in parsed]}


def _is_plain(value: object) -> bool:
    """Return True if it has only types of tables; a user's source may yield anything."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bytes | date | time | timedelta | Decimal)


def _content(value: Any, what: str) -> str | list[Any] | Unusable:
    if not isinstance(value, list | tuple):
        return "" if value == "" else checked(value, what)
    for part in value:
        if not isinstance(part, Mapping) or part.get("type", "text") != "text" or "text" not in part:
            kind = part.get("type") if isinstance(part, Mapping) else None
            return Unusable(f"{what} has a part that is {kind or described(part)}, not text")
        if isinstance(text := _content(part["text"], f"`text` of {what}"), Unusable):
            return text
        if not isinstance(text, str):
            return Unusable(f"`text` of {what} is a list, not a string")
        if not _is_plain(part):
            return Unusable(f"{what} has a value that is neither JSON nor a date")
    return list(value)
