"""Microbatches of a pipeline that repeat an earlier one: they are counted and not run."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from xtrain.plan.pipeline import ZERO_BUBBLE, Kind, order
from xtrain.runtime.inspect.ledger import Ledger, MemoryOwners
from xtrain.runtime.inspect.observer import CollectiveRecorder, Sums
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.nn.pipeline import PipelineSchedule
from xtrain.runtime.nn.transformer import Transformer

# Bytes of recorded sums that a microbatch may leave until the step ends.
LEAVINGS: Final = 1024
# Attributes that the last stage's forward sets in its batch.
LEFT_IN_BATCH: Final = ("cross_entropy", "recorded", "row_losses", "losses_BS")
# Microbatches of a step that must run: the first, two that are alike, and the last, in which gradients are exchanged.
ENOUGH: Final = 4
NEW: Final = "new"

# Storage as one microbatch sees it. Left by an earlier computation, or begun by this one (`NEW`): (True for the stage's
# first microbatch, computation, index). Older storages: their number.
Name = tuple[bool, str, int] | int


def left_in(batch: ModelBatch) -> dict[str, Any]:
    """Return the attributes that a forward sets in its batch."""
    return {name: getattr(batch, name) for name in LEFT_IN_BATCH}


class NotAlike(Exception):
    """Microbatches of a stage that differ unexpectedly: all of them have to run."""


@frozen
class Result:
    """Tensor that a computation returns to the schedule: `place` is the index of its storage, `size` its bytes."""

    place: int
    size: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    needs_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor, place: int = 0) -> "Result":
        size, offset = tensor.untyped_storage().nbytes(), int(tensor.storage_offset())
        return cls(place, size, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, tensor.requires_grad)

    def made(self) -> Tensor:
        """Return a new tensor like it."""
        whole = torch.empty(self.size // self.dtype.itemsize, dtype=self.dtype)
        tensor = whole.as_strided(self.shape, self.stride, self.offset)
        return tensor.requires_grad_(self.needs_gradient)


ResultsOf = Callable[[Any], tuple[Tensor | None, ...]]


@frozen(kw_only=True)
class Computation:
    """Effects of one forward or backward.

    changes: to the ledger, in order. left: which of its new storages outlive it. ends: for a forward, number of changes
    until it was done. kinds: of its new storages, as for `Ledger.made_up`. batch: attributes that it set there.
    """

    changes: tuple[tuple[Name, int], ...]
    left: tuple[int, ...]
    results: tuple[Result | None, ...]
    sums: Sums
    ends: int | None
    kinds: tuple[int | str, ...] = field(eq=False)
    batch: dict[str, Any] = field(eq=False, factory=dict)


@define(eq=False)
class TracedMicrobatch:
    """Storages of one microbatch. left: numbers of storages that its computations left, None for live tensors.
    sent: storages of results. stays: the others that outlive all its computations, once these are done."""

    left: dict[str, list[int | None]] = field(factory=dict)
    sent: set[int] = field(factory=set)
    stays: frozenset[tuple[str, int]] | None = None


Case = tuple[Kind, Kind | None]  # of a computation: its kind, and the kind before it on its stage


@frozen(kw_only=True)
class KnownStage:
    """Findings about a stage that ranks share. base: live storages when the step began. first: of its first
    microbatch."""

    base: dict[int, int]
    first: dict[Kind, Computation]
    cases: dict[Case, tuple[TracedMicrobatch, Computation]]


@frozen(kw_only=True)
class Shared:
    """Findings about stages that the ranks of a trace pass on, matched by their computations."""

    stages: list[KnownStage] = field(factory=list)

    def like(self, base: dict[int, int], cases: set[Case]) -> KnownStage | None:
        return next((stage for stage in self.stages if stage.base == base and cases <= stage.cases.keys()), None)


def attach_repeats(
    pipeline: PipelineSchedule,
    coordinate: int,
    count: int,
    watching: tuple[Ledger, CollectiveRecorder, MemoryOwners],
    shared: Shared | None,
) -> list["StageRepeats"]:
    """Limit the schedule of `count` microbatches to the necessary ones, in the step that begins now.

    shared: findings of other ranks, if they may be used.
    """
    ledger, collectives, owners = watching
    own, splits = tuple(pipeline.own), pipeline.schedule in ZERO_BUBBLE
    actions = order(pipeline.schedule, coordinate, pipeline.rank.pipeline_ranks, own, count)
    base = ledger.alive()
    repeats = []
    for stage in _stages(pipeline, count):
        # The first stage has no input to compute gradients of.
        kinds: list[tuple[Kind, int]] = [
            (action.kind, action.microbatch)
            for action in actions
            if action.stage == stage.stage_index and (action.kind != "I" or not stage.is_first)
        ]
        cases: dict[Case, int] = {}
        needed: set[Case] = set()  # if the last one is not run either
        before: Kind | None = None
        for kind, number in kinds:
            if number > 0:
                needed.add((kind, before))
            if 0 < number < count - 1:
                cases.setdefault((kind, before), number)
            before = kind
        known = None if shared is None else shared.like(base, needed)
        repeats.append(
            StageRepeats(
                stage=stage,
                ledger=ledger,
                collectives=collectives,
                owners=owners,
                count=count,
                run=frozenset({0} if known else {*range(ENOUGH - 1), count - 1, *cases.values()}),
                last_kind="W" if splits else "B",
                known=known,
                base=base,
            )
        )
        repeats[-1].attach()
    return repeats


def attach_skips(pipeline: PipelineSchedule, count: int) -> None:
    """Limit the schedule of `count` microbatches to the first and the last one, in the step that begins now. Between
    them the stages exchange what the schedule says, and compute nothing."""
    for stage in _stages(pipeline, count):
        StageSkips(stage=stage, run=frozenset({0, count - 1})).attach()


def _stages(pipeline: PipelineSchedule, count: int) -> Iterator[PipelineStage]:
    for schedule in pipeline.schedules_of(count):
        yield from [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages


@define(kw_only=True, eq=False)
class StageRuns:
    """Interception between a torch schedule and one of its stages. run: the microbatches to run."""

    stage: PipelineStage
    run: frozenset[int]
    _now: tuple[Kind, int] = ("F", 0)

    def attach(self) -> None:
        """Replace the stage's methods."""
        stage: Any = self.stage
        kinds: dict[str, Kind] = {
            "forward_one_chunk": "F",
            "backward_one_chunk": "B",
            "backward_weight_one_chunk": "W",
        }
        for name, kind in kinds.items():
            setattr(stage, name, partial(self._numbered, getattr(stage, name), kind))
        stage.forward_maybe_with_nosync = partial(self._forward, stage.forward_maybe_with_nosync)
        stage.backward_maybe_with_nosync = partial(self._backward, stage.backward_maybe_with_nosync)

    def _numbered(self, call: Callable[..., Any], kind: Kind, number: int, *args: Any, **kwargs: Any) -> Any:
        """Note the current microbatch and kind of computation."""
        self._now = ("I" if kwargs.get("full_backward") is False else kind), number
        return call(number, *args, **kwargs)

    def _forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = self._part.inbox[0]
        if self._now[1] in self.run:
            return self._run(partial(call, *args, **kwargs), lambda out: (out,), batch)
        (out,) = self._repeat(self._part.inbox.popleft())
        return out

    def _backward(self, call: Callable[..., Any], kind: str, given: dict[str, Any], **kwargs: Any) -> Any:
        if self._now[1] in self.run:
            return self._run(partial(call, kind, given, **kwargs), self._gradients)
        gradients = self._repeat()
        if kind == "input":  # where torch leaves them
            for tensor, gradient in zip(given["input_values"], gradients, strict=True):
                tensor.grad = gradient
        return gradients, []

    def _gradients(self, out: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients that are sent on; a backward for weights sends none."""
        return () if self._now[0] == "W" else out[0]

    @property
    def _part(self) -> Transformer:
        assert isinstance(self.stage.submod, Transformer)
        return self.stage.submod

    def _run(self, call: Callable[[], Any], results_of: ResultsOf, batch: ModelBatch | None = None) -> Any:
        raise NotImplementedError

    def _repeat(self, batch: ModelBatch | None = None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError


@define(kw_only=True, eq=False)
class StageSkips(StageRuns):
    """Microbatches that are not run return tensors like the first one."""

    _first: dict[Kind, tuple[Result | None, ...]] = field(factory=dict)
    _batch: dict[str, Any] = field(factory=dict)

    def _run(self, call: Callable[[], Any], results_of: ResultsOf, batch: ModelBatch | None = None) -> Any:
        kind, number = self._now
        out = call()
        if number == 0:
            self._first[kind] = tuple(each if each is None else Result.of(each) for each in results_of(out))
            if batch is not None:
                self._batch = left_in(batch)
        return out

    def _repeat(self, batch: ModelBatch | None = None) -> tuple[Tensor | None, ...]:
        for attribute, value in self._batch.items() if batch is not None else ():
            setattr(batch, attribute, value)
        return tuple(each if each is None else each.made() for each in self._first[self._now[0]])


@define(kw_only=True, eq=False)
class StageRepeats(StageRuns):
    """Microbatches that are not run are counted like one that was.

    last_kind: the kind that ends a microbatch of `count`. known: findings of a rank with an equal stage, if any.
    """

    ledger: Ledger
    collectives: CollectiveRecorder
    owners: MemoryOwners
    count: int
    last_kind: Kind
    known: KnownStage | None
    base: dict[int, int]
    _before: Kind | None = None
    _first: dict[Kind, Computation] = field(factory=dict)
    _cases: dict[Case, tuple[TracedMicrobatch, Computation]] = field(factory=dict)
    _microbatches: dict[int, TracedMicrobatch] = field(factory=dict)
    _last_is_alike: bool = True

    def __attrs_post_init__(self) -> None:
        if self.known is not None:
            self._cases = dict(self.known.cases)

    def shared(self) -> KnownStage | None:
        """Return findings for other ranks after the step; None if they would not help."""
        if self.known is not None:
            return None
        told = {case: (self._told(origin), self._named(done)) for case, (origin, done) in self._cases.items()}
        newest = max(self.base, default=0)
        names = (name for _, done in told.values() for name, _ in done.changes)
        if not self._last_is_alike or any(isinstance(name, int) and name > newest for name in names):
            return None
        if any(value is not None for _, done in told.values() for value in done.batch.values()):
            return None  # tensors of this rank
        return KnownStage(base=self.base, first=self._first, cases=told)

    def _named(self, done: Computation) -> Computation:
        kinds = tuple(self.ledger.kind_of(kind) if isinstance(kind, int) else kind for kind in done.kinds)
        return evolve(done, kinds=kinds)

    def _told(self, origin: TracedMicrobatch) -> TracedMicrobatch:
        return TracedMicrobatch(left=origin.left, stays=self._stays(origin))

    # run, or counted -------------------------------------------------------------------------------------------------

    def _run(self, call: Callable[[], Any], results_of: ResultsOf, batch: ModelBatch | None = None) -> Any:
        kind, number = self._now
        self.owners.name_gradients()  # before the forward, as the next one would
        begin, newest, sums = self.ledger.now, self.ledger.newest, self.collectives.sums.copy()
        out = call()
        mine = self._microbatches.setdefault(number, TracedMicrobatch())
        names: dict[int, Name] = {}
        for first, microbatch in ((True, self._microbatches.get(0)), (False, mine)):
            for earlier, numbers in () if microbatch is None else microbatch.left.items():
                names |= {n: (first, earlier, i) for i, n in enumerate(numbers) if n is not None}
        began: list[int] = []
        changes: list[tuple[Name, int]] = []
        for storage, size in self.ledger.since(begin):
            if storage > newest and storage not in names:
                names[storage] = False, NEW, len(began)
                began.append(storage)
            changes.append((names.get(storage, storage), size))
        alive = self.ledger.alive()
        left = tuple(place for place, storage in enumerate(began) if storage in alive)
        mine.left[kind] = [began[place] for place in left]
        done = Computation(
            changes=tuple(changes),
            left=left,
            results=tuple(
                result if result is None else self._result(result, began, changes) for result in results_of(out)
            ),
            sums=self.collectives.sums.since(sums),
            ends=None if batch is None else self.owners.last_forward - begin,
            kinds=tuple(began),
            batch={} if batch is None else left_in(batch),
        )
        mine.sent |= {began[result.place] for result in done.results if result is not None}
        self._note(mine, done)
        self._before = kind
        return out

    def _result(self, tensor: Tensor, began: list[int], changes: list[tuple[Name, int]]) -> Result:
        number = self.ledger.number_of(tensor)
        if number is None or number not in began:
            raise NotAlike("a tensor that is sent on is not a new one")
        place = began.index(number)
        if sum(name == (False, NEW, place) for name, _ in changes) > 1:
            raise NotAlike("a tensor that is sent on has changed its size")
        return Result.of(tensor, place)

    def _note(self, mine: TracedMicrobatch, done: Computation) -> None:
        kind, number = self._now
        case = kind, self._before
        if number == 0:
            self._first[kind] = done
            if self.known is not None and self.known.first.get(kind) != done:
                raise NotAlike("the first microbatch of the stage is another one's")
        elif number == self.count - 1:
            same = next((known for (of, _), known in self._cases.items() if of == kind and known[1] == done), None)
            self._last_is_alike &= same is not None
            if same is not None:
                self._cases.setdefault(case, same)
        elif case not in self._cases:
            self._cases[case] = mine, done
        elif self._cases[case][1] != done:
            raise NotAlike(f"{kind} of microbatch {number} is another one's")

    def _repeat(self, batch: ModelBatch | None = None) -> tuple[Tensor | None, ...]:
        """Record the changes of the first microbatch of this case; return new tensors for its results."""
        kind, number = self._now
        if (kind, self._before) not in self._cases:
            raise NotAlike(f"no microbatch has computed {kind} after {self._before}")
        self.owners.name_gradients()
        origin, done = self._cases[kind, self._before]
        mine = self._microbatches.setdefault(number, TracedMicrobatch())
        results = {result.place: result for result in done.results if result is not None}
        made: dict[int, Tensor] = {}
        began: dict[int, int] = {}
        for at, (name, size) in enumerate(done.changes):
            if at == done.ends:
                self.owners.forward_counts()
            if not isinstance(name, tuple) or name[1] != NEW:
                self.ledger.change(self._number(name, mine), size)
            elif (place := name[2]) in results:
                made[place] = results[place].made()
                self.ledger.has_kind(made[place], done.kinds[place])
            else:
                if place not in began:
                    began[place] = self.ledger.made_up(done.kinds[place])
                self.ledger.change(began[place], size)
        if done.ends == len(done.changes):
            self.owners.forward_counts()
        mine.left[kind] = [began.get(place) for place in done.left]
        self.collectives.sums.add(done.sums)
        if batch is not None:
            for attribute, value in done.batch.items():
                setattr(batch, attribute, value)
        if kind == self.last_kind:
            self._end(mine, origin)
            del self._microbatches[number]
        self._before = kind
        return tuple(result if result is None else made[result.place] for result in done.results)

    def _number(self, name: Name, mine: TracedMicrobatch) -> int:
        if isinstance(name, int):
            return name
        first, kind, place = name
        microbatch = self._microbatches[0] if first else mine
        left = microbatch.left.get(kind, [])
        if place >= len(left) or (number := left[place]) is None:
            raise NotAlike("what an earlier computation has left is not there")
        return number

    def _end(self, mine: TracedMicrobatch, origin: TracedMicrobatch) -> None:
        """End storages that outlive a microbatch's computations and ended with those of `origin`."""
        stays = self._stays(origin)
        alive = self.ledger.alive()
        for kind, numbers in mine.left.items():
            if len(numbers) != len(origin.left[kind]):
                raise NotAlike("computations of microbatches leave different storages")
            for place, number in enumerate(numbers):
                if number in alive and (kind, place) not in stays:
                    self.ledger.change(number, -alive[number])

    def _stays(self, origin: TracedMicrobatch) -> frozenset[tuple[str, int]]:
        if origin.stays is None:
            alive = self.ledger.alive()
            sizes = {
                (kind, place): alive[number]
                for kind, numbers in origin.left.items()
                for place, number in enumerate(numbers)
                if number in alive and number not in origin.sent
            }
            origin.stays = frozenset(sizes)
            if sum(sizes.values()) > LEAVINGS:
                raise NotAlike("a microbatch leaves something behind")
        return origin.stays
