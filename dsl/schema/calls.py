"""Calls that choose a component, as `source = text("*.txt")` and the links of `collate`, and those of functions of the
user's own."""

from typing import Any, TypeGuard

from attrs import field, frozen

from .component import Component


@frozen
class UserCall:
    """`name(…)`: a source, or a link of `collate`, that is a function of your own; `use` makes it known.

    module: path of the file, or dotted name. digest: of the file's content. arguments: by name, in the order of the
    function's parameters. summary: the first line of its docstring.
    """

    module: str
    function: str
    digest: str
    arguments: dict[str, Any]
    summary: str = field(default="", eq=False, kw_only=True)

    def called(self) -> dict[str, Any]:
        """As JSON: what is called, and with what."""
        arguments = {name: _json(value) for name, value in self.arguments.items()}
        return {"module": self.module, "function": self.function, "digest": self.digest, "arguments": arguments}

    def identified(self) -> list[Any]:
        """As JSON: what identifies it, wherever its file lies."""
        return [self.digest, self.function, _json(self.arguments)]


def is_call(kind: Any) -> TypeGuard[type[Component]]:
    """Whether an annotation is the base class of components that are chosen by calls."""
    return isinstance(kind, type) and issubclass(kind, Component) and bool(kind.components.call)


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _json(each) for name, each in value.items()}
    return [_json(each) for each in value] if isinstance(value, tuple) else value
