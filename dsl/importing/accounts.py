"""Classes of keys of an imported configuration, and their values as text."""

from enum import StrEnum
from typing import Any, Final

from xtrain.dsl.diagnostics.diagnostic import Span, printable
from xtrain.dsl.importing.config_file import flat
from xtrain.dsl.spec_text import value_text
from xtrain.lazy_attrs import frozen

_SHOWN: Final = 100  # characters of a value


class Fate(StrEnum):
    """Class of a key: every key of the source has exactly one."""

    TRANSLATED = "translated"
    DEFAULT = "the same as xtrain's default"
    MEANINGLESS = "without meaning here"
    MISSING = "not expressible"


@frozen
class Account:
    """Class of a key. value: as text, shortened. why: empty for translated keys."""

    key: str
    value: str
    fate: Fate
    why: str
    span: Span | None


def spec_literal(value: Any) -> str:
    """Return a plain value as a spec writes it; a text of several lines keeps them."""
    if isinstance(value, str) and "\n" in value:
        lines = value.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        return f'"""{lines}"""'
    return value_text(value)


def shown(value: Any) -> str:
    """Return a value of a configuration as one short line."""
    text = printable(value_text(value) if isinstance(value, bool | int | float | str | list) and is_plain(value) else
                     str(value))  # fmt: skip
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def is_plain(value: Any) -> bool:
    """Return True for scalars and lists of them."""
    return all(not isinstance(item, dict) and item is not None for _, item in flat(value, "value"))


def is_off(value: Any) -> bool:
    """Return True if a value switches a feature off in configurations of Python trainers."""
    return not value or (isinstance(value, str) and value.lower() in ("no", "none", "false", "off", "disabled"))
