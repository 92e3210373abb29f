"""The part of the page about what is trained on when: phases, the share of each dataset, the learning rate in them."""

from xtrain.planner.compare.resumable_phases import mix_text, start_text
from xtrain.planner.plan import Plan, PlanPhase
from xtrain.planner.report.text import Detail, Page
from xtrain.planner.schedule.arithmetic import arithmetic_of
from xtrain.planner.schedule.epochs import sampler_of
from xtrain.planner.schedule.horizon import known_arithmetic
from xtrain.planner.schedule.learning_curve import computed, learning_rate
from xtrain.planner.schedule.phases import in_order
from xtrain.planner.units import amount_in_epochs, count_text, plural

HEAD = ("phase", "steps", "learning rate", "dataset", "share", "rows", "tokens")


def show_phases(page: Page, plan: Plan, detail: Detail) -> None:
    """A line for each dataset of each phase, and the sums; nothing where one dataset is all there is."""
    phases, datasets = plan.timeline.phases, plan.node("setup.loader").args["datasets"]
    if len(phases) == 1 and len(datasets) == 1 and not detail.full:
        return
    weights = "shares of rows" if not any(phase.passes for phase in phases) else "how often an epoch takes each"
    weights = f"exact shares of the {phases[0].exact_rows} rows of every step" if phases[0].exact_rows else weights
    page.heading("PHASES", f"{plural(len(phases), 'phase')}, {plural(len(datasets), 'dataset')}, {weights}")
    rate = plan.node("setup.scheduler").args
    lengths = (rate.get("warmup") or {}, rate.get("decay") or {})
    waits = any(phase.first is None and phase.epochs for phase in phases)
    waits = waits or any(each and "steps" not in each and "fraction" not in each for each in lengths)
    if plan.timeline.steps is None or waits:
        page.described([(phase.name, _uncounted(phase)) for phase in phases])
        return
    rows = phase_rows(plan)
    most = detail.most(14)
    page.table([HEAD, *rows[:most]], align="<<<<>>>", styles=("cyan", "", "", "", "", "", ""))
    page.more(len(rows) - most, "phases")


def phase_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Phase, its steps from 1, the rate of the first and the last, then dataset, share, rows and tokens in it.

    Rows are those that the run samples, from its first step to its last; with weights in epochs they depend on the
    data.
    """
    steps, loader = plan.timeline.steps, plan.node("setup.loader").args
    assert steps is not None
    args = plan.node("setup.scheduler").args
    rate = learning_rate(args, known_arithmetic(plan), plan.timeline.phases) if computed(args) else None
    begins = [pair for pair in in_order(plan.timeline.phases, steps) if pair[0] < steps]
    ends = [first for first, _ in begins[1:]] + [steps]
    table: list[tuple[str, ...]] = []
    sizes = arithmetic_of(plan).row_sizes
    taken = dict.fromkeys(loader["datasets"], 0)
    for (first, phase), end in zip(begins, ends, strict=True):
        scale = f" (× {phase.lr_scale:g})" if phase.lr_scale != 1 else ""
        span = f"{first + 1:,} to {end:,}" if end > first + 1 else f"{end:,}"
        ends_at = f"{rate(first):.3g} → {rate(end - 1):.3g}" if rate is not None else f"by {args['kind']}"
        head = (phase.name, span, f"{ends_at}{scale}")
        if phase.passes is not None:
            for name, epochs in phase.passes.items():
                if epochs > 0:
                    table.append((*head, name, amount_in_epochs(epochs), "", ""))
                    head = ("", "", "")
            continue
        sampler = sampler_of(phase, tuple(phase.shares), {}, loader["seed"])
        sampled = sampler.counts(0, sizes.between(first, end))
        for (name, share), rows in zip(phase.shares.items(), sampled, strict=True):
            taken[name] += rows
            if share > 0:
                table.append((*head, *_amounts(name, share, rows, loader["sequence"])))
                head = ("", "", "")
    if len(begins) > 1 and not any(phase.passes for _, phase in begins):
        head = ("all", f"{steps:,}", "")
        for name, rows in taken.items():
            table.append((*head, *_amounts(name, rows / sizes.before(steps), rows, loader["sequence"])))
            head = ("", "", "")
    return table


def _amounts(name: str, share: float, rows: int, sequence: int) -> tuple[str, ...]:
    return name, f"{share:.1%}", f"{rows:,}", count_text(rows * sequence)


def _uncounted(phase: PlanPhase) -> str:
    start = f"from step {phase.first + 1:,}" if phase.first is not None else f"from {start_text(phase)}"
    scale = f", learning rate × {phase.lr_scale:g}" if phase.lr_scale != 1 else ""
    return f"{start}: {mix_text(phase)}{scale}"
