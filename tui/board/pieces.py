"""Text in pieces: what fits a line, and in which style."""

from collections.abc import Iterable, Sequence

from attrs import frozen
from rich.cells import cell_len
from textual.content import Content


@frozen
class Piece:
    """Part of a line. weight: of parts that do not all fit, those with the least weight are left out."""

    text: str
    style: str = ""
    weight: int = 0
    action: str = ""
    """Action of the application that a click runs; empty: none."""

    @property
    def content(self) -> Content:
        style = f"{self.style} @click={self.action}".strip() if self.action else self.style
        return Content.styled(self.text, style)


def line(pieces: Iterable[Piece], width: int, *, gap: str = "  ", margin: str = " ") -> Content:
    """Return the pieces that fit in `width` columns, in their order."""
    fitting = [piece for piece in pieces if piece.text]
    while len(fitting) > 1 and _columns(fitting, gap, margin) > width:
        # With equal weights, the last is dropped first.
        fitting.pop(min(reversed(range(len(fitting))), key=lambda place: fitting[place].weight))
    content = Content(margin) + Content(gap).join(piece.content for piece in fitting)
    return content.truncate(max(1, width), ellipsis=True)


def _columns(pieces: Sequence[Piece], gap: str, margin: str) -> int:
    return cell_len(margin) + sum(cell_len(piece.text) for piece in pieces) + cell_len(gap) * (len(pieces) - 1)


def stack(lines: Iterable[Content]) -> Content:
    """Join lines from top to bottom."""
    return Content("\n").join(lines)
