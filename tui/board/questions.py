"""What the reader is asked before the run is, and before the dashboard is left."""

from typing import TYPE_CHECKING

from xtrain.records.control_words import ControlWord
from xtrain.tui.board.actions import MOST_PROFILED, PROFILED, consequences, datasets, question
from xtrain.tui.board.dialog import NO, Choice, Question

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board

# A dataset has one key: more than nine are for the command line.
MOST_DATASETS = 9


def which_dataset(board: "Board") -> Question | None:
    """Return the question for the dataset to evaluate; None without a choice."""
    known = datasets(board)[:MOST_DATASETS]
    if len(known) < 2:
        return None
    said = [f"{place}: {name}, {amount}" for place, (name, amount) in enumerate(known, start=1)]
    choices = [NO, *(Choice(name, str(place), name) for place, (name, _) in enumerate(known, start=1))]
    return Question("Evaluate on which dataset?", said, choices)


def confirm(board: "Board", action: ControlWord, dataset: str = "") -> Question:
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
