"""What the events of a run say, as values.

Records come from other processes, perhaps of another version: a field that is missing or of another type reads as
None (or empty), never as an exception in the view.
"""

from attrs import frozen

from .tail import Record
from .words import brief, number, plural


def whole(value: object) -> int | None:
    """`value` as an int if it is a finite number, else None."""
    found = number(value)
    return int(found) if found is not None and abs(found) < 1e18 else None


def text(value: object) -> str:
    """`value` as text; None is empty."""
    return "" if value is None else str(value)


@frozen(kw_only=True)
class RunStart:
    """`run_start`: one attempt begins."""

    run_id: str
    plan_id: str
    name: str
    world_size: int | None
    device: str
    steps: int | None
    attempt: int
    directory: str
    resumed_step: int | None
    time: float | None

    @classmethod
    def of(cls, record: Record) -> "RunStart":
        steps = whole(record.get("steps"))
        return cls(
            run_id=text(record.get("run_id")),
            plan_id=text(record.get("plan_id")),
            name=text(record.get("name")),
            world_size=whole(record.get("world_size")),
            device=text(record.get("device")),
            steps=steps if steps is not None and steps > 0 else None,
            attempt=whole(record.get("attempt")) or 1,
            directory=text(record.get("directory")),
            resumed_step=whole(record.get("resumed_step")),
            time=number(record.get("time")),
        )


@frozen(kw_only=True)
class SetupNode:
    """`setup_begin`, then `setup`: one start-up node, under way while `seconds` is None."""

    node: str
    began: float | None
    seconds: float | None = None
    detail: str = ""


@frozen(kw_only=True)
class Evaluation:
    """`eval`: the loss on one held-out dataset; averaged: of averaged weights."""

    dataset: str
    step: int | None
    loss: float | None
    tokens: int | None
    seconds: float | None
    averaged: bool = False

    @classmethod
    def of(cls, record: Record) -> "Evaluation":
        return cls(
            dataset=text(record.get("dataset")),
            step=whole(record.get("step")),
            loss=number(record.get("loss")),
            tokens=whole(record.get("tokens")),
            seconds=number(record.get("seconds")),
            averaged=record.get("weights") == "averaged",
        )


@frozen(kw_only=True)
class Checkpoint:
    """`checkpoint`: one was saved."""

    step: int | None
    path: str
    num_bytes: int | None
    seconds: float | None

    @classmethod
    def of(cls, record: Record) -> "Checkpoint":
        return cls(
            step=whole(record.get("step")),
            path=text(record.get("path")),
            num_bytes=whole(record.get("bytes")),
            seconds=number(record.get("seconds")),
        )


@frozen(kw_only=True)
class Health:
    """`health`: all ranks have met. late_seconds: how long the first to come waited for the slowest."""

    seconds: float | None
    slowest: int | None
    late_seconds: float | None

    @classmethod
    def of(cls, record: Record) -> "Health":
        return cls(
            seconds=number(record.get("seconds")),
            slowest=whole(record.get("slowest")),
            late_seconds=number(record.get("late_seconds")),
        )

    @property
    def in_words(self) -> str:
        """`a sum takes 0.6 ms; rank 3 came last, after 1.2 ms`."""
        late = "" if self.slowest is None else f"; rank {self.slowest} came last, after {brief(self.late_seconds)}"
        return f"an all-reduce takes {brief(self.seconds)}{late}"


@frozen(kw_only=True)
class Rollback:
    """`rollback`: the run has gone back to `checkpoint`, for the `number`-th of `times` times."""

    from_step: int | None
    checkpoint: str
    number: int | None
    times: int | None
    rows: int | None

    @classmethod
    def of(cls, record: Record) -> "Rollback":
        return cls(
            from_step=whole(record.get("from_step")),
            checkpoint=text(record.get("checkpoint")),
            number=whole(record.get("number")),
            times=whole(record.get("of")),
            rows=whole(record.get("rows_left_out")),
        )

    @property
    def in_words(self) -> str:
        """`from step 12 to ckpt-s000000000010, time 1 of 3; 24 rows left out`."""
        time = "" if self.number is None else f", time {self.number} of {self.times}"
        rows = "" if self.rows is None else f"; {self.rows:,} rows left out"
        return f"from step {self.from_step} to {self.checkpoint}{time}{rows}"


@frozen(kw_only=True)
class Sample:
    """One text the model wrote, from `generate`."""

    prompt: str
    text: str

    @classmethod
    def all_of(cls, record: Record) -> tuple["Sample", ...]:
        samples = record.get("samples")
        if not isinstance(samples, list):
            return ()
        return tuple(
            cls(prompt=text(sample.get("prompt")), text=text(sample.get("text")))
            for sample in samples
            if isinstance(sample, dict)
        )


@frozen(kw_only=True)
class Failure:
    """`failure`: a rank raised. lost: it only says that another rank is gone."""

    rank: int | None
    error: str
    traceback: str
    step: int | None
    code: str
    lost: bool = False

    @classmethod
    def of(cls, record: Record) -> "Failure":
        return cls(
            rank=whole(record.get("rank")),
            error=text(record.get("error")),
            code=text(record.get("code")),
            traceback=text(record.get("traceback")),
            step=whole(record.get("step")),
            lost=record.get("lost") is True,
        )

    @property
    def message(self) -> str:
        """What went wrong, with the code that `xtrain explain` knows more about, if it has one."""
        return f"[{self.code}] {self.error}" if self.code else self.error

    @property
    def who(self) -> str:
        return "a rank" if self.rank is None else f"rank {self.rank}"


@frozen(kw_only=True)
class PhaseBegin:
    """`phase`: from here on another mixture is trained on, or with another rate."""

    name: str
    shares: dict[str, float]
    lr_scale: float | None

    @classmethod
    def of(cls, record: Record) -> "PhaseBegin":
        shares = record.get("shares")
        known = shares.items() if isinstance(shares, dict) else ()
        return cls(
            name=text(record.get("name")),
            shares={str(name): value for name, share in known if (value := number(share)) is not None},
            lr_scale=number(record.get("lr_scale")),
        )

    @property
    def in_words(self) -> str:
        """Its mixture, the largest share first, and what it does to the learning rate."""
        largest = sorted(self.shares.items(), key=lambda pair: -pair[1])
        parts = [", ".join(f"{name} {share:.1%}" for name, share in largest)]
        parts += [f"lr × {self.lr_scale:g}"] if self.lr_scale not in (None, 1) else []
        return "  ".join(filter(None, parts))


@frozen(kw_only=True)
class RunEnd:
    """`run_end`: the attempt is over, and how."""

    status: str
    step: int | None
    seconds: float | None
    loss: float | None

    @classmethod
    def of(cls, record: Record) -> "RunEnd":
        return cls(
            status=text(record.get("status")) or "ended",
            step=whole(record.get("step")),
            seconds=number(record.get("seconds")),
            loss=number(record.get("loss")),
        )


@frozen(kw_only=True)
class Restart:
    """`restart`: a gang of ranks has fallen, and another one is started in its place."""

    number: int | None
    of: int | None
    reason: str
    world: int | None
    step: int | None

    @classmethod
    def of_record(cls, record: Record) -> "Restart":
        return cls(
            number=whole(record.get("number")),
            of=whole(record.get("of")),
            reason=text(record.get("reason")),
            world=whole(record.get("world")),
            step=whole(record.get("step")),
        )

    @property
    def in_words(self) -> str:
        """`1 of 3  rank 1 was ended by SIGKILL; goes on from step 20 on 2 ranks`."""
        place = f"from step {self.step:,}" if self.step else "from the beginning"
        world = f" on {plural(self.world, 'rank')}" if self.world else ""
        count = "" if self.number is None else f"{self.number} of {self.of}  " if self.of else f"{self.number}  "
        return f"{count}{self.reason}; continues {place}{world}"
