"""`setup.reference`: the column `ref_logprobs` of a dataset, computed once with the model of the run, in its layout."""

# shapes: G rows that all data ranks take together, S positions of a whole row

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from xtrain.dsl.schema.losses import MISMATCHED, REF
from xtrain.planner.plan import Plan
from xtrain.records.start_events import ReferenceEvent
from xtrain.runtime.checkpoint.sources import starting_point
from xtrain.runtime.data.collate.collators import CollateChain
from xtrain.runtime.data.loading.loader import EvalLoader
from xtrain.runtime.data.loading.prepared import PreparedDataset, cache_of
from xtrain.runtime.data.packing.row_reader import RowReader
from xtrain.runtime.data.tokenising.build import INDEX
from xtrain.runtime.errors import EnvironmentFault, ResumeRefused
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.build import compute_format
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.monitoring.waiting import first_of_machine
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.parallelize.fsdp import reshard
from xtrain.runtime.parallelize.outline import Outlines
from xtrain.runtime.parallelize.pipeline import PipelineSchedule, forwarded
from xtrain.runtime.reference.column import column_key
from xtrain.runtime.reference.mismatched import exchanged_rows
from xtrain.runtime.reference.shared import Blocks, SharedColumn
from xtrain.runtime.reference.weights import ReferenceWeights, identity_of
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Rank, Resources

REPORT_SECONDS: Final = 10.0  # between two events of a long computation


@op("setup.reference", gives="prepared")
def add_reference(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    records: Records,
    beat: HeartbeatWriter,
    meshes: Meshes,
    collate: CollateChain,
    prepared: dict[str, PreparedDataset],
    resources: Resources,
    dataset: str,
    reference: str,
    format: str,
    digest: str = "",
    task: str | None = None,
    parts: Sequence[str] = ("training",),
    mismatched: bool = False,
    pipeline: PipelineSchedule | None = None,
) -> dict[str, PreparedDataset]:
    """Give the store of a dataset the column of log-probabilities of the labels in its rows, from the cache or by a
    forward of these rows. parts: `training`, `hold-out` or both.

    reference: as of the loss; digest: of the files of a folder. task: with whose adapter, of several. format: of the
    numbers. mismatched: another column, of labels behind the prompts of other documents. Raises EnvironmentFault if
    files are not those of the plan, DataError if the cache cannot be written.
    """
    data, begin = prepared[dataset], time.perf_counter()
    cache, readers = cache_of(plan), [data.parts[part] for part in parts]
    count = sum(rows.rows.num_rows for rows in readers)

    def named() -> str:
        return weights_now(plan, rank, beat, reference, digest)

    model_named = reference if not digest else f"{reference} {digest}"
    before = weights_before(plan, records, dataset, model_named)
    covers: dict[str, Any] = {"weights": before or named(), "rows": _fingerprint(readers), "task": task}
    covers |= {"numbers": format, "matmul": plan.node("setup.bootstrap").args["matmul"]}
    covers |= {"compute": compute_format(plan), **({"mismatched": True} if mismatched else {})}
    key = column_key(covers)
    column = SharedColumn(rank=rank, folder=cache / "reference" / key, tokens=data.store.num_tokens, form=format)
    source = column.source()
    if source is None and before is not None and named() != before:
        raise ResumeRefused(
            f"the run has compared dataset {dataset} with the reference {reference}, whose log-probabilities are not "
            f"in {cache / 'reference'} any more, and whose weights are others by now; bring back one of both, or "
            "start anew with checkpoint.resume = false"
        )

    def report(done: int) -> None:
        records.event(
            ReferenceEvent(
                step=0,
                dataset=dataset,
                reference=reference,
                key=key,
                computed=source is None,
                done=done,
                rows=count,
                tokens=column.tokens,
                seconds=time.perf_counter() - begin,
            )
        )

    if source is None:
        weights = ReferenceWeights(plan=plan, model=model, rank=rank, records=records, beat=beat, resources=resources)
        forward = RowsForward(plan=plan, model=model, rank=rank, beat=beat, meshes=meshes, collate=collate)
        with weights.in_place(reference, digest, task):
            column.write(covers, forward.of_all(readers, format, pipeline, report, mismatched=mismatched))
    else:
        column.copy(covers, source)
    found = column.open_everywhere()
    report(count)
    store = evolve(data.store, columns={**data.store.columns, MISMATCHED if mismatched else REF: found.numbers})
    known = {"reference": model_named, "weights": covers["weights"]}
    return {**prepared, dataset: evolve(data, store=store, reference=known)}


def weights_now(plan: Plan, rank: Rank, beat: HeartbeatWriter, reference: str, digest: str = "") -> str:
    """What the weights of a reference are known by, on all ranks alike. Raises EnvironmentFault where a file is not
    there."""
    index = cache_of(plan) / "tokens" / INDEX
    try:
        own = first_of_machine(rank, lambda: identity_of(plan, reference, digest, index), beat)
    except OSError as error:
        raise EnvironmentFault("X524", str(error)) from error
    return _of_first(rank, own)


def weights_before(plan: Plan, records: Records, dataset: str, reference: str) -> str | None:
    """What the weights of a reference were known by when the run saved the state that it goes on from; None if it does
    not go on, or compares with another reference from here on."""
    start = starting_point(plan, records.directory)
    if start.entry is None or not start.own:
        return None
    known = start.entry.state().get("references", {}).get(dataset, {})
    return known.get("weights") if known.get("reference") == reference else None


def _fingerprint(readers: Sequence[RowReader]) -> str | list[str]:
    one, *more = (rows.fingerprint for rows in readers)
    return [one, *more] if more else one


def _of_first(rank: Rank, own: Any) -> Any:
    """What the first rank has found."""
    found = [own]
    if rank.world_size > 1:
        dist.broadcast_object_list(found, src=0)
    return found[0]


@frozen(kw_only=True, eq=False)
class RowsForward:
    """A forward of the rows of a dataset."""

    plan: Plan
    model: ModelParts
    rank: Rank
    beat: HeartbeatWriter
    meshes: Meshes
    collate: CollateChain

    def of_all(
        self,
        readers: Sequence[RowReader],
        format: str,
        pipeline: PipelineSchedule | None,
        report: Callable[[int], None],
        *,
        mismatched: bool = False,
    ) -> Blocks:
        """As `blocks`, of several parts one behind the other."""
        before = 0
        for rows in readers:
            yield from self.blocks(
                rows, format, pipeline, lambda done, before=before: report(before + done), mismatched=mismatched
            )
            before += rows.rows.num_rows

    @torch.no_grad()
    def blocks(
        self,
        rows: RowReader,
        format: str,
        pipeline: PipelineSchedule | None,
        report: Callable[[int], None],
        *,
        mismatched: bool = False,
    ) -> Blocks:
        """Of each batch of rows the tokens that are labels, [G, S], and their log-probabilities. Collective.

        report: is told how many rows are done, every ten seconds. mismatched: of rows whose answers are exchanged.
        """
        rank = self.rank
        micro = self.plan.node("setup.loader").args["micro"]
        loader = EvalLoader(
            store=rows.store,
            documents=rows.documents,
            rows=rows.rows,
            collate=self.collate,
            micro=micro,
            data_rank=rank.data_rank,
            data_ranks=rank.data_ranks,
        )
        outlines = Outlines.of(self.plan, self.collate, rank, self.meshes)

        def batches() -> Iterator[ModelBatch]:
            usual = outlines.completed(loader, len(loader))
            for microbatch in exchanged_rows(loader.raw_rows(), rows.rows, self.collate) if mismatched else usual:
                self.beat.mark()
                batch = ModelBatch.of(microbatch, rank.device)
                batch.each = True
                yield batch

        together, said = micro * rank.data_ranks, time.perf_counter()
        empty_S = np.full(rows.rows.capacity, -1, dtype=np.int64)
        self.model.train(False)
        for number, batch in enumerate(forwarded(self.model, pipeline, batches())):
            first = number * together
            logprob_GS = self._gathered(batch, together, rows.rows.capacity, format)
            numbers = range(first, first + together)
            places = [rows.labels_at(n, exchanged=mismatched) if n < loader.num_rows else empty_S for n in numbers]
            yield np.stack(places), logprob_GS
            if time.perf_counter() - said > REPORT_SECONDS:
                report(min(first + together, loader.num_rows))
                said = time.perf_counter()
        reshard(self.model)
        self.model.train()

    def _gathered(self, batch: ModelBatch, together: int, capacity: int, format: str) -> np.ndarray:
        """Of all rows of a batch, from the ranks that have computed them, [G, S]; 0 where there is no label."""
        rank = self.rank
        dtype = torch.float64 if format == "fp64" else torch.float32
        whole_GS = torch.zeros(together, capacity, dtype=dtype, device=rank.device)
        if batch.losses_BS is not None and rank.is_tp_first:
            own_BS: Tensor = batch.losses_BS.to(dtype).neg()
            micro, positions = own_BS.shape
            in_row_BS = torch.arange(positions).expand(micro, -1) if batch.in_row_BS is None else batch.in_row_BS
            first = rank.data_rank * micro
            # Log-probabilities of fp32 may exceed 0 by a rounding.
            whole_GS[first : first + micro].scatter_(1, in_row_BS.to(rank.device), own_BS.clamp(max=0))
        if rank.world_size > 1:
            dist.all_reduce(whole_GS)
        return whole_GS.cpu().numpy()
