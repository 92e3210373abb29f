"""`rollout.score` of exact_answer."""

import re
from decimal import Decimal, InvalidOperation

from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.nn.batch import Prompt, StepCall
from xtrain.runtime.sampling.sampler import RowRanks
from xtrain.runtime.sampling.scoring import by_text, scoring


@op("rollout.score.exact_answer")
def score(rank: Rank, meshes: Meshes, pattern: str | None, compare: str) -> StepCall:
    """Score completions: 1 with the dataset's answer, otherwise 0."""
    expression = None if pattern is None else re.compile(pattern)

    def reward(prompt: Prompt, text: str) -> float:
        found = answer_in(text, expression)
        if found is None:
            return 0.0
        wanted = answer_in(prompt.answer, expression)
        return float(equal(found, prompt.answer.strip() if wanted is None else wanted, compare))

    return scoring(by_text(reward), RowRanks.of(rank, meshes))


def answer_in(text: str, expression: re.Pattern[str] | None) -> str | None:
    """Return the answer that a text gives; None where the expression does not match."""
    if expression is None:
        return text.strip()
    last = None
    for last in expression.finditer(text):  # noqa: B007
        pass
    if last is None:
        return None
    found = last[1] if expression.groups else last[0]
    return None if found is None else found.strip()


def equal(found: str, wanted: str, compare: str) -> bool:
    """Return True if the answers are equal. compare: as `text`, or as a `number`; a text that is no decimal number
    equals none."""
    if compare == "text":
        return found == wanted
    try:
        ours, theirs = (Decimal(text.replace(",", "")) for text in (found, wanted))
    except InvalidOperation:
        return False
    return ours.is_finite() and theirs.is_finite() and ours == theirs  # a signalling NaN cannot be compared
