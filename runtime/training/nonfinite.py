"""`step.check_finite`: what is done with a step whose loss or gradient norm is not a number.

Both are sums over all ranks that every rank has anyway, so all decide alike and nobody waits for it. Such a step never
reaches the weights. It is counted, as the data and the learning rate are closed forms of a step's number, and nothing
else of it stays: neither gradients, which the next step releases, nor its losses, nor what routers have counted.
"""

from math import isfinite

import torch
from torch import Tensor

from xtrain.planner.units import plural
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.models.router import ExpertRouter
from xtrain.runtime.monitoring.alerts import AlertMonitor
from xtrain.runtime.ops import op
from xtrain.runtime.state import BadSteps, Progress
from xtrain.runtime.step_state import NonFinite, SkipStep, Step, StepCall


@op("step.check_finite")
def check_finite(model: ModelParts, progress: Progress, limit: int, alerts: AlertMonitor | None = None) -> StepCall:
    """Leave a step out whose loss or norm is not a number, but for the `limit`-th in a row.

    Raises SkipStep for those that are left out, NonFinite for the `limit`-th, on all ranks alike.
    """
    counts = RouterCountsCopy(model) if limit > 1 else None

    def run(step: Step) -> None:
        number, bad = step.index + 1, progress.bad
        if isfinite(step.loss) and isfinite(step.grad_norm):
            bad.in_a_row, bad.empty, bad.last_good = 0, 0, number
            bad.latest.clear()
            if counts is not None:
                counts.keep()
            return
        bad.in_a_row += 1
        bad.total += 1
        bad.latest.append((number, step.loss, step.grad_norm))
        if alerts is not None:
            alerts.bad_step(step.loss, step.grad_norm)
        if bad.in_a_row >= limit:
            raise NonFinite(number, step.loss, step.grad_norm, bad_steps_text(bad) if limit > 1 else "")
        assert counts is not None
        counts.restore()
        reason = f"loss {step.loss:g}, gradient norm {step.grad_norm:g}; {bad.in_a_row} in a row of {limit}"
        raise SkipStep(reason, loss=step.loss, grad_norm=step.grad_norm, in_a_row=bad.in_a_row, limit=limit)

    return run


def bad_steps_text(bad: BadSteps) -> str:
    """The bad steps in a row, the latest with what they gave."""
    listed = "; ".join(f"step {number}: loss {loss:g}, gradient norm {norm:g}" for number, loss, norm in bad.latest)
    more = f"the latest {len(bad.latest)} of them: " if bad.in_a_row > len(bad.latest) else ""
    since = f"step {bad.last_good:,} was the last good one" if bad.last_good else "none was good before"
    return f"{plural(bad.in_a_row, 'step')} in a row without a finite loss and gradient norm ({since}): {more}{listed}"


class RouterCountsCopy:
    """What the routers of this rank had counted after the last good step.

    Their counts only grow: one that has taken in something that is not a number would never give one again, and the
    tokens of a step that is left out must not move the biases of experts.
    """

    def __init__(self, model: ModelParts) -> None:
        self._routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]
        self._before: list[Tensor] = []
        self._begun: list[int] = []

    def keep(self) -> None:
        """Remember the counts as they are."""
        now = self._now()
        if len(self._before) != len(now):
            self._before = [torch.empty_like(count) for count in now]
        if now:
            torch._foreach_copy_(self._before, now)  # pyright: ignore[reportPrivateImportUsage]
        self._begun = [router.begun for router in self._routers]

    def restore(self) -> None:
        """Go back to what was remembered since counting has begun, or to nothing."""
        if self._begun == [router.begun for router in self._routers]:
            if self._before:
                torch._foreach_copy_(self._now(), self._before)  # pyright: ignore[reportPrivateImportUsage]
            return
        for router in self._routers:
            router.loads_E = router.aux = None

    def _now(self) -> list[Tensor]:
        counts = ((router.loads_E, router.aux) for router in self._routers)
        return [count for pair in counts for count in pair if count is not None]
