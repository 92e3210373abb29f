"""`tick.lr_sweep`: record the loss while the learning rate grows, until it diverges; then suggest a rate."""

import json
from math import isfinite

from xtrain.components.actions.lr_sweep import RunningAverage, result
from xtrain.records.names import LR_SWEEP_FILE
from xtrain.records.training_events import LrSweepEvent
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.observe.records import Records


@op("tick.lr_sweep")
def sweep(feed: Feed, rank: Rank, records: Records, progress: Progress, times: float, smoothing: float) -> StepCall:
    """Record losses of the sweep and stop when the loss diverges. Every rank knows the step's loss, so all stop after
    the same step."""
    points: list[tuple[float, float]] = []
    average, least = RunningAverage(smoothing), float("inf")

    def run(step: Step) -> None:
        nonlocal average, least
        finite = isfinite(step.minimised) and isfinite(step.grad_norm)
        if finite:
            points.append((step.lr, step.minimised))
            average = average.add(step.minimised)
            least = min(least, average.value)
        # Policy losses can be negative.
        diverged = not finite or average.value - least > (times - 1) * abs(least)
        if diverged:
            what = f"above {times:g} times its minimum, {least:.4g}" if finite else "or its gradient norm is not finite"
            step.stop = f"the loss diverges: it is {what}"
        if rank.is_first and (diverged or progress.step == feed.steps):
            _write(records, progress.step, points, smoothing, diverged)

    return run


def _write(records: Records, step: int, points: list[tuple[float, float]], smoothing: float, diverged: bool) -> None:
    found = result(points, smoothing) | {"diverged": diverged}
    durable.write(records.directory / LR_SWEEP_FILE, json.dumps(found) + "\n")
    records.event(
        LrSweepEvent(
            step=step,
            points=len(points),
            steepest=found["steepest"],
            minimum_tenth=found["minimum_tenth"],
            diverged=diverged,
        )
    )
