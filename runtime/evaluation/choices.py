"""How many questions a model answers: the choice that is the likeliest behind its question.

Log-likelihoods and accuracies are those of EleutherAI's lm-evaluation-harness (0.4, `multiple_choice`): a choice is
scored by the sum of the log-probabilities of its tokens, and of equal ones the first is taken.
"""

import math
from itertools import pairwise

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.loading.loader import EvalLoader
from xtrain.runtime.evaluation.measure import EvaluationResult
from xtrain.runtime.models.batch import ModelBatch


@define(eq=False)
class ChoicesMeasure:
    """Sums: the loss of every document of the store, each a choice behind its question."""

    loader: EvalLoader
    device: torch.device
    _choices: np.ndarray = field(init=False)
    _scored: np.ndarray = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Raises DataError where a choice alone is longer than a row."""
        store, capacity = self.loader.store, self.loader.rows.capacity
        assert store.choices is not None
        self._choices, self._scored = store.choices, store.predicted()
        if (longest := int(self._scored.max())) > capacity:
            raise DataError(
                f"a choice of {longest:,} tokens does not fit into a row of {capacity:,}", remedy="Lengthen the rows."
            )

    def zeros(self) -> Tensor:
        return torch.zeros(len(self._choices), dtype=torch.float64, device=self.device)

    def count(self, sums: Tensor, microbatch: Microbatch) -> None:
        """All tokens are known beforehand."""

    def add(self, sums: Tensor, batch: ModelBatch) -> None:
        assert batch.losses_BS is not None and batch.text_BS is not None
        sums.index_add_(0, batch.text_BS.flatten(), batch.losses_BS.flatten().double())

    def measured(self, sums: Tensor) -> EvaluationResult:
        """`accuracies`, and the loss of the right choices, in nats a token."""
        losses, right = sums.cpu().numpy(), self._choices[:, 1] == 1
        metrics = {"loss": float(losses[right].sum() / self._scored[right].sum()), **accuracies(-losses, self._choices)}
        facts = {**metrics, "tokens": int(self._scored.sum()), "questions": int(right.sum())}
        return EvaluationResult(metrics=metrics, facts=facts)


def accuracies(likelihoods: np.ndarray, choices: np.ndarray) -> dict[str, float]:
    """acc, acc_norm, acc_bytes: shares of the questions whose right choice has the largest log-likelihood, as it is,
    for each of its characters, for each of its bytes; NaN where a log-likelihood is.

    likelihoods: float64 [documents]. choices: int32 [documents, 4], as `TokenDocument.choice` says.
    """
    numbers, right, characters, size = choices.astype(np.int64).T
    bounds = np.append(np.flatnonzero(numbers == 0), len(numbers))
    found = {}
    for name, lengths in (("acc", np.ones_like(size)), ("acc_norm", characters), ("acc_bytes", size)):
        scores = likelihoods / lengths
        best = [start + int(np.argmax(scores[start:end])) for start, end in pairwise(bounds)]
        found[name] = math.nan if np.isnan(scores).any() else float(right[best].mean())
    return found
