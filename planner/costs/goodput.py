"""Goodput: how much of the time of a run trains it, where devices fail and it goes on from its latest checkpoint.

Times between failures are exponential (Young 1974; Daly 2006, "A higher order estimate of the optimum checkpoint
interval for restart dumps"): of n devices, one fails every `mtbf / n`. A failure costs the restart, and what no
checkpoint holds; it may come during a restart too.
"""

from math import exp, expm1, inf, sqrt
from random import Random
from typing import Final

from attrs import frozen

from xtrain.planner.costs.startup import startup_of
from xtrain.planner.plan import Plan
from xtrain.planner.schedule.counts import saves

FAILURES: Final = 20_000  # of a simulation, which is right to half a percent then

NOTHING: Final = 5e-4  # a goodput that is shown as 0.0 %


@frozen(kw_only=True)
class Faults:
    """Seconds. between: failures of the whole job. restart: from a failure to the first step behind it. blocked: of a
    save, in which nothing is trained. later: from there until what was saved can be loaded."""

    between: float
    restart: float
    blocked: float
    later: float

    def goodput(self, interval: float) -> float:
        """Share of the time that trains the run, with a checkpoint after every `interval` seconds of training.

        A checkpoint counts once it is complete before the next failure, so that a time u between failures is worth
        ⌊(u - restart - later) / (interval + blocked)⌋ intervals: of exponential u, e^(-(restart + later) / M) /
        (e^((interval + blocked) / M) - 1) of them on average. Without `later` this is Daly's formula.
        """
        rounds = (interval + self.blocked) / self.between
        if rounds > 700:  # e^700 is the end of fp64
            return 0.0
        return interval / self.between * exp(-(self.restart + self.later) / self.between) / expm1(rounds)

    @property
    def young(self) -> float:
        """√(2 · blocked · M), the first order of the best interval."""
        return sqrt(2 * self.blocked * self.between)

    def best(self, shortest: float) -> float:
        """The interval of the highest goodput, of those that are not below `shortest`: interval / M is the root of
        1 - x = e^-(x + blocked / M), between 0 and 1."""
        low, high = 0.0, 1.0
        for _ in range(60):
            x = (low + high) / 2
            low, high = (x, high) if 1 - x > exp(-x - self.blocked / self.between) else (low, x)
        return max(low * self.between, shortest)

    def simulated(self, interval: float, *, failures: int = FAILURES, seed: int = 0) -> float:
        """The goodput of a made-up run of so many failures."""
        done = spent = 0.0
        random = Random(seed)
        for _ in range(failures):
            between = random.expovariate(1 / self.between)
            spent += between
            done += interval * max(0.0, (between - self.restart - self.later) // (interval + self.blocked))
        return done / spent


@frozen(kw_only=True)
class Goodput:
    """What a plan says of it.

    interval: seconds of training between checkpoints; inf: there are none on the way. share: of the time that trains;
    0 without checkpoints. trained: seconds of training in all; None where that is not known. wall: seconds of the whole
    run, and `failures` expected in it; None where its length is not known, or it never ends. best: the interval of the
    highest goodput, which is `best_share`.
    """

    faults: Faults
    interval: float
    share: float
    trained: float | None
    wall: float | None
    best: float
    best_share: float

    @property
    def failures(self) -> float | None:
        return None if self.wall is None else self.wall / self.faults.between

    @property
    def saves(self) -> float:
        """Share of the time in which training waits for saves that count."""
        return self.share * self.faults.blocked / self.interval

    @property
    def restarts(self) -> float:
        """Share of the time in restarts: of min(u, restart) on average."""
        return -expm1(-self.faults.restart / self.faults.between)

    @property
    def lost(self) -> float:
        """Share of the time of which no checkpoint holds anything."""
        return max(0.0, 1 - self.share - self.saves - self.restarts)  # the others add up to 1 within rounding

    @property
    def stands(self) -> bool:
        """Whether next to nothing of the time trains the run: `NOTHING` at most."""
        return self.interval != inf and self.share < NOTHING


def goodput_of(plan: Plan) -> Goodput | None:
    """None where `cluster` says nothing about failures, or the time of a step is not known."""
    cluster, times = plan.cluster, plan.estimates.times
    if cluster.mtbf_seconds is None or times is None:
        return None
    writes = 0.0 if cluster.storage is None else plan.estimates.checkpoint_bytes / cluster.storage
    saving = next((node for node in plan.nodes if node.op == "setup.checkpoint"), None)
    waits = saving is not None and saving.args["mode"] == "sync"
    faults = Faults(
        between=cluster.mtbf_seconds / plan.mesh.world_size,
        restart=restart_of(plan),
        blocked=writes if waits else 0.0,
        later=0.0 if waits else writes,
    )
    trained = None if plan.timeline.full_steps is None else plan.timeline.full_steps * times.step
    interval = _interval(plan, times.step)
    if trained is not None and interval > trained:
        interval = inf  # such a checkpoint never comes
    share = 0.0 if interval == inf else faults.goodput(interval)
    best = faults.best(max(times.step, writes))
    wall = None if trained is None or not share else trained / share
    return Goodput(
        faults=faults,
        interval=interval,
        share=share,
        trained=trained,
        wall=wall,
        best=best,
        best_share=faults.goodput(best),
    )


def restart_of(plan: Plan) -> float:
    """Seconds from a failure to the first step behind it: as `cluster` says, or until ranks count as stuck and all have
    started, as far as that is known."""
    if plan.cluster.restart_seconds is not None:
        return plan.cluster.restart_seconds
    return (plan.node("setup.watch").args["stuck_seconds"] or 0.0) + startup_of(plan).seconds


def _interval(plan: Plan, step: float) -> float:
    """Seconds between two checkpoints, of the tick that comes most often."""
    tokens = plan.estimates.tokens_per_step
    found = [inf]
    for tick in plan.timeline.ticks:
        if not any(saves(plan.node(each)) for each in tick.nodes):
            continue
        if tick.seconds is not None:
            found.append(tick.seconds)
        elif tick.steps is not None:
            found.append(tick.steps * step)
        elif tick.tokens is not None:
            found.append(float(tick.tokens) / tokens * step)
        elif tick.fraction is not None and plan.timeline.steps is not None:
            found.append(tick.fraction * plan.timeline.steps * step)
    return min(found)
