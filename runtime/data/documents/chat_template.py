"""Chat templates: Jinja text that writes a conversation out, in the surroundings that templates are written for."""

import json
import re
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from attrs import frozen
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ....planner.data.tokenizer_folder import markers
from ..errors import DataError
from ..records.records import Message
from ..records.texts import strings
from .chat_builtin import TEMPLATES
from .tokenizers import TextTokenizer

# What a template is told of the day: with the real one, the same data would be other tokens tomorrow. It is the one
# that templates have as their own default.
TODAY = datetime(2024, 7, 26)
_OPEN, _CLOSE = "_generation_opens", "_generation_closes"


class TemplateRefusal(Exception):
    """A template cannot write a conversation, for the reason that this text gives."""


@frozen(kw_only=True)
class Rendered:
    """A conversation written out."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Characters between `{% generation %}` and `{% endgeneration %}`, start and end of each, in order."""


@frozen(kw_only=True)
class ChatTemplate:
    """A template and the names that a tokenizer has for bos and eos. It can be pickled.

    Raises DataError if it is no Jinja template.
    """

    text: str
    origin: str
    bos_token: str
    eos_token: str
    tools: list[Any] | None = None
    """Definitions of the functions that the assistant may call in the conversations it writes."""

    def __attrs_post_init__(self) -> None:
        try:
            _compiled(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"no chat template: {error.message}", path=self.origin, line=error.lineno) from error

    @property
    def marks(self) -> bool:
        """Whether it says itself what the assistant says."""
        return re.search(r"\{%-?\+?\s*generation\b", self.text) is not None

    @property
    def markers(self) -> frozenset[str]:
        """What it sets turns apart with, as far as that can be seen in it: `<|im_start|>` and the like."""
        return frozenset(markers(self.text))

    def render(self, messages: list[Message], *, prompt: bool = False) -> Rendered:
        """Write a conversation out; with `prompt`, what comes before the next turn of the assistant stands at the end.

        Raises TemplateRefusal for one that the template does not take.
        """
        if not self.marks:
            return Rendered(text=self._write(messages, prompt), spans=())
        opens, closes = unused(messages, 2)
        found = _without_marks(self._write(messages, prompt, opens, closes), opens, closes)
        # Where a template trims what it has marked, the marks themselves would change what is written.
        if self.text not in TEMPLATES.values() and found.text != self._write(messages, prompt):
            raise TemplateRefusal("the template changes what it has marked with {% generation %}")
        return found

    def _write(self, messages: list[Message], prompt: bool, opens: str = "", closes: str = "") -> str:
        try:
            return _compiled(self.text).render(
                messages=messages, add_generation_prompt=prompt, bos_token=self.bos_token, eos_token=self.eos_token,
                tools=self.tools, documents=None, **{_OPEN: opens, _CLOSE: closes},
            )  # fmt: skip
        except RecursionError:
            raise TemplateRefusal("the template never ends") from None
        except Exception as error:  # a template is a program: it may fail in any way
            raise TemplateRefusal(f"the template refuses it: {error}") from error


def load_template(name: str, tokenizer: TextTokenizer, base: Path) -> ChatTemplate:
    """`auto` (the tokenizer's own), the name of one in TEMPLATES, or a file, relative to `base`.

    Raises DataError if there is none, or it is no Jinja template.
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
            text, origin = path.read_text(encoding="utf-8"), str(path)
        except FileNotFoundError as error:
            remedy = f"Name a file, or one of: auto, {', '.join(TEMPLATES)}."
            raise DataError("no such chat template", path=path, remedy=remedy) from error
        except (OSError, ValueError) as error:
            raise DataError(f"cannot be read: {error}", path=path) from error
    names = {token: written for written, token in tokenizer.special_names.items()}
    bos = names[tokenizer.bos] if tokenizer.has_bos else ""
    return ChatTemplate(text=text, origin=origin, bos_token=bos, eos_token=names[tokenizer.eos])


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


def _without_marks(text: str, opens: str, closes: str) -> Rendered:
    parts = re.split(f"([{opens}{closes}])", text)
    texts: list[str] = []
    spans: list[tuple[int, int]] = []
    at = start = 0
    for part in parts:
        if part == opens:
            start = at
        elif part == closes:
            spans.append((start, at))
        else:
            texts.append(part)
            at += len(part)
    return Rendered(text="".join(texts), spans=tuple(spans))


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: what stands between comes out between two private characters."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [nodes.Output([nodes.Name(name, "load")]).set_lineno(line) for name in (_OPEN, _CLOSE)]
        return [marks[0], *body, marks[1]]


@lru_cache(maxsize=16)
def _compiled(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = TODAY.strftime
    return environment.from_string(text)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
):
    # Jinja's own escapes signs that HTML has a use for.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
