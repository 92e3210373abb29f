"""Control of a run from the dashboard: possible commands, questions before them, and their answers."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from xtrain.records.events import ControlEvent, event_of
from xtrain.records.lines import object_of
from xtrain.records.names import ControlState, ControlWord
from xtrain.text.units import count, printable, size
from xtrain.tui.model.board import Board
from xtrain.tui.model.planned import PlannedCommand
from xtrain.tui.pages.figures import name_of

# Steps that a profile has unless the reader says otherwise, and most that a run takes.
PROFILED = 3
MOST_PROFILED = 100


def commands(board: Board, action: ControlWord) -> tuple[PlannedCommand, ...]:
    """Return the plan's commands for an action: for `eval`, one for each dataset."""
    known = board.planned.commands if board.planned else ()
    word = word_of(board, action)
    return tuple(command for command in known if command.name.partition(" ")[0] == word)


def word_of(board: Board, action: ControlWord) -> ControlWord:
    """Return the `xtrain control` word of an action: `resume` instead of `pause` for a paused run."""
    return ControlWord.RESUME if action == ControlWord.PAUSE and board.life.state == "paused" else action


def refusal(board: Board | None, action: ControlWord) -> str:
    """Return why the run cannot accept the action now; empty if it can."""
    if board is None or board.life.state == "waiting":
        return "the run has not started"
    if board.life.over:
        return f"the run has ended ({board.life.in_words})"
    if board.planned is None or commands(board, action):
        return ""
    return {
        ControlWord.SAVE: "this run saves no checkpoints: checkpoint.enabled is false",
        ControlWord.EVAL: "no dataset of this run has a held-out part",
    }.get(action, "the plan of this run does not support this command")


def question(board: Board, action: ControlWord) -> str:
    """Return the question that asks the reader to confirm `action`."""
    name = name_of(board)
    return {
        ControlWord.SAVE: f"Save {name} now?",
        ControlWord.EVAL: f"Evaluate {name} now?",
        ControlWord.PROFILE: f"Profile {name}?",
        ControlWord.PAUSE: f"Pause {name}?",
        ControlWord.RESUME: f"Resume {name}?",
        ControlWord.STOP: f"Stop {name} after a checkpoint?",
    }[word_of(board, action)]


def consequences(board: Board, action: ControlWord, dataset: str = "") -> list[str]:
    """Return sentences that describe what `action` will do, with the facts that the plan has."""
    later = ["The run is still in set-up: the command takes effect at its first step."] if is_starting(board) else []
    return [*_consequences(board, action, dataset), *later]


def is_starting(board: Board | None) -> bool:
    """Return True if no step has been trained yet."""
    return board is None or board.life.state in ("waiting", "starting")


def _consequences(board: Board, action: ControlWord, dataset: str) -> list[str]:
    word = word_of(board, action)
    nodes = {node.id: printable(node.does) for node in (board.planned.nodes if board.planned else ())}
    done = [nodes.get(node, node) for command in commands(board, action)
            if not dataset or command.name.partition(" ")[2] == dataset
            for node in command.nodes]  # fmt: skip
    step = f"Between two steps, after step {board.step:,} or a later one."
    if word == ControlWord.SAVE:
        return [*_saving(board, done), step]
    if word == ControlWord.EVAL:
        return [f"Computes the {text}." for text in done] + ["Training waits until it is done.", step]
    if word == ControlWord.PROFILE:
        what = [f"Effect: {text}." for text in done] or ["Records every operation of the next steps."]
        return [*what, "The profile is written to profile/. These steps are slower than others."]
    if word == ControlWord.PAUSE:
        return ["Training waits between two steps, and keeps its devices and their memory.",
                "The same key resumes it."]  # fmt: skip
    if word == ControlWord.RESUME:
        return ["Training continues with the next step."]
    steps = board.run.steps
    left = f" {steps - board.step:,} steps are left." if steps and steps > board.step else ""
    leaves = f"Then all ranks exit with code 75.{left}"
    if not done:
        return ["NOTHING IS SAVED: this run has no checkpoints.", leaves, "The same command starts from scratch."]
    return [*_saving(board, done), leaves, "The same command resumes it later."]


def _saving(board: Board, done: list[str]) -> list[str]:
    known = board.planned.checkpoint_bytes if board.planned else None
    last = board.run.checkpoint
    num_bytes = last.bytes if last and last.bytes else known
    about = f", about {size(num_bytes)}" if num_bytes else ""
    what = done[0].split(":")[0].removeprefix("save ") if done else "the full state"
    took = f" The last one took {last.seconds:.1f} s." if last and last.seconds is not None else ""
    return [f"Saves {what}{about}.{took}"]


def datasets(board: Board) -> list[tuple[str, str]]:
    """Return the datasets that can be evaluated, and the amount of data of each."""
    found = []
    for command in commands(board, ControlWord.EVAL):
        node = board.planned.node(command.nodes[0]) if board.planned and command.nodes else None
        rows = node.args.get("rows") if node else None
        amount = f"{count(rows)} rows" if isinstance(rows, int) else "its held-out part"
        found.append((command.name.partition(" ")[2], amount))
    return found


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


# A dataset has one key: more than nine are for the command line.
MOST_DATASETS = 9


def which_dataset(board: Board) -> Question | None:
    """Return the question for the dataset to evaluate; None without a choice."""
    known = datasets(board)[:MOST_DATASETS]
    if len(known) < 2:
        return None
    said = [f"{place}: {name}, {amount}" for place, (name, amount) in enumerate(known, start=1)]
    choices = [NO, *(Choice(name, str(place), name) for place, (name, _) in enumerate(known, start=1))]
    return Question("Evaluate on which dataset?", said, choices)


def confirm(board: Board, action: ControlWord, dataset: str = "") -> Question:
    """Return a question that states the consequences; for a profile, it also asks for a number."""
    asked, said = question(board, action), consequences(board, action, dataset)
    number = PROFILED if action == ControlWord.PROFILE else None
    return Question(asked, said, [NO, Choice("yes", "y", "Yes")], number=number, most=MOST_PROFILED)


class LeaveQuestion(Question):
    """Question what to do with a run that was started together with this dashboard."""

    def __init__(self, *, starting: bool) -> None:
        saves = "the run has not started to train, and ends" if starting else "the run saves a checkpoint, then ends"
        super().__init__(
            "Leave the dashboard?",
            [
                "Leave: training continues in this terminal, with lines.",
                f"Stop: {saves} with exit code 75.",
                "Press Ctrl-C again to leave.",
            ],
            [Choice("", "n", "Stay"), Choice("leave", "l", "Leave"), Choice(ControlWord.STOP, "s", "Stop")],
        )


@frozen
class Answer:
    """Answer to a command. state: `accepted`, `done`, `refused`, or `unheard` if no run was there to answer."""

    state: str
    detail: str
    step: int | None = None


def command_line(run: Path, word: str, argument: str = "") -> list[str]:
    """Return the arguments of the `xtrain control` command."""
    given = [argument] if argument else []
    return [sys.executable, "-P", "-m", "xtrain", "control", str(run.absolute()), word, *given, "--json"]


def answers(arguments: list[str]) -> Iterator[Answer]:
    """Run a command and yield its answers as they arrive; block until the last one.

    The process has no terminal: neither Ctrl-C nor a closed window cancels the request.
    """
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        yield Answer("unheard", f"xtrain control could not be started: {error.strerror}")
        return
    ended = False
    assert process.stdout is not None and process.stderr is not None
    with process:
        for text in process.stdout:
            said = event_of(object_of(text.encode()) or {})
            if isinstance(said, ControlEvent):
                ended = ended or said.state in (ControlState.DONE, ControlState.REFUSED)
                yield Answer(said.state, printable(said.detail), said.step)
        errors = process.stderr.read().strip()
    if not ended:
        last = errors.splitlines()[-1] if errors else f"xtrain control exited with code {process.returncode}"
        yield Answer("unheard", printable(last.removeprefix("xtrain control: ")))
