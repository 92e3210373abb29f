"""Which characters of a conversation the assistant said: what a model is to write itself, end of turn included."""

from attrs import define, field

from ..records.records import Message
from .chat_template import ChatTemplate, Rendered, TemplateRefusal, unused

Span = tuple[int, int]
REMEDY = "mark what the assistant says in the template with {% generation %} and {% endgeneration %}"


def assistant_spans(template: ChatTemplate, messages: list[Message], *, last: bool = False) -> tuple[str, list[Span]]:
    """The conversation written out, and the characters that the assistant said: all turns, or the last one alone.

    Where the template does not mark them, a turn is what is written behind the prompt for it: its content and the end
    of turn, without the header before and blanks behind. Raises TemplateRefusal if the template does not take the
    conversation, or writes turns in ways that leave open where one begins or ends.
    """
    rendered = template.render(messages)
    if template.marks and not last:
        return rendered.text, list(rendered.spans)
    said = _said(messages)
    turns = _spans_of_turns(template, messages, rendered, said[-1:] if last else said)
    return rendered.text, [span for spans in turns for span in spans]


def turns_of_assistant(template: ChatTemplate, messages: list[Message]) -> tuple[str, dict[int, list[Span]]]:
    """The same by message: its number, from 0, and the characters of it. Raises TemplateRefusal as that does."""
    rendered, said = template.render(messages), _said(messages)
    return rendered.text, dict(zip(said, _spans_of_turns(template, messages, rendered, said), strict=True))


def _spans_of_turns(
    template: ChatTemplate, messages: list[Message], rendered: Rendered, wanted: list[int]
) -> list[list[Span]]:
    """What the assistant says in some of its messages; where the template marks it, a turn may have several parts."""
    turns = Turns(template=template, messages=messages, text=rendered.text)
    if not template.marks:
        return [[turns.span(index)] for index in wanted]
    said = _said(messages)
    if len(rendered.spans) == len(said):
        return [[rendered.spans[said.index(index)]] for index in wanted]
    found = []
    for index in wanted:
        start, end = turns.span(index)
        found.append([span for span in rendered.spans if span[0] < end and start < span[1]])
    return found


def _said(messages: list[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


@define(kw_only=True)
class Turns:
    """Finds turns in a conversation that has been written out, by writing parts and variants of it."""

    template: ChatTemplate
    messages: list[Message]
    text: str
    _ends: dict[int, int | None] = field(factory=dict, init=False)

    def span(self, index: int) -> Span:
        """Where the turn of message `index` begins and ends. Raises TemplateRefusal if that cannot be told."""
        found = self._by_prefixes(index) or self._by_variants(index)
        if found is None:
            raise TemplateRefusal(f"where message {index + 1} begins or ends in the template is ambiguous; {REMEDY}")
        return found

    def _by_prefixes(self, index: int) -> Span | None:
        """What is written of the conversation before the turn, and up to its end, both begin the whole of it."""
        before, prompt = self._before(index)
        after = _render(self.template, self.messages[: index + 1])
        if before is None or not prompt or after is None:
            return None
        start, end = len(before) + len(prompt), len(after.rstrip())
        if start < end and self.text.startswith(before + prompt) and self.text.startswith(after):
            return start, end
        return None

    def _by_variants(self, index: int) -> Span | None:
        """The template writes a turn otherwise once others follow it, or has no prompt for it: its content is found by
        the place where a sign put before or behind it comes out."""
        end = self._end(index)
        start = None if end is None else self._start(index, end)
        if start is None or end is None:
            return None
        return start, end + self._end_of_turn(index, end)

    def _start(self, index: int, end: int) -> int | None:
        before, prompt = self._before(index)
        previous = self._end(index - 1) if index else None
        if before is not None and prompt and previous is not None:
            # Behind the message before come its end of turn and the prompt, as they do when nothing follows.
            head = self._behind(self.messages[:index])
            if head is not None and self.text.startswith(head + prompt, previous):
                return previous + len(head + prompt)
        return self._first_place(index, end)

    def _first_place(self, index: int, end: int) -> int | None:
        """Where what is written of a content begins: the template may leave out its blanks, or all before some sign."""
        content: str = self.messages[index]["content"]
        low, high = 0, len(content.rstrip())
        place = self._place(index, 0)
        while place is None and low + 1 < high:
            middle = (low + high) // 2
            if self._place(index, middle) is None:
                low = middle
            else:
                high = middle
        place = self._place(index, high) if place is None else place
        return place if place is not None and place < end else None

    def _end_of_turn(self, index: int, end: int) -> int:
        """Characters behind a content that belong to the turn: none, if its end is written otherwise in this place."""
        closing = self._behind(self.messages[: index + 1])
        closing = "" if closing is None else closing.rstrip()
        return len(closing) if self.text.startswith(closing, end) else 0

    def _end(self, index: int) -> int | None:
        if index not in self._ends:
            self._ends[index] = self._place(index, _last(self.messages[index]))
        return self._ends[index]

    def _place(self, index: int, at: int) -> int | None:
        """Where character `at` of the content of a message comes out, if that can be found out."""
        return _find(self.template, self.messages, index, at, self.text)

    def _behind(self, messages: list[Message]) -> str | None:
        """What is written behind the content of the last of some messages."""
        text = _render(self.template, messages)
        if text is None:
            return None
        place = _find(self.template, messages, len(messages) - 1, _last(messages[-1]), text)
        return None if place is None else text[place:]

    def _before(self, index: int) -> tuple[str | None, str]:
        """What is written of the messages before, and the prompt behind it; none if the template has no prompt."""
        before = _render(self.template, self.messages[:index])
        prompted = _render(self.template, self.messages[:index], prompt=True)
        if before is None or prompted is None or not prompted.startswith(before):
            return None, ""
        return before, prompted[len(before) :]


def _find(template: ChatTemplate, messages: list[Message], index: int, at: int, text: str) -> int | None:
    """Where in `text` character `at` of the content of a message stands: a sign put before it comes out there, once,
    and changes nothing else."""
    (sign,) = unused(messages, 1)
    content: str = messages[index]["content"]
    changed = {**messages[index], "content": content[:at] + sign + content[at:]}
    variant = _render(template, [*messages[:index], changed, *messages[index + 1 :]])
    if variant is None or variant.count(sign) != 1 or variant.replace(sign, "") != text:
        return None
    return variant.index(sign)


def _last(message: Message) -> int:
    """The end of a content, without blanks: a template may trim them."""
    return len(message["content"].rstrip())


def _render(template: ChatTemplate, messages: list[Message], *, prompt: bool = False) -> str | None:
    try:
        return template.render(messages, prompt=prompt).text
    except TemplateRefusal:
        return None
