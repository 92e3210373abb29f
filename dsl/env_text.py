"""Texts from environment variables: `env(NAME)` stands for the value in all that a person or a file sees.

A text that xtrain hands on unread (to a command, a tracker, a function of the user's own) is hidden: the spec and the
plan have `env(NAME)`, and the run reads the value where it is used.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from hashlib import scrypt
from typing import Any, Final

from attrs import field, frozen

_SHOWN: Final = re.compile(r"env\(([^()\"\\]+)\)")
_WRITTEN: Final = re.compile(r'env\("([^"\\]+)"\)')
# About 50 ms a guess: an unknown value has no other protection in a digest.
_SCRYPT: Final = {"n": 2**14, "r": 8, "p": 1, "dklen": 8}
# Shorter values stand for themselves in messages: they are in too many words.
SHORTEST_MASKED: Final = 6


@frozen
class Variable:
    """An environment variable with its value at the time of reading."""

    name: str
    value: str = field(repr=False)


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


class HiddenText(str):
    """A text with `env(NAME)` for the value of each variable. pieces: as of the EnvText that it was."""

    pieces: tuple[str | Variable, ...]

    @property
    def value(self) -> str:
        """The text with the values, for checks."""
        return "".join(part.value if isinstance(part, Variable) else part for part in self.pieces)


def hidden(text: str) -> str:
    """Return a text with `env(NAME)` for the values of variables."""
    if not isinstance(text, EnvText):
        return text
    found = HiddenText("".join(f"env({part.name})" if isinstance(part, Variable) else part for part in text.pieces))
    found.pieces = text.pieces
    return found


def value_of(text: str) -> str:
    """Return a text with the values of its variables, for checks: no message may have it."""
    return text.value if isinstance(text, HiddenText) else text


def variables_in(spec_text: str) -> frozenset[str]:
    """Names of the variables that a resolved spec reads where it is run."""
    return frozenset(_WRITTEN.findall(spec_text))


def digests_in(value: Any) -> dict[str, str]:
    """Name → `digest` of the variables in hidden texts of a value, also in its lists and maps; in order of names."""
    return {each.name: digest(each.name, each.value) for each in sorted(_variables(value), key=lambda each: each.name)}


def _variables(value: Any) -> Iterator[Variable]:
    if isinstance(value, HiddenText):
        yield from (piece for piece in value.pieces if isinstance(piece, Variable))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _variables(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _variables(item)


@cache
def digest(name: str, value: str) -> str:
    """16 hex digits that tell two values of a variable apart: scrypt, with the name as salt, so that the same spec has
    the same plan."""
    return scrypt(value.encode(errors="surrogateescape"), salt=f"xtrain env {name}".encode(), **_SCRYPT).hex()


def filled(value: Any, names: Collection[str], environment: Mapping[str, str]) -> Any:
    """Return shown texts, also in lists and maps, with the values of these variables. Raises ValueError where one is
    not set."""
    if isinstance(value, Mapping):
        return {name: filled(item, names, environment) for name, item in value.items()}
    if isinstance(value, list):
        return [filled(item, names, environment) for item in value]
    if not isinstance(value, str) or not names:
        return value

    def of_variable(found: re.Match[str]) -> str:
        if found[1] not in names:
            return found[0]
        if found[1] not in environment:
            raise ValueError(f"the environment variable {found[1]} is not set here")
        return environment[found[1]]

    return _SHOWN.sub(of_variable, value)


def masked(value: Any, names: Collection[str], environment: Mapping[str, str]) -> Any:
    """Return texts, also in lists and maps, with `env(NAME)` wherever the value of one of these variables stands."""
    if isinstance(value, str):
        for name in sorted(names, key=lambda name: -len(environment.get(name, ""))):
            secret = environment.get(name, "")
            value = value.replace(secret, f"env({name})") if len(secret) >= SHORTEST_MASKED else value
        return value
    if isinstance(value, Mapping):
        return {name: masked(item, names, environment) for name, item in value.items()}
    return type(value)(masked(item, names, environment) for item in value) if isinstance(value, tuple | list) else value
