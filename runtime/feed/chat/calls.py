"""Calls of functions in the texts of a model, in the form in which a chat template writes them."""

import json
from collections.abc import Iterator
from typing import Any, Final

from attrs import frozen

from xtrain.runtime.feed.chat.template import ChatTemplate, TemplateRefusal
from xtrain.runtime.feed.records import Message

NAME, KEY, VALUE, SAID = (chr(0xF0000 + number) for number in range(4))
"""Private-use characters, which no template has."""
LARGEST: Final = 64
"""Calls of one text at most."""


@frozen
class ToolCall:
    """A call. problem: why it cannot be read; "": it can."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""


@frozen
class CallForm:
    """Form of calls: a JSON object after `opening`, with the name and the arguments at these keys.

    opening: "" if the whole text is a call. function: key of the object with both; "": the outer one.
    """

    opening: str
    name: str
    arguments: str
    function: str = ""

    @classmethod
    def of(cls, template: ChatTemplate) -> "CallForm":
        """Return the form in which a template writes the calls of earlier turns. Raises TemplateRefusal if it writes no
        JSON object with a name and arguments."""
        call = {"id": "000000000", "type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}
        asked: Message = {"role": "user", "content": "a"}
        plain = template.render([asked, {"role": "assistant", "content": SAID}])
        text = template.render([asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
        begin = plain.find(SAID)
        begin = next((at for at in range(max(begin, 0)) if plain[at] != text[at : at + 1]), max(begin, 0))
        at = text.find("{", begin)
        while at >= 0:
            form = _form(text, begin, at)
            if form is not None:
                return form
            at = text.find("{", at + 1)
        raise TemplateRefusal("the template does not write calls as JSON objects with a name and arguments")

    def calls(self, text: str) -> list[ToolCall]:
        """Return the calls in a text of the model; [] if it has none."""
        if self.opening:
            return list(self._after_openings(text))[:LARGEST]
        begin = text.strip()
        return [self._call(begin, 0)[0]] if begin.startswith("{") else []

    def _after_openings(self, text: str) -> Iterator[ToolCall]:
        at = text.find(self.opening)
        while at >= 0:
            begin = at + len(self.opening)
            begin += len(text[begin:]) - len(text[begin:].lstrip())
            call, end = self._call(text, begin)
            yield call
            at = text.find(self.opening, end)

    def _call(self, text: str, begin: int) -> tuple[ToolCall, int]:
        """Return the call that begins at a place, and where it ends."""
        try:
            found, end = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError):
            return ToolCall("", {}, "the call is not valid JSON"), begin
        inner = found.get(self.function) if self.function and isinstance(found, dict) else found
        name = inner.get(self.name) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or not isinstance(name, str):
            return ToolCall("", {}, f"the call has no `{self.name}`"), end
        arguments = inner.get(self.arguments, {})
        if not isinstance(arguments, dict):
            return ToolCall(name, {}, f"`{self.arguments}` of the call is not an object"), end
        return ToolCall(name, arguments), end


def _form(text: str, begin: int, at: int) -> CallForm | None:
    """Return the form if the JSON object at a place is the call of the probe."""
    try:
        found, _ = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    for function, inner in (("", found), *((key, value) for key, value in found.items())):
        if isinstance(inner, dict):
            name = next((key for key, value in inner.items() if value == NAME), None)
            arguments = next((key for key, value in inner.items() if value == {KEY: VALUE}), None)
            if name is not None and arguments is not None:
                return CallForm(text[begin:at].strip(), name, arguments, function)
    return None


def fault_of(arguments: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return why arguments of a call do not match the schema of a function's parameters; "" if they do."""
    properties = schema["properties"]
    for name in arguments:
        if name not in properties:
            return f"there is no parameter `{name}`"
    for name in schema["required"]:
        if name not in arguments:
            return f"`{name}` is missing"
    wrong = next((name for name, value in arguments.items() if not _matches(value, properties[name])), None)
    return "" if wrong is None else f"`{wrong}` must match {json.dumps(properties[wrong])}"


def _matches(value: Any, form: dict[str, Any]) -> bool:
    if "anyOf" in form:
        return any(_matches(value, part) for part in form["anyOf"])
    match form["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str) and value in form.get("enum", (value,))
        case "array":
            return isinstance(value, list) and all(_matches(each, form["items"]) for each in value)
        case "object":
            inner = form["additionalProperties"]
            return isinstance(value, dict) and all(_matches(each, inner) for each in value.values())
    number = isinstance(value, int if form["type"] == "integer" else int | float) and not isinstance(value, bool)
    return number and (
        value >= form.get("minimum", value)
        and value <= form.get("maximum", value)
        and not ("exclusiveMinimum" in form and value <= form["exclusiveMinimum"])
        and not ("exclusiveMaximum" in form and value >= form["exclusiveMaximum"])
    )
