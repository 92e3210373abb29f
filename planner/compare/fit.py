"""`xtrain plan --fit`: every layout of a world that could run the step, judged by the closed forms.

The rows of a step stay what they are. What is varied: the axes, the schedule of a pipeline, the rows of a microbatch,
and what the backward computes again; of the last only as much as memory asks for, since more of it is always slower.
"""

from collections.abc import Iterator
from itertools import product
from typing import Literal

from attrs import evolve, frozen

from xtrain.dsl.diagnostics.codes import CODES
from xtrain.dsl.schema.parallel import Activation
from xtrain.dsl.schema.setting import AUTO, Auto
from xtrain.dsl.spec import Spec
from xtrain.planner.compile import appraise
from xtrain.planner.costs.headroom import TIGHT
from xtrain.planner.plan import Estimates, Hardware, Plan
from xtrain.planner.units import bytes_text, seconds_text

Mode = Literal["none", "selective", "full"]
Schedule = Literal["1f1b", "interleaved_1f1b", "zbv"]

LARGEST_CONTEXT = 16
LARGEST_MICRO = 8
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved_1f1b", "zbv")
RECOMPUTE: tuple[Mode, ...] = ("none", "selective", "full")


@frozen(kw_only=True)
class Candidate:
    """One layout that was judged.

    name: `tp=2 pp=4 micro=2`. sets: the `--set` texts that make the spec ask for it. rejected: why it is not among the
    best, of the kind `code`.
    """

    name: str
    sets: tuple[str, ...] = ()
    estimates: Estimates | None = None
    code: str = ""
    rejected: str = ""

    @property
    def memory(self) -> int:
        assert self.estimates is not None
        return max(each.memory.total_bytes for each in self.estimates.classes)

    @property
    def seconds(self) -> float:
        assert self.estimates is not None and self.estimates.times is not None
        return self.estimates.times.step


@frozen(kw_only=True)
class Fit:
    """best: fitting layouts, the fastest first. rejected: all others that were judged, each with its reason."""

    world: int
    rows: int
    cluster: Hardware
    best: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]

    @property
    def reasons(self) -> list[tuple[str, list[Candidate]]]:
        """The rejected ones by the kind of reason, the most frequent first."""
        found: dict[str, list[Candidate]] = {}
        for each in self.rejected:
            found.setdefault(each.code, []).append(each)
        return sorted(found.items(), key=lambda item: -len(item[1]))


class Unsearchable(Exception):
    """What a search needs is not known; the message says what to declare."""


def any_layout(spec: Spec) -> Spec:
    """The spec with all ranks in fsdp: a layout to start from, though the one it declares may be impossible.

    Where the spec does not give the rows of a step, only its own layout says how many they are, and it is kept.
    """
    if isinstance(spec.batch.rows, Auto):
        return spec
    plain = _Layout(tp=1, cp=1, pp=1, ep=1, replicate=1, schedule="1f1b", micro=1)
    return _spec(evolve(spec, batch=evolve(spec.batch, accumulate=AUTO)), plain, "none")


def search(spec: Spec, plan: Plan, *, best: int = 5) -> Fit:
    """Judge every layout of the ranks of `plan`, which is any plan of `spec`, for the rows of its steps.

    Raises Unsearchable where the cluster's memory or speed is not known.
    """
    cluster, world = plan.cluster, plan.mesh.world_size
    if cluster.memory_bytes is None or cluster.flops is None:
        raise Unsearchable("declare what a device holds and does, as `cluster h100` or `cluster other { memory = … }`")
    rows = plan.node("setup.loader").args["rows"]
    neutral = evolve(spec, batch=evolve(spec.batch, rows=rows, accumulate=AUTO))
    fitting: list[Candidate] = []
    rejected: list[Candidate] = []
    for layout in _layouts(neutral, world, cluster):
        found = _judge(neutral, layout, world, cluster.memory_bytes)
        (rejected if found.rejected else fitting).append(found)
    fitting.sort(key=lambda each: (each.seconds, each.memory))
    slower = [evolve(each, code="slower", rejected=f"{seconds_text(each.seconds)} a step") for each in fitting[best:]]
    return Fit(world=world, rows=rows, cluster=cluster, best=tuple(fitting[:best]), rejected=(*rejected, *slower))


@frozen(kw_only=True)
class _Layout:
    tp: int
    cp: int
    pp: int
    ep: int
    replicate: int
    schedule: Schedule
    micro: int


def _layouts(spec: Spec, world: int, cluster: Hardware) -> Iterator[_Layout]:
    """All that a person would consider: tp inside a machine, copies one to a machine, powers of two of rows."""
    moe = spec.model.experts > 0
    sequence = spec.batch.sequence
    divisors = [size for size in range(1, min(world, 1024) + 1) if world % size == 0]
    tps = [size for size in divisors if size <= cluster.devices]
    cps = [size for size in divisors if size <= LARGEST_CONTEXT and sequence % size == 0]
    pps = [size for size in divisors if size <= spec.model.layers]
    eps = [size for size in divisors if size <= spec.model.experts] if moe else [1]
    for tp, cp, pp, ep in product(tps, cps, pps, eps):
        if world % (tp * cp * pp):
            continue
        rest = world // (tp * cp * pp)
        for replicate in {1, *([cluster.nodes] if rest % cluster.nodes == 0 and rest > cluster.nodes else [])}:
            for schedule in SCHEDULES if pp > 1 else SCHEDULES[:1]:
                micro = 1
                while micro <= LARGEST_MICRO:
                    yield _Layout(tp=tp, cp=cp, pp=pp, ep=ep, replicate=replicate, schedule=schedule, micro=micro)
                    micro *= 2


def _judge(spec: Spec, layout: _Layout, world: int, memory: int) -> Candidate:
    """The layout with as little recomputation as fits, or why it is rejected."""
    found = Candidate(name="")
    for mode in RECOMPUTE:
        found = Candidate(name=_name(layout, mode), sets=_sets(spec, layout, mode))
        judged = appraise(_spec(spec, layout, mode), world)
        if judged.estimates is None:
            error = judged.diagnostics.errors[0]
            return evolve(found, code=error.code, rejected=error.message)
        found = evolve(found, estimates=judged.estimates)
        if found.memory <= (1 - TIGHT) * memory:
            return found
    return evolve(found, code="memory", rejected=f"{bytes_text(found.memory)} of {bytes_text(memory)}")


def _spec(spec: Spec, layout: _Layout, mode: Mode) -> Spec:
    parallel = spec.parallel
    parallel = evolve(
        parallel,
        tp=evolve(parallel.tp, size=layout.tp),
        cp=evolve(parallel.cp, size=layout.cp, ring=AUTO, ulysses=AUTO),
        ep=evolve(parallel.ep, size=layout.ep),
        pp=evolve(parallel.pp, size=layout.pp, schedule=layout.schedule, stages_per_rank=AUTO, layers=AUTO),
        fsdp=evolve(parallel.fsdp, size=AUTO, replicate=layout.replicate),
    )
    batch = evolve(spec.batch, micro=layout.micro)
    return evolve(spec, parallel=parallel, batch=batch, activation=Activation(mode=mode))


def _name(layout: _Layout, mode: str) -> str:
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "ep", "replicate", "micro")}
    parts = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    if layout.pp > 1:
        parts.append(layout.schedule)
    return " ".join((*parts, *([f"recompute={mode}"] if mode != "none" else []))) or "fsdp alone"


def _sets(spec: Spec, layout: _Layout, mode: str) -> tuple[str, ...]:
    """The settings in which the spec and the layout differ, as `--set` takes them."""
    parallel = spec.parallel
    wanted = {
        "parallel.tp": (parallel.tp.size, layout.tp),
        "parallel.cp": (parallel.cp.size, layout.cp),
        "parallel.pp": (parallel.pp.size, layout.pp),
        "parallel.pp.schedule": (parallel.pp.schedule, layout.schedule if layout.pp > 1 else parallel.pp.schedule),
        "parallel.ep": (parallel.ep.size, layout.ep),
        "parallel.fsdp": (parallel.fsdp.size, AUTO),
        "parallel.fsdp.replicate": (parallel.fsdp.replicate, layout.replicate),
        "batch.micro": (spec.batch.micro, layout.micro),
        "activation": (spec.activation.mode, mode),
    }
    for name in ("ring", "ulysses"):
        wanted[f"parallel.cp.{name}"] = (getattr(parallel.cp, name), AUTO)
    for name in ("stages_per_rank", "layers"):
        wanted[f"parallel.pp.{name}"] = (getattr(parallel.pp, name), AUTO)
    return tuple(f"{path}={value}" for path, (now, value) in wanted.items() if now != value)


def reason_text(code: str) -> str:
    """What a kind of reason is called."""
    return {"memory": "do not fit in memory", "slower": "fit and are slower"}.get(code) or CODES[code].title
