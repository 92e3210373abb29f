"""Alternatives to a plan: other settings (`xtrain plan --compare`), and every layout of a world size (`--fit`).

`--fit` keeps the rows of a step. It varies the axes, the pipeline schedule, the rows of a microbatch, and
recomputation. It recomputes only as much as memory requires, because more is always slower.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from attrs import evolve

from xtrain.dsl.diagnostics.codes import CODES
from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.schema.parallel import Activation
from xtrain.dsl.schema.setting import AUTO, Auto
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.estimates import Estimates, Hardware
from xtrain.plan.plan import Plan
from xtrain.plan.views import TIGHT
from xtrain.planner.compile import appraise
from xtrain.planner.load import plan_from_spec
from xtrain.text.page import Page, clip
from xtrain.text.units import bytes_text, count_text, plural, seconds_text

# Words of `--compare` and the settings they stand for; a word with a dot is a path as in `--set`.
SHORT = {
    **{axis: f"parallel.{axis}" for axis in ("tp", "pp", "cp", "ep", "fsdp", "stack")},
    **{name: f"parallel.fsdp.{name}" for name in ("replicate", "reshard", "offload", "reduce", "sync")},
    **{name: f"parallel.cp.{name}" for name in ("ring", "ulysses", "fold")},
    **{name: f"parallel.pp.{name}" for name in ("schedule", "stages_per_rank")},
    **{name: f"batch.{name}" for name in ("micro", "accumulate", "rows", "sequence")},
}


@frozen(kw_only=True)
class Alternative:
    """One way to run the spec: its plan, or its errors. sets: the `--set` texts that it was made with."""

    name: str
    sets: tuple[str, ...]
    plan: Plan | None
    diagnostics: Diagnostics


def compare(
    path: str | Path, texts: Sequence[str], sets: Sequence[str] = (), world: int | None = None
) -> list[Alternative]:
    """Compile the spec as it is, then with each text of settings, such as `tp=4,pp=2`, applied after `sets`.

    Ranks and rows of a step are the spec's unless a text changes them: fsdp takes the ranks that the other axes leave
    over, and microbatches follow from the rows.
    """
    declared = _plan("as declared", path, sets, world)
    return [declared, *(_variant(text, path, sets, world, declared.plan) for text in texts)]


def _plan(name: str, path: str | Path, sets: Sequence[str], world: int | None) -> Alternative:
    compiled = plan_from_spec(path, sets, world)
    return Alternative(name=name, sets=tuple(sets), plan=compiled.plan, diagnostics=compiled.diagnostics)


def _variant(text: str, path: str | Path, sets: Sequence[str], world: int | None, declared: Plan | None) -> Alternative:
    own = [_written_out(part) for part in split(text)]
    named = {part.partition("=")[0].strip() for part in own}
    unchanged: list[str] = []
    if declared is not None:
        world = declared.mesh.world_size if world is None else world
        if "parallel.fsdp" not in named:
            unchanged.append("parallel.fsdp=auto")
        if not named & {"batch.rows", "batch.accumulate"}:
            rows = declared.node("setup.loader").args["rows"]
            unchanged += ["batch.accumulate=auto", f"batch.rows={rows}"]
    if "parallel.fsdp" in named:
        world = None
    return _plan(text, path, [*sets, *unchanged, *own], world)


def _written_out(part: str) -> str:
    name, sign, value = part.partition("=")
    return f"{SHORT.get(name.strip(), name.strip())}{sign}{value}"


def split(text: str) -> list[str]:
    """Return the parts between commas outside brackets and strings."""
    parts, depth, quoted, start = [], 0, False, 0
    for place, letter in enumerate(text):
        if letter == '"' and text[place - 1 : place] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


Mode = Literal["none", "selective", "full"]
Schedule = Literal["1f1b", "interleaved_1f1b", "zbv"]

LARGEST_CONTEXT = 16
LARGEST_MICRO = 8
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved_1f1b", "zbv")
RECOMPUTE: tuple[Mode, ...] = ("none", "selective", "full")


@frozen(kw_only=True)
class Candidate:
    """Layout that was evaluated.

    name: `tp=2 pp=4 micro=2`. sets: the `--set` texts that give the spec this layout. rejected: the reason why it is
    not among the best, of kind `code`.
    """

    name: str
    sets: tuple[str, ...] = ()
    estimates: Estimates | None = None
    code: str = ""
    rejected: str = ""

    @property
    def memory(self) -> int:
        assert self.estimates is not None
        return self.estimates.fullest.memory.total_bytes

    @property
    def seconds(self) -> float:
        assert self.estimates is not None and self.estimates.times is not None
        return self.estimates.times.step


@frozen(kw_only=True)
class Fit:
    """Result of a search. best: fitting layouts, the fastest first. rejected: all other layouts, each with its
    reason."""

    world: int
    rows: int
    cluster: Hardware
    best: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]

    @property
    def reasons(self) -> list[tuple[str, list[Candidate]]]:
        """Rejected layouts by kind of reason, the most frequent first."""
        found: dict[str, list[Candidate]] = {}
        for each in self.rejected:
            found.setdefault(each.code, []).append(each)
        return sorted(found.items(), key=lambda item: -len(item[1]))


class Unsearchable(Exception):
    """Missing input of a search; the message says what to declare."""


def any_layout(spec: Spec) -> Spec:
    """Return the spec with all ranks in fsdp: a layout to start from even if the declared one is impossible.

    If the spec does not give the rows of a step, they follow from its own layout, which is kept.
    """
    if isinstance(spec.batch.rows, Auto):
        return spec
    plain = _Layout(tp=1, cp=1, pp=1, ep=1, replicate=1, schedule="1f1b", micro=1)
    return _spec(evolve(spec, batch=evolve(spec.batch, accumulate=AUTO)), plain, "none")


def search(spec: Spec, plan: Plan, *, best: int = 5) -> Fit:
    """Evaluate every layout of the ranks of `plan`, which is any plan of `spec`, for the rows of its steps.

    Raises Unsearchable if the cluster's memory or speed is unknown.
    """
    cluster, world = plan.cluster, plan.mesh.world_size
    if cluster.memory_bytes is None or cluster.flops is None:
        raise Unsearchable(
            "declare memory and speed of a device, such as `cluster h100` or `cluster other { memory = … }`"
        )
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
    """Yield the layouts that a person would consider: tp inside a machine, one copy per machine, powers of two of
    rows."""
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
    """Return the layout with the least recomputation that fits, or the reason why it is rejected."""
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
    """Return the differences between spec and layout as `--set` texts."""
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


HEAD = ("", "memory", "of it", "step", "tokens/s", "MFU", "exposed", "bubble", "sent", "")
ALIGN = "<>>>>>>>><"
UNKNOWN = "unknown"
LONGEST_NAME = 40
LEGEND = "memory: of the fullest rank · exposed: communication that is not overlapped · sent: by one rank in a step"


def render_alternatives(alternatives: Sequence[Alternative], *, color: bool = False) -> str:
    """Render a table of alternatives with a plan, then the others with their errors."""
    page = Page(color=color)
    planned = [(each.name, each.plan) for each in alternatives if each.plan is not None]
    base = alternatives[0].plan
    if planned:
        some = planned[0][1]
        rows, ranks = some.node("setup.loader").args["rows"], some.mesh.world_size
        page.heading(
            "ALTERNATIVES", f"{plural(rows, 'row')} a step on {plural(ranks, 'rank')}, unless a line says otherwise"
        )
        _table(page, [_planned(name, plan, base) for name, plan in planned])
    for each in alternatives:
        if each.plan is None:
            page.line()
            for found in each.diagnostics.errors:
                hint = f"; {found.hint}" if found.hint else ""
                page.wrapped(f"{found.message}{hint}", first=f"  {each.name}  {found.code}: ", rest="    ", style="red")
    return str(page)


def _table(page: Page, rows: list[tuple[str, ...]]) -> None:
    """Add the rows under their heads, without columns that are unknown or empty in every row."""
    shown = [column for column in range(len(HEAD)) if any(row[column] not in (UNKNOWN, "") for row in rows)]
    lines = [tuple(row[column] for column in shown) for row in (HEAD, *rows)]
    page.table(lines, align="".join(ALIGN[column] for column in shown), styles=("bold",))
    page.line()
    if HEAD.index("step") not in shown:
        page.line("  step times are unknown: the cluster has no speed", "dim")
    page.wrapped(LEGEND, style="dim")


def _planned(name: str, plan: Plan, base: Plan | None) -> tuple[str, ...]:
    remarks = []
    if base is not None and plan.mesh.world_size != base.mesh.world_size:
        remarks.append(plural(plan.mesh.world_size, "rank"))
    if base is not None and plan.config_id != base.config_id:
        remarks.append("other experiment")
    return _row(name, figures(plan.estimates, plan.cluster), remarks)


def render_fit(fit: Fit, spec: str, *, color: bool = False) -> str:
    """Render the best layouts, the reasons against the others, and the command that runs the first."""
    page = Page(color=color)
    memory = bytes_text(fit.cluster.memory_bytes or 0)
    judged = len(fit.best) + len(fit.rejected)
    ranks = plural(fit.world, "rank")
    page.heading("FIT", f"{judged:,} layouts of {ranks} with {memory} each, {plural(fit.rows, 'row')} a step")
    if fit.best:
        _table(page, [_row(each.name, figures(_known(each), fit.cluster), []) for each in fit.best])
    else:
        page.line("  none of them fits", "red")
    page.heading("THE OTHERS", "how many, and the best of them")
    page.table([_reason_row(code, members) for code, members in fit.reasons], align=">")
    if fit.best:
        sets = "".join(f" --set {text}" for text in fit.best[0].sets)
        page.line()
        page.wrapped(f"xtrain run {quote(spec)}{sets}", first="  run the first:  ", rest="    ")
    return str(page)


def _reason_row(code: str, members: list[Candidate]) -> tuple[str, str, str]:
    judged = [each for each in members if each.estimates is not None]
    nearest = members[0]
    if judged:
        nearest = min(judged, key=lambda each: each.memory if code == "memory" else each.seconds)
    reason = {"memory": "do not fit in memory", "slower": "fit and are slower"}.get(code) or CODES[code].title
    return (f"{len(members):,}", reason, f"{nearest.name}: {nearest.rejected}")


def _known(candidate: Candidate) -> Estimates:
    assert candidate.estimates is not None
    return candidate.estimates


def figures(estimates: Estimates, cluster: Hardware) -> dict[str, Any]:
    """Return the figures that alternatives are compared by; None if unknown."""
    times, memory = estimates.times, cluster.memory_bytes
    total = estimates.fullest.memory.total_bytes
    return {
        "memory_bytes": total,
        "memory_share": None if memory is None else total / memory,
        "step_seconds": None if times is None else times.step,
        "tokens_per_second": None if times is None else times.tokens_per_second,
        "mfu": None if times is None else times.mfu,
        "exposed_seconds": None if times is None else times.exposed,
        "bubble": estimates.bubble,
        "sent_bytes": max(sum(each.bytes for each in one.traffic) for one in estimates.classes),
    }


def _row(name: str, found: dict[str, Any], remarks: list[str]) -> tuple[str, ...]:
    def shown(key: str, text: Any) -> str:
        return UNKNOWN if found[key] is None else text(found[key])

    def share(value: float) -> str:
        return f"{value:.0%}"

    if found["memory_share"] is not None and found["memory_share"] > 1:
        remarks = ["does not fit", *remarks]
    return (
        clip(name, LONGEST_NAME),
        bytes_text(found["memory_bytes"]),
        shown("memory_share", share),
        shown("step_seconds", seconds_text),
        shown("tokens_per_second", count_text),
        shown("mfu", share),
        shown("exposed_seconds", seconds_text),
        shown("bubble", share),
        bytes_text(found["sent_bytes"]),
        ", ".join(remarks),
    )
