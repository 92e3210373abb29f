"""Order of training rows: the rows of each dataset that a step takes, in closed form from its number. Without torch.

The plan's samplers choose the dataset of each row. A dataset gives its rows in its own order, epoch after epoch, and
its cursor counts them. A checkpoint stores the position of a run; `position_of` checks it against the data of the run
that resumes.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from attrs import define, evolve, field, frozen

from xtrain.plan.arithmetic import Arithmetic, arithmetic_of, sampler_of
from xtrain.plan.learning_rate import in_order
from xtrain.plan.plan import Plan, PlanPhase, Timeline
from xtrain.plan.step_sizes import TURN, MixtureSampler, RepeatedSizes, StepSizes
from xtrain.plan.timeline import counted_arithmetic, counted_timeline, waits
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.packing.stored_rows import RowReader


class RowOrder:
    """Endless seeded order of `num_rows` rows: every epoch is a permutation of its own.

    Global position p is in epoch p // num_rows. A permutation depends only on (num_rows, seed, epoch), so any position
    can be read at any time; the last epoch's permutation is kept (8 bytes per row).

    Raises DataError if there are no rows or the seed is outside 0 to 2⁶⁴ - 1.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 1:
            raise DataError("there are no rows to train on", remedy="Check the sources, the hold-out and the packing.")
        if not 0 <= seed < 1 << 64:
            raise DataError(f"seed {seed} is outside 0 to 2^64 - 1")
        self.num_rows = num_rows
        self.seed = seed
        # One value, so that a thread that reads ahead and another one never combine the epoch of one with the order of
        # the other.
        self._last = (-1, np.empty(0, dtype=np.int64))

    def row(self, position: int) -> tuple[int, int]:
        """Return (epoch, row index) of a global position."""
        epoch, within = divmod(position, self.num_rows)
        return epoch, int(self.permutation(epoch)[within])

    def rows(self, start: int, count: int) -> np.ndarray:
        """Return the row indices of the positions start … start + count - 1, int64 [count], across epochs."""
        out = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, within = divmod(start + done, self.num_rows)
            taken = min(count - done, self.num_rows - within)
            out[done : done + taken] = self.permutation(epoch)[within : within + taken]
            done += taken
        return out

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the order of one epoch, int64 [num_rows]."""
        assert epoch >= 0, "positions start at 0"
        known, permutation = self._last
        if epoch != known:
            key = np.array([self.seed, epoch], dtype=np.uint64)
            permutation = np.random.Generator(np.random.Philox(key=key)).permutation(self.num_rows)
            self._last = (epoch, permutation)
        return permutation


def sampled_datasets(sampler: MixtureSampler, first: int, count: int) -> np.ndarray:
    """Return the dataset numbers of the rows first … first + count - 1, int64 [count]."""
    # A bound at the end of the circle has no point after it.
    inner = np.array([bound for bound in sampler.bounds[1:-1] if bound < sampler.turn], dtype=np.uint64)
    return np.searchsorted(inner, _points(sampler, first, count), side="right").astype(np.int64)


def _points(sampler: MixtureSampler, first: int, count: int) -> np.ndarray:
    """Return the points of some rows, uint64 [count]."""
    if sampler.turn == TURN:  # uint64 wraps around
        return np.uint64(sampler.first_point(first)) + np.arange(count, dtype=np.uint64) * np.uint64(sampler.stride)
    points = np.full(count, sampler.first_point(first), dtype=np.uint64)
    known, turn = 1, np.uint64(sampler.turn)
    while known < count:  # doubled each time, so that no product overflows
        more = points[known : 2 * known]
        more[:] = points[: len(more)] + np.uint64(known * sampler.stride % sampler.turn)
        more[more >= turn] -= turn
        known *= 2
    return points


# Each sampled dataset with its weight in epochs, in the order of sampling.
Passes = tuple[tuple[str, float], ...] | None


@frozen(kw_only=True)
class Position:
    """Position of a run before `step`. The default is its beginning."""

    step: int = 0
    rows: int = 0
    """Rows taken from all datasets."""
    cursors: dict[str, int] = field(factory=dict)
    """Rows taken from each dataset; 0 for datasets that are not named."""
    phase: str = ""
    """Phase of the last row; empty at the beginning."""
    sampled: int = 0
    """Rows taken in that phase; with weights in epochs, since these weights began."""
    passes: Passes = None
    """Weights in epochs by which that row was sampled; None for shares."""


@frozen
class _PhaseSpan:
    """Steps from `first` to the next span, and what was taken before them."""

    first: int
    phase: str
    passes: Passes
    sampler: MixtureSampler
    sampled: int
    cursors: tuple[int, ...]


@define(kw_only=True, frozen=True)
class Curriculum:
    """The rows of every step from `start` on. It has no changing state: the step is the whole position.

    Rows before `start` count as they were taken, whatever the phases and rows per step then. A phase in which the run
    stopped continues with the next row; later phases begin with their first. Weights in epochs are sampled across
    phases while they stay the same, so that their epochs come out even.
    """

    datasets: tuple[str, ...]
    phases: tuple[PlanPhase, ...]
    """Their shares are of `datasets`; a dataset that a phase does not name has none."""
    steps: int
    """Steps of the whole run, for phases that begin at a share of it."""
    rows_per_step: StepSizes = field(converter=StepSizes.of)
    seed: int
    num_rows: Mapping[str, int] = field(factory=dict)
    """Number of rows of each dataset, for phases with weights in epochs."""
    start: Position = field(factory=Position)
    _next: list[tuple[int, list[int]]] = field(factory=lambda: [(-1, [])], init=False, eq=False, repr=False)
    """The step after the last requested one, and the cursors before it."""

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset number of each row of a step and its index in the order of that dataset.

        Both are int64 [rows per step]. `step` is not before `start`.
        """
        if len(self.datasets) == 1:
            first = self._cursor(step)
            own = np.arange(first, first + self.rows_per_step.at(step), dtype=np.int64)
            return np.zeros_like(own), own
        stretch, sampled = self._at(step)
        datasets = sampled_datasets(stretch.sampler, sampled, self.rows_per_step.at(step))
        cursors = np.empty(len(datasets), dtype=np.int64)
        # Steps are mostly requested in order: the next one begins where this one ends.
        known, before = self._next[0]
        before = list(before) if known == step else self._cursors(stretch, sampled)
        for number, cursor in enumerate(before):
            (own,) = np.nonzero(datasets == number)
            before[number] = cursor + len(own)
            cursors[own] = np.arange(cursor, before[number])
        self._next[0] = (step + 1, before)
        return datasets, cursors

    def rows_before(self, step: int) -> int:
        """Return the number of rows that the run takes before a step."""
        return self.start.rows + self.rows_per_step.between(self.start.step, step)

    def position(self, step: int) -> Position:
        """Return the position of the run before a step."""
        if step == self.start.step:
            return self.start
        # The phase is the last taken step's; the plan of the next step decides whether it continues.
        stretch, _ = self._at(step - 1)
        sampled = stretch.sampled + self.rows_per_step.between(stretch.first, step)
        dataset_cursors = [self._cursor(step)] if len(self.datasets) == 1 else self._cursors(stretch, sampled)
        cursors = dict(zip(self.datasets, dataset_cursors, strict=True))
        return Position(
            step=step,
            rows=self.rows_before(step),
            cursors={**self.start.cursors, **cursors},
            phase=stretch.phase,
            sampled=max(0, sampled),
            passes=stretch.passes,
        )

    def uses(self, step: int) -> dict[str, int]:
        """Return how many rows of each dataset are trained on before a step, counting repeats."""
        cursors = self.position(step).cursors
        return {name: self.rows_per_step.uses(step, cursor) for name, cursor in cursors.items()}

    def _cursor(self, step: int) -> int:
        """Return the cursor of a run's only dataset.

        Repeated steps may begin before the run's first step, whose predecessors were larger.
        """
        return max(0, self.start.cursors.get(self.datasets[0], 0) + self.rows_per_step.between(self.start.step, step))

    @cached_property
    def _stretches(self) -> list[_PhaseSpan]:
        start = self.start
        cursors, passes, sampled = [start.cursors.get(name, 0) for name in self.datasets], start.passes, start.sampled
        plan = in_order(self.phases, self.steps)
        begins = [first for first, _ in plan]
        spans: list[_PhaseSpan] = []
        for (first, phase), end in zip(plan, [*begins[1:], None], strict=True):
            if end is not None and end <= start.step:
                continue
            before, passes = passes, self._passes(phase)
            goes_on = passes == before if passes is not None else not spans and phase.name == start.phase
            sampled = sampled if goes_on else 0
            sampler = sampler_of(phase, self.datasets, self.num_rows, self.seed)
            spans.append(_PhaseSpan(max(first, start.step), phase.name, passes, sampler, sampled, tuple(cursors)))
            if end is not None:
                count = self.rows_per_step.between(spans[-1].first, end)
                counts = sampler.counts(sampled, count)
                cursors = [cursor + own for cursor, own in zip(cursors, counts, strict=True)]
                sampled += count
        return spans

    def _passes(self, phase: PlanPhase) -> Passes:
        if phase.passes is None:
            return None
        weights = ((name, phase.passes.get(name, 0.0)) for name in self.datasets)
        return tuple((name, epochs) for name, epochs in weights if epochs > 0)

    def _at(self, step: int) -> tuple[_PhaseSpan, int]:
        """Return the span of a step, and the number of rows of its phase before it."""
        assert step >= self.start.step, f"step {step} lies before the one that this run starts with"
        place = bisect_right(self._stretches, step, key=lambda stretch: stretch.first)
        stretch = self._stretches[place - 1]
        return stretch, stretch.sampled + self.rows_per_step.between(stretch.first, step)

    @staticmethod
    def _cursors(stretch: _PhaseSpan, sampled: int) -> list[int]:
        counts = stretch.sampler.counts(stretch.sampled, sampled - stretch.sampled)
        return [cursor + count for cursor, count in zip(stretch.cursors, counts, strict=True)]


@frozen(kw_only=True, eq=False)
class TrainingRows:
    """Rows of a training dataset, and their order."""

    name: str
    reader: RowReader
    order: RowOrder

    @classmethod
    def of(cls, name: str, reader: RowReader, seed: int) -> "TrainingRows":
        """Return the rows of a dataset in seeded order. Raises DataError if there are none."""
        rows, documents = reader.rows, len(reader.documents)
        if not rows.num_rows and documents and rows.num_skipped == documents:
            raise DataError(
                f"dataset {name} has no rows to train on: all of its {documents:,} documents are left out, "
                f"as they are longer than a row of {rows.capacity:,}",
                remedy="Lengthen the rows (`batch.sequence`), or leave out less (`oversized`).",
            )
        return cls(name=name, reader=reader, order=RowOrder(reader.rows.num_rows, seed))


def curriculum_of(plan: Plan, rows: dict[str, int]) -> Curriculum:
    """Return the curriculum of a plan from its beginning; `rows` has the number of rows of each dataset.

    Amounts in epochs become shares and steps here. Raises DataError if an epoch has no rows.
    """
    args, phases = plan.node("setup.loader").args, plan.timeline.phases
    for phase in phases:
        if phase.passes is not None and not any(rows[name] for name, epochs in phase.passes.items() if epochs):
            raise DataError("there are no rows to train on", remedy="Check the sources, the hold-out and the packing.")
    batch = counted_arithmetic(plan, rows) if waits(plan) else arithmetic_of(plan)
    timeline = counted_timeline(plan.timeline, batch, rows)
    assert timeline.steps is not None
    return Curriculum(
        datasets=tuple(args["datasets"]),
        phases=timeline.phases,
        steps=timeline.steps,
        rows_per_step=RepeatedSizes(batch.rows, **args["again"]) if "again" in args else batch.row_sizes,
        seed=args["seed"],
        num_rows=rows,
    )


FORMAT: Final = 2
# Facts that must not change between the run that wrote a state and the one that resumes it, in words.
SAME: Final = {
    "seed": "seed of the row order",
    "capacity": "positions in a row",
    "align": "alignment of documents in positions",
}
OF_A_DATASET: Final = {
    "rows": "number of packed rows",
    "content": "content of the rows (data, tokenizer, hold-out or packing)",
}


def state_of(
    curriculum: Curriculum, datasets: Sequence[TrainingRows], step: int, left: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON state from which `step` (the next one) can be resumed exactly. left: states of datasets that the
    run was trained on earlier, by name."""
    position, rows = curriculum.position(step), datasets[0].reader.rows
    return {
        "format": FORMAT,
        "step": step,
        "seed": curriculum.seed,
        "capacity": rows.capacity,
        "align": rows.align,
        "rows_per_step": curriculum.rows_per_step.full,
        "rows": position.rows,
        "phase": position.phase,
        "rows_in_phase": position.sampled,
        **({} if position.passes is None else {"passes": [list(weight) for weight in position.passes]}),
        "datasets": {
            **left,
            **{
                dataset.name: {
                    "cursor": position.cursors.get(dataset.name, 0),
                    "rows": dataset.order.num_rows,
                    "content": dataset.reader.fingerprint,
                }
                for dataset in datasets
            },
        },
    }


def by_key(state: dict[str, Any], datasets: Sequence[TrainingRows]) -> dict[str, Any]:
    """Return `state` with current fingerprints instead of earlier ones of the same rows."""
    readers = [dataset.reader for dataset in datasets]
    known = {reader.fingerprint for reader in readers}

    def renewed(data: dict[str, Any]) -> dict[str, Any]:
        content = data.get("content", "")
        same = () if content in known else (candidate for candidate in readers if candidate.was_called(content))
        renamed = next(iter(same), None)
        return data if renamed is None else {**data, "content": renamed.fingerprint}

    return {**state, "datasets": {name: renewed(data) for name, data in state.get("datasets", {}).items()}}


def counted_from(
    curriculum: Curriculum, planned: Timeline, batch: Arithmetic, past: StepSizes | None, rows: Mapping[str, int]
) -> tuple[Curriculum, Arithmetic, Timeline]:
    """Return a curriculum with lengths in tokens and epochs counted from its start, as its arithmetic and timeline.

    curriculum: at the position of the resume. past: rows of the steps before it, None if they had the rows of `batch`.
    rows: of each dataset.
    """
    step = curriculum.start.step
    uses = curriculum.uses(step)
    batch = batch.resumed(past, step, sum(uses.get(name, 0) for name in curriculum.datasets))
    timeline = counted_timeline(planned, batch, rows)
    assert timeline.steps is not None
    repeats = isinstance(curriculum.rows_per_step, RepeatedSizes)
    sizes = curriculum.rows_per_step if repeats else batch.row_sizes
    resumed = evolve(curriculum, steps=timeline.steps, phases=timeline.phases, rows_per_step=sizes)
    return resumed, batch, timeline


@frozen(kw_only=True)
class Remarks:
    """Differences between a run's datasets and its checkpoint's.

    new: begin with their first row. renamed: old name → new one, with the same rows. left: states of datasets that are
    not read any more; if they are added again, they resume where they stopped.
    """

    new: tuple[str, ...]
    renamed: dict[str, str]
    left: dict[str, dict[str, Any]]

    def in_words(self) -> list[str]:
        """Return a line for each difference."""
        lines = [f"dataset {name} is new to this run: it begins with its first row" for name in self.new]
        for old, new in self.renamed.items():
            lines.append(f"dataset {new} was called {old} before, and resumes where it stopped")
        for name, state in self.left.items():
            stopped = f"after {state['cursor']:,} rows, and resumes there if it is added again"
            lines.append(f"dataset {name} is no longer trained on: it stopped {stopped}")
        return lines


def position_of(state: dict[str, Any], now: dict[str, Any]) -> tuple[Position, Remarks]:
    """Return the position at which a run resumes from a checkpoint's data `state`; `now` is the state of its own data.

    Raises DataError with all differences if the rows that were taken are not rows of this data.
    """
    _check(state, now)
    saved, own = dict(state["datasets"]), now["datasets"]
    # A renamed dataset is recognized by its content.
    renamed = {}
    for name in (name for name in own if name not in saved):
        same_content = (
            old for old, old_state in saved.items() if old not in own and _content(old_state) == _content(own[name])
        )
        if (old := next(same_content, None)) is not None:
            renamed[old], saved[name] = name, saved.pop(old)
    new = tuple(name for name in own if name not in saved)
    left = {name: old_state for name, old_state in saved.items() if name not in own}
    position = Position(
        step=state["step"],
        rows=state["rows"],
        cursors={name: saved[name]["cursor"] for name in own if name in saved},
        phase=state["phase"],
        sampled=state["rows_in_phase"],
        passes=_passes(state.get("passes"), renamed),
    )
    return position, Remarks(new=new, renamed=renamed, left=left)


def _passes(passes: list[tuple[str, float]] | None, renamed: dict[str, str]) -> Passes:
    return None if passes is None else tuple((renamed.get(name, name), epochs) for name, epochs in passes)


def _content(state: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(state[key] for key in OF_A_DATASET)


def _check(state: dict[str, Any], now: dict[str, Any]) -> None:
    if state.get("format") != FORMAT:
        raise DataError(
            f"the data position of the checkpoint has format {state.get('format', 1)}, but this version of xtrain "
            f"reads format {FORMAT}: the data cannot be resumed",
            remedy="Resume with the version that wrote it, or start a new run from the weights alone.",
        )
    differences = [
        f"{words}: {state.get(key, 'missing')} in the checkpoint, {now[key]} now"
        for key, words in SAME.items()
        if state.get(key) != now[key]
    ]
    for name, own in now["datasets"].items():
        saved = state["datasets"].get(name, own)
        differences += [
            f"dataset {name}, {words}: {saved.get(key, 'missing')} in the checkpoint, {own[key]} now"
            for key, words in OF_A_DATASET.items()
            if saved.get(key) != own[key]
        ]
    if differences:
        listed = "".join(f"\n    {difference}" for difference in differences)
        raise DataError(
            f"the data differs from the checkpoint's:{listed}",
            remedy="Restore these settings, give a dataset that has changed another name so that it starts from the "
            "beginning, or start a new run from the checkpoint's weights alone.",
        )
