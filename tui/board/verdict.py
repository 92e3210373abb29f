"""What to do now: of a run that is over, and of one that has raised an alert."""

from typing import TYPE_CHECKING

from ..event_text import cause, failed
from ..lines.next_steps import generate_command, going_on, more_of_it, outcome, short_path, succeeded
from ..words import decimal, duration, plural, printable

if TYPE_CHECKING:
    from ..model.board import Board


def headline(board: "Board") -> str:
    """How it ended, in one line."""
    run, life = board.run, board.life
    if life.state == "lost":
        return f"LOST at step {board.step:,}: {life.why or 'its processes are gone'}"
    why = outcome(run)
    parts = [f"{life.in_words.upper()} after {plural(board.step, 'step')}{_time_taken(board)}"]
    parts += [f"loss {decimal(run.loss, 4)}"] if run.loss is not None else []
    parts += [why] if why else []
    return printable(", ".join(parts))


def _time_taken(board: "Board") -> str:
    """` in 4m02s`; of a run that was stopped before, and of which this start is a part, how large a part."""
    run = board.run
    if run.end is None or run.end.seconds is None:
        return ""
    own = f", the last {board.step - run.first_step:,} of them" if 0 < run.first_step < board.step else ""
    return f"{own} in {duration(run.end.seconds)}"


def advice(board: "Board") -> list[str]:
    """What to do next, the most helpful first."""
    run, directory = board.run, board.directory
    if succeeded(run):
        command = " ".join(generate_command(directory))
        more = more_of_it(run)
        return [f"generate text: {command}", *([more] if more else [])]
    lines = [f"{failed(failure)}: {cause(failure)}" for failure in run.failures[:1]]
    lines.append(going_on(run))
    if run.status == "failed" or board.life.state == "lost":
        lines.append(f"logs: {short_path(directory / 'logs')}")
    return [printable(text) for text in lines]
