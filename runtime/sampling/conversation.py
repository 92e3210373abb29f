"""Tokens of a conversation with an environment: each text is tokenized once, and what the model wrote never again."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from attrs import evolve, frozen

from xtrain.runtime.base.bounded import BeyondBounds, Bounded
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.chat.calls import CallForm
from xtrain.runtime.feed.chat.template import ChatTemplate, TemplateRefusal
from xtrain.runtime.feed.chat.writer import written_prompt
from xtrain.runtime.feed.records import Message
from xtrain.runtime.nn.texts import Chat, TextEnds

SAID: Final = chr(0xF0100)
"""Private-use character for the model's turn, which no template has."""
_ASKED: Final[Message] = {"role": "user", "content": "a"}


class EpisodeWriter:
    """Renderer of the messages of an environment, up to where the next turn of the model begins.

    What follows a turn must not depend on it. So it is rendered after a placeholder, as the text after the end of the
    turn; a template may need the calls of a turn before answers of tools, and may leave out its text then.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def __call__(self, asked: tuple[bool, list[Message]]) -> str:
        """Return the text of messages at the beginning (True) or after a turn. Raises TemplateRefusal."""
        begins, messages = asked
        if begins:
            return written_prompt(self._template, messages)
        if messages[0]["role"] != "tool":
            return self._after({"role": "assistant", "content": SAID}, messages)
        calls = [
            {"id": m["tool_call_id"], "type": "function", "function": {"name": m["name"], "arguments": {}}}
            for m in messages
        ]
        with_calls: Message = {"role": "assistant", "content": SAID, "tool_calls": calls}
        refusal: TemplateRefusal | None = None
        for turn in ({"role": "assistant", "content": SAID}, with_calls, {**with_calls, "content": ""}):
            try:
                return self._after(turn, messages)
            except TemplateRefusal as problem:
                refusal = problem
        assert refusal is not None
        raise refusal

    def _after(self, turn: Message, messages: list[Message]) -> str:
        alone = self._template.render([_ASKED, turn])
        whole = self._template.render([_ASKED, turn, *messages], prompt=True)
        if turn["content"]:
            if alone.count(SAID) != 1 or whole.count(SAID) != 1:
                raise TemplateRefusal("the template does not write the text of a turn once")
            alone, whole = (text.partition(SAID)[2] for text in (alone, whole))
        end = alone.rstrip()
        if not whole.startswith(end):
            raise TemplateRefusal("what the template writes before a turn's end depends on what follows it")
        rest = whole[len(end) :]
        for number, message in enumerate(messages):
            if message["content"].strip() not in rest:  # left out, or written in another form, such as JSON
                other = [*messages[:number], {**message, "content": f"{message['content']} b"}, *messages[number + 1 :]]
                if self._template.render([_ASKED, turn, *other], prompt=True).endswith(rest):
                    raise TemplateRefusal(f"the template does not write messages of the role {message['role']}")
        return rest


@frozen(kw_only=True, eq=False)
class Conversations:
    """Conversations of one dataset with an environment. ends: of a turn. form: of calls; None without tools. around:
    what the template writes before and after a single user message of the dataset; None if unknown. writer: in a
    process of its own."""

    chat: Chat
    ends: TextEnds
    form: CallForm | None
    around: tuple[str, str] | None
    writer: Bounded[tuple[bool, list[Message]], str]

    @classmethod
    def of(cls, chat: Chat, tools: Sequence[Any]) -> "Conversations":
        """Prepare the conversations. Raises DataError if the template cannot write them."""
        mark: Message = {"role": "user", "content": SAID}
        plain = Bounded(partial(written_prompt, chat.template))
        chat = evolve(chat, template=evolve(chat.template, tools=list(tools) or None))
        writer, form = Bounded(EpisodeWriter(chat.template)), None
        names = [tool["function"]["name"] for tool in tools]
        replies: list[Message] = [{"role": "user", "content": "b"}]
        replies += [{"role": "tool", "name": name, "tool_call_id": "000000000", "content": "b"} for name in names[:1]]
        try:
            (alone,) = plain.map([[mark]])
            opening, *_ = writer.map([(True, [mark]), *((False, [reply]) for reply in replies)])
            if missing := [name for name in names if name not in opening]:
                raise TemplateRefusal(f"it does not tell the model of the tool `{missing[0]}`")
            if tools:
                (form,) = Bounded(CallForm.of).map([chat.template])
        except (TemplateRefusal, BeyondBounds) as problem:
            remedy = "Name a template that writes conversations of several turns, with `tools` if there are any."
            message = f"an environment cannot use {chat.template.origin}: {problem}"
            raise DataError(message, remedy=remedy) from problem
        before, found, after = chat.tokenizer.decode(chat.begun(alone)).partition(SAID)
        closing = chat.closing
        if form is not None:  # the text of a turn has no special tokens
            opening = form.opening
            for name in chat.tokenizer.special_names:
                opening = opening.replace(name, "")
            form = evolve(form, opening=opening.strip())
        ends = TextEnds.of(chat.tokenizer, [closing] if closing else [])
        around = (before, after) if found else None
        return cls(chat=chat, ends=ends, form=form, around=around, writer=writer)

    def question(self, prompt: str) -> str:
        """Return the user message of a prompt; the whole prompt as the template writes it, if there are others."""
        if self.around is None:
            return prompt
        before, after = self.around
        fits = len(prompt) >= len(before) + len(after) and prompt.startswith(before) and prompt.endswith(after)
        return prompt[len(before) : len(prompt) - len(after)] if fits else prompt

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens up to where the first turn begins. Raises DataError."""
        return self.chat.begun(self._written(True, messages))

    def following(self, messages: Sequence[Message], tokens: Sequence[int], text: str) -> list[int]:
        """Return the tokens between a turn and the next one. tokens, text: of the turn. Raises DataError.

        The last token of a turn may contain more than its end; if the template writes the same, it is not repeated.
        """
        written = self._written(False, messages)
        if tokens[-1] not in self.ends.tokens:
            after = self.chat.tokenizer.decode(tokens)[len(text) :]
            beyond = next((after[len(end) :] for end in self.ends.texts if after.startswith(end)), "")
            written = written.removeprefix(beyond)
        return self.chat.tokenizer.encode_rendered([written])[0].ids.tolist() if written else []

    def _written(self, begins: bool, messages: Sequence[Message]) -> str:
        try:
            return self.writer.map([(begins, self._clean(messages))])[0]
        except (TemplateRefusal, BeyondBounds) as refusal:
            raise DataError(f"{self.chat.template.origin}: {refusal}") from refusal

    def _clean(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in which no text reads as a special token or as a marker between turns: a space follows its
        first character. Half a surrogate pair, which has no UTF-8, becomes a question mark."""

        def broken(text: str) -> str:
            text = text.encode(errors="replace").decode()
            return self.chat.reserved.sub(lambda found: f"{found[0][:1]} {found[0][1:]}", text)

        return [{**message, "content": broken(message["content"])} for message in messages]
