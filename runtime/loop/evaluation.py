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


@define(eq=False)
class LossMeasure:
    """Sums of losses over all ranks divided by sums of tokens and bytes: no average of averages. Of a model that gives
    rewards the loss is what is minimised.

    token_bytes: None where bits per byte cannot be told. Sums: losses, valid tokens; with `token_bytes` also losses of
    tokens that are text, and their bytes.
    objective: what is minimised is of each token, sequence or pair, and measured as well; None: it is not. Behind the
    others are then the number of sequences or pairs, what is minimised, and the metrics of the loss. counts_units:
    whether this rank counts these, of all that hold positions of the same rows.
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
        """Add losses and bytes of a batch; NaN if its losses were asked for, and nothing has computed them."""
        if batch.losses_BS is not None:
            sums[2:4] += self._of_text(batch)
        elif batch.each:
            sums[3] = math.nan

    def _of_text(self, batch: ModelBatch) -> Tensor:
        """Losses and bytes of the labels that are text: special tokens stand for none."""
        assert self.token_bytes is not None and batch.losses_BS is not None
        assert batch.labels_BS is not None and batch.input_ids_BS is not None
        if self._tables is None:
            found = self.token_bytes
            self._tables = (
                torch.from_numpy(found.inside).to(self.device),
                torch.from_numpy(found.first).to(self.device),
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
        if size > 0:  # not NaN
            metrics["bits_per_byte"] = facts["bits_per_byte"] = of_text / size / math.log(2)
            facts["bytes"] = int(size)
        if self.objective is not None:
            minimised, measured = self._minimised(tokens, *more)
            metrics |= {"objective": minimised, **measured}
            facts |= {"objective": minimised, **({"metrics": measured} if measured else {})}
        warning = "" if tokens else "the held-out rows have no valid token, so there is no loss"
        return EvaluationResult(metrics=metrics, facts=facts, warning=warning)

    def _minimised(self, tokens: float, units: float, total: float, *others: float) -> tuple[float, dict[str, float]]:
        """What is minimised, and the metrics of the loss by name: means over tokens, sequences or pairs."""
        measured = units if self.model.measures_units else tokens
        metrics = {name: _mean(other, measured) for name, other in zip(self.model.measured, others, strict=True)}
        return _mean(total, tokens if self.objective == "token" else units), metrics


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


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
