"""Rendered conversations: their text, the characters to predict, and content that the template left out."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from attrs import evolve, frozen

from xtrain.runtime.feed.chat.template import (
    REASONING,
    TOOLS,
    ChatTemplate,
    ChatTrace,
    TemplateRefusal,
    TextSource,
    reserved,
)
from xtrain.runtime.feed.chat.turns import Span, Turns, trace_of
from xtrain.runtime.feed.records import Conversation, Message, Reads, content_size, content_text, strings
from xtrain.runtime.feed.tokenizers import TextTokenizer

# Keys of messages, of calls and of parts of a content that hold no text of the conversation.
_LABELS = frozenset({"role", "tool_call_id", "index"})
_CALL_LABELS = frozenset({"id", "type", "index"})


@frozen
class TemplateLoss:
    """Content of one message, call or list of tools that the template left out."""

    message: int
    """Message number, from 0, or TOOLS."""
    kind: str
    """As `developer message`, `assistant reasoning_content`, `part of assistant content`."""
    whole: bool
    """True for a message, a call or all tools that are left out completely."""


def find_losses(
    messages: list[Message], trace: ChatTrace | None, text: str, labels: frozenset[str]
) -> list[TemplateLoss]:
    """Return what the template left out of a conversation that it rendered as `text`.

    trace: None if the origins of characters are unknown; then texts count as written if `text` contains them. labels:
    further keys of messages that are not meant for the template.
    """
    sources = _sources(messages) if trace is None else trace.sources
    missing = _missing_words(sources, text) if trace is None else _missing(trace)
    by_message: dict[int, list[int]] = defaultdict(list)
    for number, source in enumerate(sources):
        if source.text.strip() and not _is_label(source, labels):
            by_message[source.message].append(number)
    names = {s.text for s in sources if s.message != TOOLS and s.path[0] == "tool_calls" and s.path[-1] == "name"}
    losses: list[TemplateLoss] = []
    for message, numbers in by_message.items():
        losses += _of_message(message, messages, [sources[n] for n in numbers], [missing[n] for n in numbers], names)
    return losses


def _of_message(
    message: int, messages: list[Message], sources: list[TextSource], missing: list[bool | None], names: set[str]
) -> Iterator[TemplateLoss]:
    """Yield the losses of one message. missing: for each source None if it is written, True if it is left out, False if
    a part is."""
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
            continue  # it repeats the name in the call
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
    """Return for each source None if it is written, True if it is left out, False if a part is."""
    kept: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for segment in trace.segments:
        length = segment.stop - segment.start
        kept[segment.source].append((segment.place, segment.place + length, segment.start, segment.stop))
    lacks: list[bool | None] = []
    for number, source in enumerate(trace.sources):
        if number not in kept:
            lacks.append(True)
        elif any(place < 0 for place, *_ in kept[number]):
            lacks.append(None)
        else:
            lacks.append(False if _has_gap(source.text, sorted(kept[number]), trace.text) else None)
    return lacks


def _has_gap(source: str, kept: list[tuple[int, int, int, int]], text: str) -> bool:
    """Return True if more than white space is left out that the template does not write itself, as tags of reasoning.

    kept: bounds of the written parts, in the source and in the text, in the order of the source.
    """
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
    sources: list[TextSource] = []

    def visit(value: object, message: int, path: tuple[str | int, ...]) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(inner, message, (*path, key))
        elif isinstance(value, list | tuple):
            for at, inner in enumerate(value):
                visit(inner, message, (*path, at))
        elif isinstance(value, str):
            sources.append(TextSource(message, path, value))

    for index, message in enumerate(messages):
        visit({key: value for key, value in message.items() if key != "role"}, index, ())
    return sources


LONGEST_CONVERSATION = 1 << 24  # characters
# OpenAI's key of messages: 0 for a message of the assistant that is not trained on.
WEIGHT = "weight"
REMEDY = f'message_weight = "{WEIGHT}"'


@frozen(kw_only=True)
class WrittenConversation:
    """A conversation as text. prompt: its beginning without predicted characters, if it is separate."""

    text: str
    spans: list[Span]
    """Predicted characters."""
    weights: list[float] | None = None
    """Loss weight of each span."""
    prompt: str = ""
    ended: bool = False
    """True if it ends with a special token or marker, so that no other token needs to end it."""
    lost: tuple[str, ...] = ()
    """Kinds of content that the template left out."""


class ConversationWriter:
    """Renderer of a dataset's conversations with the characters to predict. Can be pickled.

    template: None if no record can be a conversation, or for pairs, which may be plain texts, with a tokenizer without
    a template.
    """

    def __init__(self, tokenizer: TextTokenizer, reads: Reads, template: ChatTemplate | None) -> None:
        self._tokenizer, self._reads, self._template = tokenizer, reads, template

    def written(self, conversation: list[Message] | Conversation) -> WrittenConversation | str:
        """Return the conversation as text with the characters to predict, or the reason why it is unusable."""
        if self._template is None:
            return f"messages need a chat template, and tokenizer {self._tokenizer.name} has none: set `template`"
        if isinstance(conversation, list):
            conversation = Conversation(messages=conversation)
        messages, tools = conversation.messages, conversation.tools
        for number, message in enumerate(messages, start=1):
            for text in strings(message):
                if (spelt := self._reserved.search(text)) is not None:
                    return f"message {number} contains the special token {spelt[0]}"
        for text in strings(tools):
            if (spelt := self._reserved.search(text)) is not None:
                return f"the definition of a tool contains the special token {spelt[0]}"
        if content_size(messages) > LONGEST_CONVERSATION:
            return f"a conversation of more than {LONGEST_CONVERSATION:,} characters"
        template = self._template if tools is None else evolve(self._template, tools=tools)
        try:
            turns, losses = written_turns(template, messages, self._reserved, self._labels)
            if (refused := self._refused(losses, len(messages))) is not None:
                return refused
            if conversation.prompt:
                rendered = self._answer(turns, conversation.prompt)
            elif self._reads.train_on == "all":
                rendered = WrittenConversation(text=turns.text, spans=[(0, len(turns.text))])
            elif self._chooses(messages):
                rendered = self._chosen_turns(turns)
            else:
                rendered = WrittenConversation(text=turns.text, spans=turns.spans(last=self._reads.train_on == "last"))
        except TemplateRefusal as refusal:
            return str(refusal)
        if isinstance(rendered, str):
            return rendered
        if not any(rendered.text[start:end].strip() for start, end in rendered.spans):
            roles = ", ".join(dict.fromkeys(f"`{message['role']}`" for message in messages))
            return "the assistant says nothing" + ("" if "`assistant`" in roles else f": the roles are {roles}")
        kinds = {loss.kind: None for loss in losses}
        if self._reads.train_on != "all" and (end := turns.unmarked_end()) is not None:
            kinds[f"{end} outside of {{% generation %}}"] = None
        return evolve(rendered, ended=turns.ends(len(turns.text)), lost=tuple(kinds))

    def _refused(self, losses: list[TemplateLoss], messages: int) -> str | None:
        """Return why these losses make the record bad; None if they do not."""
        for loss in losses:
            if self._reads.lost == "error" or (self._reads.lost == "warn" and loss.whole):
                place = "the template" if loss.message == TOOLS else f"message {loss.message + 1}: the template"
                return f"{place} does not write the {loss.kind}"
        return None

    def _answer(self, turns: Turns, prompt: int) -> WrittenConversation | str:
        """Return the conversation with the part after the first `prompt` messages to predict."""
        if turns.messages[prompt]["role"] != "assistant":
            return f"the answer begins with message {prompt + 1}, which has the role {turns.messages[prompt]['role']}"
        before = turns.template.render(turns.messages[:prompt], prompt=True)
        chosen = self._chosen_turns(turns) if self._chooses(turns.messages) else None
        if isinstance(chosen, str):
            return chosen
        spans = turns.spans() if chosen is None else chosen.spans
        if not turns.text.startswith(before):
            return "the template writes the prompt differently before an answer"
        spans = [(max(start, len(before)), end) for start, end in spans if end > len(before)]
        return WrittenConversation(text=turns.text, spans=spans, prompt=before)

    def _chooses(self, messages: list[Message]) -> bool:
        """Return True if messages say themselves whether they are trained on."""
        if self._reads.message_train is not None or self._reads.message_weight is not None:
            return True
        return any(WEIGHT in message for message in messages)

    def _chosen_turns(self, turns: Turns) -> WrittenConversation | str:
        """Select the turns that their messages, or else `train_on`, choose for training, with the messages' weights."""
        by_message = turns.by_message()
        train, weight = self._reads.message_train, self._reads.message_weight
        spans, weights = [], []
        for index, parts in by_message.items():
            message = turns.messages[index]
            flag = message.get(train) if train is not None else None
            if flag is None:
                flag = self._reads.train_on != "last" or index == max(by_message)
            share = message.get(weight) if weight is not None else None
            if weight is None and train != WEIGHT and WEIGHT in message:
                if message[WEIGHT] not in (0, 1):
                    return (
                        f"message {index + 1}: `{WEIGHT}` is {message[WEIGHT]!r:.40}, neither 0 nor 1; set `{REMEDY}`"
                    )
                flag = flag and message[WEIGHT] == 1
            if flag:
                spans += parts
                weights += [1.0 if share is None else float(share)] * len(parts)
        if not spans:
            return "no message is trained on"
        return WrittenConversation(text=turns.text, spans=spans, weights=None if weight is None else weights)

    @property
    def _labels(self) -> frozenset[str]:
        """Keys of messages that are meant for training alone."""
        named = (self._reads.message_train, self._reads.message_weight, WEIGHT)
        return frozenset(name for name in named if name is not None)

    @cached_property
    def _reserved(self) -> re.Pattern[str]:
        assert self._template is not None
        return reserved(self._tokenizer, self._template)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_reserved"}


def written_turns(
    template: ChatTemplate, messages: list[Message], reserved: re.Pattern[str], labels: frozenset[str] = frozenset()
) -> tuple[Turns, list[TemplateLoss]]:
    """Return a rendered conversation and what the template left out; labels: see `find_losses`.

    Templates differ in the forms of contents and arguments that they accept: if one refuses a form, or leaves out a
    message, other forms are tried. Raises TemplateRefusal if all are refused.
    """
    refusal: TemplateRefusal | None = None
    best: tuple[Turns, list[TemplateLoss]] | None = None
    for form in _forms(messages):
        try:
            turns = Turns(template, form, reserved)
        except TemplateRefusal as error:
            refusal = refusal or error
            continue
        losses = find_losses(form, turns.trace, turns.text, labels)
        if best is None or _whole(losses) < _whole(best[1]):
            best = turns, losses
        if not _whole(losses):
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def written_prompt(template: ChatTemplate, messages: list[Message]) -> str:
    """Render a conversation up to where an answer begins, in the first form without left-out messages.

    Raises TemplateRefusal if the template refuses all forms or leaves out a message.
    """
    refusal: TemplateRefusal | None = None
    for form in _forms(messages):
        try:
            text = template.render(form, prompt=True)
        except TemplateRefusal as error:
            refusal = refusal or error
            continue
        losses = find_losses(form, trace_of(template, form, text, prompt=True), text, frozenset())
        if not (whole := [loss for loss in losses if loss.whole]):
            return text
        refusal = refusal or TemplateRefusal(f"the template does not write the {whole[0].kind}")
    assert refusal is not None
    raise refusal


def _whole(losses: list[TemplateLoss]) -> int:
    return sum(loss.whole for loss in losses)


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield a conversation as transformers passes it to templates, then with contents and arguments in other forms."""
    yield messages
    texts = [{**message, "content": content_text(message)} for message in messages]
    parts = [{**message, "content": _parts(message)} for message in messages]
    forms = [form for form in (texts, parts) if form != messages]
    yield from forms
    for form in (messages, *forms):
        if (written := _with_written_arguments(form)) != form:
            yield written


def _parts(message: Message) -> list[Any]:
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_written_arguments(messages: list[Message]) -> list[Message]:
    """Return a conversation with the arguments of calls as JSON text."""
    written = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            if isinstance(function.get("arguments"), dict):
                function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            calls.append({**call, "function": function} if "function" in call else function)
        written.append({**message, "tool_calls": calls} if calls else message)
    return written
