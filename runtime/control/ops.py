"""`event.pause` and `event.profile`: what commands do that nothing else in a plan does: wait, and record a profile."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import define
from torch.profiler import ProfilerActivity

from ..health.beat import Beat
from ..observation.records import Records
from ..ops import op
from ..state import Progress, Rank, Step
from .agreement import Agreement
from .commands import Control
from .inbox import Order

StepCall = Callable[[Step], None]
# Between two looks of ranks that wait: nobody notices a fifth of a second, and nothing is busy meanwhile.
WAIT_SECONDS = 0.2


@op("event.pause")
def pause(control: Control, agreement: Agreement, records: Records, progress: Progress, beat: Beat | None = None):
    """Wait until the run is to go on. Commands are carried out meanwhile; raises Halt if it is to stop."""

    def run(step: Step) -> None:
        assert control.order is not None
        control.paused, began = True, time.monotonic()
        control.tell(control.order, "done", f"the run waits after step {progress.step:,}")
        while control.paused and not control.stopping:
            time.sleep(WAIT_SECONDS)
            if beat is not None:
                beat.mark()
            agreement.meet_waiting()
            control.carry_out(step)
        records.event("paused", step=progress.step, seconds=time.monotonic() - began)

    return run


@op("event.profile")
def profile(control: Control, rank: Rank, records: Records, progress: Progress, beat: Beat | None = None) -> StepCall:
    """Begin to record what every rank does in the next steps, as many as were asked for."""

    def run(step: Step) -> None:
        assert control.order is not None
        control.go_on_with(Profile.begin(control, control.order, rank, records, progress, beat))

    return run


@define(kw_only=True, eq=False)
class Profile:
    """A profile under way; ends as a Chrome trace per rank in `profile/steps-<first>-<last>/`."""

    control: Control
    order: Order
    rank: Rank
    records: Records
    progress: Progress
    first: int
    profiler: Any
    beat: Beat | None
    taken: int = 0

    @classmethod
    def begin(
        cls, control: Control, order: Order, rank: Rank, records: Records, progress: Progress, beat: Beat | None
    ) -> "Profile":
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (rank.device.type == "cuda")
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        first = progress.step + 1
        return cls(
            control=control,
            order=order,
            rank=rank,
            records=records,
            progress=progress,
            first=first,
            profiler=profiler,
            beat=beat,
        )

    def after_step(self) -> bool:
        self.taken += 1
        if self.taken < self.order.amount:
            self.profiler.step()
            return True
        if self.beat is not None:
            self.beat.lasting = True  # a trace is large, and disks are slow
        failures = torch.tensor(float(not self._write()), device=self.rank.device)
        if self.rank.world_size > 1:
            dist.all_reduce(failures)
        self._tell(int(failures))
        return False

    def cut_short(self) -> None:
        with suppress(Exception):  # the run may end because of anything
            self._tell(int(not self._write()))

    def _write(self) -> bool:
        """Whether this rank's trace lies in its place."""
        self.profiler.stop()
        path = self._folder() / f"rank-{self.rank.rank:05d}.json"
        beside = path.with_suffix(".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(beside))
            beside.replace(path)
        except (OSError, RuntimeError) as error:
            message = f"rank {self.rank.rank} could not write its profile {path}: {error}"
            self.records.event("warning", step=self.progress.step, every_rank=True, message=message)
            return False
        return True

    def _tell(self, failures: int) -> None:
        if self.control.inbox is not None:
            self.control.inbox.profiling = False
        what = f"{self.taken} of {self.order.amount} steps in {self._folder()}, one trace per rank"
        if failures:
            self.control.tell(self.order, "refused", f"{failures} ranks could not write their traces; {what}")
        else:
            self.control.tell(self.order, "done", what)

    def _folder(self) -> Path:
        last = self.first + max(self.taken, 1) - 1
        return self.records.directory / "profile" / f"steps-{self.first:012d}-{last:012d}"
