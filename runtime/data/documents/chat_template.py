"""Chat templates: Jinja text that writes a conversation out, in the surroundings that templates are written for."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from attrs import frozen
from jinja2.meta import find_undeclared_variables

from xtrain.planner.data.tokenizer_folder import markers
from xtrain.regular_files import read_regular
from xtrain.runtime.data.documents.chat_builtin import TEMPLATES
from xtrain.runtime.data.documents.chat_environment import CLOSE, OPEN, compiled, tracing
from xtrain.runtime.data.documents.chat_trace import CLOSES, OPENS, Run, TracedText, joined, plain, runs_of, traced
from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.records.records import Message
from xtrain.runtime.data.records.texts import strings

# Names that reasoning goes by, the first is the one that most templates read. transformers copies it as done here
# (`_alias_reasoning_fields` of 5.24).
REASONING = ("reasoning_content", "thinking", "reasoning")
LARGEST = 1 << 22
"""Bytes of a template."""
Arguments = tuple[tuple[str, Any], ...]
TOOLS = -1
"""In place of the number of a message: the definitions of functions."""


class TemplateRefusal(Exception):
    """A template cannot write a conversation, for the reason that this text gives."""


@frozen
class TextSource:
    """A text or number of a conversation."""

    message: int
    """Its number, from 0, or TOOLS."""
    path: tuple[str | int, ...]
    """Keys and indices that lead to it in the message, or in the list of tools."""
    text: str


@frozen
class SourceSegment:
    """Characters `start` to `stop` of a conversation as it is written out, which come from one source."""

    start: int
    stop: int
    source: int
    place: int
    """The first of the characters in the source, or SOMEWHERE."""


@frozen(kw_only=True)
class ChatTrace:
    """A conversation written out, and where its characters come from."""

    text: str
    sources: list[TextSource]
    segments: list[SourceSegment]
    """In order."""
    pieces: list[int]
    """Where each expression or text of the template begins, in order."""
    spans: list[tuple[int, int]]
    """Characters between `{% generation %}` and `{% endgeneration %}`, in order."""


@frozen(kw_only=True)
class ChatTemplate:
    """A template and the names that a tokenizer has for bos and eos. It can be pickled.

    Raises DataError if it is no Jinja template.
    """

    text: str
    origin: str
    bos_token: str
    eos_token: str
    arguments: Arguments = ()
    """What else the template is given, by name."""
    tools: list[Any] | None = None
    """Definitions of the functions that the assistant may call in the conversations it writes."""

    def __attrs_post_init__(self) -> None:
        try:
            compiled(self.text)
            tracing(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"no chat template: {error.message}", path=self.origin, line=error.lineno) from error
        except RecursionError as error:
            raise DataError("no chat template: nested too deep", path=self.origin) from error
        except Exception as error:  # of Python's compiler, which has limits of its own
            raise DataError(f"no chat template: {_reason(error)}", path=self.origin) from error

    @property
    def marks(self) -> bool:
        """Whether it says itself what the assistant says."""
        return re.search(r"\{%-?\+?\s*generation\b", self.text) is not None

    @property
    def markers(self) -> frozenset[str]:
        """What it sets turns apart with, as far as that can be seen in it: `<|im_start|>` and the like."""
        return frozenset(markers(self.text))

    @property
    def variables(self) -> frozenset[str]:
        """What it reads besides the conversation: the names that may have arguments."""
        tree = compiled(self.text).environment.parse(self.text)
        known = {*compiled(self.text).globals, *self._variables([], None, False)} - set(dict(self.arguments))
        return frozenset(find_undeclared_variables(tree) - known)

    def render(self, messages: list[Message], *, prompt: bool = False) -> str:
        """Write a conversation out; with `prompt`, what comes before the next turn of the assistant stands at the end.

        Raises TemplateRefusal for one that the template does not take.
        """
        return "".join(_written(compiled(self.text), self._variables(_aliased(messages), self.tools, prompt)))

    def trace(self, messages: list[Message], *, prompt: bool = False) -> ChatTrace:
        """Write a conversation out as `render` does, with the origins of its characters. The text is another where a
        template looks into the types of its values. Raises TemplateRefusal.
        """
        sources: list[TextSource] = []
        # Tools first: so sources have the same numbers in every beginning of a conversation.
        tools = None if self.tools is None else _marked(self.tools, TOOLS, (), sources)
        marked = [_marked_message(message, index, sources) for index, message in enumerate(messages)]
        variables = self._variables(_aliased(marked), tools, prompt)
        variables |= {name: TracedText("", ((0, mark, 0),)) for name, mark in ((OPEN, OPENS), (CLOSE, CLOSES))}
        parts = _written(tracing(self.text), variables)
        pieces, at = [], 0
        for part in parts:
            pieces.append(at)
            at += len(part)
        whole = joined(parts)
        segments, spans = _placed(runs_of(whole))
        return ChatTrace(text=plain(whole), sources=sources, segments=segments, pieces=pieces, spans=spans)

    def _variables(self, messages: list[Message], tools: list[Any] | None, prompt: bool) -> dict[str, Any]:
        return {
            **dict(self.arguments), "messages": messages, "add_generation_prompt": prompt, "bos_token": self.bos_token,
            "eos_token": self.eos_token, "tools": tools, "documents": None, OPEN: "", CLOSE: "",
        }  # fmt: skip


def _written(template: jinja2.Template, variables: dict[str, Any]) -> list[str]:
    try:
        return list(template.generate(**variables))
    except RecursionError:
        raise TemplateRefusal("the template never ends") from None
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it may fail in any way
        raise TemplateRefusal(f"the template refuses it: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _aliased(messages: list[Message]) -> list[Message]:
    """Messages whose reasoning goes by the names that templates read as well."""
    if not any(name in message for message in messages for name in REASONING):
        return messages
    found = []
    for message in messages:
        thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
        found.append(message if thought is None else {"thinking": thought, **message, "reasoning_content": thought})
    return found


def _marked_message(message: Message, index: int, sources: list[TextSource]) -> Message:
    return {key: value if key == "role" else _marked(value, index, (key,), sources) for key, value in message.items()}


def _marked(value: Any, message: int, path: tuple[str | int, ...], sources: list[TextSource]) -> Any:
    """A value of a conversation whose texts and numbers are traced, keys of arguments included."""
    if isinstance(value, Mapping):
        named = path[-1:] in (("arguments",), ("properties",))
        return {
            _marked(key, message, (*path, key), sources) if named else key: _marked(
                inner, message, (*path, key), sources
            )
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_marked(inner, message, (*path, at), sources) for at, inner in enumerate(value)]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    sources.append(TextSource(message, path, str(value)))
    return traced(value, len(sources) - 1)


def _placed(runs: tuple[Run, ...]) -> tuple[list[SourceSegment], list[tuple[int, int]]]:
    segments: list[SourceSegment] = []
    spans: list[tuple[int, int]] = []
    at, opened = 0, None
    for length, source, place in runs:
        if source >= 0:
            segments.append(SourceSegment(at, at + length, source, place))
        elif source == OPENS:
            opened = at
        elif source == CLOSES and opened is not None:
            spans.append((opened, at))
            opened = None
        at += length
    return segments, spans


def load_template(name: str, tokenizer: TextTokenizer, base: Path, arguments: Arguments = ()) -> ChatTemplate:
    """`auto` (the tokenizer's own), the name of one in TEMPLATES, or a file, relative to `base`.

    arguments: what else the template is given. Raises DataError if there is no such template, it is no Jinja template,
    or it does not read an argument.
    """
    if name == "auto":
        text, origin = tokenizer.chat_template, f"chat template of tokenizer {tokenizer.name}"
        if text is None:
            remedy = f"Set `template` to a file, or to one of: {', '.join(TEMPLATES)}."
            raise DataError(f"tokenizer `{tokenizer.name}` has no chat template", remedy=remedy)
    elif name in TEMPLATES:
        text, origin = TEMPLATES[name], f"chat template {name}"
    else:
        path = base / name
        try:
            text, origin = read_regular(path, LARGEST).decode(), str(path)
        except FileNotFoundError as error:
            remedy = f"Name a file, or one of: auto, {', '.join(TEMPLATES)}."
            raise DataError("no such chat template", path=path, remedy=remedy) from error
        except (OSError, ValueError) as error:
            raise DataError(f"cannot be read: {error}", path=path) from error
    names = {token: written for written, token in tokenizer.special_names.items()}
    bos = names[tokenizer.bos] if tokenizer.has_bos else ""
    template = ChatTemplate(
        text=text, origin=origin, bos_token=bos, eos_token=names[tokenizer.eos], arguments=tuple(arguments)
    )
    for argument, _ in template.arguments:
        if argument not in template.variables:
            remedy = "Remove it, or write its name as the template does."
            raise DataError(f"the template does not read the argument `{argument}`", path=origin, remedy=remedy)
    return template


def reserved(tokenizer: TextTokenizer, template: ChatTemplate) -> re.Pattern[str]:
    """What no content may spell: names of special tokens, and what the template sets turns apart with."""
    names = {*tokenizer.special_names, *template.markers}
    # The longest first: of two that begin alike, that is the one that stands there.
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name))))


def unused(messages: list[Message], count: int) -> list[str]:
    """Some private characters that no string of a conversation has."""
    present = "".join(strings(messages))
    found: list[str] = []
    code = 0xF0000
    while len(found) < count:
        if chr(code) not in present:
            found.append(chr(code))
        code += 1
    return found
