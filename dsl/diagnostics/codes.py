"""Diagnostic codes, with the page that `xtrain explain CODE` prints."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from xtrain.dsl.diagnostics.suggest import closest
from xtrain.lazy_attrs import frozen

# Files of `pages/`, in the order in which codes are listed.
FILES: Final = ("language", "layout", "course", "environment", "warnings", "data")


@frozen
class CodePage:
    """A stable code. meaning: why it is reported. wrong: text that causes it; right: what to write instead.

    An empty `wrong` means that no text alone causes it.
    """

    code: str
    title: str
    meaning: str
    wrong: str = ""
    right: str = ""

    def page(self) -> str:
        """Return the page for people."""
        lines = [f"{self.code}: {self.title}", "", *_wrapped(self.meaning)]
        for heading, text in (("Wrong", self.wrong), ("Right", self.right)):
            if text:
                lines += ["", f"{heading}:", "", *(f"    {line}".rstrip() for line in text.split("\n"))]
        return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    lines: list[str] = []
    for paragraph in paragraphs:
        lines += ([""] if lines else []) + textwrap.wrap(paragraph, width=100, break_on_hyphens=False)
    return lines


def _pages(name: str) -> Iterator[CodePage]:
    """Read the pages of a file: a heading `## CODE title`, the meaning, and blocks fenced as `wrong` and `right`."""
    text = (Path(__file__).parent / "pages" / f"{name}.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, rest = section.partition("\n")
        code, _, title = heading.partition(" ")
        examples = dict(re.findall(r"^```(wrong|right)\n(.*?)\n```$", rest, re.MULTILINE | re.DOTALL))
        yield CodePage(code, title, rest.partition("```")[0].strip(), **examples)


CODES: Final[dict[str, CodePage]] = {page.code: page for name in FILES for page in _pages(name)}


def near(code: str) -> str | None:
    """Return the existing code closest to a wrong one."""
    upper = code.strip().upper()
    return upper if upper in CODES else closest(upper, CODES)
