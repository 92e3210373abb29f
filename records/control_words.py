"""The words of `xtrain control`, for those too who read and write no records."""

from enum import StrEnum


class ControlWord(StrEnum):
    """What a live run can be asked for: the first word of a command in its plan, in a file and in the answers."""

    STOP = "stop"
    SAVE = "save"
    EVAL = "eval"
    PROFILE = "profile"
    PAUSE = "pause"
    RESUME = "resume"


class ControlState(StrEnum):
    """What has become of a command: `state` of a `control` event."""

    ACCEPTED = "accepted"
    DONE = "done"
    REFUSED = "refused"
