"""What a live run can be asked for: whether it can be now, and what will happen."""

from typing import TYPE_CHECKING

from xtrain.records.control_words import ControlWord
from xtrain.tui.board.head import name_of
from xtrain.tui.words import count, printable, size

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board
    from xtrain.tui.model.planned import PlannedCommand

# Steps that a profile has unless the reader says otherwise, and most that a run takes.
PROFILED = 3
MOST_PROFILED = 100


def commands(board: "Board", action: ControlWord) -> "tuple[PlannedCommand, ...]":
    """Return the plan's commands for an action: for `eval`, one for each dataset."""
    known = board.planned.commands if board.planned else ()
    word = word_of(board, action)
    return tuple(command for command in known if command.name.partition(" ")[0] == word)


def word_of(board: "Board", action: ControlWord) -> ControlWord:
    """Return the `xtrain control` word of an action: `resume` instead of `pause` for a paused run."""
    return ControlWord.RESUME if action == ControlWord.PAUSE and board.life.state == "paused" else action


def refusal(board: "Board | None", action: ControlWord) -> str:
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
    }.get(action, "the plan of this run has no such command")


def question(board: "Board", action: ControlWord) -> str:
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


def consequences(board: "Board", action: ControlWord, dataset: str = "") -> list[str]:
    """Return sentences that describe what `action` will do, with the facts that the plan has."""
    later = ["The run is still in set-up: the command takes effect at its first step."] if is_starting(board) else []
    return [*_consequences(board, action, dataset), *later]


def is_starting(board: "Board | None") -> bool:
    """Return True if no step has been trained yet."""
    return board is None or board.life.state in ("waiting", "starting")


def _consequences(board: "Board", action: ControlWord, dataset: str) -> list[str]:
    word = word_of(board, action)
    done = [_does(board, node) for command in commands(board, action) if _is_for(command, dataset)
            for node in command.nodes]  # fmt: skip
    step = f"Between two steps, after step {board.step:,} or a later one."
    if word == ControlWord.SAVE:
        return [*_saving(board, done), step]
    if word == ControlWord.EVAL:
        return [f"Computes the {text}." for text in done] + ["Training waits until it is done.", step]
    if word == ControlWord.PROFILE:
        what = [f"What is done: {text}." for text in done] or ["Records every operation of the next steps."]
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


def _saving(board: "Board", done: list[str]) -> list[str]:
    known = board.planned.checkpoint_bytes if board.planned else None
    last = board.run.checkpoint
    num_bytes = last.bytes if last and last.bytes else known
    about = f", about {size(num_bytes)}" if num_bytes else ""
    what = done[0].split(":")[0].removeprefix("save ") if done else "the full state"
    took = f" The last one took {last.seconds:.1f} s." if last and last.seconds is not None else ""
    return [f"Saves {what}{about}.{took}"]


def _is_for(command: "PlannedCommand", dataset: str) -> bool:
    return not dataset or command.name.partition(" ")[2] == dataset


def _does(board: "Board", node: str) -> str:
    found = board.planned.node(node) if board.planned else None
    return printable(found.does) if found else node


def datasets(board: "Board") -> list[tuple[str, str]]:
    """Return the datasets that can be evaluated, and the amount of data of each."""
    found = []
    for command in commands(board, ControlWord.EVAL):
        node = board.planned.node(command.nodes[0]) if board.planned and command.nodes else None
        rows = node.args.get("rows") if node else None
        amount = f"{count(rows)} rows" if isinstance(rows, int) else "its held-out part"
        found.append((command.name.partition(" ")[2], amount))
    return found
