"""Questions before anything is asked of the run: the answer that Enter alone gives is always no."""

from collections.abc import Sequence

from attrs import frozen
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Button, Static


@frozen
class Choice:
    """Answer of a question: its value, its key, and its label."""

    value: str
    key: str
    label: str


NO = Choice("", "n", "No")


class Question(ModalScreen[str]):
    """Modal question; the result is the value of a choice, "" for no.

    choices: the first one has the focus. number: also ask for a whole number from 1 to `most`, which is then the
    result.
    """

    DEFAULT_CSS = """
    Question { align: center middle; background: $background 60%; }
    Question > ToastRack { display: none; }
    Question > Vertical {
        width: 72; max-width: 96%; height: auto; max-height: 96%;
        background: $surface; border: round $primary; padding: 0 1;
    }
    Question #asked { text-style: bold; width: 1fr; height: auto; }
    Question #said { height: auto; max-height: 14; }
    Question.short #said { max-height: 7; }
    Question.tiny #said { max-height: 5; }
    Question.tiny #amount, Question.tiny #choices { margin-top: 0; }
    Question #said Static { width: 1fr; height: auto; }
    Question #amount { width: 1fr; height: 1; margin-top: 1; }
    Question #choices { height: 1; width: 1fr; margin-top: 1; }
    Question Button { min-width: 6; width: auto; margin-right: 1; }
    Question Button:focus { text-style: bold reverse; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "narrow"), (80, "wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "tiny"), (16, "short"), (30, "tall")]  # noqa: RUF012
    BINDINGS = [  # noqa: RUF012
        Binding("escape", "choose('')", "no", show=False),
        Binding("left", "app.focus_previous", "previous answer", show=False),
        Binding("right", "app.focus_next", "next answer", show=False),
        Binding("up", "scroll(-1)", "up", show=False),
        Binding("down", "scroll(1)", "down", show=False),
    ]

    def __init__(
        self, asked: str, said: Sequence[str], choices: Sequence[Choice], *, number: int | None = None, most: int = 0
    ) -> None:
        super().__init__()
        self._asked, self._said, self._choices, self._most = asked, said, choices, most
        self._typed = None if number is None else str(number)
        self._untouched = True
        self._wrong = False

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Content(self._asked), id="asked")
            with VerticalScroll(id="said", can_focus=False):
                yield Static(Content("\n".join(self._said)))
            if self._typed is not None:
                yield Static(self._amount(), id="amount")
            with Horizontal(id="choices"):
                for choice in self._choices:
                    label = Content(f"{choice.label} ({choice.key})")
                    yield Button(label, name=choice.value, compact=True, id=f"choice-{choice.key}")

    def on_mount(self) -> None:
        self.query_one(f"#choice-{self._choices[0].key}").focus()

    def on_key(self, event: Key) -> None:
        """Handle the keys of the choices, and the digits of the number."""
        for choice in self._choices:
            if event.key == choice.key:
                event.stop()
                self.action_choose(choice.value)
                return
        if self._typed is None:
            return
        if event.character and event.character in "0123456789":
            self._typed = (event.character if self._untouched else self._typed + event.character)[:4]
        elif event.key == "backspace":
            self._typed = self._typed[:-1]
        else:
            return
        event.stop()
        self._untouched = self._wrong = False
        self.query_one("#amount", Static).update(self._amount())

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.action_choose(event.button.name or "")

    def action_scroll(self, by: int) -> None:
        """Scroll a text that does not fit."""
        self.query_one("#said").scroll_relative(y=by, animate=False)

    def action_choose(self, value: str) -> None:
        """Answer, unless the requested number is invalid."""
        if value and self._typed is not None:
            if not 1 <= int(self._typed or 0) <= self._most:
                self._wrong = True
                self.query_one("#amount", Static).update(self._amount())
                return
            value = str(int(self._typed))
        self.dismiss(value)

    def _amount(self) -> Content:
        figure = Content.styled(f" {self._typed or ' '} ", "reverse")
        hint = f"  {'not a valid number: type one ' if self._wrong else 'type another one, '}from 1 to {self._most}"
        return Content.assemble("Steps: ", figure, (hint, "$error" if self._wrong else "$text-muted"))
