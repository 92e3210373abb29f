"""What a template makes of conversations: their text, and which characters of that are to be predicted."""

import re
from functools import cached_property
from typing import Any

from attrs import evolve, frozen

from ..records.records import Conversation, Message, Reads
from ..records.texts import strings
from .chat_template import ChatTemplate, TemplateRefusal, reserved
from .chat_turns import Span, assistant_spans, turns_of_assistant
from .tokenizers import TextTokenizer

LONGEST_CONVERSATION = 1 << 24  # characters


@frozen(kw_only=True)
class WrittenConversation:
    """A conversation as text. prompt: its beginning, of which nothing is predicted, where that is set apart."""

    text: str
    spans: list[Span]
    """Characters that are predicted."""
    weights: list[float] | None = None
    """Of each of them the weight of its loss."""
    prompt: str = ""


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
        if sum(len(message["content"]) for message in messages) > LONGEST_CONVERSATION:
            return f"a conversation of more than {LONGEST_CONVERSATION:,} characters"
        template = self._template if tools is None else evolve(self._template, tools=tools)
        try:
            if conversation.prompt:
                found = self._answer(template, messages, conversation.prompt)
            elif self._reads.message_train is not None or self._reads.message_weight is not None:
                found = self._chosen_turns(template, messages)
            elif self._reads.train_on == "all":
                text = template.render(messages).text
                found = WrittenConversation(text=text, spans=[(0, len(text))])
            else:
                text, spans = assistant_spans(template, messages, last=self._reads.train_on == "last")
                found = WrittenConversation(text=text, spans=spans)
        except TemplateRefusal as refusal:
            return str(refusal)
        if isinstance(found, str):
            return found
        if (left_out := _unwritten(template, messages, found.text)) is not None:
            return left_out
        if any(found.text[start:end].strip() for start, end in found.spans):
            return found
        return "the assistant says nothing in it"

    def _answer(self, template: ChatTemplate, messages: list[Message], prompt: int) -> WrittenConversation | str:
        """What follows a prompt of so many messages."""
        if messages[prompt]["role"] != "assistant":
            return f"message {prompt + 1}, with which the answer begins, is of {messages[prompt]['role']}"
        before = template.render(messages[:prompt], prompt=True).text
        text, spans = assistant_spans(template, messages)
        if not text.startswith(before):
            return "the template writes the prompt otherwise where an answer follows it"
        spans = [(max(start, len(before)), end) for start, end in spans if end > len(before)]
        return WrittenConversation(text=text, spans=spans, prompt=before)

    def _chosen_turns(self, template: ChatTemplate, messages: list[Message]) -> WrittenConversation | str:
        """The turns that their messages say are trained on, or else `train_on`, with the weights of the messages."""
        text, turns = turns_of_assistant(template, messages)
        train, weight = self._reads.message_train, self._reads.message_weight
        spans, weights = [], []
        for index, parts in turns.items():
            flag = messages[index].get(train) if train is not None else None
            if flag is None:
                flag = self._reads.train_on != "last" or index == max(turns)
            share = messages[index].get(weight) if weight is not None else None
            if flag:
                spans += parts
                weights += [1.0 if share is None else float(share)] * len(parts)
        if not spans:
            return "no message in it is trained on"
        return WrittenConversation(text=text, spans=spans, weights=None if weight is None else weights)

    @cached_property
    def _reserved(self) -> re.Pattern[str]:
        assert self._template is not None
        return reserved(self._tokenizer, self._template)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_reserved"}


def _unwritten(template: ChatTemplate, messages: list[Message], text: str) -> str | None:
    """What of a conversation a template has left out that has no word for it, as `text` is what it writes without it
    too: calls of functions, or definitions of tools."""
    calls = [number for number, message in enumerate(messages, start=1) if message.get("tool_calls")]
    without = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    if calls and _writes_alike(template, without, text):
        return f"message {calls[0]}: the template does not write its calls of functions"
    if template.tools and _writes_alike(evolve(template, tools=None), messages, text):
        return "the template does not write the definitions of tools"
    return None


def _writes_alike(template: ChatTemplate, messages: list[Message], text: str) -> bool:
    try:
        return template.render(messages).text == text
    except TemplateRefusal:
        return False
