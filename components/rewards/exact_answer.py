"""`reward exact_answer { … }`: exact match with the dataset's answer."""

import re
from typing import Final, Literal

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.policy import REWARDS, Reward
from xtrain.dsl.schema.setting import TextCheck, setting
from xtrain.lazy_attrs import frozen


def _problem(text: str) -> str | None:
    try:
        re.compile(text)
    except re.error as error:
        return f"is not a regular expression: {error}"
    return None


regular_expression: Final = TextCheck(
    "a regular expression of Python", r'write for example `"= *(-?\d+)"`', "", _problem
)


@REWARDS.register()
@frozen
class ExactAnswer(Reward):
    """`reward exact_answer { … }`: 1 for a completion with the right answer, otherwise 0."""

    kind: str = named("exact_answer")
    pattern: str | None = setting(
        "regular expression that extracts the answer from a text: the first group, or else the whole match, of its "
        "last match; applied to the dataset's answer too, if it matches there; none: the whole text",
        default=None,
        check=regular_expression,
        example=r'"#### (.+)"',
        resuming="answers are extracted by it from here on",
    )
    compare: Literal["text", "number"] = setting(
        "text: answers must have the same characters; number: the same value, 1,000 and 1000.0 being equal; white "
        "space around them does not count",
        default="text",
    )

    def does(self) -> str:
        where = "" if self.pattern is None else f", extracted by `{self.pattern}`"
        return f"1 for the dataset's answer, compared as {self.compare}{where}; else 0"
