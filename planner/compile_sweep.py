"""`SweepPlan` and its compiler: every trial of a `sweep` is compiled before the first one starts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import product
from typing import Any, Final

from attrs import evolve

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics, Note
from xtrain.dsl.load import Loaded, load_spec
from xtrain.dsl.schema.sweep import Halving, Method, Point, Sweep
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Dimension
from xtrain.lazy_attrs import frozen
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
    """Point of a sweep and the plan of its run. number: index in the sweep, from 0. name: of its run directory, derived
    from its point. sets: the `--set` texts that make it from the spec. same_as: an earlier trial with an equal plan,
    which is run instead.

    A trial's plan contains its output folder, so two trials never have the same id. `same_as` compares everything else.
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
        """Time of all its steps; None if the cluster's speed is unknown."""
        times, steps = self.plan.estimates.times, self.plan.timeline.full_steps
        return None if times is None or steps is None else times.step * steps

    @property
    def flops(self) -> float | None:
        """FLOPs of all its steps."""
        steps = self.plan.timeline.full_steps
        return None if steps is None else self.plan.estimates.flops_per_step * steps

    @property
    def memory_bytes(self) -> int:
        """Bytes of its fullest rank."""
        return self.plan.estimates.fullest.memory.total_bytes


@frozen(kw_only=True)
class SweepPlan:
    """Plan of a sweep.

    id: identifies the experiment with its budget, dimensions, method and objective, but not the number of trials or of
    parallel runs. base: the plan of the spec itself. count: number of trials; `trials` are known now, the others follow
    from results. tried: plans of points that enclose the others, compiled for their errors. rungs: budgets at which
    trials are compared, as values of `launch.stop_at`. tokens, rows: groups of trials that read the same tokenized
    documents, or the same packed rows, from the cache.
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
        """Folder of the sweep and the runs of its trials."""
        return f"{self.root}/{self.lineage}"

    @property
    def runs(self) -> tuple[Trial, ...]:
        """Known trials that are run: the first of each set with equal plans."""
        return tuple(each for each in self.trials if each.same_as is None)

    def to_json(self) -> dict[str, Any]:
        """Return everything except the plans, which are in the run directories of trials."""
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
"""Called with the number of compiled plans and the total."""


@frozen
class CompiledSweep:
    """Plan of a sweep, or None with at least one error among the diagnostics."""

    plan: SweepPlan | None
    diagnostics: Diagnostics


def compile_sweep(
    path: str,
    sets: Sequence[str] = (),
    world: int | None = None,
    count: Count | None = None,
    progress: Progress = lambda done, of: None,
    loaded: Loaded | None = None,
) -> CompiledSweep | None:
    """Compile the spec at `path` and every known point of its sweep, or the points that enclose unknown ones.

    loaded: the spec if it has been read already. None if the spec has no sweep. Reports user errors as diagnostics and
    raises none.
    """
    loaded = load_spec(path, sets) if loaded is None else loaded
    if loaded.spec is None or loaded.spec.sweep is None:
        return None
    return _Compiling(loaded, loaded.spec, loaded.spec.sweep, path, tuple(sets), world, count, progress).run()


def corners(over: Mapping[str, Dimension]) -> list[Point]:
    """Return points at the ends of the dimensions: every combination of ends or, if there are many, each end with the
    other dimensions in the middle."""
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
    """Return the `--set` texts of a point."""
    return tuple(f"{name}={value}" for name, value in point.items())


def point_name(number: int, point: Point) -> str:
    """Return the name of a trial's run directory."""
    text = "\n".join(point_sets(point)).encode()
    return f"{number:03d}-{blake2b(text, digest_size=4).hexdigest()}"


def sameness(plan: Plan) -> str:
    """Return a key that trials with equal plans share: the id of the plan without its output folder."""
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
        # Without points, or with points that follow from results, there are or may be trials that are still unknown.
        unknown = not self.sweep.method.everything and (self.sweep.method.suggests or not points)
        tried = corners(self.sweep.over) if unknown else []
        trials, plans = self._compiled(trials_of, points, tried)
        if not self.diagnostics.has_errors:
            found = Findings(self.spec)
            check_plans(self.sweep, [*(each.plan for each in trials), *plans], found)
            self.diagnostics.extend(found.diagnostics)
        if self.diagnostics.has_errors:
            return CompiledSweep(None, self.diagnostics)
        return CompiledSweep(trials_of.plan(trials, plans), self.diagnostics)

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
        """Collect the errors at a point; an error at several points counts once."""
        for each in compiled.diagnostics.errors:
            self.wrong.setdefault((dimension_of(each, point), each.code, each.message), []).append((each, point))

    def _say_what_is_wrong(self) -> None:
        """Report each error at the dimension that causes it, or else at the sweep, with the first point that has it."""
        for (name, _, _), there in self.wrong.items():
            each, point = there[0]
            shown = ", ".join(point_sets(point))
            origin = origin_of(self.spec, f"sweep.{name}" if name else "sweep")
            notes: list[Note] = [(f"{each.code}: {each.message}", each.span if name is None else None)]
            if len(there) > 1:
                notes.append((f"the same error occurs at {plural(len(there) - 1, 'other point')}", None))
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
    """Builder of trials from points, before and during the sweep."""

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
        """Folder of the sweep, below the root of all runs."""
        return f"{self.base.workspace['lineage']}-sweep-{self.id[:8]}"

    def sets_of(self, number: int, point: Point, stop_at: str | None = None) -> tuple[str, ...]:
        """Return all `--set` texts of a trial, the user's first. stop_at: the rung up to which it is trained."""
        where = (f"workspace.lineage={self.lineage}", f"workspace.run={point_name(number, point)}")
        stop = () if stop_at is None else (f"launch.stop_at={stop_at}",)
        return (*self.sets, *point_sets(point), *where, *stop)

    def compiled(self, number: int, point: Point, stop_at: str | None = None) -> Compiled:
        """Return the plan of a trial, signed like a saved plan; `plan` is None if the point has none."""
        sets = self.sets_of(number, point, stop_at)
        compiled = plan_from_loaded(load_spec(self.path, sets), self.world, self.count)
        if compiled.plan is None:
            return compiled
        return evolve(compiled, plan=signed(compiled.plan, sets, self.world))

    def trial(self, number: int, point: Point, plan: Plan, seen: dict[str, int]) -> Trial:
        """Return a trial. seen: key of each plan so far → its trial; updated."""
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
    """Return the rungs that come before the end of every plan."""
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
    """Return a key of everything that tokenized documents depend on."""
    data = [each.args for each in plan.nodes if each.op == "setup.data"]
    sources = [{name: each.get(name) for name in ("kind", "patterns", "options", "reads")} for each in data]
    return fingerprint([plan.node("setup.tokenizer").args, sources])


def _rows(plan: Plan) -> str:
    """Return a key of everything that packed rows depend on."""
    nodes = [each for each in plan.nodes if each.op == "setup.data" or each.id == "collate.pack"]
    return fingerprint([plan.node("setup.tokenizer").args, [each.args for each in nodes]])
