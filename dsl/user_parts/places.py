"""Where hooks of the user's own are called in a run, and what those of each place may change.

One vocabulary for `@hook`, the nodes of a plan, and the run.
"""

from typing import Final, Literal

NOTHING: Final = "nothing"
GRADIENTS: Final = "gradients"
PARAMETERS: Final = "parameters"
CHANGES: Final = (NOTHING, GRADIENTS, PARAMETERS)

Place = Literal[
    "before_phase", "after_phase", "before_step", "before_backward", "after_backward", "before_optimizer",
    "after_optimizer", "after_step", "before_evaluation", "after_evaluation", "before_checkpoint", "after_checkpoint",
    "at_failure", "at_end",
]  # fmt: skip
# Place → when, in words.
PLACES: Final[dict[Place, str]] = {
    "before_phase": "before the first step of each phase",
    "after_phase": "after the last step of each phase",
    "before_step": "before each step, when its rows have been read",
    "before_backward": "before the forward and backward of each step",
    "after_backward": "after the backward of each step, when gradients are summed over ranks and not yet clipped",
    "before_optimizer": "before the optimizer in each step, when gradients are clipped",
    "after_optimizer": "after the optimizer in each step",
    "after_step": "at the end of each step, when it has been measured",
    "before_evaluation": "before each evaluation",
    "after_evaluation": "after each evaluation",
    "before_checkpoint": "before each save of the full state",
    "after_checkpoint": "after each save of the full state has begun, or ended where training waits for it",
    "at_failure": "when the run fails, on each rank that can",
    "at_end": "when the run ends or stops without a failure",
}
# What may be changed besides nothing, and where.
MAY_CHANGE: Final[dict[str, tuple[Place, ...]]] = {
    GRADIENTS: ("after_backward", "before_optimizer"),
    PARAMETERS: ("before_optimizer", "after_optimizer", "after_step"),
}
IN_STEP: Final[tuple[Place, ...]] = tuple(PLACES)[:8]
AROUND: Final[tuple[Place, ...]] = tuple(PLACES)[8:12]


def may_change(place: str, changes: str) -> bool:
    """Whether hooks of a place may change something."""
    return changes == NOTHING or place in MAY_CHANGE[changes]
