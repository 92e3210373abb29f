"""Conversations in one form: lists of messages with `role` and `content`, whatever way a record spells them."""

import re
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from ..records.records import Message, Unusable
from ..records.texts import checked, described, not_text, strings

# Two spellings are in use: {"role", "content"}, and {"from", "value"} with names of its own for who speaks.
SPEAKERS = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def conversation(value: object, what: str) -> list[Message] | Unusable:
    """The messages of a conversation, or why it is none; `what` names it.

    A content that is a list of texts is joined. What else a message says stays, for the template; nulls do not:
    tables have them wherever another message has a value.
    """
    if not isinstance(value, list | tuple):
        return Unusable(f"{what} is {described(value)}, not a list of messages")
    if not value:
        return Unusable(f"{what} has no messages")
    messages: list[Message] = []
    for number, item in enumerate(value, start=1):
        message = _message(item)
        if isinstance(message, Unusable):
            return Unusable(f"{what}, message {number}: {message.reason}")
        messages.append(message)
    return messages


def pair(prompt: str, response: str) -> list[Message]:
    """The conversation of one question and its answer."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _message(item: object) -> Message | Unusable:
    if not isinstance(item, Mapping):
        return Unusable(f"{described(item)}, not an object")
    who, said = ("from", "value") if "from" in item and "role" not in item else ("role", "content")
    for key in (who, said):
        if key not in item:
            return Unusable(f"no `{key}`")
    role = item[who]
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        return Unusable(f"`{who}` is {role!r:.40}, which is not a role name")
    if who == "from":
        if role not in SPEAKERS:
            return Unusable(f"`from` is {role!r:.40}; known are {', '.join(SPEAKERS)}")
        role = SPEAKERS[role]
    content = _content(item[said], f"`{said}`")
    if isinstance(content, Unusable):
        return content
    if role == "assistant" and not content:
        return Unusable("the assistant says nothing")
    rest = {key: value for key, value in item.items() if key not in (who, said) and value is not None}
    if not _is_plain(rest):
        return Unusable("its value is neither JSON nor a date")
    for text in strings(rest):
        if (fault := not_text(text)) is not None:
            return Unusable(fault)
    return {"role": role, "content": content, **rest}


def _is_plain(value: object) -> bool:
    """Whether it is of types that tables have; what a user's own code gives may be anything."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bytes | date | time | timedelta | Decimal)


def _content(value: Any, what: str) -> str | Unusable:
    if isinstance(value, list | tuple):
        parts = []
        for part in value:
            if not isinstance(part, Mapping) or part.get("type", "text") != "text" or "text" not in part:
                kind = part.get("type") if isinstance(part, Mapping) else None
                return Unusable(f"{what} has a part that is {kind or described(part)}, not text")
            text = _content(part["text"], f"`text` of {what}")
            if isinstance(text, Unusable):
                return text
            parts.append(text)
        return "".join(parts)
    return "" if value == "" else checked(value, what)
