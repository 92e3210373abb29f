"""The words of `xtrain control`, for those too who read and write no records."""

from enum import StrEnum


class ControlWord(StrEnum):
    """Commands for a running run: the first word in its plan, in a file and in the answers."""

    STOP = "stop"
    SAVE = "save"
    EVAL = "eval"
    PROFILE = "profile"
    PAUSE = "pause"
    RESUME = "resume"


class ControlState(StrEnum):
    """State of a command: `state` of a `control` event."""

    ACCEPTED = "accepted"
    DONE = "done"
    REFUSED = "refused"
