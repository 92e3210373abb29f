"""Turns of the assistant in a rendered conversation: the characters that a model learns to write, end of turn
included."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from attrs import evolve, frozen

from xtrain.runtime.feed.chat.template import ChatTemplate, ChatTrace, SourceSegment, TemplateRefusal
from xtrain.runtime.feed.records import Message

Span = tuple[int, int]
# Bounds of parts of a header, or of the end of a turn.
_BOUNDS = re.compile(r"<[^<>\s]+>|\n")
REMEDY = "mark what the assistant says in the template with {% generation %} and {% endgeneration %}"
# Number of turns with equal surroundings that are located one by one.
ALIKE = 4
# Fields of the assistant's messages with answers of functions (Gemma 4), and with texts of headers.
_ANSWERS = frozenset({"tool_responses"})
_HEADERS = frozenset({"name", "tool_call_id"})


class Turns:
    """Locator of the assistant's turns in a rendered conversation.

    A turn is what the model must write: it begins after the prompt that the template gives in its place, and ends with
    what the template writes after the message, without white space. Answers of functions inside are not part of it. If
    the template marks the words of the assistant, the marked parts are the turn.
    """

    def __init__(self, template: ChatTemplate, messages: list[Message], reserved: re.Pattern[str]) -> None:
        """Render and trace a conversation. reserved: matches special tokens and the template's markers between turns.

        Raises TemplateRefusal if the template does not accept the conversation.
        """
        self.template, self.messages, self._reserved = template, messages, reserved
        self.text = template.render(messages)
        self.trace = trace_of(template, messages, self.text)
        self._segments = [] if self.trace is None else self.trace.segments
        # Text that is written again, as function names next to their answers, does not count again.
        self._first: dict[tuple[int, int], int] = {}
        for segment in self._segments:
            self._first.setdefault((segment.source, segment.place), segment.start)
        self._starts = [segment.start for segment in self._segments]
        self._own: dict[int, list[SourceSegment]] = {}
        for segment in self._segments:
            index = self._message(segment)
            if self._is_own(index, segment) and self._field(segment) not in _HEADERS:
                self._own.setdefault(index, []).append(segment)
        self._alike: dict[tuple[Any, ...], list[tuple[int, int]]] = {}

    @property
    def spoken(self) -> list[int]:
        """Numbers of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def spans(self, *, last: bool = False) -> list[Span]:
        """Return the characters of all turns, or only of the last one. Raises TemplateRefusal if they cannot be
        located."""
        if self.template.marks and not last and self.trace is not None:
            return self.trace.spans
        turns = self.by_message(self.spoken[-1:] if last else None)
        return [span for spans in turns.values() for span in spans]

    def by_message(self, wanted: list[int] | None = None) -> dict[int, list[Span]]:
        """Return the characters of turns by message number, of all messages of the assistant or the wanted ones."""
        wanted = self.spoken if wanted is None else wanted
        if not self.template.marks:
            return {index: self._turn(index) for index in wanted}
        if self.trace is None:
            raise TemplateRefusal("the template changes what it has marked with {% generation %}")
        spans: dict[int, list[Span]] = {index: [] for index in wanted}
        spoken, owner = set(self.spoken), None
        for start, end in self.trace.spans:
            inside = (self._message(s) for s in self._segments if s.start < end and start < s.stop)
            owner = next((index for index in inside if index in spoken), owner)
            if owner in spans:
                spans[owner].append((start, end))
        return spans

    def ends(self, place: int) -> bool:
        """Return True if a special token or marker ends before this character, ignoring white space."""
        place = len(self.text[:place].rstrip())
        return any(match.end() == place for match in self._reserved.finditer(self.text, max(place - 64, 0), place))

    def unmarked_end(self) -> str | None:
        """Return the token that ends the last turn, if the template leaves it out of its `{% generation %}` block."""
        if not self.template.marks or not self.spans() or self.messages[-1]["role"] != "assistant":
            return None
        end = self.spans()[-1][1]
        match = self._reserved.match(self.text, end + _blanks(self.text[end:]))
        return None if match is None or self.ends(end) else match[0]

    # The rest is for templates without marks.

    def _turn(self, index: int) -> list[Span]:
        own = self._own.get(index, [])
        if self.trace is not None and not own:
            return []  # nothing of it is written
        if self.trace is None or (surroundings := self._surroundings(index, own)) is None:
            return self._compared(index, own)
        # Each comparison renders parts of the conversation: of many turns with equal surroundings, only the first are
        # compared.
        alike = self._alike.setdefault(surroundings, [])
        if len(alike) < ALIKE or len(set(alike)) > 1:
            spans = self._compared(index, own)
            margins = (own[0].start - spans[0][0], spans[0][1] - own[-1].stop) if len(spans) == 1 else (-1, -1)
            alike.append(margins if min(margins) >= 0 else (-1, -len(alike)))
            return spans
        before, behind = alike[0]
        return [(own[0].start - before, own[-1].stop + behind)]

    def _surroundings(self, index: int, own: list[SourceSegment]) -> tuple[Any, ...] | None:
        """Return the surroundings that identify a kind of turn: the text around it, and the fields of the adjacent
        messages.

        None if anything else is written between its first and last character.
        """
        assert self.trace is not None
        first, last = bisect_left(self._starts, own[0].start), bisect_left(self._starts, own[-1].start)
        if last - first + 1 != len(own):
            return None
        before = self._segments[first - 1].stop if first else 0
        behind = self._segments[last + 1].start if last + 1 < len(self._segments) else len(self.text)
        near = self.messages[max(index - 1, 0) : index + 2]
        kinds = tuple((message["role"], *message) for message in near)
        return (
            self.text[before : own[0].start],
            self.text[own[-1].stop : behind],
            kinds,
            self._field(own[0]),
            index == 0,
        )

    def _compared(self, index: int, own: list[SourceSegment]) -> list[Span]:
        """Locate a turn by rendering the conversation before it and up to it."""
        before = _attempt(self.template, self.messages[:index], prompt=True)
        after = _attempt(self.template, self.messages[: index + 1])
        if self.trace is None:
            # Without origins only an exact match can be found.
            if before is None or after is None or not (self.text.startswith(before) and self.text.startswith(after)):
                place = f"where message {index + 1} begins or ends in the template is ambiguous"
                raise TemplateRefusal(f"{place}; {REMEDY}")
            return [(len(before), len(after.rstrip()))]
        start = self._start(index, before, own)
        return self._without_answers(index, start, self._end(index, after, start, own))

    def _start(self, index: int, before: str | None, own: list[SourceSegment]) -> int:
        """Return the first character after the prompt. before: the conversation up to there."""
        first, habits = own[0].start, _habits(self.template)
        if before is not None and self.text.startswith(before) and len(before) < own[-1].stop:
            if habits.prompts:
                # The header may also follow without a prompt, as after a function's answer.
                begun = self.text.startswith(habits.header, len(before)) and len(before) + len(habits.header) <= first
                return len(before) + begun * len(habits.header)
            return self._after_header(len(before), first)
        # Earlier messages are rendered differently here: the end of the last one is a position in both texts.
        place = max((s.stop for s in self._segments if s.start < first and self._message(s) < index), default=0)
        written = before and trace_of(self.template, self.messages[:index], before, prompt=True)
        if not before or not written:
            return self._after_header(place, first)
        tail = before[written.segments[-1].stop :] if written.segments else before
        if self.text.startswith(tail, place):
            place += len(tail)
            return place if habits.prompts else self._after_header(place, first)
        common = place + _common(tail, self.text[place:first])
        names = [s for s in self._segments if self._message(s) == index and common <= s.start < first]
        if names:  # in the header
            rest = tail[common - place :]
            return names[-1].stop + (len(rest) if self.text.startswith(rest, names[-1].stop) else 0)
        common = self._shared(tail, written, place, first)
        if habits.prompts and habits.header not in self.text[place:first] and self.text[place:common].strip():
            return common
        return self._after_header(place if habits.prompts else common, first)

    def _after_header(self, place: int, first: int) -> int:
        """Return the first character after the last header between two positions, or after the part of it that is
        there.

        Without prompts, white space after it counts as part of the header.
        """
        habits = _habits(self.template)
        header = habits.header
        if header.strip():
            for end in (len(header), *sorted({match.end() for match in _BOUNDS.finditer(header)}, reverse=True)):
                header_start = self.text.rfind(header[:end], place, first) if header[:end].strip() else -1
                if header_start >= 0:
                    place = header_start + end
                    break
            else:
                place = first
        return place if habits.prompts else place + _blanks(self.text[place:first])

    def _end(self, index: int, after: str | None, start: int, own: list[SourceSegment]) -> int:
        """Return the end of a turn. after: the conversation up to there."""
        last, tail, written = self._last(index, after, start, own)
        follow = next((s for s in self._segments if self._message(s) > index and s.start >= last), None)
        stop = len(self.text) if follow is None else follow.start
        limit = stop
        if follow is not None and self.messages[self._message(follow)]["role"] == "tool":
            # Text in one piece with a function's answer belongs to the answer.
            begun = self._piece(stop)[0]
            limit = begun if begun >= last else stop
        elif follow is None and self.messages[index].get("tool_calls"):
            limit = self._before_answer(index, last)
        end = last
        if tail.strip():
            end = self._shared(tail.rstrip(), written, last, limit)
            over = self._piece(last - 1)[1]
            if not self.text[last:end].strip() and over <= stop:
                end = over
            end = last + len(self.text[last:end].rstrip())
        habits = _habits(self.template)
        if end > last and habits.closes:
            return end
        # If a turn has no end of its own, the token that begins the next turn ends it, as in GLM-4.
        match = self._reserved.match(self.text, end + _blanks(self.text[end:stop]), stop)
        if match is None or match[0] == self.template.bos_token or habits.header.lstrip().startswith(match[0]):
            return max(start, len(self.text[:end].rstrip()))
        return match.end()

    def _before_answer(self, index: int, last: int) -> int:
        """Return where a function's answer after the last message would begin, if it is written in one piece."""
        call = self.messages[index]["tool_calls"][-1]
        name = call.get("function", call).get("name") if isinstance(call, Mapping) else None
        identity = call.get("id") if isinstance(call, Mapping) else None
        answer: Message = {"role": "tool", "content": "a", "name": name, "tool_call_id": identity}
        answer = {key: value for key, value in answer.items() if value is not None}
        messages = [*self.messages[: index + 1], answer]
        text = _attempt(self.template, messages)
        answered = (
            None if text is None or not text.startswith(self.text) else Turns(self.template, messages, self._reserved)
        )
        if answered is None or answered.trace is None:
            return len(self.text)
        start = next((s.start for s in answered._segments if answered._message(s) > index and s.start >= last), None)
        begun = len(self.text) if start is None else answered._piece(start)[0]
        return begun if begun >= last else len(self.text)

    def _last(
        self, index: int, after: str | None, start: int, own: list[SourceSegment]
    ) -> tuple[int, str, ChatTrace | None]:
        """Return the end of the message's own text in a turn, the text after it if no message follows, and the
        trace."""
        follow = next((s.start for s in self._segments if self._message(s) > index and s.start >= own[0].start), None)
        inside = [s.stop for s in own if follow is None or s.start < follow] or [own[0].stop]
        if after is None:
            return inside[-1], "", None
        if self.text.startswith(after):
            last = max((s.stop for s in own if s.stop <= len(after)), default=inside[-1])
            return last, after[last:], None
        written = trace_of(self.template, self.messages[: index + 1], after)
        said = [] if written is None else [s for s in written.segments if written.sources[s.source].message == index]
        if not said:
            return inside[-1], "", written
        places = self._places_of(said[-1])
        return min((place for place in places if place > start), default=inside[-1]), after[said[-1].stop :], written

    def _without_answers(self, index: int, start: int, end: int) -> list[Span]:
        """Split a turn so that answers of functions in it are left out."""
        spans, at = [], start
        inside = [s for s in self._segments if start < s.stop and s.start < end]
        for place, segment in enumerate(inside):
            if self._message(segment) == index and self._field(segment) not in _ANSWERS:
                continue
            before = max((s.stop for s in inside[:place] if self._is_own(index, s)), default=start)
            behind = min((s.start for s in inside[place:] if self._is_own(index, s)), default=end)
            spans.append((at, max(at, before, self._piece(segment.start)[0])))
            at = max(at, min(behind, self._piece(segment.stop - 1)[1]))
        spans.append((at, end))
        return [span for span in spans if self.text[span[0] : span[1]].strip()]

    def _is_own(self, index: int, segment: SourceSegment) -> bool:
        """Return True if a segment is text of the message itself, written for the first time."""
        if self._message(segment) != index or self._field(segment) in _ANSWERS:
            return False
        return self._first[segment.source, segment.place] == segment.start

    def _message(self, segment: SourceSegment) -> int:
        assert self.trace is not None
        return self.trace.sources[segment.source].message

    def _field(self, segment: SourceSegment) -> str | int:
        assert self.trace is not None
        return self.trace.sources[segment.source].path[0]

    def _piece(self, place: int) -> Span:
        """Return the bounds of the template's expression or text around a character."""
        assert self.trace is not None
        at = bisect_right(self.trace.pieces, place)
        return self.trace.pieces[at - 1], self.trace.pieces[at] if at < len(self.trace.pieces) else len(self.text)

    def _places_of(self, other: SourceSegment) -> list[int]:
        """Return where the last character of another trace's segment ends in this text."""
        final = other.place + other.stop - other.start - 1
        ends = []
        for segment in self._segments:
            if segment.source != other.source:
                continue
            if segment.place < 0 or other.place < 0:
                ends.append(segment.stop)
            elif segment.place <= final < segment.place + segment.stop - segment.start:
                ends.append(segment.start + final - segment.place + 1)
        return ends

    def _shared(self, tail: str, written: ChatTrace | None, place: int, limit: int) -> int:
        """Return the end of what `tail`, the end of another trace, has in common with the text from `place` on.

        A partial match ends at a piece of the template, a special token, a tag or a line.
        """
        common = _common(tail, self.text[place:limit])
        if common == len(tail):
            return place + common
        ends = {match.end() for pattern in (self._reserved, _BOUNDS) for match in pattern.finditer(tail)}
        if written is not None:
            ends |= {piece - (len(written.text) - len(tail)) for piece in written.pieces}
        return place + max((end for end in ends if 0 <= end <= common), default=0)


@frozen
class _Habits:
    """Structure of a template. prompts: it can write a prompt before an answer. header: the text before an answer.
    closes: it writes something after an answer."""

    prompts: bool
    header: str
    closes: bool


def _habits(template: ChatTemplate) -> _Habits:
    return _known_habits(evolve(template, tools=None))


@lru_cache(maxsize=64)
def _known_habits(template: ChatTemplate) -> _Habits:
    question: Message = {"role": "user", "content": "a"}
    before = _attempt(template, [question]) or ""
    prompt = _attempt(template, [question], prompt=True) or before
    call = {"type": "function", "id": "a23456789", "function": {"name": "b", "arguments": {"c": "d"}}}
    leads, tails = [], []
    for answer in ({"content": "b"}, {"content": "b", "reasoning_content": "c"}, {"content": "", "tool_calls": [call]}):
        messages: list[Message] = [question, {"role": "assistant", **answer}]
        text = _attempt(template, messages)
        trace = None if text is None else trace_of(template, messages, text)
        own = [] if trace is None else [s for s in trace.segments if trace.sources[s.source].message == 1]
        if text is not None and own and text.startswith(before):
            leads.append(text[len(before) : own[0].start])
            tails.append(text[own[-1].stop :])
    # Without a prompt, the header is the common prefix of answers of all kinds.
    header = prompt[_common(before, prompt) :] if prompt != before else leads[0] if leads else ""
    if prompt == before:
        header = header[: min((_common(header, lead) for lead in leads), default=0)]
    return _Habits(prompts=prompt != before, header=header, closes=not tails or bool(tails[0].strip()))


def trace_of(template: ChatTemplate, messages: list[Message], text: str, prompt: bool = False) -> ChatTrace | None:
    """Return the trace of a conversation that is rendered as `text`; None if tracing changes the text."""
    try:
        trace = template.trace(messages, prompt=prompt)
    except TemplateRefusal:
        return None
    return trace if trace.text == text else None


def _attempt(template: ChatTemplate, messages: list[Message], *, prompt: bool = False) -> str | None:
    try:
        return template.render(messages, prompt=prompt)
    except TemplateRefusal:
        return None


def _blanks(text: str) -> int:
    return len(text) - len(text.lstrip())


def _common(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    shorter = min(len(first), len(second))
    return next((at for at in range(shorter) if first[at] != second[at]), shorter)
