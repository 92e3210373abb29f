"""Rows that a model is trained on, and what comes back.

Shapes: T tokens of a row, N tokens of a text that was written.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from attrs import frozen

IGNORED: Final = -100  # a target without a loss


@frozen(kw_only=True)
class TrainingRow:
    """A training row. tokens: [T]. targets: the token to predict after each token, or IGNORED, [T]. weights: of each
    target, any sign; default 1. logprobs, advantages: for policy losses; ignored where the target is."""

    tokens: Sequence[int]
    targets: Sequence[int]
    weights: Sequence[float] | None = None
    logprobs: Sequence[float] | None = None
    advantages: Sequence[float] | None = None

    @classmethod
    def of_text(cls, tokens: Sequence[int], prompt: int = 1) -> "TrainingRow":
        """Return a row of a text whose tokens after the first `prompt` are learned."""
        return cls(tokens=tokens[:-1], targets=[IGNORED] * (prompt - 1) + list(tokens[prompt:]))

    @classmethod
    def of_answer(cls, prompt: Sequence[int], answer: "WrittenText", advantage: float) -> "TrainingRow":
        """Return a row of an answer to a prompt, for a policy loss: each token of the answer has the same advantage."""
        row, before = cls.of_text([*prompt, *answer.tokens], len(prompt)), len(prompt) - 1
        return cls(
            tokens=row.tokens,
            targets=row.targets,
            logprobs=[0.0] * before + list(answer.logprobs),
            advantages=[0.0] * before + [advantage] * len(answer.tokens),
        )

    def body(self) -> dict[str, Any]:
        names = ("tokens", "targets", "weights", "logprobs", "advantages")
        return {name: _numbers(getattr(self, name)) for name in names if getattr(self, name) is not None}


def _numbers(values: Sequence[Any]) -> list[Any]:
    return np.asarray(values).tolist()


@frozen(kw_only=True, eq=False)
class PassOutcome:
    """Result of a pass. loss: sum over targets. tokens: number of targets with a loss. logprobs: of the targets of each
    row, [T]; 0 where ignored."""

    loss: float
    tokens: int
    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]

    @property
    def mean(self) -> float:
        return self.loss / max(1, self.tokens)


@frozen(kw_only=True)
class WrittenText:
    """A sampled text. tokens: [N]. logprobs: of each token in the distribution it was drawn from, [N]. stopped: it
    ended before the maximum length."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool


def outcome(answers: Sequence[Mapping[str, Any]]) -> PassOutcome:
    """Combine the answers of a pass that was sent in parts."""
    metrics: dict[str, float] = {}
    for answer in answers:
        for name, value in answer["metrics"].items():
            if name.endswith(":sum"):
                metrics[name] = metrics.get(name, 0.0) + _number(value)
    return PassOutcome(
        loss=metrics["loss:sum"],
        tokens=sum(answer["tokens"] for answer in answers),
        logprobs=[np.array([_number(each) for each in row]) for answer in answers for row in answer["logprobs"]],
        metrics=metrics,
    )


def written(answers: Sequence[Mapping[str, Any]]) -> list[WrittenText]:
    return [
        WrittenText(
            tokens=sample["tokens"],
            logprobs=[_number(each) for each in sample["logprobs"]],
            stopped=sample["stopped"],
        )
        for answer in answers
        for sample in answer["samples"]
    ]


def _number(value: float | None) -> float:
    """Return a number from JSON, where null means not finite."""
    return float("nan") if value is None else float(value)
