"""Texts that name files: a name is one folder or file, a path may lead through several."""

import re
from collections.abc import Callable
from typing import Any, Final

from attrs import field, frozen

# Bytes of UTF-8. File systems take 255; what is put behind a name, as the time at which a run is set aside, needs some.
LONGEST: Final = 200
_VARIABLE: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")
_ORIGIN: Final = re.compile(r"https?://[a-z0-9._-]+(:[0-9]+)?")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@frozen
class TextCheck:
    """Which texts are allowed. words: the rule for the docs. hint: what to write instead. pattern: a part of the rule
    for editors, empty for none."""

    words: str
    hint: str | None
    pattern: str
    _problem: Callable[[str], str | None] = field(repr=False)

    def __call__(self, value: Any) -> str | None:
        """What is wrong with a text, or with one of a list, as the end of a sentence; None if nothing is."""
        texts = [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, str)]
        return next((problem for text in texts if (problem := self._problem(text)) is not None), None)


def _problem_of_name(text: str) -> str | None:
    if not text.strip():
        return "must not be empty"
    if text in (".", ".."):
        return f"must be a name, not the path `{text}`"
    if sign := re.search(r"[/\\]", text):
        return f"must not contain `{sign[0]}`"
    if sign := _CONTROL.search(text):
        return f"must be a name without control characters, and has U+{ord(sign[0]):04X}"
    size = len(text.encode())
    return f"must have at most {LONGEST} bytes, not {size:,}" if size > LONGEST else None


def _problem_of_path(text: str) -> str | None:
    return "must be a path, and no path has U+0000 in it" if "\0" in text else None


def _problem_of_line(text: str) -> str | None:
    if sign := _CONTROL.search(text):
        return f"must be one line, and has U+{ord(sign[0]):04X}"
    return None if text.strip() else "must not be empty"


def _problem_of_variable(text: str) -> str | None:
    named = _VARIABLE.fullmatch(text)
    return None if named else "must be the name of an environment variable, of letters, digits and `_`"


def _problem_of_host(text: str) -> str | None:
    return None if _HOST.fullmatch(text) else "must be a name or an address, without a port"


def _problem_of_origin(text: str) -> str | None:
    return None if _ORIGIN.fullmatch(text) else "must be the origin of a web page: scheme, host and port"


file_name: Final = TextCheck("a name, not a path", "write one name, such as `mine`", r"^[^/\\]+$", _problem_of_name)
file_path: Final = TextCheck("", None, "", _problem_of_path)
variable_name: Final = TextCheck(
    "the name of an environment variable",
    "write a name, such as `XTRAIN_KEY`, and what it stands for into the environment",
    f"^{_VARIABLE.pattern}$",
    _problem_of_variable,
)
some_text: Final = TextCheck(
    "not empty", "write a text, or leave it out", "", lambda text: None if text else "must not be empty"
)
one_line: Final = TextCheck("one line, not empty", "write a text, or leave it out", "", _problem_of_line)
host_name: Final = TextCheck(
    "a name or an address, without a port", 'write it as clients do, such as `"gpu1.lab"`', "", _problem_of_host
)
web_origin: Final = TextCheck(
    "the origin of a web page",
    'write it as browsers do, in small letters and without a path, such as `"https://lab.example"`',
    f"^{_ORIGIN.pattern}$",
    _problem_of_origin,
)
