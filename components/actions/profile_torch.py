"""`tick.profile` and `event.profile`: a trace and a summary of some steps on each selected rank."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import cattrs
from attrs import asdict, define, field, frozen

from xtrain.records.names import ControlState
from xtrain.records.training_events import ProfileEvent
from xtrain.regular_files import read_json
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.inspect.profile_summary import ProfileRecorder, Summary, TornTrace, entries_of, summarise
from xtrain.runtime.loop.commands import Control, UnderWay
from xtrain.runtime.loop.memory_report import (
    count_reports,
    file_of,
    folder_of,
    from_first,
    report_name,
    summed,
    sweep,
    write_json,
    write_whole,
)
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.text.units import plural, table

COLUMNS = ("matmul", "attention", "other", "copies", "exposed", "idle")
NOTES = """\
Each instant is counted once. `exposed` is communication that nothing else overlapped, `communication` all of it, hidden
or not; `idle` is time in which no operation ran: Python, waiting for data, waiting for other ranks.
"""


def summary_text(summaries: Sequence[Summary], *, node: str, world: int, note: str = "") -> str:
    """Return the page for the summaries of ranks, in order. note: a sentence about how the profile ended."""
    head = summaries[0]
    steps = head.last - head.first + 1
    what = f"step {head.first:,}" if steps == 1 else f"steps {head.first:,} to {head.last:,}"
    lines = [f"# Profile of {what}", ""]
    lines += [f"`{node}`, {len(summaries)} of {world:,} ranks; time of the {head.device.upper()}. {note}".rstrip(), ""]
    rows = [
        (
            f"{summary.rank}",
            _milliseconds(summary.seconds / steps),
            *(f"{summary.shares[name]:.1%}" for name in COLUMNS),
            f"{summary.communication:.1%}",
        )
        for summary in summaries
    ]
    lines += [*table(("rank", "ms a step", *COLUMNS, "communication"), rows, texts=0), "", NOTES]
    nodes = sorted(head.nodes.items(), key=lambda item: -item[1])
    rows = [(f"`{name}`", _milliseconds(took / steps), f"{took / head.seconds:.1%}") for name, took in nodes]
    lines += [f"## Nodes of the plan, rank {head.rank}", ""]
    lines += [*table(("node", "ms a step", "share"), rows, texts=1), ""]
    rows = [
        (
            f"`{_short(operator.name)}`",
            operator.kind,
            f"{operator.calls / steps:,.4g}",
            _milliseconds(operator.seconds / steps),
            f"{operator.seconds / head.seconds:.1%}",
        )
        for operator in head.operators
    ]
    lines += [f"## Operators, rank {head.rank}", ""]
    lines += [*table(("operator", "kind", "calls a step", "ms a step", "share"), rows, texts=2), ""]
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3f}"


def _short(name: str) -> str:
    """Shorten the name of a kernel, which may be pages long."""
    name = name.replace("|", "¦").replace("`", "'")
    return name if len(name) <= 80 else f"{name[:79]}…"


@frozen(kw_only=True)
class Subject:
    """Settings of a profile. Steps: `wait` are skipped, `warmup` discarded, `active` kept. ranks: None for all. node:
    of the plan, which requests it."""

    node: str
    wait: int
    warmup: int
    active: int
    ranks: list[int] | None
    shapes: bool
    stacks: bool
    memory: bool

    @property
    def before(self) -> int:
        """Steps before the first one that is kept."""
        return self.wait + self.warmup


Report = Callable[[bool, str], None]
"""Called on every rank when a profile has ended: True if it exists, and the outcome in words."""


@define(kw_only=True, eq=False)
class Profile:
    """Running profile, written to `profile/steps-<first>-<last>/`."""

    kind: str = field(default="profile", init=False)
    subject: Subject
    rank: Rank
    records: Records
    progress: Progress
    beat: HeartbeatWriter | None
    report: Report | None
    begun: int
    """The step that had ended when it began."""
    number: int
    """Number of earlier profiles from the same step, which is trained again after a rollback."""
    passed: int = 0
    _recorder: ProfileRecorder | None = field(default=None, init=False)
    _fault: str = field(default="", init=False)

    @classmethod
    def begin(
        cls,
        subject: Subject,
        *,
        rank: Rank,
        records: Records,
        progress: Progress,
        beat: HeartbeatWriter | None = None,
        report: Report | None = None,
    ) -> "Profile":
        """Begin with the next step. Collective."""
        begun = progress.step
        first = f"steps-{begun + subject.before + 1:012d}-"
        if rank.is_first:
            sweep(records.directory)
        number = from_first(rank, lambda: count_reports(records.directory, first))
        profile = cls(
            subject=subject,
            rank=rank,
            records=records,
            progress=progress,
            beat=beat,
            report=report,
            begun=begun,
            number=number,
        )
        profile._prepare_step()
        return profile

    @property
    def recorded(self) -> int:
        """Number of steps kept so far."""
        return max(self.passed - self.subject.before, 0)

    @property
    def folder(self) -> Path:
        first = self.begun + self.subject.before + 1
        name = f"steps-{first:012d}-{first + max(self.recorded, 1) - 1:012d}"
        return folder_of(self.records.directory) / report_name(name, self.number)

    def after_step(self) -> bool:
        self.passed += 1
        if self.recorded < self.subject.active:
            self._prepare_step()
            return True
        self._end("")
        return False

    def cut_short(self, why: str) -> None:
        if self.recorded:
            self._end(f"cut short, as {why}")
            return
        self.drop()
        text = f"no step was recorded, as {why}"
        if self.report is not None:
            self.report(False, text)
        else:
            self.records.warn(f"{self.subject.node}: {text}", step=self.progress.step)

    def drop(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            with suppress(Exception):
                recorder.stop()

    def _prepare_step(self) -> None:
        """Prepare for the next step."""
        subject, at = self.subject, self.passed
        if subject.ranks is not None and self.rank.rank not in subject.ranks:
            return
        if at == subject.wait:
            self._try(self._make)
        if at == subject.before and self._recorder is not None:
            self._try(self._recorder.start)
        if at >= subject.before and self._recorder is not None:
            self._try(partial(self._recorder.begin_step, self.begun + at + 1))

    def _make(self) -> None:
        subject = self.subject
        recorder = ProfileRecorder.of(
            self.rank.device, shapes=subject.shapes, stacks=subject.stacks, memory=subject.memory, beat=self.beat
        )
        self._recorder = recorder
        recorder.prepare()

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # torch's profiler raises many kinds of errors
            self._fault = str(error) or repr(error)
            self.drop()

    def _end(self, note: str) -> None:
        """Write and report the profile. Collective."""
        began = time.perf_counter()
        if self.beat is not None:
            self.beat.at(self.subject.node, lasting=True)  # a trace is large, and disks are slow
        size = self._write()
        if self._fault:
            message = f"rank {self.rank.rank} could not write its profile {self.folder}: {self._fault}"
            self.records.warn(message, step=self.progress.step, every_rank=True)
        failures, size = summed(self.rank, bool(self._fault), size)
        page = self._write_page(note) if self.rank.is_first else 0
        steps = f"{self.recorded} of {self.subject.active} steps" if note else f"{self.recorded} steps"
        count = self.rank.world_size if self.subject.ranks is None else len(self.subject.ranks)
        what = f"{steps} in {self.folder}, {plural(count - int(failures), 'trace')}"
        if failures < count:
            first = self.begun + self.subject.before + 1
            self.records.event(
                ProfileEvent(
                    step=self.progress.step,
                    node=self.subject.node,
                    path=str(self.folder),
                    first=first,
                    last=first + self.recorded - 1,
                    ranks=count - int(failures),
                    seconds=time.perf_counter() - began,
                    bytes=int(size) + page,
                    note=note,
                )
            )
        if self.report is not None:
            lost = f"{int(failures)} of {count} ranks could not write their traces; " if failures else ""
            self.report(not failures, lost + what + (f"; {note}" if note else ""))

    def _write(self) -> int:
        """Write this rank's trace; return its bytes."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return 0
        try:
            recorder.stop()
            path = file_of(self.folder, self.rank.rank, "json")
            size = write_whole(path, recorder.write)
            return size + self._summarise(path)
        except Exception as error:
            self._fault = str(error) or repr(error)
            return 0

    def _summarise(self, path: Path) -> int:
        """Write the summary; return its bytes. Raises TornTrace, after removing the trace, if it is incomplete."""
        first = self.begun + self.subject.before + 1
        try:
            summary = summarise(entries_of(path), rank=self.rank.rank, first=first, last=first + self.recorded - 1)
        except TornTrace:
            path.unlink(missing_ok=True)
            raise
        return write_json(file_of(self.folder, self.rank.rank, "summary.json"), asdict(summary))

    def _write_page(self, note: str) -> int:
        """Write `summary.md` from the summaries of all ranks that have one; return its bytes."""
        try:
            summaries = read_summaries(self.folder)
            if not summaries:
                return 0
            text = summary_text(summaries, node=self.subject.node, world=self.rank.world_size, note=note)
            return write_whole(self.folder / "summary.md", lambda beside: beside.write_text(text, encoding="utf-8"))
        except Exception as error:  # for any content of a file
            message = f"the summary of {self.folder} could not be written: {error}"
            self.records.warn(message, step=self.progress.step)
            return 0


def read_summaries(folder: Path) -> list[Summary]:
    """Return the summaries of all ranks, in order. Raises errors of the disk and of invalid files."""
    paths = sorted(folder.glob("rank-*.summary.json"))
    return [cattrs.structure(read_json(path), Summary) for path in paths]


@op("tick.profile")
def profile(
    node_id: str,
    rank: Rank,
    feed: Feed,
    records: Records,
    progress: Progress,
    under_way: UnderWay,
    beat: HeartbeatWriter | None = None,
    **subject: Any,
) -> StepCall:
    """Start a profile with the next step, unless no step is left or another profile is in progress."""
    whole = Subject(node=node_id, **subject)

    def run(step: Step) -> None:
        if progress.step + whole.before >= feed.steps:
            return
        if under_way.has("profile"):
            message = f"{node_id}: another profile is being recorded, and this one is skipped"
            records.warn(message, step=progress.step)
            return
        under_way.begin(Profile.begin(whole, rank=rank, records=records, progress=progress, beat=beat))

    return run


@op("event.profile")
def profile_on_request(
    node_id: str,
    control: Control,
    rank: Rank,
    records: Records,
    progress: Progress,
    under_way: UnderWay,
    beat: HeartbeatWriter | None = None,
    **subject: Any,
) -> StepCall:
    """Start a profile of the requested number of steps; the request is answered when it has ended."""

    def run(step: Step) -> None:
        order = control.order
        assert order is not None

        def answer(done: bool, detail: str) -> None:
            if control.inbox is not None:
                control.inbox.profiling = False
            control.report(order, ControlState.DONE if done else ControlState.REFUSED, detail)

        if under_way.has("profile"):
            answer(False, "another profile is being recorded")
            return
        whole = Subject(node=node_id, wait=0, active=order.amount, **subject)
        under_way.begin(Profile.begin(whole, rank=rank, records=records, progress=progress, beat=beat, report=answer))

    return run
