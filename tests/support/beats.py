"""What ranks say of their progress, made up for tests."""

from typing import Any

from xtrain.records.status import Heartbeat


def reading(rank: int = 1, **given: Any) -> Heartbeat:
    """A line of a rank that waits in step 7."""
    fields = {
        "host": "a", "pid": 10 + rank, "born": 5, "attempt": 1, "alive": 900, "time": 0.0, "step": 7,
        "node": "step.agree", "marks": 70, "within": 3, "lasting": False, "idle": 100.0,
        "place": "torch/distributed/x.py:1 wait",
        "debugger": False,
    }  # fmt: skip
    return Heartbeat(**{**fields, "rank": rank, **given})
