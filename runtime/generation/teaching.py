"""What a teacher holds probable in the place of each token of a store: the model of a folder in one process, its logits
made piece by piece.

Shapes: B rows, S positions, T positions that hold tokens, D dim of the teacher, V vocabulary, K tokens that are stored.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from ...dsl.schema.losses import TEACHER_IDS, TEACHER_LOGPROBS
from ...planner.load import plan_from_text
from ...planner.model.teacher import NAME, teacher_text
from ...planner.plan import Node, Plan
from ...planner.weights.fit import assign
from ..bootstrap import choose_device, set_matmul, use_threads
from ..checkpoint.model_folder import planned_files
from ..checkpoint.stored_weights import WeightReader
from ..data.errors import DataError
from ..data.loading.feeding import RowFeeder
from ..data.packing.pack import pack_rows
from ..data.stores.store import TokenStore
from ..input.reading_process import chain_of
from ..models.batch import ModelBatch
from ..models.loss import cap_logits
from ..models.tensors import model_tensors
from ..models.transformer import Transformer
from ..state import Rank
from .trained import alone, whole_model

CHUNK_BYTES = 2**28
Report = Callable[[int], None]
"""Is told how many tokens are done."""


@frozen(eq=False)
class TeacherModel:
    """A model in one process. rows: of a microbatch."""

    plan: Plan
    model: Transformer
    rank: Rank
    rows: int

    @classmethod
    def load(cls, plan: Plan, node: Node) -> "TeacherModel":
        """The teacher of a `setup.teacher` node of a plan. Raises DataError where it cannot be read."""
        args, rows = node.args, plan.node("setup.loader").args["micro"]
        device = plan.node("setup.bootstrap").args["device"]
        source = plan.node("setup.tokenizer").args["source"]
        text = teacher_text(
            args["folder"], source, sequence=args["sequence"], rows=rows, precision=args["precision"], device=device
        )
        compiled = plan_from_text(text, NAME, world=1)
        if compiled.plan is None:
            first = compiled.diagnostics.errors[0]
            raise DataError(f"the teacher {args['folder']}: {first.message}", remedy=first.hint)
        own = compiled.plan
        if own.architecture.vocab != plan.architecture.vocab:
            theirs, ours = own.architecture.vocab, plan.architecture.vocab
            raise DataError(f"the teacher {args['folder']} has a vocabulary of {theirs:,}, and the model of {ours:,}")
        chosen = choose_device(device, local_rank=0)
        use_threads(None, local_world=1)
        set_matmul(plan.node("setup.bootstrap").args["matmul"], chosen)
        rank = alone(chosen)
        model = whole_model(own, rank)
        with torch.no_grad():
            files = planned_files(**own.node("setup.read_weights").args)
            with WeightReader(files, assign(own.architecture, files), lambda done: None) as reader:
                reader.read([each for each in model_tensors(model, "").items() if reader.has(each[0])])
        model.train(False)
        return cls(own, model.whole, rank, rows)

    def fill(
        self, columns: Mapping[str, np.ndarray], store: TokenStore, top: int, temperature: float, report: Report
    ) -> None:
        """Write [tokens, K] ids, the most probable one first, and [tokens, K + 1] log-probabilities of them and of all
        others together, at every token but the first of a document. Documents longer than a row are cut as in training:
        into rows of their own, each of which begins anew."""
        done = 0
        for batch, real_T, targets in self._microbatches(store):
            with torch.no_grad():
                hidden_TD = self.model.hidden(batch).flatten(0, 1)[real_T]
                for part, (ids_tK, logprobs_tK1) in self._distributions(hidden_TD, top, temperature):
                    columns[TEACHER_IDS][targets[part]] = ids_tK.to(torch.int32).cpu().numpy()
                    columns[TEACHER_LOGPROBS][targets[part]] = logprobs_tK1.float().cpu().numpy()
            done += len(targets)
            report(done)

    def _microbatches(self, store: TokenStore) -> Iterator[tuple[ModelBatch, Tensor, np.ndarray]]:
        """Each with its positions that hold tokens, int64 [T], and which token of the store is predicted at each."""
        plain = evolve(store, columns={}, values={})
        sequence = self.plan.node("setup.loader").args["sequence"]
        rows = pack_rows(store.lengths(), sequence, "split")
        documents = np.arange(store.num_documents, dtype=np.int64)
        collate = chain_of(self.plan, self.rank)
        feeder = RowFeeder(store=plain, documents=documents, rows=rows, collate=collate)
        for first in range(0, rows.num_rows, self.rows):
            numbers = np.arange(first, min(first + self.rows, rows.num_rows), dtype=np.int64)
            batch = feeder.microbatch(numbers)
            real_T = batch.real_BS.flatten().nonzero()[:, 0]
            targets = [self._predicted(feeder, number) for number in numbers.tolist()]
            yield ModelBatch.of(batch, self.rank.device), real_T.to(self.rank.device), np.concatenate(targets)

    @staticmethod
    def _predicted(feeder: RowFeeder, number: int) -> np.ndarray:
        """The tokens of the store that a row predicts, in the order of its positions."""
        rows, offsets = feeder.rows, feeder.store.offsets
        segments = slice(int(rows.row_offsets[number]), int(rows.row_offsets[number + 1]))
        documents = rows.document[segments]
        first = offsets[documents] + rows.starts(segments)
        end = np.minimum(first + rows.capacity + 1, offsets[documents + 1])
        return np.concatenate([np.arange(a + 1, b) for a, b in zip(first.tolist(), end.tolist(), strict=True)])

    def _distributions(
        self, hidden_TD: Tensor, top: int, temperature: float
    ) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
        """Of a piece of the positions after another, the ids [t, K] and the log-probabilities [t, K + 1]."""
        weight_VD, head = self.model.head_weight(), self.model.head
        exact = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        tokens = max(1, CHUNK_BYTES // (4 * head.vocabulary))
        for first in range(0, len(hidden_TD), tokens):
            part = slice(first, first + tokens)
            logits_tV = F.linear(hidden_TD[part], weight_VD).to(exact)
            cap_logits(logits_tV, head, slope=False)
            yield part, largest(logits_tV.div_(temperature), top)


def largest(logits_TV: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Of each distribution the ids [T, K] of its most probable tokens, the first most of all, and the logarithms of
    their probabilities and of that of all others together [T, K + 1]. `logits_TV` is overwritten."""
    lse_T = logits_TV.logsumexp(-1)
    values_TK, ids_TK = logits_TV.topk(top)
    # Summed without them: what is left of a difference of sums would be rounding.
    rest_T = logits_TV.scatter_(1, ids_TK, -torch.inf).logsumexp(-1)
    tiny = torch.finfo(logits_TV.dtype).tiny
    found = torch.cat((values_TK, rest_T[:, None]), 1) - lse_T[:, None]
    return ids_TK, found.clamp_(min=float(np.log(tiny)))
