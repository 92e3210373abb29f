"""`SweepPlan`: the plan of the plans of a sweep, as far as they are known before there are results."""

from typing import Any

from attrs import frozen

from xtrain.dsl.schema.sweep import Method, Point
from xtrain.planner.plan import Plan


@frozen(kw_only=True)
class Trial:
    """A point and the plan of its run. number: its place in the sweep, from 0. name: of its run directory, by its
    point. sets: the `--set` texts that make it of the spec. same_as: the earlier trial with an equal plan, which is
    run in its place.

    Its plan says where it is written: two trials never have the same id. `same_as` compares all but that.
    """

    number: int
    name: str
    point: Point
    sets: tuple[str, ...]
    plan: Plan
    same_as: int | None = None

    @property
    def steps(self) -> int | None:
        return self.plan.timeline.steps

    @property
    def tokens(self) -> int | None:
        return self.plan.timeline.tokens

    @property
    def seconds(self) -> float | None:
        """Time of all its steps, where the cluster says how fast it is."""
        times, steps = self.plan.estimates.times, self.plan.timeline.full_steps
        return None if times is None or steps is None else times.step * steps

    @property
    def flops(self) -> float | None:
        """Operations of all its steps."""
        steps = self.plan.timeline.full_steps
        return None if steps is None else self.plan.estimates.flops_per_step * steps

    @property
    def memory_bytes(self) -> int:
        """Of its fullest rank."""
        return max(each.memory.total_bytes for each in self.plan.estimates.classes)


@frozen(kw_only=True)
class SweepPlan:
    """What a sweep is going to do.

    id: which sweep this is: the experiment with its budget, dimensions, method and objective; neither how many trials
    nor how many at once. base: the plan of the spec itself. count: trials, of which `trials` are known now, and the
    others follow from results. tried: plans of points between which the others lie, compiled for their mistakes.
    rungs: budgets at which trials are compared, as `launch.stop_at` takes them. tokens, rows: groups of trials, each
    of those that read the same tokenized documents, or the same packed rows, from the cache.
    """

    id: str
    name: str
    spec: str
    root: str
    lineage: str
    over: dict[str, str]
    method: Method
    objective: str
    count: int
    parallel: int
    retries: int
    base: Plan
    trials: tuple[Trial, ...]
    tried: tuple[Plan, ...] = ()
    rungs: tuple[str, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()

    @property
    def folder(self) -> str:
        """Of the sweep and the runs of its trials."""
        return f"{self.root}/{self.lineage}"

    @property
    def runs(self) -> tuple[Trial, ...]:
        """The known trials that are run: of those with equal plans the first."""
        return tuple(each for each in self.trials if each.same_as is None)

    def to_json(self) -> dict[str, Any]:
        """Everything but the plans, which a trial has in its run directory."""
        return {
            "sweep_id": self.id,
            "name": self.name,
            "spec": self.spec,
            "folder": self.folder,
            "over": self.over,
            "method": self.method.args(),
            "objective": self.objective,
            "count": self.count,
            "parallel": self.parallel,
            "retries": self.retries,
            "rungs": list(self.rungs),
            "base_plan_id": self.base.id,
            "trials": [
                {
                    "number": each.number,
                    "name": each.name,
                    "point": dict(each.point),
                    "sets": list(each.sets),
                    "plan_id": each.plan.id,
                    "config_id": each.plan.config_id,
                    "same_as": each.same_as,
                    "steps": each.steps,
                    "tokens": each.tokens,
                    "seconds": each.seconds,
                    "flops": each.flops,
                    "parameters": each.plan.parameters.total,
                    "memory_bytes": each.memory_bytes,
                }
                for each in self.trials
            ],
            "caches": {"tokens": [list(each) for each in self.tokens], "rows": [list(each) for each in self.rows]},
        }
