"""Takes the text, the conversation or the pair that a dataset reads out of the fields of a record."""

from collections.abc import Callable, Mapping
from typing import Any

from ..documents.chat_messages import conversation, pair
from ..records.records import Message, Reads, Unusable
from ..records.texts import checked, described

Take = Callable[[Mapping[str, Any]], str | list[Message] | Unusable]
_MISSING = object()


def taker(reads: Reads) -> Take:
    """A function of a record's fields that gives the text or the messages in them, or says why there are none."""
    match reads.form:
        case "text":
            name = reads.text
            return lambda fields: _text(fields, name)
        case "chat":
            name = reads.messages
            return lambda fields: _conversation(fields, name)
        case "instruction":
            prompt, response = reads.prompt, reads.response
            return lambda fields: _pair(fields, prompt, response)


def find(fields: Mapping[str, Any], name: str) -> Any | Unusable:
    """The value of a field. A name with dots is that of a field as it stands, or else leads into objects."""
    value = fields.get(name, _MISSING)
    if value is not _MISSING:
        return value
    value, came = fields, ""
    for step in name.split("."):
        if not isinstance(value, Mapping):
            return Unusable(f"field `{came}` is {described(value)}, not an object")
        came = f"{came}.{step}" if came else step
        there, value = value, value.get(step, _MISSING)
        if value is _MISSING:
            return Unusable(f"no field `{came}`; there {_list(there)}")
    return value


def _list(fields: Mapping[str, Any]) -> str:
    if not fields:
        return "are none"
    names = [f"`{name}`" for name in fields]
    return f"are {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"


def _text(fields: Mapping[str, Any], name: str) -> str | Unusable:
    text = fields.get(name)
    if type(text) is str and text and text.isascii():
        return text
    text = find(fields, name)
    return text if isinstance(text, Unusable) else checked(text, f"field `{name}`")


def _conversation(fields: Mapping[str, Any], name: str) -> list[Message] | Unusable:
    messages = find(fields, name)
    return messages if isinstance(messages, Unusable) else conversation(messages, f"field `{name}`")


def _pair(fields: Mapping[str, Any], prompt: str, response: str) -> list[Message] | Unusable:
    texts = []
    for name in (prompt, response):
        text = find(fields, name)
        text = text if isinstance(text, Unusable) else checked(text, f"field `{name}`")
        if isinstance(text, Unusable):
            return text
        texts.append(text)
    return pair(*texts)
