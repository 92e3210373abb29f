"""Log-probabilities of a reference model as a stored column of a dataset, computed once in the layout of the run."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from xtrain.dsl.schema.losses import MISMATCHED, REF
from xtrain.plan.canonical import DATA, digest
from xtrain.plan.plan import Plan
from xtrain.records.training_events import ReferenceEvent
from xtrain.regular_files import read_json
from xtrain.runtime.base.errors import DataError, EnvironmentFault, ResumeRefused
from xtrain.runtime.base.files import make_folder, move_aside
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank, Resources
from xtrain.runtime.feed.collate import CollateChain
from xtrain.runtime.feed.loader import EvalLoader
from xtrain.runtime.feed.packing.stored_rows import RowReader
from xtrain.runtime.feed.prepared import INDEX, PreparedDataset, cache_of
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.nn.build import compute_format
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.pipeline import Outlines, PipelineSchedule, forwarded
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter, first_of_machine
from xtrain.runtime.observe.records import Records
from xtrain.runtime.sampling.reference_weights import ReferenceWeights, exchanged_rows, identity_of
from xtrain.runtime.store.beginning import starting_point

# Part of every key: raise it whenever the same weights and documents would give other numbers.
FORMAT: Final = 1
NUMBERS, META = "logprobs.bin", "meta.json"
DTYPES: Final = {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)}
AT_ONCE: Final = 1 << 20  # numbers


Blocks = Iterator[tuple[np.ndarray, np.ndarray]]
"""(places, values): tokens of a store, int64, -1 for none, and the number of each."""


def column_key(depends_on: Any) -> str:
    """Return the hex name of a column that is determined by JSON values."""
    return digest([FORMAT, depends_on], DATA, size=16)


@frozen(kw_only=True, eq=False)
class StoredColumn:
    """Stored column of log-probabilities. numbers: [tokens], mapped and read-only; NaN for tokens without one. digest:
    of their bytes."""

    numbers: np.ndarray
    digest: str


def open_column(folder: Path, tokens: int, form: str) -> StoredColumn | None:
    """Open the column in `folder`; None if it is missing, unreadable, or has another length or number format."""
    try:
        meta = read_json(folder / META)
        numbers = np.asarray(np.memmap(folder / NUMBERS, dtype=DTYPES[form], mode="r"))
        intact = (
            (meta["format"], meta["numbers"], meta["tokens"]) == (FORMAT, form, tokens) == (FORMAT, form, len(numbers))
        )
        return StoredColumn(numbers=numbers, digest=str(meta["digest"])) if intact else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_column(
    folder: Path,
    tokens: int,
    form: str,
    covers: Any,
    blocks: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    replaces: bool,
) -> None:
    """Write a column of `blocks` and publish it at `folder` atomically; it is NaN elsewhere.

    covers: JSON values that it depends on, for people. replaces: move an existing column aside. Raises the errors of
    `blocks`, and DataError if the cache cannot be written.
    """

    def write(partial: Path) -> None:
        with _growing(partial / NUMBERS, tokens, DTYPES[form]) as numbers:
            for places, values in blocks:
                known = places >= 0
                numbers[places[known]] = values[known]
        with (partial / NUMBERS).open("rb") as file:
            content = hashlib.file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()
        meta = {"format": FORMAT, "numbers": form, "tokens": tokens, "digest": content}
        with (partial / META).open("wb") as file:
            file.write(json.dumps({**meta, "covers": covers}, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())

    try:
        if replaces:
            folder.parent.mkdir(parents=True, exist_ok=True)
            move_aside(folder)
        make_folder(folder, write, lambda there: open_column(there, tokens, form) is not None)
    except OSError as error:
        remedy = "Free some space or choose another cache folder."
        raise DataError(f"cannot write log-probabilities: {error}", path=folder, remedy=remedy) from error


@contextmanager
def _growing(path: Path, tokens: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield an array of NaN backed by a file, which is synced after the block."""
    numbers = np.memmap(path, dtype=dtype, mode="w+", shape=(tokens,))
    for first in range(0, tokens, AT_ONCE):
        numbers[first : first + AT_ONCE] = np.nan
    yield numbers
    numbers.flush()
    with path.open("rb") as file:
        os.fsync(file.fileno())


@frozen(kw_only=True, eq=False)
class SharedColumn:
    """Column in the cache, which machines share or each has for itself. tokens: of the store. form: fp32 or fp64. All
    methods are collective."""

    rank: Rank
    folder: Path
    tokens: int
    form: str

    def source(self) -> int | None:
        """Return the first rank that has the column; None if none does."""
        return next((rank for rank, digest in enumerate(self._digests()) if digest), None)

    def write(self, covers: Any, blocks: Blocks) -> None:
        """Write the blocks that all ranks compute together, on the first rank of each machine. covers: see
        `write_column`."""
        self._put(covers, blocks, writes=self.rank.local_rank == 0, replaces=False)

    def copy(self, covers: Any, source: int) -> None:
        """Copy the column of rank `source` to machines that lack it or have another, through their first ranks."""
        digests = self._digests()
        others = {digest != digests[source] for digest in digests}
        if True in others:
            lacks = digests[self.rank.rank] != digests[source]
            writes = lacks and self.rank.local_rank == 0
            self._put(covers, self._sent(source), writes=writes, replaces=bool(digests[self.rank.rank]))

    def open_everywhere(self) -> StoredColumn:
        """Open the column, the same on every rank. Raises DataError."""
        column = self._own()
        if column is None or len(set(self._digests())) > 1:
            message = f"rank {self.rank.rank} does not find the log-probabilities that were written"
            raise DataError(message, path=self.folder, remedy="Check this file system.")
        return column

    def _own(self) -> StoredColumn | None:
        return open_column(self.folder, self.tokens, self.form)

    def _digests(self) -> list[str]:
        """Return the digest of each rank's column; empty without one."""
        column = self._own()
        digests = [column.digest if column is not None else ""]
        if self.rank.world_size > 1:
            own, digests = digests[0], [""] * self.rank.world_size
            dist.all_gather_object(digests, own)
        return digests

    def _put(self, covers: Any, blocks: Blocks, *, writes: bool, replaces: bool) -> None:
        if writes:
            write_column(self.folder, self.tokens, self.form, covers, blocks, replaces=replaces)
        for _ in blocks:  # also ranks that do not write take part
            pass
        if self.rank.world_size > 1:  # complete before another rank opens it
            dist.all_reduce(torch.zeros(1))

    def _sent(self, source: int) -> Blocks:
        """Yield the column of a rank, piece by piece."""
        own = self._own() if self.rank.rank == source else None
        for first in range(0, self.tokens, AT_ONCE):
            places = np.arange(first, min(first + AT_ONCE, self.tokens))
            piece = torch.empty(len(places), dtype=torch.float64 if self.form == "fp64" else torch.float32)
            if own is not None:
                piece = torch.from_numpy(own.numbers[first : first + len(places)].copy())
            dist.broadcast(piece, src=source)
            yield places, piece.numpy()


# shapes: G rows that all data ranks take together, S positions of a whole row


REPORT_SECONDS: Final = 10.0  # between two events of a long computation


@op("setup.reference", gives="prepared", traced=False)
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
    """Add to a dataset's store a column with the reference's log-probability of each label in its rows, from the cache
    or by a forward. parts: `training`, `hold-out` or both.

    reference: as in the loss; digest: of the files of a folder. task: whose adapter, of several. format: of the
    numbers. mismatched: use labels after the prompts of other documents, as another column. Raises EnvironmentFault if
    files have changed since planning, DataError if the cache cannot be written.
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
            f"the run compared dataset {dataset} with the reference {reference}, whose log-probabilities are no longer "
            f"in {cache / 'reference'}, and whose weights have changed; restore either of them, or start from scratch "
            "with checkpoint.resume = false"
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
    written = column.open_everywhere()
    report(count)
    store = evolve(data.store, columns={**data.store.columns, MISMATCHED if mismatched else REF: written.numbers})
    known = {"reference": model_named, "weights": covers["weights"]}
    return {**prepared, dataset: evolve(data, store=store, reference=known)}


def weights_now(plan: Plan, rank: Rank, beat: HeartbeatWriter, reference: str, digest: str = "") -> str:
    """Return the identity of a reference's weights, alike on all ranks. Raises EnvironmentFault if a file is
    missing."""
    index = cache_of(plan) / "tokens" / INDEX
    try:
        own = first_of_machine(rank, lambda: identity_of(plan, reference, digest, index), beat)
    except OSError as error:
        raise EnvironmentFault("X524", str(error)) from error
    return _of_first(rank, own)


def weights_before(plan: Plan, records: Records, dataset: str, reference: str) -> str | None:
    """Return the identity of a reference's weights that the resumed state was trained with; None if the run is not
    resumed, or has had another reference."""
    start = starting_point(plan, records.directory)
    if start.entry is None or not start.own:
        return None
    known = start.entry.state().get("references", {}).get(dataset, {})
    return known.get("weights") if known.get("reference") == reference else None


def _fingerprint(readers: Sequence[RowReader]) -> str | list[str]:
    one, *more = (
        f"{reader.fingerprint} {reader.rows.fingerprint()}" if reader.rows.packed_as else reader.fingerprint
        for reader in readers
    )
    return [one, *more] if more else one


def _of_first(rank: Rank, own: Any) -> Any:
    """Return the first rank's value on all ranks."""
    values = [own]
    if rank.world_size > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


@frozen(kw_only=True, eq=False)
class RowsForward:
    """Forward of a dataset's rows."""

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
        mismatched: bool,
    ) -> Blocks:
        """Yield `blocks` of several parts in sequence."""
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
        mismatched: bool,
    ) -> Blocks:
        """Yield, for each batch of rows, its label tokens [G, S] and their log-probabilities. Collective.

        report: called with the number of finished rows every ten seconds. mismatched: exchange the answers of rows.
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
        """Gather the log-probabilities of all rows of a batch from the ranks, [G, S]; 0 where there is no label."""
        rank = self.rank
        dtype = torch.float64 if format == "fp64" else torch.float32
        whole_GS = torch.zeros(together, capacity, dtype=dtype, device=rank.device)
        if batch.losses_BS is not None and rank.is_tp_first:
            own_BS: Tensor = batch.losses_BS.to(dtype).neg()
            micro, positions = own_BS.shape
            in_row_BS = torch.arange(positions).expand(micro, -1) if batch.in_row_BS is None else batch.in_row_BS
            first = rank.data_rank * micro
            # fp32 log-probabilities may exceed 0 by rounding.
            whole_GS[first : first + micro].scatter_(1, in_row_BS.to(rank.device), own_BS.clamp(max=0))
        if rank.world_size > 1:
            dist.all_reduce(whole_GS)
        return whole_GS.cpu().numpy()
