"""What a user says, written out as the conversations that a model has learned from."""

import re
from functools import partial

from attrs import frozen

from xtrain.planner.plan import Plan
from xtrain.runtime.data.documents.bounded import BeyondBounds, Bounded
from xtrain.runtime.data.documents.chat_template import Arguments, ChatTemplate, TemplateRefusal, reserved, unused
from xtrain.runtime.data.documents.chat_writer import written_prompt, written_turns
from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.records.records import Message, named_values


def planned_template(plan: Plan) -> str:
    """The template of the conversations that a plan reads, `auto` where it reads none or by several templates."""
    reads = [node.args["reads"] for node in plan.nodes if node.op == "setup.data"]
    found = {each["template"] for each in reads if "template" in each}
    return found.pop() if len(found) == 1 else "auto"


def planned_arguments(plan: Plan, template: str) -> Arguments:
    """Return what a template is given for all conversations that a plan reads by it; () where these differ."""
    reads = [node.args["reads"] for node in plan.nodes if node.op == "setup.data"]
    found = [named_values(each.get("template_arguments", {})) for each in reads if each.get("template") == template]
    return found[0] if found and all(each == found[0] for each in found) else ()


@frozen(kw_only=True)
class Chat:
    """A template, and the turn of the system that conversations begin with; "": none."""

    template: ChatTemplate
    tokenizer: TextTokenizer
    system: str = ""

    def prompt(self, said: str) -> list[int]:
        """The tokens of a conversation in which a user has said something, up to where the answer begins.

        Raises DataError where the template does not take it or leaves it out, and for texts that spell a special token:
        such turns are in no data either.
        """
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": said})
        for message in messages:
            if (spelt := self._reserved.search(message["content"])) is not None:
                raise DataError(f"the {message['role']} says the special token {spelt[0]}")
        try:
            (text,) = Bounded(partial(written_prompt, self.template)).map([messages])
        except (TemplateRefusal, BeyondBounds) as refusal:
            raise DataError(f"{self.template.origin}: {refusal}") from refusal
        ids = self.tokenizer.encode_rendered([text])[0].ids.tolist()
        begun = not self.tokenizer.has_bos or ids[:1] == [self.tokenizer.bos]
        return ids if begun else [self.tokenizer.bos, *ids]

    @property
    def closing(self) -> str:
        """What the template writes behind an answer; "" where it writes nothing, or in ways that leave it open."""
        question: Message = {"role": "user", "content": "a"}
        (answer,) = unused([question], 1)
        said: list[Message] = [question, {"role": "assistant", "content": answer}]
        try:
            (turn,) = Bounded(self._said).map([said])
        except (TemplateRefusal, BeyondBounds):
            return ""
        return turn.partition(answer)[2].strip()

    def _said(self, messages: list[Message]) -> str:
        turns, _ = written_turns(self.template, messages, self._reserved)
        return "".join(turns.text[start:end] for start, end in turns.spans())

    @property
    def _reserved(self) -> re.Pattern[str]:
        return reserved(self.tokenizer, self.template)
