"""Set-up of a run's data: `setup.tokenizer`, `setup.data`, `collate.microbatches`, `setup.loader`, `setup.horizon`.

`Feed` is the result: the training loader and the held-out rows. `setup.horizon` counts the data, so that epochs become
steps, and checks the rules that depend on the count. A resume with another batch does the same for lengths in tokens,
which count from the checkpoint.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from attrs import asdict, define

from xtrain.dsl.diagnostics.diagnostic import Diagnostic
from xtrain.plan.arithmetic import Arithmetic, Counts
from xtrain.plan.learning_rate import phase_at
from xtrain.plan.plan import Plan, PlanPhase, Timeline
from xtrain.plan.step_sizes import StepSizes
from xtrain.plan.timeline import counted_arithmetic, counted_timeline
from xtrain.records.training_events import DataEvent, HorizonEvent, HorizonStretch, HorizonTick, TokeniseEvent
from xtrain.runtime.base.errors import DataError, EnvironmentFault
from xtrain.runtime.base.mesh import CollectiveErrors
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.feed import collate as collators
from xtrain.runtime.feed.collate import CollateChain
from xtrain.runtime.feed.curriculum import Remarks, TrainingRows, counted_from, curriculum_of
from xtrain.runtime.feed.loader import EvalLoader, RowLoader, TextLoader
from xtrain.runtime.feed.microbatch import Microbatch
from xtrain.runtime.feed.prepared import PreparedDataset, opened_from, prepared_from
from xtrain.runtime.feed.reading_ahead import ReaderProcesses, ReadingAhead
from xtrain.runtime.feed.token_store import BAD, DataProgress, every
from xtrain.runtime.feed.tokenizers import TextTokenizer, load_tokenizer
from xtrain.runtime.observe.heartbeat import HeartbeatWriter, first_of_machine
from xtrain.runtime.observe.records import Records
from xtrain.text.units import plural

# Seconds between two events of a long build.
REPORT_SECONDS = 10.0
ALONE = PlanPhase(name="train", first=0, fraction=None, shares={})


@define
class Feed:
    """Data of the loop: the training loader, the number of its steps, and the datasets for evaluation.

    planned: the timeline of the plan, with uncounted parts; batch: the counted facts. Both are None for a trace of the
    program without a run. ahead: reads the next steps while one computes; None without prefetch.
    """

    loader: RowLoader
    collate: CollateChain
    micro: int
    steps: int
    datasets: dict[str, PreparedDataset]
    phases: tuple[PlanPhase, ...] = (ALONE,)
    planned: Timeline | None = None
    batch: Arithmetic | None = None
    ahead: ReadingAhead | None = None

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return this rank's microbatches of optimizer step `step`, from 0."""
        return self.loader.microbatches(step) if self.ahead is None else self.ahead.take(step)

    def phase(self, step: int) -> PlanPhase:
        """Return the phase of a step."""
        return phase_at(self.phases, step, self.steps)

    def rows_taken(self, step: int) -> dict[str, int]:
        """Return the rows taken from each dataset before `step`; empty with a single training dataset."""
        return self.loader.rows_taken(step) if len(self.loader.datasets) > 1 else {}

    def resume(self, state: dict[str, Any], past: StepSizes | None) -> Remarks:
        """Resume from a checkpoint's state of the loader. past: rows of earlier steps, None if they had the rows of
        this batch.

        Lengths in tokens and epochs count from there. Raises DataError if its rows are not rows of this data.
        """
        remarks = self.loader.restore(state, self.steps)
        if self.batch is not None and self.planned is not None:
            self.loader.curriculum, self.batch, timeline = counted_from(
                self.loader.curriculum, self.planned, self.batch, past, self._num_rows
            )
            assert timeline.steps is not None
            self.steps, self.phases = timeline.steps, timeline.phases
        return remarks

    @property
    def _num_rows(self) -> dict[str, int]:
        """Number of rows of each training dataset."""
        return {dataset.name: dataset.order.num_rows for dataset in self.loader.datasets}

    @property
    def timeline(self) -> Timeline:
        """The timeline of the run with everything counted."""
        assert self.planned is not None and self.batch is not None
        return counted_timeline(self.planned, self.batch, self._num_rows)

    def tokens_taken(self, step: int) -> int:
        """Return the positions in the rows that the run has taken before `step`."""
        assert self.batch is not None
        return self.batch.rows_before(step) * self.batch.sequence

    def epoch(self, step: int) -> float | None:
        """Return the epochs of its data that the run has taken before `step`."""
        epoch = None if self.batch is None else self.batch.epochs_before(step)
        return None if epoch is None else round(epoch, 6)

    def begins_epoch(self, step: int) -> bool:
        """Return True if a step is the first that begins in its epoch."""
        return step == 0 or (self.batch is not None and self.batch.epoch_ended(step) is not None)

    def begins_phase(self, step: int) -> bool:
        """Return True if a step is the first of its phase."""
        return step == 0 or self.phase(step).name != self.phase(step - 1).name

    def evaluation(self, dataset: str, max_rows: int | None, rank: Rank, *, measures: bool = False) -> EvalLoader:
        """Return the loader of a dataset's held-out rows; for questions, its microbatches have each position's text.

        measures: with everything that the loss reads, not only labels.
        """
        prepared = self.datasets[dataset]
        kind = EvalLoader if prepared.store.choices is None else TextLoader
        return kind(
            store=prepared.store,
            documents=prepared.heldout_documents,
            rows=prepared.heldout_rows,
            collate=self.collate if measures else self.collate.of_labels,
            micro=self.micro,
            data_rank=rank.data_rank,
            data_ranks=rank.data_ranks,
            max_rows=max_rows,
        )

    def close(self) -> None:
        """Stop reading ahead."""
        if self.ahead is not None:
            self.ahead.close()


@op("setup.tokenizer", gives="tokenizer", traced=False)
def open_tokenizer(source: str) -> TextTokenizer:
    """Open a tokenizer: `bytes`, or a folder relative to the working folder."""
    return load_tokenizer(source, Path.cwd())


@op("setup.data", gives="prepared", traced=False)
def prepare_dataset(
    plan: Plan,
    rank: Rank,
    tokenizer: TextTokenizer,
    records: Records,
    prepared: dict[str, PreparedDataset],
    beat: HeartbeatWriter,
    node_id: str,
    dataset: str,
    kind: str,
    patterns: list[str],
    options: dict[str, Any],
    reads: dict[str, Any],
    holdout: float,
    oversized: str,
    bad_records: int,
    seed: int,
    sequence: int,
    align: int,
    method: str | None = None,
    group: int = 1,
    without: list[int] | None = None,
    deduplicate: str | float = "none",
    decontaminate: list[str] | None = None,
    min_tokens: int = 0,
) -> dict[str, PreparedDataset]:
    """Tokenize, split off the hold-out, and pack both parts into rows of `sequence` positions: once, then cached.

    Documents are padded to a multiple of `align` positions; `group` of them are packed together unless they are packed
    in order. Documents with fewer than `min_tokens` tokens are left out, repeated or similar ones if `deduplicate` says
    so, and those that share words with the benchmarks `decontaminate`. The tokens of the documents `without` are
    removed from the packed rows. One rank of a machine builds, the others then open the result.
    """
    node = plan.node(node_id)

    def report(line: str, now: DataProgress) -> None:
        records.event(TokeniseEvent(step=0, dataset=dataset, message=line, **asdict(now)))

    progress = every(REPORT_SECONDS, report)
    ready = first_of_machine(rank, lambda: prepared_from(plan, node, tokenizer, progress=progress), beat)
    if rank.world_size > 1:
        said: list[Any] = [None if ready is None else ready.store.names]
        dist.broadcast_object_list(said, src=0)
        (names,) = said
        ready = ready or opened_from(plan, node, names) or prepared_from(plan, node, tokenizer)
        if ready.store.key != names[0]:
            raise DataError(
                f"dataset {dataset}: rank {rank.rank} reads different data than rank 0",
                remedy="All machines need the same files.",
            )
    assert ready is not None
    _warn_of_left_out(records, ready, oversized, silent=reads.get("lost") == "allow")
    return {**prepared, dataset: ready}


def _warn_of_left_out(records: Records, prepared: PreparedDataset, oversized: str, *, silent: bool) -> None:
    """Warn of left-out content. silent: not of content that the template left out."""
    name = prepared.name
    if prepared.store.lost and not silent:
        lost = ", ".join(f"{kind} in {plural(count, 'record')}" for kind, count in prepared.store.lost.items())
        records.warn(f"dataset {name}: the chat template does not write {lost}", step=0)
    if prepared.left_out is not None:
        records.warn(f"dataset {name}: {prepared.left_out.text(prepared.store.num_documents)}", step=0)
    bad_records = prepared.store.bad_records
    for bad in bad_records.first:
        records.warn(f"dataset {name}: {bad.origin}: {bad.reason}", step=0)
    if more := bad_records.count - len(bad_records.first):
        listed = f"cache/tokens/{prepared.store.folder}/{BAD}"
        message = f"dataset {name}: {more:,} more bad records, all of them listed in {listed} below workspace.root"
        records.warn(message, step=0)
    for part, rows in (("training", prepared.train_rows), ("hold-out", prepared.heldout_rows)):
        if rows.num_truncated or rows.num_skipped:
            why = f"because oversized = {oversized}"
            if prepared.store.choices is not None:
                why = "at the front, because questions with their choices are longer than a row"
            message = (
                f"dataset {name}, {part}: {rows.num_truncated:,} documents cut, {rows.num_skipped:,} left out, "
                f"{rows.num_dropped_positions:,} tokens in total, {why}"
            )
            records.warn(message, step=0)


@op("collate.microbatches", gives="collate")
def microbatches(
    stages: list[collators.Stage], micro: int, accumulate: int, pad_to: int | None = None, together: bool = False
) -> CollateChain:
    """Compose the chain; the loader passes it `micro` rows, `accumulate` times a step. pad_to, together: see
    `CollateChain`."""
    assert micro > 0 and accumulate > 0
    return collators.compose(stages, pad_to, together=together)


@op("setup.loader", gives="feed", traced=False)
def build_loader(
    plan: Plan,
    rank: Rank,
    records: Records,
    prepared: dict[str, PreparedDataset],
    collate: CollateChain,
    datasets: list[str],
    micro: int,
    accumulate: int,
    rows: int,
    sequence: int,
    seed: int,
    steps: int | None,
    epochs: float | None,
    prefetch: int,
    workers: int,
    balance: bool = False,
    task_of: list[int] | None = None,
    ramp: dict[str, int] | None = None,
    again: dict[str, int] | None = None,
    prompts: bool = False,
) -> Feed:
    """Build the feed with the rows of every step, dealt to data ranks; `balance`: by the cost of attention.

    task_of: the task of each dataset, by which rows of a microbatch are sorted. prompts: completions will be sampled
    after the rows, which have nothing but labels for a loss yet.

    With a budget in epochs the steps are known from here on. ramp: `rows` of the first step, and the number of `steps`
    that grow from there to `rows`. again: the rows of `steps` steps repeat in the next ones, until each is taken
    `turns` times. `prefetch` steps are read ahead, by a thread, or by `workers` processes.
    """
    trained = tuple(TrainingRows.of(name, prepared[name].parts["training"], seed) for name in datasets)
    counts = {dataset.name: dataset.order.num_rows for dataset in trained}
    curriculum = curriculum_of(plan, counts)
    assert steps in (None, curriculum.steps) and seed == curriculum.seed
    loader = RowLoader(
        datasets=trained,
        curriculum=curriculum,
        collate=collate.of_labels if prompts else collate,
        micro=micro,
        accumulate=accumulate,
        data_rank=rank.row_rank,
        data_ranks=rank.row_ranks,
        balance=balance,
        task_of=tuple(task_of or ()),
    )
    assert loader.rows_per_step == rows and {dataset.reader.rows.capacity for dataset in trained} == {sequence}
    first = curriculum.rows_per_step.first
    assert first == (rows if ramp is None else ramp["rows"])
    loader.make_ready()
    batch = counted_arithmetic(plan, counts)
    assert epochs == batch.epochs
    report_rows(records, trained, curriculum.steps, batch)
    _warn_of_repeats(records, curriculum.phases, trained, rows)
    feed = Feed(
        loader=loader,
        collate=collate,
        micro=micro,
        steps=curriculum.steps,
        datasets=prepared,
        phases=curriculum.phases,
        planned=plan.timeline,
        batch=batch,
    )
    feed.ahead = ahead_of(feed, plan, rank, records, prefetch, workers)
    return feed


def ahead_of(feed: Feed, plan: Plan, rank: Rank, records: Records, prefetch: int, workers: int) -> ReadingAhead | None:
    """Return the reader of `prefetch` steps ahead, in a thread or `workers` processes; None without prefetch."""
    if prefetch == 0:
        return None

    def here(first: int, until: int) -> Generator[list[Microbatch]]:
        return (feed.loader.microbatches(step) for step in range(first, until))

    def warn(step: int, message: str) -> None:
        records.warn(message, step=step, every_rank=True)

    def elsewhere(first: int, until: int) -> Generator[list[Microbatch]]:
        others = ReaderProcesses(plan=plan, rank=rank, loader=feed.loader, count=workers, warn=warn)
        return others.reads(first, until)

    # Every process has a step in progress; finished ones wait here.
    waiting = max(1, prefetch - workers)
    return ReadingAhead(elsewhere if workers else here, ahead=waiting, end=lambda: feed.steps, device=rank.device)


def report_rows(records: Records, trained: tuple[TrainingRows, ...], steps: int, batch: Arithmetic) -> None:
    """Report the rows of each dataset, the steps of the run, and the rows and tokens of an epoch."""
    rows = {dataset.name: dataset.order.num_rows for dataset in trained}
    epoch = float(batch.epoch_rows or 0)
    tokens = epoch * batch.sequence
    records.event(DataEvent(step=0, rows=rows, steps=steps, epoch_rows=epoch, epoch_tokens=tokens, epochs=batch.epochs))


def _warn_of_repeats(
    records: Records, phases: tuple[PlanPhase, ...], trained: tuple[TrainingRows, ...], rows: int
) -> None:
    """Warn if a step takes more rows of a dataset than it has."""
    for dataset in trained:
        most = rows if len(trained) == 1 else round(max(phase.shares.get(dataset.name, 0) for phase in phases) * rows)
        if dataset.order.num_rows < most:
            some = f"{most:,}" if len(trained) == 1 else f"up to {most:,} of them"
            have = f"dataset {dataset.name} has {dataset.order.num_rows:,} rows"
            message = f"{have}, and a step takes {some}: some rows are repeated in a step"
            records.warn(message, step=0)


class SpecRefused(EnvironmentFault):
    """The spec is invalid for this data; the text lists the mistakes."""

    agreed = True

    def __init__(self, errors: list[Diagnostic]) -> None:
        first, *others = errors
        lines = [_said(first), *(f"{error.code}: {_said(error)}" for error in others)]
        super().__init__(first.code, "\n".join(lines))


@op("setup.horizon", traced=False)
def see_horizon(plan: Plan, feed: Feed, rank: Rank, records: Records, progress: Progress) -> None:
    """Report the steps of the run and the steps of its events; then check the rules that depend on them.

    Raises SpecRefused on all ranks alike.
    """
    batch = feed.batch
    assert batch is not None and batch.epoch_rows is not None
    records.event(_horizon_event(feed.timeline, progress.step, float(batch.epoch_rows)))
    if feed.steps < batch.done_steps:
        return  # there is nothing left to check: the start of training reports that no step is left
    counts = Counts(
        epoch_rows=batch.epoch_rows, done_steps=batch.done_steps, done_rows=batch.done_rows, past=batch.past
    )
    diagnostics = CollectiveErrors.of(rank).first(lambda: _found(plan, counts))
    for diagnostic in diagnostics:
        if diagnostic.severity == "warning":
            records.warn(_said(diagnostic), step=progress.step, code=diagnostic.code)
    if errors := [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]:
        raise SpecRefused(errors)


def _found(plan: Plan, counts: Counts) -> list[Diagnostic]:
    from xtrain.planner.rules.validate import Unreadable, check_counted

    try:
        return [*check_counted(plan, counts)]
    except Unreadable as problem:
        message = f"rules that depend on the data could not be checked, because the spec cannot be read: {problem}"
        return [Diagnostic(severity="warning", code="W705", message=message, span=None)]


def _said(diagnostic: Diagnostic) -> str:
    """Return `tiny.xtrain:7:20: warmup 50 steps is longer …; use …`."""
    place, hint = f"{diagnostic.span}: " if diagnostic.span else "", f"; {diagnostic.hint}" if diagnostic.hint else ""
    return f"{place}{diagnostic.message}{hint}"


def _horizon_event(timeline: Timeline, step: int, epoch_rows: float) -> HorizonEvent:
    """Return the event with counted values: only ticks and phases that were in epochs or shares of them."""
    ticks = [tick for tick in timeline.ticks if tick.epochs is not None or tick.fraction is not None]
    return HorizonEvent(
        step=step,
        epoch_rows=epoch_rows,
        steps=timeline.steps,
        stop_at=timeline.stop_at,
        stop_after=timeline.stop_after,
        phases={phase.name: phase.first for phase in timeline.phases},
        ticks=[
            HorizonTick([*tick.nodes], tick.steps, None if tick.tokens is None else float(tick.tokens))
            for tick in ticks
        ],
        stretches=[HorizonStretch(part.first, part.tokens, part.tokens_before) for part in timeline.stretches],
    )
