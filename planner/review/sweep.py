"""Page of a sweep: dimensions, known trials, total cost, and shared caches."""

from collections.abc import Callable, Sequence
from shlex import quote
from typing import Final

from xtrain.planner.compile_sweep import SweepPlan, Trial
from xtrain.planner.review.page import launcher_text
from xtrain.text.page import Page, clip
from xtrain.text.units import WIDTH, bytes_text, count_text, flops_text, plural, seconds_text

MOST_ROWS: Final = 24


def render_sweep(sweep: SweepPlan, *, color: bool = False, full: bool = False) -> str:
    """Render the page of a sweep. full: every known trial."""
    page = Page(color=color)
    page.line(f"{sweep.name}: a sweep of {plural(sweep.count, 'trial')}, {sweep.parallel:,} at once", "bold")
    page.line(f"{sweep.spec} · sweep {sweep.id} · experiment {sweep.base.config_id}", "dim")
    page.line(f"in {sweep.folder}", "dim")
    has_launcher = "launcher" in sweep.base.launch
    if has_launcher:
        page.line(clip(launcher_text(sweep.base), WIDTH), "dim")
    page.heading("SWEEP")
    page.described([
        *sweep.over.items(),
        ("method", f"{sweep.method.kind}: {sweep.method.does()}"),
        ("objective", f"the lowest {sweep.objective} in a trial's last measurement"),
    ])  # fmt: skip
    _trials(page, sweep, full)
    _cost(page, sweep)
    _caches(page, sweep)
    page.line()
    as_jobs = f"; as jobs: xtrain launch {quote(sweep.spec)}" if has_launcher else ""
    page.line(f"  run it: xtrain run {quote(sweep.spec)}{as_jobs}", "dim")
    return str(page)


def _trials(page: Page, sweep: SweepPlan, full: bool) -> None:
    known, same = len(sweep.trials), len(sweep.trials) - len(sweep.runs)
    remarks = [f"{known} known" if known < sweep.count else "all known"]
    remarks += [f"{plural(sweep.count - known, 'trial')} follow from results"] if known < sweep.count else []
    remarks += [f"{same} equal to another and not run"] if same else []
    remarks += [f"{plural(len(sweep.tried), 'point')} at the ends compiled too"] if sweep.tried else []
    page.heading("TRIALS", " · ".join(remarks))
    shown = sweep.trials if full else sweep.trials[:MOST_ROWS]
    names = list(sweep.over)
    head = (
        "",
        *(name.rpartition(".")[2] for name in names),
        "parameters",
        "steps",
        "tokens",
        "compute",
        "memory",
        "time",
        "",
    )
    rows = [head, *(_row(each, names) for each in shown)]
    has_time = any(each.seconds is not None for each in shown)
    rows = [row if has_time else (*row[:-2], row[-1]) for row in rows]
    page.table(rows, align=">" * (len(rows[0]) - 1) + "<", styles=("dim",))
    if len(shown) < known:
        page.line(f"  and {known - len(shown):,} more: --full", "dim")


def _row(trial: Trial, names: Sequence[str]) -> tuple[str, ...]:
    return (
        f"{trial.number:03d}",
        *(trial.point[name].strip('"') for name in names),
        count_text(trial.plan.parameters.total),
        _or_unknown(trial.steps, lambda count: f"{count:,.0f}"),
        _or_unknown(trial.tokens, count_text),
        _or_unknown(trial.flops, flops_text),
        bytes_text(trial.memory_bytes),
        _or_unknown(trial.seconds, seconds_text),
        "" if trial.same_as is None else f"as {trial.same_as:03d}",
    )


def _or_unknown(value: float | None, text: Callable[[float], str]) -> str:
    return "unknown" if value is None else text(value)


def _cost(page: Page, sweep: SweepPlan) -> None:
    """Show the cost of all trials; unknown trials count as the mean of the others or of the ends."""
    page.heading("COST")
    rows = [("every trial to its end", _amounts(sweep, 1.0))]
    if sweep.rungs:
        rungs = ", ".join(_shown(each) for each in sweep.rungs)
        factor = sweep.method.halving.factor if sweep.method.halving else 1
        share = share_trained(sweep)
        rows += [
            ("compared at", rungs),
            (f"if one in {factor} continues", _amounts(sweep, share)),
        ]
    plans = [*(each.plan for each in sweep.runs), *sweep.tried]
    worst = max(plan.estimates.fullest.memory.total_bytes for plan in plans)
    ranks = max(plan.mesh.world_size for plan in plans)
    rows.append(("at once", f"up to {plural(sweep.parallel * ranks, 'rank')}, at most {bytes_text(worst)} on one"))
    page.described(rows)


def share_trained(sweep: SweepPlan) -> float:
    """Return the share of all trials' budget that is trained if one in `factor` continues at every rung."""
    halving = sweep.method.halving
    assert halving is not None
    lengths = [each.steps if halving.first.unit == "steps" else each.tokens for each in sweep.runs]
    known = [each for each in lengths if each]
    whole = sum(known) / len(known)
    ends = [float(each.partition(" ")[0]) for each in sweep.rungs] + [whole]
    trained, before = 0.0, 0.0
    for place, end in enumerate(ends):
        trained += (end - before) / halving.factor**place
        before = end
    return trained / whole


def _amounts(sweep: SweepPlan, share: float) -> str:
    """Return tokens, FLOPs and time of all trials as text."""
    runs = sweep.count - (len(sweep.trials) - len(sweep.runs))
    texts = [
        _total([each.tokens for each in sweep.runs], runs, share, lambda n: f"{count_text(n)} tokens"),
        _total([each.flops for each in sweep.runs], runs, share, flops_text),
        _total([each.seconds for each in sweep.runs], runs, share / sweep.parallel, seconds_text),
    ]
    return ", ".join(text for text in texts if text) or "unknown"


def _total(values: Sequence[float | None], runs: int, share: float, text: Callable[[float], str]) -> str:
    known = [each for each in values if each is not None]
    if len(known) < len(values) or not known:
        return ""
    return text(sum(known) / len(known) * runs * share)


def _shown(rung: str) -> str:
    amount, _, unit = rung.partition(" ")
    return f"{int(amount):,} {unit}"


def _caches(page: Page, sweep: SweepPlan) -> None:
    if len(sweep.runs) < 2:
        return
    page.heading("CACHES", "what is prepared once for several trials")
    page.described([("tokens", _shared(sweep.tokens)), ("packed rows", _shared(sweep.rows))])


def _shared(groups: Sequence[Sequence[int]]) -> str:
    if len(groups) == 1:
        return "prepared once for all trials"
    several = [each for each in groups if len(each) > 1]
    if not several:
        return "prepared for each trial"
    named = "; ".join(", ".join(f"{number:03d}" for number in each) for each in several[:4])
    return f"prepared {len(groups):,} times; shared by {named}{' …' if len(several) > 4 else ''}"
