"""Evaluation on held-out rows: loss over every valid token once, loss for each byte, and accuracy of choices."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from xtrain.runtime.base.data_errors import DataError
from xtrain.runtime.feed.loader import EvalLoader
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch
from xtrain.runtime.feed.tokenizers import TokenBytes
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.nn.transformer import ModelParts


@frozen(kw_only=True)
class EvaluationResult:
    """Result of an evaluation. metrics: name after `eval/DATASET/` → value. facts: fields of the event. warning: empty
    if there is none."""

    metrics: Mapping[str, float]
    facts: Mapping[str, Any]
    warning: str = ""


class Measure(Protocol):
    """Measure computed from a sum over microbatches and ranks."""

    loader: EvalLoader

    def zeros(self) -> Tensor:
        """Return float64 zeros for the sums, which are added over all ranks at the end."""
        ...

    def count(self, sums: Tensor, microbatch: Microbatch) -> None:
        """Add counts known before the forward, on one of the ranks that hold the same tokens."""
        ...

    def add(self, sums: Tensor, batch: ModelBatch) -> None:
        """Add results of a forward, on one of the ranks that have them."""
        ...

    def measured(self, sums: Tensor) -> EvaluationResult:
        """Return the result of the sums over all ranks."""
        ...


@define(eq=False)
class LossMeasure:
    """Loss of held-out rows: sums over all ranks divided by sums of tokens and bytes, never an average of averages. A
    reward model's loss is its objective.

    token_bytes: None if bits per byte are undefined. Sums: losses, valid tokens; with `token_bytes` also losses of text
    tokens, and their bytes. objective: unit of the objective (token, sequence or pair), which is then measured too;
    None: not measured. Its sums follow the others: number of sequences or pairs, objective, and the metrics of the
    loss. counts_units: this rank counts them, of all ranks that hold positions of the same rows.
    """

    loader: EvalLoader
    device: torch.device
    token_bytes: TokenBytes | None
    model: ModelParts
    objective: str | None = None
    counts_units: bool = True
    _tables: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def zeros(self) -> Tensor:
        more = 0 if self.objective is None else 2 + len(self.model.measured)
        return torch.zeros(4 + more, dtype=torch.float64, device=self.device)

    def count(self, sums: Tensor, microbatch: Microbatch) -> None:
        sums[1] += microbatch.num_valid
        if self.objective is not None and self.counts_units:
            sums[4] += microbatch.num_units

    def add(self, sums: Tensor, batch: ModelBatch) -> None:
        assert batch.cross_entropy is not None
        sums[0] += batch.cross_entropy
        self.add_text(sums, batch)
        if self.objective is not None:
            assert batch.recorded is not None
            sums[5:] += batch.recorded

    def add_text(self, sums: Tensor, batch: ModelBatch) -> None:
        """Add losses and bytes of a batch; NaN if its losses were requested and not computed."""
        if batch.losses_BS is not None:
            sums[2:4] += self._of_text(batch)
        elif batch.each:
            sums[3] = math.nan

    def _of_text(self, batch: ModelBatch) -> Tensor:
        """Return losses and bytes of the labels that are text; special tokens have no bytes."""
        assert self.token_bytes is not None and batch.losses_BS is not None
        assert batch.labels_BS is not None and batch.input_ids_BS is not None
        if self._tables is None:
            token_bytes = self.token_bytes
            self._tables = (
                torch.from_numpy(token_bytes.inside).to(self.device),
                torch.from_numpy(token_bytes.first).to(self.device),
            )
        inside_V, first_V = self._tables
        labels_BS = batch.labels_BS.clamp(min=0)
        begins_BS = (batch.positions_BS == 0) & (inside_V[batch.input_ids_BS] == 0)
        text_BS = (batch.labels_BS != IGNORE_INDEX) & (inside_V[labels_BS] > 0)
        bytes_BS = torch.where(begins_BS, first_V[labels_BS], inside_V[labels_BS]) * text_BS
        return torch.stack(((batch.losses_BS.double() * text_BS).sum(), bytes_BS.sum().double()))

    def measured(self, sums: Tensor) -> EvaluationResult:
        total, tokens, of_text, size, *more = sums.tolist()
        loss = _mean(total, tokens if self.model.predicts else more[0])
        metrics, facts = {"loss": loss}, {"loss": loss, "tokens": int(tokens)}
        if size > 0:  # false for NaN
            metrics["bits_per_byte"] = facts["bits_per_byte"] = of_text / size / math.log(2)
            facts["bytes"] = int(size)
        if self.objective is not None:
            minimised, measured = self._minimised(tokens, *more)
            metrics |= {"objective": minimised, **measured}
            facts |= {"objective": minimised, **({"metrics": measured} if measured else {})}
        warning = "" if tokens else "the held-out rows have no valid token, so there is no loss"
        return EvaluationResult(metrics=metrics, facts=facts, warning=warning)

    def _minimised(self, tokens: float, units: float, total: float, *others: float) -> tuple[float, dict[str, float]]:
        """Return the objective and the metrics of the loss by name: means over tokens, sequences or pairs."""
        measured = units if self.model.measures_units else tokens
        metrics = {name: _mean(other, measured) for name, other in zip(self.model.measured, others, strict=True)}
        return _mean(total, tokens if self.objective == "token" else units), metrics


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


@define(eq=False)
class ChoicesMeasure:
    """Accuracy on multiple-choice questions. Sums: the loss of every document of the store, each a choice after its
    question."""

    loader: EvalLoader
    device: torch.device
    _choices: np.ndarray = field(init=False)
    _scored: np.ndarray = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Raises DataError if a choice alone is longer than a row."""
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
        """Do nothing: all tokens are known beforehand."""

    def add(self, sums: Tensor, batch: ModelBatch) -> None:
        assert batch.losses_BS is not None and batch.text_BS is not None
        sums.index_add_(0, batch.text_BS.flatten(), batch.losses_BS.flatten().double())

    def measured(self, sums: Tensor) -> EvaluationResult:
        """Return `accuracies`, and the loss of the right choices in nats a token."""
        losses, right = sums.cpu().numpy(), self._choices[:, 1] == 1
        metrics = {"loss": float(losses[right].sum() / self._scored[right].sum()), **accuracies(-losses, self._choices)}
        facts = {**metrics, "tokens": int(self._scored.sum()), "questions": int(right.sum())}
        return EvaluationResult(metrics=metrics, facts=facts)


def accuracies(likelihoods: np.ndarray, choices: np.ndarray) -> dict[str, float]:
    """Return acc, acc_norm, acc_bytes: shares of questions whose right choice has the largest log-likelihood, as it is,
    per character and per byte; NaN if a log-likelihood is NaN.

    likelihoods: float64 [documents]. choices: int32 [documents, 4], see `TokenDocument.choice`.
    """
    numbers, right, characters, size = choices.astype(np.int64).T
    bounds = np.append(np.flatnonzero(numbers == 0), len(numbers))
    shares = {}
    for name, lengths in (("acc", np.ones_like(size)), ("acc_norm", characters), ("acc_bytes", size)):
        scores = likelihoods / lengths
        best = [start + int(np.argmax(scores[start:end])) for start, end in pairwise(bounds)]
        shares[name] = math.nan if np.isnan(scores).any() else float(right[best].mean())
    return shares
