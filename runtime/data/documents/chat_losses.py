"""Texts of a conversation that its template has not written."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping

from attrs import frozen

from xtrain.runtime.data.documents.chat_template import REASONING, TOOLS, ChatTrace, TextSource
from xtrain.runtime.data.records.records import Message

# Keys of messages, of calls and of parts of a content that lead to no text of the conversation.
_LABELS = frozenset({"role", "tool_call_id", "index"})
_CALL_LABELS = frozenset({"id", "type", "index"})


@frozen
class TemplateLoss:
    """What is lost of one message, call or list of tools."""

    message: int
    """Number of the message, from 0, or TOOLS."""
    kind: str
    """`developer message`, `assistant reasoning_content`, `part of assistant content`."""
    whole: bool
    """A message, a call or all tools, of which nothing is written."""


def find_losses(
    messages: list[Message], trace: ChatTrace | None, text: str, labels: frozenset[str]
) -> list[TemplateLoss]:
    """Return what a template has left out of a conversation that it has written as `text`.

    trace: None if it is unknown where the characters of `text` come from; then texts count as written that stand in it
    word for word. labels: further keys of messages that are not meant for the template.
    """
    sources = _sources(messages) if trace is None else trace.sources
    missing = _missing_words(sources, text) if trace is None else _missing(trace)
    by_message: dict[int, list[int]] = defaultdict(list)
    for number, source in enumerate(sources):
        if source.text.strip() and not _is_label(source, labels):
            by_message[source.message].append(number)
    names = {s.text for s in sources if s.message != TOOLS and s.path[0] == "tool_calls" and s.path[-1] == "name"}
    found: list[TemplateLoss] = []
    for message, numbers in by_message.items():
        found += _of_message(message, messages, [sources[n] for n in numbers], [missing[n] for n in numbers], names)
    return found


def _of_message(
    message: int, messages: list[Message], sources: list[TextSource], missing: list[bool | None], names: set[str]
) -> Iterator[TemplateLoss]:
    """missing: of each source None if it is written, True if nothing of it is, False if a part is left out."""
    role = "tools" if message == TOOLS else str(messages[message]["role"])
    if all(missing):
        only_calls = message != TOOLS and all(source.path[0] == "tool_calls" for source in sources)
        kind = "definitions of tools" if message == TOOLS else f"{role} {'tool_calls' if only_calls else 'message'}"
        yield TemplateLoss(message, kind, True)
        return
    written = {source.text for source, lack in zip(sources, missing, strict=True) if lack is None}
    calls: dict[str | int, list[bool | None]] = defaultdict(list)
    for source, lack in zip(sources, missing, strict=True):
        if message != TOOLS and source.path[0] == "tool_calls":
            calls[source.path[1]].append(lack)
    dropped = {number for number, lacks in calls.items() if all(lacks)}
    if dropped:
        yield TemplateLoss(message, f"{role} tool_calls", True)
    kinds: dict[str, None] = {}
    for source, lack in zip(sources, missing, strict=True):
        if lack is None or source.text in written:
            continue
        field = "" if message == TOOLS else str(source.path[0])
        if field == "tool_calls" and source.path[1] in dropped:
            continue
        if field == "name" and role == "tool" and source.text in names:
            continue  # it repeats what the call has said
        if field in REASONING:
            field = REASONING[0]
        whole_field = lack and len(source.path) == 1
        kinds[f"{role} {field}" if whole_field else f"part of {role} {field}".rstrip()] = None
    for kind in kinds:
        yield TemplateLoss(message, kind, False)


def _is_label(source: TextSource, labels: frozenset[str]) -> bool:
    assert source.path, "it is in a message or a list"
    key = source.path[-1]
    if source.message == TOOLS:
        return key in ("type", "strict")
    field = source.path[0]
    if field == "tool_calls":
        return len(source.path) == 3 and key in _CALL_LABELS
    if field == "content" and len(source.path) > 1:
        return key == "type"
    return field in _LABELS or field in labels


def _missing(trace: ChatTrace) -> list[bool | None]:
    """For each source None if it is written, True if nothing of it is, False if a part is left out."""
    kept: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for segment in trace.segments:
        length = segment.stop - segment.start
        kept[segment.source].append((segment.place, segment.place + length, segment.start, segment.stop))
    found: list[bool | None] = []
    for number, source in enumerate(trace.sources):
        if number not in kept:
            found.append(True)
        elif any(place < 0 for place, *_ in kept[number]):
            found.append(None)
        else:
            found.append(False if _has_gap(source.text, sorted(kept[number]), trace.text) else None)
    return found


def _has_gap(source: str, kept: list[tuple[int, int, int, int]], text: str) -> bool:
    """Whether more than white space is left out that the template has not put there itself, as it does with tags of
    reasoning. kept: bounds of what is written, in the source and in the text, in the order of the source."""
    at, before = 0, None
    for place, stop, start, end in kept:
        if place > at and _is_lost(source[at:place], before, start, text):
            return True
        if stop > at:
            at, before = stop, end
    return at < len(source) and _is_lost(source[at:], before, None, text)


def _is_lost(gap: str, before: int | None, behind: int | None, text: str) -> bool:
    gap = gap.strip()
    if not gap:
        return False
    reach = len(gap) + 16
    first = before if before is not None else max(0, (behind or 0) - reach)
    last = behind if behind is not None and behind > first else first + reach
    return gap not in text[first:last]


def _missing_words(sources: list[TextSource], text: str) -> list[bool | None]:
    def stands(word: str) -> bool:
        return word in text or json.dumps(word, ensure_ascii=False)[1:-1] in text

    return [None if stands(source.text.strip()) else True for source in sources]


def _sources(messages: list[Message]) -> list[TextSource]:
    found: list[TextSource] = []

    def visit(value: object, message: int, path: tuple[str | int, ...]) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(inner, message, (*path, key))
        elif isinstance(value, list | tuple):
            for at, inner in enumerate(value):
                visit(inner, message, (*path, at))
        elif isinstance(value, str):
            found.append(TextSource(message, path, value))

    for index, message in enumerate(messages):
        visit({key: value for key, value in message.items() if key != "role"}, index, ())
    return found
