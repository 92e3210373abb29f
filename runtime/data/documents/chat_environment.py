"""The Jinja environments that chat templates run in: as transformers has it, and the same with traced strings."""

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from xtrain.runtime.data.documents.chat_trace import guessed, joined, joined_by, spelled, to_json

# The date that templates are given: with the real one, the same data would be other tokens tomorrow. It is the one that
# templates have as their own default.
TODAY = datetime(2024, 7, 26)
OPEN, CLOSE = "_generation_opens", "_generation_closes"
# Filters that make a text of a text in ways that are not traced.
_GUESSED = (
    "center", "e", "escape", "forceescape", "format", "indent", "pprint", "replace", "safe", "striptags", "title",
    "truncate", "urlencode", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: the block between the values of two variables, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens, closes = (nodes.Output([nodes.Name(name, "load")]).set_lineno(line) for name in (OPEN, CLOSE))
        # In transformers the block is a macro: what it sets is not seen outside.
        return [opens, nodes.Scope(body).set_lineno(line), closes]


class _Code(CodeGenerator):
    """Code that leaves constants to be computed when the template is rendered, which has bounds."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if isinstance(node, nodes.TemplateData):
            return super()._output_child_to_const(node, frame, finalize)
        raise nodes.Impossible


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Code


class _TracingCode(_Code):
    """Code that writes values, and concatenates them with `~`, by functions of the environment."""

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
    """A template as transformers compiles it. Raises jinja2.TemplateSyntaxError."""
    environment = _environment(_Environment)
    environment.filters["tojson"] = _to_json
    return environment.from_string(text)


@lru_cache(maxsize=16)
def tracing(text: str) -> jinja2.Template:
    """A template that keeps the origins of traced strings. Raises jinja2.TemplateSyntaxError."""
    environment = _environment(_TracingEnvironment)
    environment.filters |= {name: _guessing(FILTERS[name]) for name in _GUESSED}
    environment.filters["tojson"] = _traced_json
    environment.filters["join"] = _joining
    environment.filters["string"] = spelled
    return environment.from_string(text)


def _guessing(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter_)  # with the marks that say what else Jinja passes
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
    # Jinja's own escapes characters that HTML has a use for.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _traced_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    return to_json(value, ensure_ascii, indent, separators, sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
