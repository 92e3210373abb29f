"""The bottom line: the keys that do something here."""

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from attrs import frozen
from textual.binding import Binding
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen

from xtrain.records.control_words import ControlWord
from xtrain.tui.board.actions import refusal
from xtrain.tui.board.pieces import Piece, line

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board

_SIGNS = {
    "question_mark": "?", "slash": "/", "plus": "+", "minus": "-", "left": "←", "right": "→", "up": "↑", "down": "↓",
    "shift+tab": "⇧tab", "escape": "esc", "pageup": "pgup", "pagedown": "pgdn", "equals_sign": "=",
    "right_square_bracket": "]", "left_square_bracket": "[", "less_than_sign": "<", "greater_than_sign": ">",
    "comma": ",", "full_stop": ".",
}  # fmt: skip
# Action → its key, and how much it is wanted where not all fit: stopping in order more than anything else.
_ACTIONS: dict[ControlWord, tuple[str, int]] = {
    ControlWord.SAVE: ("S", 7),
    ControlWord.EVAL: ("E", 5),
    ControlWord.PROFILE: ("P", 4),
    ControlWord.PAUSE: ("W", 6),
    ControlWord.STOP: ("X", 8),
}


@frozen
class Key:
    """Key hint: the key, its label, and whether it works now. weight: see `Piece`. action: action of a click."""

    key: str
    label: str
    enabled: bool = True
    weight: int = 0
    action: str = ""


def sign(key: str) -> str:
    """Return a key as printed on a keyboard; several keys are separated by blanks."""
    return " ".join(_SIGNS.get(one.strip(), one.strip()) for one in key.split(","))


def app_keys(board: "Board | None", *, view_is_frozen: bool) -> tuple[Key, ...]:
    """Return the keys that are the same on every screen."""
    paused = board is not None and board.life.state == "paused"
    keys = [
        Key("?", "help", weight=20, action="app.help"),
        Key("q", "quit", weight=19, action="app.quit"),
        Key("space", "unfreeze" if view_is_frozen else "freeze", weight=7, action="app.freeze"),
    ]
    for action, (key, weight) in _ACTIONS.items():
        label = ControlWord.RESUME if paused and action == ControlWord.PAUSE else action
        keys.append(Key(key, label, not refusal(board, action), weight, f"app.ask('{action}')"))
    return (*keys, Key("t", "theme", weight=1, action="app.theme"))


def keys_of(nodes: Iterable[DOMNode | None]) -> list[Key]:
    """Return the keys of the focused widget and of the widgets around it, up to the screen."""
    found: list[Key] = []
    for node in nodes:
        if node is None or isinstance(node, Screen):
            break
        bindings = [binding for binding in node.BINDINGS if isinstance(binding, Binding)]
        shown = (binding for binding in bindings if binding.show and binding.description)
        found += [Key(binding.key_display or binding.key, binding.description, weight=3) for binding in shown]
    return found


@lru_cache(maxsize=16)
def footer(keys: tuple[Key, ...], width: int) -> Content:
    """Return the keys that fit; keys that do nothing now are in parentheses."""
    pieces = [
        Piece(
            f"{sign(key.key)} {key.label}" if key.enabled else f"({sign(key.key)} {key.label})",
            "" if key.enabled else "$text-muted",
            key.weight,
            key.action,
        )
        for key in keys
    ]
    return line(pieces, width)
