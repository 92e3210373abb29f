"""The loss on held-out documents, over every valid token once, and what that is for each byte of their text."""

import math

import torch
from attrs import define, field
from torch import Tensor

from ..data.collate.batch import IGNORE_INDEX, Microbatch
from ..data.documents.token_bytes import TokenBytes
from ..data.loading.loader import EvalLoader
from ..models.batch import ModelBatch
from .measure import EvaluationResult


@define(eq=False)
class LossMeasure:
    """Sums of losses over all ranks divided by sums of tokens and bytes: no average of averages.

    token_bytes: None where bits per byte cannot be told. Sums: losses, valid tokens; with `token_bytes` also losses of
    tokens that are text, and their bytes.
    """

    loader: EvalLoader
    device: torch.device
    token_bytes: TokenBytes | None
    _tables: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def zeros(self) -> Tensor:
        return torch.zeros(4, dtype=torch.float64, device=self.device)

    def count(self, sums: Tensor, microbatch: Microbatch) -> None:
        sums[1] += microbatch.num_valid

    def add(self, sums: Tensor, batch: ModelBatch) -> None:
        assert batch.cross_entropy is not None
        sums[0] += batch.cross_entropy
        if batch.losses_BS is not None:
            sums[2:] += self._of_text(batch)

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
        total, tokens, of_text, size = sums.tolist()
        loss = total / tokens if tokens else math.nan
        metrics, facts = {"loss": loss}, {"loss": loss, "tokens": int(tokens)}
        if size:
            metrics["bits_per_byte"] = facts["bits_per_byte"] = of_text / size / math.log(2)
            facts["bytes"] = int(size)
        warning = "" if tokens else "the held-out rows have no valid token, so there is no loss"
        return EvaluationResult(metrics=metrics, facts=facts, warning=warning)
