"""Page of a plan: header, glance, model, values, parts and warnings, for a decision before an accelerator is used.

At most 100 columns and 119 lines. Decisive parts come first: whether the plan fits, how long it takes, and warnings.
The other parts are ordered so that each prepares the next.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from shlex import quote
from textwrap import wrap
from typing import Final

from attrs import evolve

from xtrain.dsl.diagnostics.diagnostic import Diagnostic
from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.plan.architecture import Architecture, LayerKind
from xtrain.plan.canonical import fingerprint
from xtrain.plan.estimates import Hardware, Remedy
from xtrain.plan.graph import SETUP, UnknownLauncher, launcher_of, restarts_of, slots_of
from xtrain.plan.plan import ElasticWorld, Plan
from xtrain.plan.timeline import as_known
from xtrain.plan.views import Verdict, headroom, no_times
from xtrain.planner.derive.modules import adapters_of, modules_of
from xtrain.planner.graph.server import slots_that_fit
from xtrain.planner.review.costs import show_communication, show_compute, show_memory
from xtrain.planner.review.mesh import show_mesh, show_order, show_stages, show_step
from xtrain.planner.review.training import show_data, show_phases, show_training
from xtrain.text.page import DETAILS, FULL, LONGEST, Detail, Page, clip
from xtrain.text.printing import WHOLE
from xtrain.text.units import (
    WIDTH,
    amount_in_epochs,
    amount_text,
    bytes_text,
    consecutive,
    count_text,
    plural,
    rate_text,
    seconds_text,
)
from xtrain.version import __version__

# Derived values that repeat another line, or that are rarely of interest.
QUIET = {"world_size", "steps", "tokens_per_step", "precision.compute", "parallel.fsdp.reduce", "launch.ranks_per_node"}
QUIET |= {"model.qk_norm", "batch.accumulate", "collate", "parallel.pp.layers", "parallel.fsdp.reshard"}
CHOSEN = ("derived", "set", "param", "let", "config")
VERDICTS = ("fail", "warn", "unknown", "pass")
VERDICT_STYLES: dict[Verdict, str] = {"fits": "green", "tight": "yellow", "does not fit": "red", "unknown": "dim"}


def show_header(page: Page, plan: Plan, *, short: bool = False) -> None:
    """Show the run, its ids, and the machines; `short` omits the machines."""
    nodes = plan.launch["nodes"]
    where = plural(plan.mesh.world_size, "rank") + (f" on {plural(nodes, 'node')}" if nodes > 1 else "")
    device = {"auto": "cuda or cpu"}.get(plan.launch["device"], plan.launch["device"])
    steps = "an unknown number of steps" if plan.timeline.steps is None else plural(plan.timeline.steps, "step")
    steps = "a server" if plan.serves else steps
    page.line(clip(f"{plan.name}: {steps} on {where}, {device}", WIDTH), "bold")
    if short:
        page.line(clip(f"{plan.spec} · seed {plan.seed} · plan {plan.id} · experiment {plan.config_id}", WIDTH), "dim")
        return
    text = f" · text {fingerprint(plan.spec_text)}" if plan.spec_text else ""
    page.line(clip(f"{plan.spec} · seed {plan.seed} · xtrain {__version__}", WIDTH), "dim")
    page.line(clip(f"plan {plan.id} · experiment {plan.config_id}{text}", WIDTH), "dim")
    page.line(clip(cluster_text(plan.cluster), WIDTH), "dim")
    if plan.cluster.measured is not None:
        page.line(clip(f"measured on this machine: {plan.cluster.measured}", WIDTH), "dim")
    if "launcher" in plan.launch:
        page.line(clip(launcher_text(plan), WIDTH), "dim")


def cluster_text(cluster: Hardware) -> str:
    """Return the machines as text, with the unit of every number; missing numbers are unknown."""
    if not CLUSTERS[cluster.preset].known:
        return "cluster unknown: add `cluster here` (this machine) or `cluster h100 { … }` for memory and time"
    parts = [
        f"cluster {cluster.preset}: {plural(cluster.nodes, 'node')} × {plural(cluster.devices, 'device')}",
        f"{_known(cluster.memory_bytes and bytes_text(cluster.memory_bytes), 'memory')}, "
        f"{_known(cluster.flops and rate_text(cluster.flops, 'FLOP/s'), 'speed')} each",
        "link " + _known(cluster.link and rate_text(cluster.link, "B/s")),
    ]
    if cluster.measured is None or cluster.nodes > 1:
        parts.append("network " + _known(cluster.network and rate_text(cluster.network, "B/s")))
    return " · ".join(parts)


def launcher_text(plan: Plan) -> str:
    """Return the source of `xtrain launch`'s machines as text."""
    try:
        launcher = launcher_of(plan)
    except UnknownLauncher as unknown:
        return f"launcher {plan.launch['launcher']['kind']}: {unknown}"
    if launcher is None:
        return "none"
    says = launcher.says()
    return f"launcher {launcher.kind}" + (f": {says}" if says else "")


def _known(text: str | float | None, what: str = "") -> str:
    return str(text) if text else f"{what} unknown".lstrip()


def show_glance(page: Page, plan: Plan, spare: Sequence[Remedy] = ()) -> None:
    """Show the four facts that a decision depends on, and uses of the memory that is left."""
    page.line()
    room = headroom(plan)
    verdicts = _verdicts(plan, VERDICTS)
    worst = "red" if "fail" in verdicts else "yellow" if "warn" in verdicts else "green"
    first, *more = wrap(f"{room.verdict}: {room.text}", WIDTH - len("  memory  "))
    rows = [
        ("memory", page.paint(room.verdict, VERDICT_STYLES[room.verdict]) + first.removeprefix(room.verdict)),
        *(("", line) for line in more),
        *(("", _use_text(use, plan)) for use in spare),
        ("step", _step_text(plan)),
        ("run", _run_text(plan)),
        ("checks", page.paint(verdicts, worst)),
    ]
    for name, text in rows:
        page.line(f"  {name:<6}  {text}")


def _use_text(use: Remedy, plan: Plan) -> str:
    device, times = plan.cluster.memory_bytes, plan.estimates.times
    sets = " ".join(f"--set {quote(text)}" for text in use.sets)
    share = f" ({use.memory_bytes / device:.0%})" if device else ""
    change = f"{use.seconds / times.step - 1:+.0%}" if use.seconds and times else ""
    step = "in the same planned time" if change in ("+0%", "-0%") else f"a step {change}"
    return f"room for {sets}: {bytes_text(use.memory_bytes)}{share}, {step}"


def _verdicts(plan: Plan, order: Sequence[str]) -> str:
    counts = Counter(check.status for check in plan.checks)
    return ", ".join(f"{counts[each]} {each}" for each in order if counts[each])


def _step_text(plan: Plan) -> str:
    times = plan.estimates.times
    tokens = f"{count_text(plan.estimates.tokens_per_step)} tokens a step"
    if times is None:
        return f"unknown: {no_times(plan)}; {tokens}"
    low, high = times.mfu * times.step / times.slow, times.mfu * times.step / times.fast
    span = f" ({seconds_text(times.fast)} to {seconds_text(times.slow)})" if times.fast != times.slow else ""
    span += f", {times.label}" if times.label is not None else ""
    mfu = f"MFU {times.mfu:.0%}" + (f" ({low:.0%} to {high:.0%})" if span else "")
    return f"{seconds_text(times.step)}{span} · {count_text(times.tokens_per_second)} tokens/s · {mfu}"


def _run_text(plan: Plan) -> str:
    times, timeline = plan.estimates.times, plan.timeline
    if timeline.steps is None or timeline.tokens is None:
        return f"{amount_in_epochs(timeline.epochs or 0.0)}; steps are unknown until the data is counted"
    amount = f"{plural(timeline.steps, 'step')}, {count_text(timeline.tokens)} tokens"
    if times is None:
        return f"{amount}; how long is unknown"
    seconds = (timeline.full_steps or 0) * times.step
    hours = seconds * plan.mesh.world_size / 3600
    price = plan.cluster.price
    cost = "" if price is None else f" · cost {amount_text(hours * price)}"
    return f"{seconds_text(seconds)} · {amount_text(hours)} device-hours{cost} · {amount}"


def show_model(page: Page, plan: Plan, detail: Detail) -> None:
    """Show the model's size and shape."""
    arch, count = plan.architecture, plan.parameters
    size = f"{count.total:,} parameters"
    if arch.is_moe:
        size += f", {count.active:,} active"
    page.heading("MODEL", size)
    heads = f"{arch.heads} heads of {arch.head_dim}"
    if arch.kv_heads != arch.heads:
        heads += f" ({arch.kv_heads} kv)"
    windows = {layer.window for kind in arch.kinds for layer in kind.block.layers() if layer.attends}
    heads += "".join(f", window {window:,}" for window in windows if window is not None and len(windows) == 1)
    wide = f"{arch.experts} experts of {arch.expert_ffn}, {arch.experts_per_token} a token"
    parts = [
        arch.title,
        f"{plural(arch.layers, 'block')} of width {arch.dim}",
        heads,
        wide if arch.is_moe else f"ffn {arch.ffn}",
        f"vocab {arch.vocab:,}" + (", tied" if arch.tie_embeddings else ""),
        *(["a reward head"] if not arch.has_logits else []),
        *([f"positions {arch.rope}"] if arch.rope.scaling != "none" else []),
    ]
    page.wrapped(" · ".join(parts))
    if count.trained < count.total:
        parts = {
            "adapter": adapters_of(count),
            "trained": modules_of(count, trained=True),
            "frozen": modules_of(count, trained=False),
        }
        for word, modules in parts.items():
            if not modules:
                continue
            total = sum(each.parameters for each in modules)
            shown = " · ".join(f"{each.name} {count_text(each.parameters)}" for each in modules)
            page.wrapped(f"{word:<7} {total:,}: {shown}", rest=" " * 10)
        if begun := sum(tensor.size for tensor in count.tensors if tensor.begun):
            page.wrapped(f"{'begun':<7} {begun:,}: initial values of the adapter, which stay fixed", rest=" " * 10)
    if len(arch.base.kinds) > 1:
        page.table([(_layers_text(kind.layers), words) for kind, words in _kinds(arch.base)], styles=("", "dim"))
    if detail.full:
        rows = [(tensor.name, " · ".join(map(str, tensor.shape))) for tensor in plan.parameters.tensors]
        page.table(rows, styles=("", "dim"))


def _kinds(arch: Architecture) -> Iterator[tuple[LayerKind, str]]:
    """Yield each kind of layers with the words that distinguish it."""
    said = [[word for layer in kind.block.layers() for word in layer.words(arch)] for kind in arch.kinds]
    for kind, words in zip(arch.kinds, said, strict=True):
        yield kind, " · ".join(word for word in words if not all(word in each for each in said))


def _layers_text(layers: tuple[int, ...]) -> str:
    """Return layers as text: `layers 0 to 2, 5`, or `layers 1, 3, 5, … 47`."""
    runs = consecutive(layers)
    shown = [f"{first} to {last}" if last > first else f"{first}" for first, last in runs]
    shown = shown if len(shown) <= 6 else [*shown[:3], f"… {shown[-1]}"]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(shown)}"


def show_values(page: Page, plan: Plan, detail: Detail) -> None:
    """Show derived values and values from outside the plain text; defaults and literals are only counted."""
    page.heading("VALUES", _origins(plan))
    if detail.full:
        rows = []
        for entry in plan.provenance:
            how, place = (f" = {entry.how}" if entry.how else "", f", {entry.place}" if entry.place else "")
            rows.append((entry.path, f"{entry.value}  ({entry.origin}{how}{place})"))
        page.described(rows)
        return
    chosen = [
        (entry.path, entry.value, f"= {entry.how}" if entry.how else f"{entry.origin} {entry.place}".strip())
        for entry in plan.provenance
        if entry.path not in QUIET and entry.origin in CHOSEN
    ]
    most = detail.most(12)
    page.table([(path, clip(value, 40), how) for path, value, how in chosen[:most]], styles=("", "cyan", "dim"))
    page.more(len(chosen) - most, "values")


def _origins(plan: Plan) -> str:
    origins = Counter(entry.origin for entry in plan.provenance)
    return ", ".join(f"{count} {origin}" for origin, count in sorted(origins.items()))


def show_server_glance(page: Page, plan: Plan) -> None:
    """Show whether the server fits, how many adapters fit, and its address."""
    args, room = plan.node(SETUP).args, headroom(plan)
    fit = slots_that_fit(plan)
    room_text = "how many fit is unknown" if fit is None else f"there is room for {fit:,}"
    page.line()
    page.line(f"  memory  {room.verdict}: {room.text}")
    trained = (
        f"{plural(args['adapters'], 'adapter')}; {room_text}" if slots_of(plan) else "none: one client trains the model"
    )
    page.line(f"  slots   {trained}")
    key = f"key in {args['key']}" + ("" if args["key_needed"] else ", or a generated one that it prints")
    scheme = "https" if args["certificate"] else "http"
    page.line(f"  listens {scheme}://{args['host']}:{args['port']} as `{args['model_name']}`, {key}")
    page.line(f"  checks  {_verdicts(plan, VERDICTS)}")


def show_requests(page: Page, plan: Plan, detail: Detail) -> None:
    """Show the nodes of requests; all ranks run each, in the order in which requests arrive."""
    nodes = plan.of_kind("request")
    if not nodes:
        return
    args = plan.node(SETUP).args
    longest = f"of up to {args['texts']:,} texts of {args['max_tokens']:,} tokens; {args['queue']:,} may wait"
    page.heading("REQUESTS", f"{longest}; {count_text(plan.estimates.flops_per_token)} operations a token")
    rows = [(node.id.removeprefix("request."), node.does) for node in nodes]
    page.described(rows, wraps=True)


LACKS_MEMORY = "W423"
CHECK_STYLES = {"warn": "yellow", "fail": "red", "unknown": "dim", "pass": "green"}


def show_restarts(page: Page, plan: Plan, detail: Detail) -> None:
    """Show restarts; omitted from a short page if nothing restarts and no other world is allowed."""
    _, times = restarts_of(plan)
    if not times and not plan.elastic and not detail.full:
        return
    head = f"up to {times}, each from the last checkpoint" if times else "not by xtrain itself"
    page.heading("RESTARTS", head)
    if not plan.elastic:
        page.wrapped("on the same number of ranks" if times else "a rank that fails ends the run")
        return
    page.wrapped("on fewer ranks if devices are missing or the same rank fails twice without a new checkpoint:")
    most = detail.most(8)
    shown = sorted(plan.elastic, key=lambda each: -each.world)
    page.table([_world_row(each, plan) for each in shown[:most]], styles=("", "", "", "", "", "dim"))
    page.more(len(shown) - most, "restarts")
    for each in plan.refused[: detail.most(4)]:
        page.wrapped(f"not {each.worlds}: {each.reason}")
    page.more(len(plan.refused) - detail.most(4), "restarts")


def _world_row(world: ElasticWorld, plan: Plan) -> tuple[str, ...]:
    axes = " · ".join(f"{name} {size}" for name, size in world.axes.items() if size > 1) or "all axes 1"
    step = "step unknown" if world.seconds is None else f"{seconds_text(world.seconds)} a step"
    here = "this plan" if world.world == plan.mesh.world_size else f"plan {world.id}"
    count = plural(world.accumulate, "microbatch")
    return (
        plural(world.world, "rank"),
        axes,
        f"{count} a step",
        f"{bytes_text(world.memory_bytes)} at most",
        step,
        here,
    )


def show_checks(page: Page, plan: Plan, detail: Detail) -> None:
    """Show every check that did not pass, and the number of the others, or all of them in full."""
    passed = [check for check in plan.checks if check.status == "pass"]
    page.heading("CHECKS", f"{len(passed)} of {len(plan.checks)} pass")
    # Remedies for memory are shown with the memory, as a table.
    show_warnings(page, plan, but="; use " if plan.estimates.remedies else "")
    if detail.full:
        page.table([("pass", check.id, check.evidence) for check in passed], styles=("green", "", "dim"))


def show_warnings(page: Page, plan: Plan, *, but: str = "") -> None:
    """Show the text of every check that did not pass; text from `but` on is cut."""
    order = ("fail", "warn", "unknown")
    for check in sorted((each for each in plan.checks if each.status != "pass"), key=lambda c: order.index(c.status)):
        label = f"{check.status} {check.code or check.id}"
        place = f" ({check.place})" if check.place else ""
        first, rest = f"  {label}: ", " " * min(len(label) + 4, 24)
        text = check.evidence
        if but and check.code == LACKS_MEMORY:
            text = f"{text.partition(but)[0]}; for settings that would help see MEMORY"
        page.wrapped(text + place, first=first, rest=rest, style=CHECK_STYLES[check.status])


def show_footer(page: Page, plan: Plan, detail: Detail) -> None:
    page.line()
    verdicts = _verdicts(plan, ("pass", "warn", "unknown", "fail"))
    summary = f"{plural(len(plan.nodes), 'node')}, {plural(len(plan.checks), 'check')} ({verdicts})"
    page.line(f"Plan {plan.id}: {summary}, checkpoint {bytes_text(plan.estimates.checkpoint_bytes)}", "bold")
    if not plan.serves:
        room = headroom(plan)
        run = f" · run {_run_text(plan).partition(' · ')[0]}" if plan.estimates.times is not None else ""
        verdict = f"memory {room.verdict}: {room.text.partition(' (')[0].partition(';')[0]}{run}"
        page.line(clip(verdict, WIDTH), VERDICT_STYLES[room.verdict])
    if not detail.full:
        page.line("more: --full, --part memory, --rank N, --show NODE, --why SETTING; keep it: --out plan.json", "dim")


Part = Callable[[Page, Plan, Detail], None]

PARTS: Final[dict[str, Part]] = {
    "model": show_model,
    "values": show_values,
    "mesh": show_mesh,
    "stages": show_stages,
    "order": show_order,
    "step": show_step,
    "memory": show_memory,
    "communication": show_communication,
    "compute": show_compute,
    "training": show_training,
    "phases": show_phases,
    "data": show_data,
    "restarts": show_restarts,
    "requests": show_requests,
    "checks": show_checks,
}
OF_SERVERS: Final = ("model", "values", "mesh", "order", "memory", "requests", "checks")


def parts_of(plan: Plan) -> dict[str, Part]:
    """Return the entries of PARTS for a plan; a server has no steps and no data."""
    return {name: PARTS[name] for name in OF_SERVERS} if plan.serves else PARTS


def render(
    plan: Plan,
    *,
    color: bool = False,
    full: bool = False,
    parts: Sequence[str] = (),
    spare: Sequence[Remedy] = (),
) -> str:
    """Render the whole page, ending with a newline. Data for programs is in the JSON instead.

    full: show everything, however long. parts: keys of PARTS to show, in full, instead of the page. spare: uses of the
    memory that the plan leaves (`review/spare.py`).
    """
    plan = as_known(plan)
    if parts:
        chosen = Page(color=color)
        show_header(chosen, plan)
        for name, part in parts_of(plan).items():
            if name in parts:
                part(chosen, plan, FULL)
        return str(chosen)
    if full:
        return str(_page(plan, FULL, color, spare))

    @cache
    def page(detail: Detail) -> Page:
        return _page(plan, detail, color, spare)

    def fits(detail: Detail) -> bool:
        return page(detail).height <= LONGEST

    first = 0 if WHOLE.get() or fits(DETAILS[0]) else bisect_left(DETAILS, True, lo=1, key=fits)
    return str(page(DETAILS[min(first, len(DETAILS) - 1)]))


def _page(plan: Plan, detail: Detail, color: bool, spare: Sequence[Remedy]) -> Page:
    page = Page(color=color)
    show_header(page, plan)
    show_server_glance(page, plan) if plan.serves else show_glance(page, plan, spare)
    for part in parts_of(plan).values():
        part(page, plan, detail)
    show_footer(page, plan, detail)
    return page


def render_summary(plan: Plan, *, said: Collection[Diagnostic] = (), verbose: bool = False) -> str:
    """Render a few lines for the start of a run: model, ranks, duration and all warnings.

    said: printed diagnostics, which are not repeated. verbose: also show each amount that is unknown before the data is
    counted.
    """
    plan = as_known(plan)
    page = Page()
    show_header(page, plan, short=True)
    estimates = plan.estimates
    axes = " · ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes if axis.size > 1)
    parts = [
        f"{plan.architecture.family}, {count_text(plan.parameters.total)} parameters",
        f"{estimates.tokens_per_step:,} tokens a step",
        axes,
        f"{bytes_text(max(each.memory.states for each in estimates.classes))} of model states a rank",
    ]
    page.wrapped(" · ".join(part for part in parts if part), first="", rest="")
    unsaid = (
        check
        for check in plan.checks
        if (verbose or check.status != "unknown")
        and not any(each.code == check.code and check.evidence.startswith(each.message) for each in said)
    )
    show_warnings(page, evolve(plan, checks=tuple(unsaid)))
    return str(page)
