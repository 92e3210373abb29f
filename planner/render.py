"""A plan as a page that a person reads before a single accelerator is touched: at most 100 columns, 120 lines."""

from collections import Counter

from .plan import Plan
from .render_cluster import show_memory, show_mesh
from .render_flow import show_setup, show_step, show_timeline
from .text import WIDTH, Page, clip
from .units import bytes_text, count_text, flops_text, plural

# Derived values that repeat what another line says, or that nobody asks for.
QUIET = {"world_size", "steps", "tokens_per_step", "precision.compute", "parallel.fsdp.reduce", "launch.ranks_per_node"}
QUIET |= {"model.qk_norm", "batch.accumulate", "collate", "parallel.pp.layers", "parallel.fsdp.reshard"}
MOST_VALUES = 14


def render(plan: Plan, *, color: bool = False) -> str:
    """The whole page, ending with a newline. What a program wants to know stands in the JSON, not here."""
    page = Page(color=color)
    _header(page, plan)
    _model(page, plan)
    _arithmetic(page, plan)
    _values(page, plan)
    show_mesh(page, plan)
    show_memory(page, plan)
    show_setup(page, plan)
    show_step(page, plan)
    show_timeline(page, plan)
    _checks(page, plan)
    return str(page)


def render_summary(plan: Plan, *, color: bool = False) -> str:
    """A few lines for the start of a run: what is trained, on what, how long, and whatever there is to warn of."""
    page = Page(color=color)
    _header(page, plan)
    estimates = plan.estimates
    axes = " · ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes if axis.size > 1)
    parts = [
        f"{plan.architecture.family}, {count_text(plan.parameters.total)} parameters",
        f"{estimates.tokens_per_step:,} tokens a step",
        axes,
        f"{bytes_text(max(each.memory.states for each in estimates.classes))} of model states a rank",
    ]
    page.wrapped(" · ".join(part for part in parts if part), first="", rest="")
    _warnings(page, plan)
    return str(page)


def _header(page: Page, plan: Plan) -> None:
    nodes = plan.launch["nodes"]
    where = plural(plan.mesh.world_size, "rank") + (f" on {plural(nodes, 'node')}" if nodes > 1 else "")
    device = {"auto": "cuda or cpu"}.get(plan.launch["device"], plan.launch["device"])
    steps = "an unknown number of steps" if plan.timeline.steps is None else plural(plan.timeline.steps, "step")
    page.line(clip(f"{plan.name}: {steps} on {where}, {device}", WIDTH), "bold")
    origin = f"{plan.spec} · seed {plan.seed} · plan {plan.id} · experiment {plan.config_id}"
    page.line(clip(origin, WIDTH), "dim")


def _model(page: Page, plan: Plan) -> None:
    arch, count = plan.architecture, plan.parameters
    size = f"{count.total:,} parameters"
    if arch.is_moe:
        size += f", {count.active:,} active"
    page.heading("MODEL", size)
    heads = f"{arch.heads} heads of {arch.head_dim}"
    if arch.kv_heads != arch.heads:
        heads += f" ({arch.kv_heads} kv)"
    wide = f"{arch.experts} experts of {arch.expert_ffn}, {arch.experts_per_token} a token"
    parts = [
        arch.family,
        f"{plural(arch.layers, 'block')} of width {arch.dim}",
        heads,
        wide if arch.is_moe else f"ffn {arch.ffn}",
        f"vocab {arch.vocab:,}" + (", tied" if arch.tie_embeddings else ""),
    ]
    page.wrapped(" · ".join(parts))


def _arithmetic(page: Page, plan: Plan) -> None:
    """How much is computed, and on how many tokens."""
    estimates, timeline = plan.estimates, plan.timeline
    loader = plan.node("setup.loader").args
    rows, sequence = loader["rows"], loader["sequence"]
    page.heading("TRAINING")
    table = [("tokens a step", f"{estimates.tokens_per_step:,}", f"{plural(rows, 'row')} · {sequence:,} tokens")]
    if timeline.steps is None or timeline.tokens is None:
        table.append(("steps", "unknown", f"{plural(int(timeline.epochs or 0), 'epoch')} of data not counted yet"))
    else:
        ratio = timeline.tokens / plan.parameters.total
        table.append(("steps", f"{timeline.steps:,}", _how(plan, "steps") or "the budget"))
        table.append(("tokens", count_text(timeline.tokens), f"{ratio:.3g} a parameter"))
        total = estimates.flops_per_step * timeline.steps
        table.append(("compute", flops_text(total), f"{flops_text(estimates.flops_per_step)} a step"))
    attention = 12 * plan.architecture.layers * plan.architecture.heads * plan.architecture.head_dim * sequence
    share = attention / estimates.flops_per_token
    table.append(("compute a token", flops_text(estimates.flops_per_token), f"{share:.0%} of it attention"))
    page.table(table, align="<>", styles=("", "", "dim"))


def _how(plan: Plan, path: str) -> str:
    """The reason of a derived value; empty if it was not derived."""
    return next((entry.how for entry in plan.provenance if entry.path == path), "")


def _values(page: Page, plan: Plan) -> None:
    """What was derived, and what came from elsewhere than the plain text; defaults and literals are only counted."""
    chosen = [
        (entry.path, entry.value, f"= {entry.how}" if entry.how else f"{entry.origin} {entry.place}".strip())
        for entry in plan.provenance
        if entry.path not in QUIET and entry.origin in ("derived", "set", "param", "let")
    ]
    origins = Counter(entry.origin for entry in plan.provenance)
    page.heading("VALUES", ", ".join(f"{count} {origin}" for origin, count in sorted(origins.items())))
    page.table([(path, clip(value, 40), how) for path, value, how in chosen[:MOST_VALUES]], styles=("", "cyan", "dim"))
    if len(chosen) > MOST_VALUES:
        page.line(f"  and {len(chosen) - MOST_VALUES} more under `provenance` of --json", "dim")


def _checks(page: Page, plan: Plan) -> None:
    if any(check.status != "pass" for check in plan.checks):
        page.heading("CHECKS")
    _warnings(page, plan)
    counts = Counter(check.status for check in plan.checks)
    verdicts = ", ".join(
        f"{counts[status]} {status}" for status in ("pass", "warn", "unknown", "fail") if counts[status]
    )
    page.line()
    summary = f"{plural(len(plan.nodes), 'node')}, {plural(len(plan.checks), 'check')} ({verdicts})"
    page.line(f"Plan {plan.id}: {summary}, checkpoint {bytes_text(plan.estimates.checkpoint_bytes)}", "bold")


def _warnings(page: Page, plan: Plan) -> None:
    """Every check that did not pass, in its own words."""
    for check in plan.checks:
        if check.status == "pass":
            continue
        style = {"warn": "yellow", "fail": "red"}.get(check.status, "dim")
        mark = f"  {check.status} {check.code or check.id}: "
        place = f" ({check.place})" if check.place else ""
        page.wrapped(check.evidence + place, first=mark, rest=" " * len(mark), style=style)
