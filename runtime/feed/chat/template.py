"""Chat templates: Jinja text that renders a conversation, in the environment of transformers.

`compiled` renders plain strings; `tracing` renders `TracedText`, so that the origin of every character is known. In the
built-in templates the words of the assistant are between `generation` and `endgeneration`.
"""

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import jinja2
from attrs import frozen
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from xtrain.dsl.schema.data import is_template_text
from xtrain.plan.data import markers
from xtrain.regular_files import read_regular
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.chat.traced_text import (
    CLOSES,
    OPENS,
    Run,
    TracedText,
    guessed,
    joined,
    joined_by,
    plain,
    runs_of,
    spelled,
    to_json,
    traced,
)
from xtrain.runtime.feed.records import Message, strings
from xtrain.runtime.feed.tokenizers import TextTokenizer

_CHATML = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_LLAMA3 = """
{{- '<|begin_of_text|>' if bos_token == '<|begin_of_text|>' -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content | trim + '<|eot_id|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content | trim + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

_PLAIN = """
{%- for message in messages -%}
    {{- '\\n\\n' if not loop.first -}}
    {{- message.role | capitalize + ':' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- ' ' + message.content + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- ' ' + message.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '\\n\\nAssistant:' -}}
{%- endif -%}
"""

TEMPLATES = {"chatml": _CHATML, "llama3": _LLAMA3, "plain": _PLAIN}


# Date that templates get: with the real one, the same data would be tokenized differently tomorrow. It is the default
# of common templates.
TODAY = datetime(2024, 7, 26)
OPEN, CLOSE = "_generation_opens", "_generation_closes"
# Filters that change a text in ways that are not traced.
_GUESSED = (
    "center", "e", "escape", "forceescape", "format", "indent", "pprint", "replace", "safe", "striptags", "title",
    "truncate", "urlencode", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip


class _Generation(Extension):
    """Tag `{% generation %}…{% endgeneration %}`: its block between the values of two variables, in a scope of
    its own."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens, closes = (nodes.Output([nodes.Name(name, "load")]).set_lineno(line) for name in (OPEN, CLOSE))
        # In transformers the block is a macro: variables set inside are not visible outside.
        return [opens, nodes.Scope(body).set_lineno(line), closes]


class _Code(CodeGenerator):
    """Code generator that leaves constants to be computed during rendering, which has limits."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if isinstance(node, nodes.TemplateData):
            return super()._output_child_to_const(node, frame, finalize)
        raise nodes.Impossible


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Code


class _TracingCode(_Code):
    """Code generator that writes values, and concatenates with `~`, by functions of the environment."""

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("(environment.spelled(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("))")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(environment.spelled, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _TracingEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _TracingCode
    concat = staticmethod(joined)
    spelled = staticmethod(spelled)

    intercepted_binops = frozenset({"%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return guessed(super().call_binop(context, operator, left, right), [left, right])

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps `format`.
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if not isinstance(text, str):
            return super().call(__context, __obj, *args, **kwargs)
        if __obj.__name__ == "join" and len(args) == 1:
            return joined_by(text, args[0])
        result = super().call(__context, __obj, *args, **kwargs)
        return guessed(result, [text, args, kwargs])


def _environment(kind: type[ImmutableSandboxedEnvironment]) -> ImmutableSandboxedEnvironment:
    environment = kind(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


@lru_cache(maxsize=16)
def compiled(text: str) -> jinja2.Template:
    """Compile a template as transformers does. Raises jinja2.TemplateSyntaxError."""
    environment = _environment(_Environment)
    environment.filters["tojson"] = _to_json
    return environment.from_string(text)


@lru_cache(maxsize=16)
def tracing(text: str) -> jinja2.Template:
    """Compile a template that keeps the origins of traced strings. Raises jinja2.TemplateSyntaxError."""
    environment = _environment(_TracingEnvironment)
    environment.filters |= {name: _guessing(FILTERS[name]) for name in _GUESSED}
    environment.filters["tojson"] = to_json
    environment.filters["join"] = _joining
    environment.filters["string"] = spelled
    return environment.from_string(text)


def _guessing(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter_)  # keeps the marks for the further arguments that Jinja passes
    def guess(*args: Any, **kwargs: Any) -> Any:
        return guessed(filter_(*args, **kwargs), [args, kwargs])

    return guess


@jinja2.pass_environment
def _joining(environment: jinja2.Environment, value: Any, d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return joined_by(str(d), map(str, value))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    # Jinja's own filter escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


# Names of reasoning; most templates read the first. transformers copies it in the same way (`_alias_reasoning_fields`
# of 5.24).
REASONING = ("reasoning_content", "thinking", "reasoning")
LARGEST = 1 << 22
"""Largest size of a template in bytes."""
Arguments = tuple[tuple[str, Any], ...]
TOOLS = -1
"""Message number of the definitions of functions."""


class TemplateRefusal(Exception):
    """A template cannot write a conversation; the text is the reason."""


@frozen
class TextSource:
    """A text or number of a conversation."""

    message: int
    """Message number, from 0, or TOOLS."""
    path: tuple[str | int, ...]
    """Keys and indices that lead to it in the message, or in the list of tools."""
    text: str


@frozen
class SourceSegment:
    """Characters `start` to `stop` of a rendered conversation, which come from one source."""

    start: int
    stop: int
    source: int
    place: int
    """Position of the first character in the source, or SOMEWHERE."""


@frozen(kw_only=True)
class ChatTrace:
    """A rendered conversation with the origins of its characters."""

    text: str
    sources: list[TextSource]
    segments: list[SourceSegment]
    """In order."""
    pieces: list[int]
    """Start of each expression or text of the template, in order."""
    spans: list[tuple[int, int]]
    """Characters between `{% generation %}` and `{% endgeneration %}`, in order."""


@frozen(kw_only=True)
class ChatTemplate:
    """Chat template with the tokenizer's names of bos and eos. Can be pickled.

    Raises DataError if it is no Jinja template.
    """

    text: str
    origin: str
    bos_token: str
    eos_token: str
    arguments: Arguments = ()
    """Further values for the template, by name."""
    tools: list[Any] | None = None
    """Definitions of the functions that the assistant may call in the rendered conversations."""

    def __attrs_post_init__(self) -> None:
        try:
            compiled(self.text)
            tracing(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"invalid chat template: {error.message}", path=self.origin, line=error.lineno) from error
        except RecursionError as error:
            raise DataError("invalid chat template: nested too deep", path=self.origin) from error
        except Exception as error:  # of Python's compiler, which has limits of its own
            raise DataError(f"invalid chat template: {_reason(error)}", path=self.origin) from error

    @property
    def marks(self) -> bool:
        """True if the template marks the words of the assistant itself."""
        return re.search(r"\{%-?\+?\s*generation\b", self.text) is not None

    @property
    def markers(self) -> frozenset[str]:
        """Markers between turns that can be seen in the template: `<|im_start|>` and the like."""
        return frozenset(markers(self.text))

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template reads in addition to the conversation; these may be arguments."""
        tree = compiled(self.text).environment.parse(self.text)
        known = {*compiled(self.text).globals, *self._variables([], None, False)} - set(dict(self.arguments))
        return frozenset(find_undeclared_variables(tree) - known)

    def render(self, messages: list[Message], *, prompt: bool = False) -> str:
        """Render a conversation; with `prompt`, it ends with the text that precedes the next turn of the assistant.

        Raises TemplateRefusal if the template does not accept the conversation.
        """
        return "".join(_written(compiled(self.text), self._variables(_aliased(messages), self.tools, prompt)))

    def trace(self, messages: list[Message], *, prompt: bool = False) -> ChatTrace:
        """Render a conversation as `render` does, with the origins of its characters. Raises TemplateRefusal.

        The text differs from `render` if the template inspects the types of its values.
        """
        sources: list[TextSource] = []
        # Tools first, so that sources have the same numbers in every prefix of a conversation.
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
        raise TemplateRefusal("the template calls itself without end") from None
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it may fail in any way
        raise TemplateRefusal(f"the template refuses it: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _aliased(messages: list[Message]) -> list[Message]:
    """Return messages whose reasoning also has the other names that templates read."""
    if not any(name in message for message in messages for name in REASONING):
        return messages
    aliased = []
    for message in messages:
        thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
        aliased.append(message if thought is None else {"thinking": thought, **message, "reasoning_content": thought})
    return aliased


def _marked_message(message: Message, index: int, sources: list[TextSource]) -> Message:
    return {key: value if key == "role" else _marked(value, index, (key,), sources) for key, value in message.items()}


def _marked(value: Any, message: int, path: tuple[str | int, ...], sources: list[TextSource]) -> Any:
    """Return a value of a conversation with traced texts and numbers, including keys of arguments."""
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
    """Load a template: `auto` (the tokenizer's own), a name in TEMPLATES, a file relative to `base`, or its text.

    arguments: further values for the template. Raises DataError if there is no such template, it is no Jinja template,
    or it does not read an argument.
    """
    if name == "auto":
        text, origin = tokenizer.chat_template, f"chat template of tokenizer {tokenizer.name}"
        if text is None:
            remedy = f"Set `template` to a file, or to one of: {', '.join(TEMPLATES)}."
            raise DataError(f"tokenizer `{tokenizer.name}` has no chat template", remedy=remedy)
    elif name in TEMPLATES:
        text, origin = TEMPLATES[name], f"chat template {name}"
    elif is_template_text(name):
        text, origin = name, "chat template of the spec"
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
    """Return a pattern of what no content may contain: names of special tokens, and the template's markers between
    turns."""
    names = {*tokenizer.special_names, *template.markers}
    # The longest first: of two that begin alike, that is the one that stands there.
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name))))


def unused(messages: list[Message], count: int) -> list[str]:
    """Return `count` private-use characters that no string of the conversation contains."""
    present = "".join(strings(messages))
    characters: list[str] = []
    code = 0xF0000
    while len(characters) < count:
        if chr(code) not in present:
            characters.append(chr(code))
        code += 1
    return characters
