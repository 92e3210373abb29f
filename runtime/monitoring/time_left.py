"""How long this start of a run will take on this machine: measured on its first steps, and told once."""

from typing import Final

from attrs import define

from xtrain.records.start_events import EstimateEvent
from xtrain.runtime.step_state import Step

# Seconds of steps, and steps, that are measured before anything is said.
LEAST_SECONDS: Final = 3.0
LEAST_STEPS: Final = 2


@define
class TimeLeft:
    """Of the first rank alone: all ranks wait for each other in every step."""

    done: bool = False
    _first: float | None = None
    _steps: int = 0
    _rows: int = 0
    _seconds: float = 0.0

    def after(self, step: Step, seconds: float, last: int, rows_left: int) -> EstimateEvent | None:
        """The event `estimate` once enough has been measured, else None.

        seconds: that the step has taken. last: the steps behind which this start of the run ends. rows_left: those that
        it takes until then.
        """
        if step.warms_up:
            self._first = seconds
            return None
        self._steps += 1
        self._rows += step.rows
        self._seconds += seconds
        left = last - (step.index + 1)
        if self._seconds < LEAST_SECONDS or self._steps < LEAST_STEPS or left <= 0:
            return None
        self.done = True
        each = self._seconds / self._steps
        return EstimateEvent(
            step=step.index + 1,
            step_seconds=each,
            measured_steps=self._steps,
            first_step_seconds=self._first,
            steps_left=left,
            seconds_left=rows_left * self._seconds / self._rows,
        )
