"""Takes the text, the conversation, the pair or the question that a dataset reads out of the fields of a record."""

from collections.abc import Callable, Mapping
from typing import Any

from ..documents.chat_messages import conversation, pair
from ..records.records import ChoiceQuestion, Message, Reads, Unusable
from ..records.texts import checked, described

Take = Callable[[Mapping[str, Any]], str | list[Message] | ChoiceQuestion | Unusable]
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
        case "choices":
            return lambda fields: _question(fields, reads)


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


def _question(fields: Mapping[str, Any], reads: Reads) -> ChoiceQuestion | Unusable:
    found = [find(fields, name) for name in (reads.question, reads.choices, reads.answer)]
    for each in found:
        if isinstance(each, Unusable):
            return each
    text, choices, answer = found
    text = checked(text, f"field `{reads.question}`")
    if isinstance(text, Unusable):
        return text
    if not text.strip():
        return Unusable(f"field `{reads.question}` is blank")
    if not isinstance(choices, list | tuple) or len(choices) < 2:
        what = f"has {len(choices)}" if isinstance(choices, list | tuple) else f"is {described(choices)}, not a list"
        return Unusable(f"field `{reads.choices}` {what}; a question has two choices or more")
    for number, choice in enumerate(choices):
        if isinstance(problem := checked(choice, f"choice {number} of field `{reads.choices}`"), Unusable):
            return problem
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        there = f"0 to {len(choices) - 1}"
        return Unusable(f"field `{reads.answer}` is neither the number of a choice, {there}, nor the text of one")
    return ChoiceQuestion(text=text, choices=tuple(choices), right=answer)
