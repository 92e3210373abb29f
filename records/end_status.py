"""How a run can end, for those too who read and write no records."""

from enum import StrEnum


class EndStatus(StrEnum):
    """`status` of a `run_end` event."""

    DONE = "done"
    COMPLETE = "complete"
    FAILED = "failed"
    ENVIRONMENT = "environment"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
