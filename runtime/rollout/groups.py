"""What is sampled: groups of completions, each of one prompt.

Shapes: G completions of a group, P tokens of a prompt, C of a completion.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define, field, frozen

from xtrain.dsl.schema.rollout import EXPERTS
from xtrain.runtime.data.packing.row_reader import RawRow


@frozen(kw_only=True, eq=False)
class Prompt:
    """ids: int64 [P]. answer: the text that the dataset has behind it; rest: int64, tokens of the document behind that.
    place: rows of the run before its own. values: numbers of its document. dataset: its number among those that are
    trained on."""

    ids: np.ndarray
    text: str
    answer: str
    rest: np.ndarray
    values: Mapping[str, float]
    dataset: int
    place: int


@frozen(kw_only=True)
class Completion:
    """tokens [C]: with what ends it. logprobs [C]: of logits / temperature, before anything is left out. left_out: sum
    over its tokens of the probability that was. text: without what ends it. cut: it has no end, as it has the most
    tokens that it may have. experts: int32 [P + C, width], the column `EXPERTS` of the prompt with it, where that is
    recorded."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    text: str
    cut: bool
    left_out: float = 0.0
    experts: np.ndarray | None = field(default=None, eq=False)


@define(eq=False)
class SampledGroup:
    """The completions of a prompt. rewards, advantages: float64 [G], once they are known."""

    prompt: Prompt
    completions: Sequence[Completion]
    rewards: np.ndarray = field(factory=lambda: np.empty(0))
    advantages: np.ndarray = field(factory=lambda: np.empty(0))

    def row(self, *, mask_truncated: bool = False) -> RawRow:
        """One document for each completion, of which the completion is to be predicted, unless it is cut and
        `mask_truncated`."""
        head, sizes = len(self.prompt.ids), [len(each.tokens) for each in self.completions]
        learned = [not (mask_truncated and each.cut) for each in self.completions]

        experts = [each.experts for each in self.completions if each.experts is not None]

        def column(numbers: Sequence[Sequence[float]]) -> list[np.ndarray]:
            return [np.concatenate((np.zeros(head), each)).astype(np.float32) for each in numbers]

        return RawRow(
            segments=[np.concatenate((self.prompt.ids, each.tokens)) for each in self.completions],
            trained=[np.repeat(np.array([0, on], np.uint8), (head, n)) for on, n in zip(learned, sizes, strict=True)],
            columns={
                "logprobs": column([each.logprobs for each in self.completions]),
                "advantages": column([[a] * size for a, size in zip(self.advantages, sizes, strict=True)]),
                **({EXPERTS: experts} if len(experts) == len(sizes) else {}),
            },
            values={name: [value] * len(sizes) for name, value in self.prompt.values.items()},
            dataset=self.prompt.dataset,
            position=self.prompt.place,
        )


def advantages_of(rewards: np.ndarray, scale: str) -> np.ndarray:
    """Rewards less their mean; by `group` divided by their standard deviation, of a sample, + 1e-4, as in TRL
    (arXiv 2402.03300, §4.1.2). float64 [G] both."""
    apart = rewards - rewards.mean()
    return apart / (rewards.std(ddof=1) + 1e-4) if scale == "group" else apart
