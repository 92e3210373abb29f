"""`CodePage`: a diagnostic's stable code and the page that explains it."""

import textwrap

from attrs import frozen


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
        """The page for people."""
        lines = [f"{self.code}: {self.title}", "", *_wrapped(self.meaning)]
        for heading, text in (("Wrong", self.wrong), ("Right", self.right)):
            if text:
                lines += ["", f"{heading}:", "", *(f"    {line}".rstrip() for line in text.strip("\n").split("\n"))]
        return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    lines: list[str] = []
    for paragraph in paragraphs:
        lines += ([""] if lines else []) + textwrap.wrap(paragraph, width=100, break_on_hyphens=False)
    return lines
