"""Texts from environment variables: a command with `env("NAME")` in it is shown as `env(NAME)` everywhere, and gets the
value where it is run. No file and no message has the value."""

import re
from collections.abc import Collection, Mapping
from typing import Final

from attrs import frozen

_SHOWN: Final = re.compile(r"env\(([^()\"\\]+)\)")
_WRITTEN: Final = re.compile(r'env\("([^"\\]+)"\)')


@frozen
class Variable:
    """An environment variable with its value at the time of reading."""

    name: str
    value: str


class EnvText(str):
    """A text with the values of variables. pieces: what it was put together from."""

    pieces: tuple[str | Variable, ...]

    @classmethod
    def of(cls, *pieces: str | Variable) -> "EnvText":
        """Join texts, some with pieces of their own, and variables."""
        flat = [part for piece in pieces for part in (piece.pieces if isinstance(piece, EnvText) else (piece,))]
        found = cls("".join(part.value if isinstance(part, Variable) else part for part in flat))
        found.pieces = tuple(flat)
        return found

    @property
    def shown(self) -> str:
        """The text with `env(NAME)` for the value of a variable."""
        return "".join(f"env({part.name})" if isinstance(part, Variable) else part for part in self.pieces)


class HiddenText(EnvText):
    """A text whose values are not shown, as it belongs to a command."""


def hidden(text: str) -> str:
    """Return a text whose values of variables are hidden from now on."""
    return HiddenText.of(*text.pieces) if isinstance(text, EnvText) else text


def shown(text: str) -> str:
    """Return a text as people and files see it."""
    return text.shown if isinstance(text, HiddenText) else text


def variables_in(spec_text: str) -> frozenset[str]:
    """Names of the variables that a resolved spec reads where it is run."""
    return frozenset(_WRITTEN.findall(spec_text))


def filled(text: str, names: Collection[str], environment: Mapping[str, str]) -> str:
    """Return a shown text with the values of these variables. Raises ValueError where one is not set."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in names:
            return found[0]
        if found[1] not in environment:
            raise ValueError(f"the environment variable {found[1]} is not set here")
        return environment[found[1]]

    return _SHOWN.sub(value, text)
