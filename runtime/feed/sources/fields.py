"""Fields of a record: the text, conversation, pair, question or token ids that a dataset reads, and their numbers."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeVar

import numpy as np
from attrs import evolve

from xtrain.dsl.schema.losses import OLD, REF
from xtrain.runtime.feed.chat.messages import conversation, flagged, pair, parsed_calls, tool_definitions
from xtrain.runtime.feed.records import (
    ChoiceQuestion,
    Content,
    Conversation,
    Message,
    Numbered,
    PreferencePair,
    Reads,
    TokenIds,
    Unusable,
    checked,
    content_text,
    described,
    shown,
)
from xtrain.runtime.feed.records import as_number as as_number

# Settings of a dataset → field of each; and optional ones, added if the field exists.
_FORMS: Final[tuple[tuple[dict[str, str], dict[str, str]], ...]] = (
    ({"messages": "messages"}, {"tools": "tools", "system": "system"}),
    ({"messages": "conversations"}, {"tools": "tools", "system": "system"}),
    ({"messages": "conversation"}, {"tools": "tools", "system": "system"}),
    ({"chosen": "chosen", "rejected": "rejected"}, {"prompt": "prompt"}),
    ({"prompt": "prompt", "response": "completion"}, {"label": "label"}),
    ({"prompt": "prompt", "response": "response"}, {"label": "label"}),
    ({"prompt": "instruction", "response": "output"}, {"input": "input", "system": "system"}),
    ({"prompt": "instruction", "response": "response"}, {"input": "context"}),
    ({"prompt": "question", "response": "answer"}, {}),
    ({"prompt": "question", "response": "response"}, {"system": "system_prompt"}),
    ({"prompt": "problem", "response": "solution"}, {}),
    ({"tokens": "input_ids"}, {"mask": "labels"}),
    ({"tokens": "tokens"}, {"mask": "mask"}),
    ({"text": "content"}, {}),
)


def settings_for(fields: Collection[str]) -> str:
    """Return the settings of a dataset whose records have these fields, as in a spec; empty if the fields are not
    common ones."""
    for needed, further in _FORMS:
        if all(name in fields for name in needed.values()):
            settings = needed | {setting: name for setting, name in further.items() if name in fields}
            return ", ".join(f'{setting} = "{name}"' for setting, name in settings.items())
    return ""


# Largest log-probability above 0 that rounding of bf16 logits can cause.
ROUNDED = 0.1
IGNORED = -100
"""Label of a token that is not predicted, in data made for torch and transformers."""


def numbered(content: Content, fields: Mapping[str, Any], reads: Reads) -> Numbered | Unusable:
    """Return `content` with its numbers from `fields`, or why they are unusable."""
    count = len(content.ids) if isinstance(content, TokenIds) else None
    columns: dict[str, float | np.ndarray] = {}
    for name, field in reads.columns:
        column = _column(fields[field], f"field `{field}`", count, reads)
        if isinstance(column, Unusable):
            return column
        if name in (OLD, REF) and (most := _largest(column, content)) > ROUNDED:
            return Unusable(f"field `{field}` is {most:g} for a predicted token, but log-probabilities are at most 0")
        columns[name] = column
    values: dict[str, float] = {}
    for name, field in reads.values:
        value = as_number(fields[field], f"field `{field}`")
        if isinstance(value, Unusable):
            return value
        values[name] = value
    if reads.label is not None:
        label = fields[reads.label]
        if isinstance(label, Unusable):
            return label
        if not isinstance(label, bool):
            return Unusable(f"field `{reads.label}` is {shown(label)}, neither true nor false")
        values["label"] = float(label)
    return Numbered(content=content, columns=columns, values=values)


def token_ids(ids: Any, mask: Any, reads: Reads) -> TokenIds | Unusable:
    """Return a document of token ids, or why it is unusable.

    mask: predicted tokens as 0 and 1, or labels: the ids, with −100 for tokens that are not predicted. None: all but
    the first are predicted.
    """
    integers = _integers(ids, f"field `{reads.tokens}`")
    if isinstance(integers, Unusable):
        return integers
    if len(integers) < 2:
        return Unusable(f"field `{reads.tokens}` has {len(integers)} tokens, and nothing to predict")
    if mask is None and reads.mask is None:
        return TokenIds(ids=integers)
    trained = _mask(mask, f"field `{reads.mask}`", integers, reads)
    return trained if isinstance(trained, Unusable) else TokenIds(ids=integers, trained=trained)


def _largest(column: float | np.ndarray, content: Content) -> float:
    """Return the largest number of a predicted token, of which there is at least one."""
    if not isinstance(column, np.ndarray):
        return column
    trained = content.trained if isinstance(content, TokenIds) else None
    # The first token of a document is never predicted.
    return float((column if trained is None else np.where(trained, column, -np.inf))[1:].max())


def _column(value: Any, what: str, count: int | None, reads: Reads) -> float | np.ndarray | Unusable:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return as_number(value, what)
    if count is None:
        return Unusable(f"{what} is a list; only records of token ids (`tokens`) have a number per token")
    if len(value) != count:
        return Unusable(f"{what} has {len(value):,} numbers, and `{reads.tokens}` has {count:,} tokens")
    for place, number in enumerate(value):
        if isinstance(problem := as_number(number, f"{what}, number {place},"), Unusable):
            return problem
    return np.array(value, dtype=np.float32)


def _listed(value: Any, what: str, of: str = "") -> list | tuple | Unusable:
    if isinstance(value, np.ndarray):
        value = value.tolist()  # a number if it has no dimensions
    is_fit = isinstance(value, list | tuple | Unusable)
    return value if is_fit else Unusable(f"{what} is {described(value)}, not a list{of}")


def _integers(value: Any, what: str) -> np.ndarray | Unusable:
    value = _listed(value, what, " of token ids")
    if isinstance(value, Unusable):
        return value
    for place, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            return Unusable(f"{what}, token {place}, is {shown(token)}, not a whole number")
        if not 0 <= token < 1 << 32:
            return Unusable(f"{what}, token {place}, is {shown(token)}, which is not a token id")
    return np.array(value, dtype=np.int64)


def _mask(value: Any, what: str, ids: np.ndarray, reads: Reads) -> np.ndarray | Unusable:
    value = _listed(value, what)
    if isinstance(value, Unusable):
        return value
    if len(value) != len(ids):
        return Unusable(f"{what} has {len(value):,} entries, and `{reads.tokens}` has {len(ids):,} tokens")
    if IGNORED in value or (list(value) == ids.tolist() and max(value) > 1):
        for place, (label, token) in enumerate(zip(value, ids.tolist(), strict=True)):
            if label not in (IGNORED, token):
                return Unusable(f"{what}, label {place}, is {label}, neither the token there, {token}, nor {IGNORED}")
        trained = np.array(value) != IGNORED
    else:
        for place, entry in enumerate(value):
            if entry not in (0, 1):
                return Unusable(f"{what}, entry {place}, is {shown(entry)}, neither 0 nor 1")
        trained = np.array(value, dtype=bool)
    if not trained[1:].any():
        return Unusable(f"{what} leaves no token to predict")
    return trained


Take = Callable[[Mapping[str, Any]], Content | Unusable]
Talk = TypeVar("Talk", Conversation, PreferencePair)
_MISSING = object()


def taker(reads: Reads) -> Take:
    """Return a function from a record's fields to its content, or to the reason why it has none."""
    take_content = _content_taker(reads)
    if not reads.columns and not reads.value_names:
        return take_content

    def with_numbers(fields: Mapping[str, Any]) -> Content | Unusable:
        content = take_content(fields)
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
    """Return the value of a field. A name with dots is tried as it is, then as a path into objects."""
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
    value = find(fields, reads.messages)
    if isinstance(value, Unusable):
        return value
    messages = conversation(value, f"field `{reads.messages}`")
    if isinstance(messages, Unusable):
        return messages
    if (problem := flagged(messages, reads.message_train, reads.message_weight)) is not None:
        return Unusable(f"field `{reads.messages}`, {problem.reason}")
    if reads.drop_system and messages[0]["role"] == "system":
        del messages[0]
        if not messages:
            return Unusable(f"field `{reads.messages}` has a system message alone, which `drop_system` leaves out")
    if all(setting is None for setting in (reads.tools, reads.system, reads.message_train, reads.message_weight)):
        return messages
    return _completed(fields, reads, Conversation(messages=messages))


def _instruction(fields: Mapping[str, Any], reads: Reads) -> list[Message] | Conversation | Unusable:
    """Return a prompt and a response, each a text or a list of messages, as a conversation."""
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
    """Return the text to append to the prompt, after an empty line; empty if the record has none."""
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
            return Unusable(f"{names[0]} is a text, and field `{reads.system}` is only for conversations")
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
        # The common messages of two conversations are the prompt.
        common = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
        common = min(common, len(first) - 1, len(second) - 1)
        for side in (first, second):
            if (role := side[common]["role"]) != "assistant":
                return Unusable(f"answers to different prompts: message {common + 1} has the role {role}")
        return _completed(fields, reads, PreferencePair(chosen=first, rejected=second, prompt=common))
    prompt = find(fields, reads.prompt)
    before = prompt if isinstance(prompt, Unusable) else _turns(prompt, reads.prompt, "user")
    if isinstance(before, Unusable):
        return before
    # Many datasets repeat the prompt in both sides, some there after a system message.
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
    """Return a text as a message of `role`, or a list of messages."""
    if isinstance(value, Unusable):
        return value
    if isinstance(value, list | tuple):
        return conversation(value, f"field `{name}`")
    text = checked(value, f"field `{name}`")
    return text if isinstance(text, Unusable) else [{"role": role, "content": text}]


def _completed(fields: Mapping[str, Any], reads: Reads, content: Talk) -> Talk | Unusable:
    """Return `found` with the record's tools and system message. Arguments of calls become objects, as templates read
    them."""
    names = ("messages",) if isinstance(content, Conversation) else ("chosen", "rejected")
    changed: dict[str, Any] = {}
    if reads.tools is not None:
        value = find(fields, reads.tools)
        tools = value if isinstance(value, Unusable) else tool_definitions(value, f"field `{reads.tools}`")
        if isinstance(tools, Unusable):
            return tools
        changed["tools"] = tools
        for name in names:
            messages = parsed_calls(getattr(content, name))
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
            messages = changed.get(name, getattr(content, name))
            if messages[0]["role"] == "system":
                return Unusable(f"field `{reads.system}` and the first message are both system messages")
            changed[name] = [{"role": "system", "content": said}, *messages]
        if content.prompt or isinstance(content, PreferencePair):  # 0 means no prompt in a conversation
            changed["prompt"] = content.prompt + 1
    return evolve(content, **changed)


def _tokens(fields: Mapping[str, Any], reads: Reads) -> Content | Unusable:
    ids = find(fields, reads.tokens)
    mask = None if reads.mask is None else find(fields, reads.mask)
    return token_ids(ids, mask, reads)


def _question(fields: Mapping[str, Any], reads: Reads) -> ChoiceQuestion | Unusable:
    values = [find(fields, name) for name in (reads.question, reads.choices, reads.answer)]
    for value in values:
        if isinstance(value, Unusable):
            return value
    text, choices, answer = values
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
