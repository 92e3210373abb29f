"""`rollout.score` with user code."""

import math
from numbers import Real
from typing import Any

from xtrain.plan.plan import Plan
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.base.user_parts import failures_of, part_of, spec_folder
from xtrain.runtime.nn.batch import Prompt, StepCall
from xtrain.runtime.sampling.sampler import RowRanks
from xtrain.runtime.sampling.scoring import by_text, scoring


@op("rollout.score.user")
def score(plan: Plan, rank: Rank, meshes: Meshes, user: dict[str, Any]) -> StepCall:
    """Score completions with the user's function. A step raises PartFailed if the function raises or returns no finite
    number."""
    part = part_of("reward", user, spec_folder(plan.spec))
    function = part.load()

    def reward(prompt: Prompt, text: str) -> float:
        with failures_of(part):
            found = function(prompt.text, text, {"answer": prompt.answer, **prompt.values}, **part.arguments)
        try:
            number, said = float(found) if isinstance(found, Real) else math.nan, f"{found!r}"
        except (OverflowError, ValueError):  # an integer with too many digits for both conversions
            number, said = math.inf, "a number that is too large"
        if not math.isfinite(number):
            raise part.failed(f"gave {said} for the completion {text!r} of {prompt.text!r}, and a reward is a number")
        return number

    return scoring(by_text(reward), RowRanks.of(rank, meshes))
