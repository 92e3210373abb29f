"""Keys: the bottom line and the help screen, both made of the bindings."""

from collections.abc import Iterable, Sequence

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from xtrain.records.names import ControlWord
from xtrain.tui.board.actions import refusal
from xtrain.tui.board.head import Piece, stack
from xtrain.tui.board.pane import Pane
from xtrain.tui.model.board import Board
from xtrain.tui.pages.sheet import left, wrapped

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


def sign(key: str) -> str:
    """Return a key as printed on a keyboard; several keys are separated by blanks."""
    return " ".join(_SIGNS.get(one.strip(), one.strip()) for one in key.split(","))


def hint(key: str, label: str, *, enabled: bool = True, weight: int = 0, action: str = "") -> Piece:
    """Return a key and its label; in parentheses if the key does nothing now. action: action of a click."""
    text = f"{sign(key)} {label}"
    return Piece(text if enabled else f"({text})", "" if enabled else "$text-muted", weight, action)


def app_keys(board: Board | None, *, view_is_frozen: bool) -> tuple[Piece, ...]:
    """Return the keys that are the same on every screen."""
    paused = board is not None and board.life.state == "paused"
    keys = [
        hint("?", "help", weight=20, action="app.help"),
        hint("q", "quit", weight=19, action="app.quit"),
        hint("space", "unfreeze" if view_is_frozen else "freeze", weight=7, action="app.freeze"),
    ]
    for word, (key, weight) in _ACTIONS.items():
        label = ControlWord.RESUME if paused and word == ControlWord.PAUSE else word
        keys.append(hint(key, label, enabled=not refusal(board, word), weight=weight, action=f"app.ask('{word}')"))
    return (*keys, hint("t", "theme", weight=1, action="app.theme"))


def keys_of(nodes: Iterable[DOMNode | None]) -> list[Piece]:
    """Return the keys of the focused widget and of the widgets around it, up to the screen."""
    found: list[Piece] = []
    for node in nodes:
        if node is None or isinstance(node, Screen):
            break
        bindings = [binding for binding in node.BINDINGS if isinstance(binding, Binding)]
        shown = (binding for binding in bindings if binding.show and binding.description)
        found += [hint(binding.key_display or binding.key, binding.description, weight=3) for binding in shown]
    return found


# Title of a group of keys, and its keys, each as (key, what it does, reason why it does nothing now).
Group = tuple[str, tuple[tuple[str, str, str], ...]]


def group(title: str, bindings: Iterable[BindingType], board: Board | None = None) -> Group:
    """Return the group of the bindings that have a tooltip, in their order."""
    known = [binding for binding in bindings if isinstance(binding, Binding)]
    keys = (
        (sign(binding.key_display or binding.key), binding.tooltip or binding.description, _why_not(binding, board))
        for binding in known
        if binding.description
    )
    return title, tuple(keys)


def _why_not(binding: Binding, board: Board | None) -> str:
    asks = binding.action.startswith("ask(")
    return refusal(board, ControlWord(binding.action.split("'")[1])) if asks else ""


def all_groups(
    everywhere: Iterable[BindingType], panes: Iterable[type[Pane]], visited: Pane | None, board: Board | None
) -> list[Group]:
    """Return the keys of the application, of each pane, and of the parts of the visited one."""
    groups = [group("everywhere", everywhere, board)]
    for cls in panes:
        groups.append(group(cls.title, cls.__dict__.get("BINDINGS", ())))
        if visited is not None and type(visited) is cls:
            kinds = dict.fromkeys(type(widget) for widget in visited.query("*") if widget.can_focus)
            parts = (group(f"{cls.title}: {kind.__name__}", kind.__dict__.get("BINDINGS", ())) for kind in kinds)
            groups += parts
    return [each for each in groups if each[1]]


def help_text(groups: Sequence[Group], width: int) -> Content:
    """Return all groups, one after the other, in `width` columns."""
    widest = max((len(key) for _, keys in groups for key, _, _ in keys), default=0)
    rest = max(10, width - widest - 2)
    lines: list[Content] = []
    for title, keys in groups:
        lines += [Content("")] if lines else []
        lines.append(Content.styled(title, "bold $primary"))
        reasons = [why for _, _, why in keys]
        for (key, said, why), after in zip(keys, [*reasons[1:], ""], strict=True):
            style = "$text-muted" if why else ""
            for place, text in enumerate(wrapped(said, rest)):
                lines.append(Content.assemble((left("" if place else key, widest), "bold"), "  ", (text, style)))
            # A reason shared by several keys is shown below the last of them.
            for text in wrapped(f"not now: {why}", rest) if why and why != after else ():
                lines.append(Content.styled(f"{' ' * widest}  {text}", "$warning"))
    return stack(each.truncate(width, ellipsis=True) for each in lines)


class HelpScreen(ModalScreen[None]):
    """Screen of all keys, until a key closes it."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; background: $background 60%; }
    HelpScreen > VerticalScroll {
        width: 76; max-width: 100%; height: auto; max-height: 100%;
        background: $surface; border: round $primary; padding: 0 1;
        border-title-color: $primary; border-subtitle-color: $text-muted;
    }
    HelpScreen Static { width: 1fr; height: auto; }
    """
    BINDINGS = [  # noqa: RUF012
        Binding("escape,question_mark,q", "close", "close", show=False),
    ]

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__()
        self._groups = groups

    def compose(self) -> ComposeResult:
        with VerticalScroll() as scroll:
            scroll.border_title = "keys"
            scroll.border_subtitle = "↑ ↓ scroll, esc closes"
            yield Static()

    def on_resize(self) -> None:
        # Two columns of border, two of padding, two of the scroll bar.
        self.query_one(Static).update(help_text(self._groups, min(76, self.size.width) - 6))

    def action_close(self) -> None:
        self.dismiss(None)
