"""What a template makes of conversations: their text, and which characters of that are to be predicted."""

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from attrs import evolve, frozen

from xtrain.runtime.data.documents.chat_losses import TemplateLoss, find_losses
from xtrain.runtime.data.documents.chat_template import TOOLS, ChatTemplate, TemplateRefusal, reserved
from xtrain.runtime.data.documents.chat_turns import Span, Turns, trace_of
from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.data.records.records import Conversation, Message, Reads, content_size, content_text
from xtrain.runtime.data.records.texts import strings

LONGEST_CONVERSATION = 1 << 24  # characters
# OpenAI's key of messages: 0 where a message of the assistant is not trained on.
WEIGHT = "weight"
REMEDY = f'message_weight = "{WEIGHT}"'


@frozen(kw_only=True)
class WrittenConversation:
    """A conversation as text. prompt: its beginning, of which nothing is predicted, where that is set apart."""

    text: str
    spans: list[Span]
    """Characters that are predicted."""
    weights: list[float] | None = None
    """Of each of them the weight of its loss."""
    prompt: str = ""
    ended: bool = False
    """It closes with a special token, or with what the template sets turns apart with: no other token ends it."""
    lost: tuple[str, ...] = ()
    """Kinds of what the template has left out."""


class ConversationWriter:
    """reads: of a dataset. template: None where no record of it may be a conversation, or pairs are read, which may be
    texts, with a tokenizer that has none. It can be pickled."""

    def __init__(self, tokenizer: TextTokenizer, reads: Reads, template: ChatTemplate | None) -> None:
        self._tokenizer, self._reads, self._template = tokenizer, reads, template

    def written(self, conversation: list[Message] | Conversation) -> WrittenConversation | str:
        """The conversation as text and what is to be predicted of it; or the reason why there is none."""
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
                found = self._answer(turns, conversation.prompt)
            elif self._reads.train_on == "all":
                found = WrittenConversation(text=turns.text, spans=[(0, len(turns.text))])
            elif self._chooses(messages):
                found = self._chosen_turns(turns)
            else:
                found = WrittenConversation(text=turns.text, spans=turns.spans(last=self._reads.train_on == "last"))
        except TemplateRefusal as refusal:
            return str(refusal)
        if isinstance(found, str):
            return found
        if not any(found.text[start:end].strip() for start, end in found.spans):
            return "the assistant says nothing in it"
        kinds = {loss.kind: None for loss in losses}
        if self._reads.train_on != "all" and (end := turns.unmarked_end()) is not None:
            kinds[f"{end} outside of {{% generation %}}"] = None
        return evolve(found, ended=turns.ends(len(turns.text)), lost=tuple(kinds))

    def _refused(self, losses: list[TemplateLoss], messages: int) -> str | None:
        """Why a conversation of which this is lost is a bad record; None if it is not."""
        for loss in losses:
            if self._reads.lost == "error" or (self._reads.lost == "warn" and loss.whole):
                place = "the template" if loss.message == TOOLS else f"message {loss.message + 1}: the template"
                return f"{place} does not write the {loss.kind}"
        return None

    def _answer(self, turns: Turns, prompt: int) -> WrittenConversation | str:
        """What follows a prompt of so many messages."""
        if turns.messages[prompt]["role"] != "assistant":
            return f"message {prompt + 1}, with which the answer begins, is of {turns.messages[prompt]['role']}"
        before = turns.template.render(turns.messages[:prompt], prompt=True)
        chosen = self._chosen_turns(turns) if self._chooses(turns.messages) else None
        if isinstance(chosen, str):
            return chosen
        spans = turns.spans() if chosen is None else chosen.spans
        if not turns.text.startswith(before):
            return "the template writes the prompt otherwise where an answer follows it"
        spans = [(max(start, len(before)), end) for start, end in spans if end > len(before)]
        return WrittenConversation(text=turns.text, spans=spans, prompt=before)

    def _chooses(self, messages: list[Message]) -> bool:
        """Whether messages say themselves if they are trained on."""
        if self._reads.message_train is not None or self._reads.message_weight is not None:
            return True
        return any(WEIGHT in message for message in messages)

    def _chosen_turns(self, turns: Turns) -> WrittenConversation | str:
        """The turns that their messages say are trained on, or else `train_on`, with the weights of the messages."""
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
            return "no message in it is trained on"
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
    """Return a conversation as the template writes it, and what it leaves out; labels: as `find_losses` says.

    Templates differ in how they take contents and arguments: where one refuses a form, or writes nothing of a message,
    the others are tried. Raises TemplateRefusal where all are refused.
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
    """Return a conversation up to where an answer begins, in the first form of which the template writes all messages.

    Raises TemplateRefusal where it refuses all forms or leaves out a message.
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
    """A conversation as it is, which is what transformers gives to templates, and with contents and arguments in other
    forms."""
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
    """A conversation whose calls have their arguments as JSON text."""
    found = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            if isinstance(function.get("arguments"), dict):
                function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            calls.append({**call, "function": function} if "function" in call else function)
        found.append({**message, "tool_calls": calls} if calls else message)
    return found
