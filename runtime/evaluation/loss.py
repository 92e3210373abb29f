"""The loss on held-out documents, over every valid token once, what that is for each byte of their text, and what is
minimised and measured besides."""

import math

import torch
from attrs import define, field
from torch import Tensor

from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.collate.samples import IGNORE_INDEX
from xtrain.runtime.data.documents.token_bytes import TokenBytes
from xtrain.runtime.data.loading.loader import EvalLoader
from xtrain.runtime.evaluation.measure import EvaluationResult
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.parts import ModelParts


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
