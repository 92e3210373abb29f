"""The line of screens: the number of each is its key."""

from functools import lru_cache

from textual.content import Content

from .pane import Pane
from .pieces import Piece, line


@lru_cache(maxsize=16)
def tabs(screens: tuple[tuple[int, str, type[Pane]], ...], visited: str, width: int) -> Content:
    """`screens` as (number, name, class); the visited one stands in brackets, so that it shows without colour."""
    for words in ("title", "short"):
        pieces = []
        for number, name, cls in screens:
            label = f"{number} {getattr(cls, words)}"
            here = name == visited
            pieces.append(
                Piece(
                    f"[{label}]" if here else f" {label} ",
                    "bold reverse" if here else "$text-muted",
                    weight=2 if here else 1,
                    action=f"app.visit('{name}')",
                )
            )
        if sum(len(piece.text) for piece in pieces) <= width:
            break
    return line(pieces, width, gap="", margin="")
