"""`SweepPlan` and its compiler: every trial of a `sweep` is compiled before the first one starts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import product
from typing import Any, Final

from attrs import evolve, frozen

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics, Note
from xtrain.dsl.load import Loaded, load_spec
from xtrain.dsl.schema.sweep import Halving, Method, Point, Sweep
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Dimension
from xtrain.plan.canonical import fingerprint
from xtrain.plan.findings import Findings, origin_of
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import plan_id, signed
from xtrain.planner.compile import Compiled, Count
from xtrain.planner.load import plan_from_loaded
from xtrain.planner.rules.sweep import check_dimensions, check_plans, check_sweep, dimension_of
from xtrain.text.units import plural


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


MOST_CORNERS: Final = 32
Progress = Callable[[int, int], None]
"""Is told how many plans of how many have been compiled."""


@frozen
class CompiledSweep:
    """The plan of a sweep, or None with at least one error among the diagnostics."""

    plan: SweepPlan | None
    diagnostics: Diagnostics


def compile_sweep(
    path: str,
    sets: Sequence[str] = (),
    world: int | None = None,
    count: Count | None = None,
    progress: Progress = lambda done, of: None,
) -> CompiledSweep | None:
    """Compile the spec at `path` and every point of its sweep that is known, else the points that others lie between.

    None where the spec has no sweep. Never raises for what a user wrote.
    """
    loaded = load_spec(path, sets)
    if loaded.spec is None or loaded.spec.sweep is None:
        return None
    return _Compiling(loaded, loaded.spec, loaded.spec.sweep, path, tuple(sets), world, count, progress).run()


def corners(over: Mapping[str, Dimension]) -> list[Point]:
    """Points at the ends of the dimensions: every combination of them, or, where these are many, each end with the
    others in the middle."""
    ends = {name: dimension.ends() for name, dimension in over.items()}
    size = 1
    for each in ends.values():
        size *= len(each)
    if size <= MOST_CORNERS:
        return [dict(zip(over, each, strict=True)) for each in product(*ends.values())]
    middle = {name: dimension.at(0.5) for name, dimension in over.items()}
    points = [{**middle, name: value} for name, values in ends.items() for value in values]
    return [
        {name: values[0] for name, values in ends.items()},
        {name: each[-1] for name, each in ends.items()},
        *points,
    ]


def point_sets(point: Point) -> tuple[str, ...]:
    """The `--set` texts of a point."""
    return tuple(f"{name}={value}" for name, value in point.items())


def point_name(number: int, point: Point) -> str:
    """The run directory of a trial."""
    text = "\n".join(point_sets(point)).encode()
    return f"{number:03d}-{blake2b(text, digest_size=4).hexdigest()}"


def sameness(plan: Plan) -> str:
    """What trials with equal plans have in common: all of a plan but where it is written."""
    return plan_id(evolve(plan, workspace={}, name=""))


class _Compiling:
    def __init__(
        self, loaded: Loaded, spec: Spec, sweep: Sweep, path: str, sets: tuple[str, ...], world: int | None,
        count: Count | None, progress: Progress,
    ) -> None:  # fmt: skip
        self.spec, self.sweep, self.path, self.sets, self.world = spec, sweep, path, sets, world
        self.count, self.progress, self.loaded = count, progress, loaded
        self.diagnostics = Diagnostics()
        self.wrong: dict[tuple[str | None, str, str], list[tuple[Diagnostic, Point]]] = {}

    def run(self) -> CompiledSweep:
        base = plan_from_loaded(self.loaded, self.world, self.count)
        self.diagnostics.extend(base.diagnostics)
        found = Findings(self.spec)
        check_sweep(self.spec, self.sweep, found)
        self.diagnostics.extend(found.diagnostics)
        self.diagnostics.extend(check_dimensions(self.loaded, self.sets))
        if base.plan is None or self.diagnostics.has_errors:
            return CompiledSweep(None, self.diagnostics)
        trials_of = Trials(self.sweep, base.plan, self.path, self.sets, self.world, self.count)
        points = self.sweep.method.points(self.sweep.over, self.sweep.count)
        tried = [] if not self._goes_beyond(points) else corners(self.sweep.over)
        trials, plans = self._compiled(trials_of, points, tried)
        if not self.diagnostics.has_errors:
            found = Findings(self.spec)
            check_plans(self.sweep, [*(each.plan for each in trials), *plans], found)
            self.diagnostics.extend(found.diagnostics)
        if self.diagnostics.has_errors:
            return CompiledSweep(None, self.diagnostics)
        return CompiledSweep(trials_of.plan(trials, plans), self.diagnostics)

    def _goes_beyond(self, points: Sequence[Point]) -> bool:
        """Whether there are or may be trials that are not known yet."""
        return not self.sweep.method.everything and (self.sweep.method.suggests or not points)

    def _compiled(
        self, trials_of: "Trials", points: Sequence[Point], tried: Sequence[Point]
    ) -> tuple[list[Trial], list[Plan]]:
        trials: list[Trial] = []
        plans: list[Plan] = []
        seen: dict[str, int] = {}
        for number, point in enumerate([*points, *tried]):
            compiled = trials_of.compiled(number, point)
            if compiled.plan is None:
                self._report(compiled, point)
            elif number < len(points):
                trials.append(trials_of.trial(number, point, compiled.plan, seen))
            else:
                plans.append(compiled.plan)
            self.progress(number + 1, len(points) + len(tried))
        self._say_what_is_wrong()
        return trials, plans

    def _report(self, compiled: Compiled, point: Point) -> None:
        """Collect what is wrong at a point: a mistake that several have is one."""
        for each in compiled.diagnostics.errors:
            self.wrong.setdefault((dimension_of(each, point), each.code, each.message), []).append((each, point))

    def _say_what_is_wrong(self) -> None:
        """Say it at the dimension that it is wrong in, or else at the sweep, of the first point that it is wrong of."""
        for (name, _, _), there in self.wrong.items():
            each, point = there[0]
            shown = ", ".join(point_sets(point))
            origin = origin_of(self.spec, f"sweep.{name}" if name else "sweep")
            notes: list[Note] = [(f"{each.code}: {each.message}", each.span if name is None else None)]
            if len(there) > 1:
                notes.append((f"the same is wrong with {plural(len(there) - 1, 'other point')}", None))
            hint = (
                each.hint
                if name is None
                else f"change the values of `{name}`" + (f"; {each.hint}" if each.hint else "")
            )
            self.diagnostics.add(
                Diagnostic(
                    severity="error",
                    code="X641",
                    message=f"the point {shown} has no plan",
                    span=origin.span if origin else None,
                    hint=hint,
                    notes=tuple(notes),
                )
            )


@frozen
class Trials:
    """Makes trials of points, now and while the sweep goes on."""

    sweep: Sweep
    base: Plan
    path: str
    sets: tuple[str, ...]
    world: int | None
    count: Count | None

    @property
    def id(self) -> str:
        return fingerprint(
            {
                "config": self.base.config_id,
                "steps": self.base.timeline.steps,
                "epochs": self.base.timeline.epochs,
                "over": {name: str(each) for name, each in self.sweep.over.items()},
                "method": self.sweep.method.args(),
                "objective": str(self.sweep.objective),
            }
        )

    @property
    def lineage(self) -> str:
        """The folder of the sweep, below the root of all runs."""
        return f"{self.base.workspace['lineage']}-sweep-{self.id[:8]}"

    def sets_of(self, number: int, point: Point, stop_at: str | None = None) -> tuple[str, ...]:
        """All `--set` texts of a trial, those of the user before them. stop_at: the rung that it is trained up to."""
        where = (f"workspace.lineage={self.lineage}", f"workspace.run={point_name(number, point)}")
        stop = () if stop_at is None else (f"launch.stop_at={stop_at}",)
        return (*self.sets, *point_sets(point), *where, *stop)

    def compiled(self, number: int, point: Point, stop_at: str | None = None) -> Compiled:
        """The plan of a trial, signed as one that is saved; `plan` None where the point has none."""
        sets = self.sets_of(number, point, stop_at)
        compiled = plan_from_loaded(load_spec(self.path, sets), self.world, self.count)
        if compiled.plan is None:
            return compiled
        return evolve(compiled, plan=signed(compiled.plan, sets, self.world))

    def trial(self, number: int, point: Point, plan: Plan, seen: dict[str, int]) -> Trial:
        """seen: what has been planned so far → its trial; grows."""
        first = seen.setdefault(sameness(plan), number)
        return Trial(
            number=number,
            name=point_name(number, point),
            point=point,
            sets=self.sets_of(number, point),
            plan=plan,
            same_as=None if first == number else first,
        )

    def plan(self, trials: Sequence[Trial], tried: Sequence[Plan]) -> SweepPlan:
        sweep, halving = self.sweep, self.sweep.method.halving
        return SweepPlan(
            id=self.id,
            name=self.base.name,
            spec=self.path,
            root=self.base.workspace["root"],
            lineage=self.lineage,
            over={name: str(each) for name, each in sweep.over.items()},
            method=sweep.method,
            objective=str(sweep.objective),
            count=len(trials) if sweep.method.everything else sweep.count,
            parallel=sweep.parallel,
            retries=sweep.retries,
            base=self.base,
            trials=tuple(trials),
            tried=tuple(tried),
            rungs=() if halving is None else rungs_below(halving, [*(each.plan for each in trials), *tried]),
            tokens=_groups(trials, _tokens),
            rows=_groups(trials, _rows),
        )


def rungs_below(halving: Halving, plans: Iterable[Plan]) -> tuple[str, ...]:
    """The rungs that come before the end of every one of some plans."""
    lengths = [each.timeline.steps if halving.first.unit == "steps" else each.timeline.tokens for each in plans]
    least = min((each for each in lengths if each is not None), default=0)
    found, amount = [], int(halving.first.value)
    while amount < least:
        found.append(f"{amount} {halving.first.unit}")
        amount *= halving.factor
    return tuple(found)


def _groups(trials: Sequence[Trial], what: Callable[[Plan], str]) -> tuple[tuple[int, ...], ...]:
    found: dict[str, list[int]] = {}
    for each in trials:
        if each.same_as is None:
            found.setdefault(what(each.plan), []).append(each.number)
    return tuple(map(tuple, found.values()))


def _tokens(plan: Plan) -> str:
    """What tokenized documents depend on."""
    data = [each.args for each in plan.nodes if each.op == "setup.data"]
    sources = [{name: each.get(name) for name in ("kind", "patterns", "options", "reads")} for each in data]
    return fingerprint([plan.node("setup.tokenizer").args, sources])


def _rows(plan: Plan) -> str:
    """What packed rows depend on."""
    nodes = [each for each in plan.nodes if each.op == "setup.data" or each.id == "collate.pack"]
    return fingerprint([plan.node("setup.tokenizer").args, [each.args for each in nodes]])
