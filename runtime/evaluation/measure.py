"""What an evaluation measures over the rows that it reads."""

from collections.abc import Mapping
from typing import Any, Protocol

from attrs import frozen
from torch import Tensor

from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.loading.loader import EvalLoader
from xtrain.runtime.models.batch import ModelBatch


@frozen(kw_only=True)
class EvaluationResult:
    """metrics: name behind `eval/DATASET/` → value. facts: fields of the event. warning: what is wrong, or ""."""

    metrics: Mapping[str, float]
    facts: Mapping[str, Any]
    warning: str = ""


class Measure(Protocol):
    """A sum over microbatches and ranks, and what follows from it."""

    loader: EvalLoader

    def zeros(self) -> Tensor:
        """float64: sums of nothing yet; those of all ranks are added up in the end."""
        ...

    def count(self, sums: Tensor, microbatch: Microbatch) -> None:
        """Add what is known before the forward, on one rank of those that hold the same tokens."""
        ...

    def add(self, sums: Tensor, batch: ModelBatch) -> None:
        """Add what a forward has left, on one rank of those that have it."""
        ...

    def measured(self, sums: Tensor) -> EvaluationResult:
        """What the sums over all ranks come to."""
        ...
