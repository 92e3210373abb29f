"""`xtrain control RUN COMMAND [ARGUMENT]`: ask a running run to do something between two steps."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import RUN_HELP, Refused, above_zero
from xtrain.records.names import ControlState, ControlWord

if TYPE_CHECKING:
    from xtrain.records.events import ControlEvent

HELP = "ask a running run to save, stop, evaluate, pause or profile"
DESCRIPTION = "Ask a running run to do something between two steps, and wait until it is done."
EPILOG = """\
RUN is a name as for `xtrain watch`. If it means several runs, as an experiment's name, the command goes to the one
that was started last and is live.

commands:
  stop            save and stop, as on SIGTERM; the run can be gone on with
  save            save the full state, whatever the plan says of saving
  eval [DATASET]  the loss on what a dataset held out; the name may be left out where there is one
  profile N       record N steps: traces, and where their time went, under profile/
  pause           wait between two steps, holding on to devices and memory
  resume          go on after a pause

examples:
  xtrain control runs/quickstart save
  xtrain control runs/quickstart/<run> profile 3

exit codes: 0 done, 1 refused, 2 the command line is wrong, 3 no such run is live or it did not answer
"""
COMMANDS = tuple(word.value for word in ControlWord)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("path", metavar="RUN", help=RUN_HELP)
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=", ".join(COMMANDS))
    parser.add_argument("argument", metavar="ARGUMENT", nargs="?", help="a dataset for eval, a number for profile")
    parser.add_argument("--json", action="store_true", help="print the run's answers as JSON, one object per line")
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=above_zero("a number of seconds"),
        default=60.0,
        help="how long ranks may take to start and read the command before it is withdrawn (default: 60)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain control`. The help lists the exit statuses."""
    from xtrain.records.lines import line_of
    from xtrain.runtime.jobs.runs import Asked, NotLive, live_run
    from xtrain.tui.model.find import NoRun, runs_at

    argument: str | int | None = arguments.argument
    if arguments.command == ControlWord.PROFILE:
        if argument is None or not str(argument).isdecimal():
            raise Refused(2, "xtrain control: profile takes a number of steps, as in `profile 3`")
        argument = int(argument)
    elif argument is not None and arguments.command != ControlWord.EVAL:
        raise Refused(2, f"xtrain control: {arguments.command} takes no argument")
    try:
        asked = Asked.put(live_run(runs_at(arguments.path), arguments.wait), arguments.command, argument)
    except (NoRun, NotLive) as error:
        from xtrain.runtime.jobs.submitted import not_begun

        raise Refused(3, f"xtrain control: {not_begun(Path(arguments.path)) or error}") from None
    except OSError as error:
        raise Refused(3, f"xtrain control: the command could not be written: {error.strerror}") from None
    state = ""
    try:
        for answer in asked.answers(arguments.wait):
            state = answer.state
            print(line_of(answer).decode().rstrip() if arguments.json else _line(answer), flush=True)
    except NotLive as error:
        raise Refused(3, f"xtrain control: {error}") from None
    except KeyboardInterrupt:
        taken = (
            "the command was withdrawn" if asked.take_back() else "the run has read the command and continues with it"
        )
        raise Refused(130, f"xtrain control: interrupted; {taken}") from None
    return 0 if state == ControlState.DONE else 1


def _line(answer: "ControlEvent") -> str:
    detail = f": {answer.detail}" if answer.detail else ""
    return f"{answer.state}  {answer.command}  step {answer.step or 0:,}{detail}"
