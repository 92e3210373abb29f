"""Takes what a dataset reads out of the fields of a record: a text, a conversation, a pair, a question, token ids."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from attrs import evolve

from xtrain.runtime.data.documents.chat_messages import conversation, flagged, pair, parsed_calls, tool_definitions
from xtrain.runtime.data.records.records import (
    ChoiceQuestion,
    Content,
    Conversation,
    Message,
    PreferencePair,
    Reads,
    Unusable,
    content_text,
)
from xtrain.runtime.data.records.texts import checked, described
from xtrain.runtime.data.records.usual_fields import settings_for
from xtrain.runtime.data.sources.numbers import numbered, token_ids

Take = Callable[[Mapping[str, Any]], Content | Unusable]
Talk = TypeVar("Talk", Conversation, PreferencePair)
_MISSING = object()


def taker(reads: Reads) -> Take:
    """A function of a record's fields that gives what is in them, or says why there is nothing."""
    take = _content_taker(reads)
    if not reads.columns and not reads.value_names:
        return take

    def with_numbers(fields: Mapping[str, Any]) -> Content | Unusable:
        content = take(fields)
        if isinstance(content, Unusable):
            return content
        return numbered(content, {name: find(fields, name) for name in reads.fields}, reads)

    return with_numbers


def _content_taker(reads: Reads) -> Take:
    match reads.form:
        case "text":
            name = reads.text
            return lambda fields: _text(fields, name)
        case "chat":
            return lambda fields: _conversation(fields, reads)
        case "instruction":
            return lambda fields: _instruction(fields, reads)
        case "choices":
            return lambda fields: _question(fields, reads)
        case "preference":
            return lambda fields: _preference(fields, reads)
        case "tokens":
            return lambda fields: _tokens(fields, reads)


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
    if isinstance(text, Unusable):
        settings = settings_for(fields)
        return Unusable(f"{text.reason}; write `{settings}`") if settings and name not in fields else text
    return checked(text, f"field `{name}`")


def _conversation(fields: Mapping[str, Any], reads: Reads) -> list[Message] | Conversation | Unusable:
    found = find(fields, reads.messages)
    if isinstance(found, Unusable):
        return found
    messages = conversation(found, f"field `{reads.messages}`")
    if isinstance(messages, Unusable):
        return messages
    if (problem := flagged(messages, reads.message_train, reads.message_weight)) is not None:
        return Unusable(f"field `{reads.messages}`, {problem.reason}")
    if all(each is None for each in (reads.tools, reads.system, reads.message_train, reads.message_weight)):
        return messages
    return _completed(fields, reads, Conversation(messages=messages))


def _instruction(fields: Mapping[str, Any], reads: Reads) -> list[Message] | Conversation | Unusable:
    """A prompt and a response, each a text or a list of messages."""
    assert reads.prompt is not None
    prompt, response = find(fields, reads.prompt), find(fields, reads.response)
    plain = reads.label is None and reads.tools is None and reads.system is None
    if isinstance(prompt, str) and isinstance(response, str) and plain:
        texts = [checked(prompt, f"field `{reads.prompt}`"), checked(response, f"field `{reads.response}`")]
        further = _further_input(fields, reads)
        for text in (*texts, further):
            if isinstance(text, Unusable):
                return text
        return pair(f"{texts[0]}{further}", f"{texts[1]}")
    before = _turns(prompt, reads.prompt, "user")
    if isinstance(before, Unusable):
        return before
    if further := _further_input(fields, reads):
        if isinstance(further, Unusable):
            return further
        before = [*before[:-1], {**before[-1], "content": content_text(before[-1]) + further}]
    answer = _turns(response, reads.response, "assistant")
    if isinstance(answer, Unusable):
        return answer
    whole = Conversation(messages=[*before, *answer], prompt=len(before))
    return _completed(fields, reads, whole)


def _further_input(fields: Mapping[str, Any], reads: Reads) -> str | Unusable:
    """What is appended to the prompt, behind an empty line; empty if the record has none."""
    if reads.input is None:
        return ""
    text = find(fields, reads.input)
    if isinstance(text, Unusable) or text is None or text == "":
        return text if isinstance(text, Unusable) else ""
    text = checked(text, f"field `{reads.input}`")
    return text if isinstance(text, Unusable) else f"\n\n{text}"


def _preference(fields: Mapping[str, Any], reads: Reads) -> PreferencePair | Unusable:
    fields_of_sides = (reads.chosen, reads.rejected)
    sides = [find(fields, name) for name in fields_of_sides]
    names = [f"field `{name}`" for name in fields_of_sides]
    for side in sides:
        if isinstance(side, Unusable):
            return side
    if sides[0] == sides[1]:
        return Unusable(f"fields `{reads.chosen}` and `{reads.rejected}` are equal")
    if reads.prompt is None and all(isinstance(side, str) for side in sides):
        if reads.system is not None:
            return Unusable(f"{names[0]} is a text, and field `{reads.system}` is said before conversations")
        if reads.tools is not None:
            return Unusable(f"{names[0]} is a text, and field `{reads.tools}` is for conversations")
        texts = [checked(side, name) for side, name in zip(sides, names, strict=True)]
        for text in texts:
            if isinstance(text, Unusable):
                return text
        return PreferencePair(chosen=texts[0], rejected=texts[1])  # pyright: ignore[reportArgumentType]
    for text, other in ((0, 1), (1, 0)):
        if reads.prompt is None and isinstance(sides[text], str):
            return Unusable(f"{names[text]} is a text, and {names[other].removeprefix('field ')} is not")
    answers = [_turns(side, name, "assistant") for side, name in zip(sides, fields_of_sides, strict=True)]
    for answer in answers:
        if isinstance(answer, Unusable):
            return answer
    first, second = (answer for answer in answers if not isinstance(answer, Unusable))
    if reads.prompt is None:
        # Of two conversations the messages that they have in common are the prompt.
        common = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
        common = min(common, len(first) - 1, len(second) - 1)
        for side in (first, second):
            if (role := side[common]["role"]) != "assistant":
                return Unusable(f"answers to different prompts: message {common + 1} is of {role}")
        return _completed(fields, reads, PreferencePair(chosen=first, rejected=second, prompt=common))
    prompt = find(fields, reads.prompt)
    before = prompt if isinstance(prompt, Unusable) else _turns(prompt, reads.prompt, "user")
    if isinstance(before, Unusable):
        return before
    # Many datasets have the prompt by itself and once more in both sides, some there behind a message of the system.
    behind = [*first[:1], *before]
    if first[0]["role"] == "system" and all(side[: len(behind)] == behind for side in (first, second)):
        before = behind
    chosen, rejected = (
        side if side[: len(before)] == before and len(side) > len(before) else [*before, *side]
        for side in (first, second)
    )
    whole = PreferencePair(chosen=chosen, rejected=rejected, prompt=len(before))
    return _completed(fields, reads, whole)


def _turns(value: Any, name: str, role: str) -> list[Message] | Unusable:
    """A text as a message of `role`, or a list of messages."""
    if isinstance(value, Unusable):
        return value
    if isinstance(value, list | tuple):
        return conversation(value, f"field `{name}`")
    text = checked(value, f"field `{name}`")
    return text if isinstance(text, Unusable) else [{"role": role, "content": text}]


def _completed(fields: Mapping[str, Any], reads: Reads, found: Talk) -> Talk | Unusable:
    """`found` with what its record says beside: the tools, with the arguments of calls as objects, as templates write
    them, and the message of the system."""
    names = ("messages",) if isinstance(found, Conversation) else ("chosen", "rejected")
    changed: dict[str, Any] = {}
    if reads.tools is not None:
        value = find(fields, reads.tools)
        tools = value if isinstance(value, Unusable) else tool_definitions(value, f"field `{reads.tools}`")
        if isinstance(tools, Unusable):
            return tools
        changed["tools"] = tools
        for name in names:
            messages = parsed_calls(getattr(found, name))
            if isinstance(messages, Unusable):
                return messages
            changed[name] = messages
    said = "" if reads.system is None else find(fields, reads.system)
    said = (
        checked(said, f"field `{reads.system}`") if said not in ("", None) and not isinstance(said, Unusable) else said
    )
    if isinstance(said, Unusable):
        return said
    if said:
        for name in names:
            messages = changed.get(name, getattr(found, name))
            if messages[0]["role"] == "system":
                return Unusable(f"field `{reads.system}` and the first message are both of the system")
            changed[name] = [{"role": "system", "content": said}, *messages]
        if found.prompt or isinstance(found, PreferencePair):  # of a conversation 0 is none
            changed["prompt"] = found.prompt + 1
    return evolve(found, **changed)


def _tokens(fields: Mapping[str, Any], reads: Reads) -> Content | Unusable:
    ids = find(fields, reads.tokens)
    mask = None if reads.mask is None else find(fields, reads.mask)
    return token_ids(ids, mask, reads)


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
