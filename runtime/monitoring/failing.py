"""What a rank says of what has gone wrong: the record `failure`, and the text in its own log.

Nothing here raises where a disk takes no word of it: whoever reports has a rank to end, and ends it all the same.
"""

import re
import sys
import traceback
from contextlib import suppress

from xtrain.records.run_events import FailureEvent
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.user_parts import PartFailed
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.ops import PlanMismatch
from xtrain.runtime.reporting.records import Records


def report_failure(
    records: Records,
    error: BaseException,
    *,
    step: int,
    place: str,
    exit_code: int,
    trace: bool,
    more: str = "",
    quiet: bool = False,
) -> None:
    """Report an error. place: what was under way; trace: whether its traceback tells anything, of the user's own code
    the part from there on; more: a line to be said with its message; quiet: the first rank says what this one has
    reported.

    `agreed` in the record: every rank finds the same, and so would another start. `lost`: the reason is another rank's.
    """
    lost = lost_a_peer(error)
    own = isinstance(error, PartFailed)
    text = error.trace if own else "".join(traceback.format_exception(error))
    message = str(error) or repr(error)
    if more:
        message, text = f"{message}\n{more}", f"{text}{more}\n"
    said = text if trace or lost else message  # of what is no surprise the message is enough
    said = records.without_values(f"{text}{message}" if own else said)
    if not quiet:
        say(said)
    if lost:
        message = f"lost contact with another rank in {place}"
    agreed = bool(getattr(error, "agreed", False))
    event = FailureEvent(
        step=step,
        rank=records.rank,
        error=message,
        exit_code=exit_code,
        traceback=text if trace else "",
        code=error.code if isinstance(error, EnvironmentFault | DataError) else "",
        agreed=agreed or isinstance(error, PlanMismatch),
        lost=lost,
    )
    try:
        records.event(event, every_rank=not agreed)
    except EnvironmentFault:
        if quiet:  # nobody else knows
            say(said)


def report_deadline(records: Records, message: str, *, step: int) -> None:
    """Report that this rank is ended because it did not stop in time; `stopping`: that it was asked to is known."""
    event = FailureEvent(step=step, rank=records.rank, error=message, exit_code=1, traceback="", stopping=True)
    with suppress(EnvironmentFault):
        records.event(event, every_rank=True)


def say(text: str) -> None:
    """Write into the rank's own log."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def lost_a_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone: that rank's own report is the one to read."""
    gone = re.search(r"Connection (closed|reset) by (peer|remote)", str(error))
    return isinstance(error, RuntimeError) and gone is not None
