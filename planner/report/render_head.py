"""The head of the page: what is planned, on what, whether it fits and how long it takes; the model; who said what."""

from collections import Counter
from collections.abc import Iterator
from textwrap import wrap

from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.planner.architecture import Architecture, LayerKind
from xtrain.planner.costs.headroom import Verdict, headroom, no_times
from xtrain.planner.graph.launcher_args import UnknownLauncher, launcher_of
from xtrain.planner.identity import fingerprint
from xtrain.planner.model.module_names import adapters_of, modules_of
from xtrain.planner.plan import Hardware, Plan
from xtrain.planner.report.text import Detail, Page, clip
from xtrain.planner.units import (
    WIDTH,
    amount_in_epochs,
    amount_text,
    bytes_text,
    count_text,
    plural,
    rate_text,
    seconds_text,
)
from xtrain.version import __version__

# Derived values that repeat what another line says, or that nobody asks for.
QUIET = {"world_size", "steps", "tokens_per_step", "precision.compute", "parallel.fsdp.reduce", "launch.ranks_per_node"}
QUIET |= {"model.qk_norm", "batch.accumulate", "collate", "parallel.pp.layers", "parallel.fsdp.reshard"}
CHOSEN = ("derived", "set", "param", "let", "config")
STYLES: dict[Verdict, str] = {"fits": "green", "tight": "yellow", "does not fit": "red", "unknown": "dim"}


def show_header(page: Page, plan: Plan, *, short: bool = False) -> None:
    """What is planned, the names it goes by, and the machines; `short` leaves the machines out."""
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
    if "launcher" in plan.launch:
        page.line(clip(launcher_text(plan), WIDTH), "dim")


def cluster_text(cluster: Hardware) -> str:
    """The machines with the unit of every number; what nobody says is unknown."""
    if not CLUSTERS[cluster.preset].known:
        return "cluster unknown: add `cluster h100 { … }` to estimate memory and time"
    parts = [
        f"cluster {cluster.preset}: {plural(cluster.nodes, 'node')} × {plural(cluster.devices, 'device')}",
        f"{_known(cluster.memory_bytes and bytes_text(cluster.memory_bytes), 'memory')}, "
        f"{_known(cluster.flops and rate_text(cluster.flops, 'FLOP/s'), 'speed')} each",
        "link " + _known(cluster.link and rate_text(cluster.link, "B/s")),
        "network " + _known(cluster.network and rate_text(cluster.network, "B/s")),
    ]
    return " · ".join(parts)


def launcher_text(plan: Plan) -> str:
    """Where `xtrain launch` has the machines from."""
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


def show_glance(page: Page, plan: Plan) -> None:
    """The four things a decision rests on."""
    page.line()
    room = headroom(plan)
    counts = Counter(check.status for check in plan.checks)
    verdicts = ", ".join(f"{counts[each]} {each}" for each in ("fail", "warn", "unknown", "pass") if counts[each])
    worst = "red" if counts["fail"] else "yellow" if counts["warn"] else "green"
    first, *more = wrap(f"{room.verdict}: {room.text}", WIDTH - len("  memory  "))
    rows = [
        ("memory", page.paint(room.verdict, STYLES[room.verdict]) + first.removeprefix(room.verdict)),
        *(("", line) for line in more),
        ("step", _step_text(plan)),
        ("run", _run_text(plan)),
        ("checks", page.paint(verdicts, worst)),
    ]
    for name, text in rows:
        page.line(f"  {name:<6}  {text}")


def _step_text(plan: Plan) -> str:
    times = plan.estimates.times
    tokens = f"{count_text(plan.estimates.tokens_per_step)} tokens a step"
    if times is None:
        return f"unknown: {no_times(plan)}; {tokens}"
    low, high = times.mfu * times.step / times.slow, times.mfu * times.step / times.fast
    span = f" ({seconds_text(times.fast)} to {seconds_text(times.slow)})" if times.fast != times.slow else ""
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
    """Its size and its shape."""
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
        *(["a head of rewards"] if arch.head == "reward" else []),
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
            page.wrapped(
                f"{'begun':<7} {begun:,}: what the adapter has begun with, which stays as it is", rest=" " * 10
            )
    if len(arch.base.kinds) > 1:
        page.table([(_layers_text(kind.layers), words) for kind, words in _kinds(arch.base)], styles=("", "dim"))
    if detail.full:
        rows = [(tensor.name, " · ".join(map(str, tensor.shape))) for tensor in plan.parameters.tensors]
        page.table(rows, styles=("", "dim"))


def _kinds(arch: Architecture) -> Iterator[tuple[LayerKind, str]]:
    """Each kind of layers with what not all of them have."""
    said = [[word for layer in kind.block.layers() for word in layer.words(arch)] for kind in arch.kinds]
    for kind, words in zip(arch.kinds, said, strict=True):
        yield kind, " · ".join(word for word in words if not all(word in each for each in said))


def _layers_text(layers: tuple[int, ...]) -> str:
    """`layers 0 to 2, 5`, or `layers 1, 3, 5, … 47`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    shown = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    shown = shown if len(shown) <= 6 else [*shown[:3], f"… {shown[-1]}"]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(shown)}"


def show_values(page: Page, plan: Plan, detail: Detail) -> None:
    """What was derived, and what came from elsewhere than the plain text; defaults and literals are only counted."""
    if detail.full:
        _all_values(page, plan)
        return
    chosen = [
        (entry.path, entry.value, f"= {entry.how}" if entry.how else f"{entry.origin} {entry.place}".strip())
        for entry in plan.provenance
        if entry.path not in QUIET and entry.origin in CHOSEN
    ]
    page.heading("VALUES", _origins(plan))
    most = detail.most(12)
    page.table([(path, clip(value, 40), how) for path, value, how in chosen[:most]], styles=("", "cyan", "dim"))
    page.more(len(chosen) - most, "values")


def _all_values(page: Page, plan: Plan) -> None:
    page.heading("VALUES", _origins(plan))
    rows = []
    for entry in plan.provenance:
        how = f" = {entry.how}" if entry.how else ""
        rows.append((entry.path, f"{entry.value}  ({entry.origin}{how}{f', {entry.place}' if entry.place else ''})"))
    page.described(rows)


def _origins(plan: Plan) -> str:
    origins = Counter(entry.origin for entry in plan.provenance)
    return ", ".join(f"{count} {origin}" for origin, count in sorted(origins.items()))
