"""Warnings about written settings that have no effect, and about values far from the usual ones."""

from typing import Final

from xtrain.contracts.actions import PlannedAction
from xtrain.contracts.optimizers import PlannedOptimizer
from xtrain.contracts.stacks import stack_of
from xtrain.dsl.schema.cluster import Cluster
from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.precision import Fp8, Fp16
from xtrain.dsl.schema.setting import UsualRange, settings_of
from xtrain.dsl.spec import Origin, Spec
from xtrain.dsl.values import Quantity
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.findings import Findings, checks
from xtrain.plan.graph import obeying_launchers
from xtrain.plan.groups import written_optimizers
from xtrain.plan.mesh import Layout, device_kind, shard_axes
from xtrain.plan.resolved import Shape, resolve_formats
from xtrain.plan.timeline import times_due
from xtrain.plan.weight_layout import draws_head
from xtrain.planner.graph.saving import OF_WRITING
from xtrain.planner.graph.timeline import Schedule, recurring
from xtrain.text.units import seconds_text

STEPS_BETWEEN: Final = UsualRange(
    100, 10_000, "every 1,000 steps in Pythia (arXiv 2304.01373), 500 by default in torchtitan"
)
SECONDS_BETWEEN: Final = UsualRange(
    900, 6 * 3600, "15 to 30 min (NVIDIA, nvCOMP 2026), an epoch of several hours (CheckFreq, FAST 2021)"
)
LONG: Final = 1000  # steps of a run from which a save every few steps is no trial
# Axis → the settings that only concern it.
OF_AXIS = {
    "tp": ("sequence", "loss", "overlap"),
    "pp": ("schedule", "stages_per_rank", "layers", "embedding_cost", "head_cost"),
    "cp": ("fold",),
}


def check_idle(spec: Spec, shape: Shape, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Warn of every setting that has no effect because of another one."""
    check_idle_saving(spec, found)
    _check_idle_model(spec, shape, found)
    for group, chosen in written_optimizers(spec).items():
        for name, why in planned(chosen, PlannedOptimizer).idle(spec):
            _warn(spec, f"{group}optimizer.{name}", why, "remove it", found)
    for name, why in spec.loss.idle():
        _warn(spec, f"loss.{name}", why, "remove it", found)
    _check_idle_actions(spec, layout, found)
    _check_idle_watching(spec, found)
    for name, why in spec.scheduler.idle().items():
        _warn(spec, f"scheduler.{name}", why, "remove it", found)
    _check_idle_axes(spec, layout, batch, found)
    for kind, block in spec.parallel.of_stacks().items():
        for name in settings_of(type(block)) if kind != spec.parallel.stack else ():
            why = f"the stack is {spec.parallel.stack}"
            _warn(spec, f"parallel.{kind}.{name}", why, f"use stack {kind}, or remove it", found)
    for name, why in stack_of(spec).idle(spec):
        _warn(spec, f"parallel.{spec.parallel.stack}.{name}", why, "remove it", found)
    _check_idle_restarts(spec, layout, found)
    for name, why in spec.launcher.idle() if spec.launcher is not None else ():
        _warn(spec, f"launcher.{name}", why, "remove it", found)
    if spec.batch.ramp_from is None:
        why = "every step has the same rows without `ramp_from`"
        _warn(spec, "batch.ramp", why, "set ramp_from, or remove it", found)
    if spec.batch.workers and not spec.batch.prefetch:
        _warn(spec, "batch.workers", "nothing is read ahead", "use prefetch 2, or remove it", found)
    if spec.serve is not None and spec.serve.mode == "full":
        _warn(spec, "serve.adapters", "clients train the model itself", "remove it", found)
    if spec.serve is not None and layout.size("pp") > 1:
        why = "a server computes the forwards of some microbatches, and then their backwards"
        _warn(spec, "parallel.pp.schedule", why, "remove it", found)
    if spec.activation.mode == "none":
        for name in ("every", "save"):
            _warn(spec, f"activation.{name}", "nothing is recomputed", "use mode full or selective", found)
    if not spec.cluster.known:
        for name in settings_of(Cluster) if _writes(spec, "cluster") else ():
            if name not in ("nodes", "devices"):  # they decide the number of ranks
                _warn(spec, f"cluster.{name}", "the cluster is none", "name a preset, or `other`", found)
        return
    if spec.cluster.mtbf is None:
        _warn(spec, "cluster.restart", "no failure rate is given", "give mtbf too, or remove it", found)
    if layout.mesh.world_size == 1:
        for name in ("store_rate", "connect"):
            _warn(spec, f"cluster.{name}", "there is one rank", "remove it", found)
    elif device_kind(spec) == "cpu":
        _warn(spec, "cluster.connect", "ranks on CPUs have no communicators of GPUs", "remove it", found)
    if spec.compile.mode == "none":
        _warn(spec, "cluster.compile", "no block is compiled", "use compile { mode = default }, or remove it", found)


def _check_idle_model(spec: Spec, shape: Shape, found: Findings) -> None:
    """Warn of idle settings of the model, its averages and its number formats."""
    model, ema = spec.model, spec.ema
    drawn = shape.weights is not None and draws_head(shape.architecture, shape.weights)
    for name in spec.phases if not model.mtp else ():
        _warn(spec, f"phase.{name}.mtp_weight", "no module predicts further tokens", "remove it", found)
    for name, phase in spec.phases.items():
        for each in phase.router:
            path = f"phase.{name}.{each}"
            if not shape.architecture.is_moe:
                _warn(spec, path, "the model has no routers", "remove it", found)
            elif (
                each != "router_bias_speed"
                and "code" in shape.architecture.own
                and not shape.architecture.router_aux_loss
            ):
                why = "the modeling file has no load-balancing loss"
                _warn(spec, path, why, "give model.router.aux_loss, or remove it", found)
            elif each == "router_bias_speed" and not shape.architecture.router_bias_speed:
                _warn(spec, path, "the routers have no biases", "give model.router.bias_speed, or remove it", found)
    for name, (why, hint) in model.idle().items():
        if name == "init_std" and drawn:  # the reward head is drawn with it
            continue
        if name == "mtp" and any(phase.mtp_weight for phase in spec.phases.values()):
            continue
        _warn(spec, f"model.{name}", why, hint, found)
    if not spec.loss.of_logits:
        why = f"the model has a reward head, for loss {spec.loss.kind}"
        _warn(spec, "model.tie_embeddings", why, "remove it", found)
    if resolve_formats(spec.precision, spec.parallel).compute == "fp64":
        why = "it concerns fp32 products, and all products are fp64"
        _warn(spec, "precision.matmul", why, "remove it", found)
    for kind, used in ((Fp16, spec.precision.loss_scale), (Fp8, spec.precision.scaled)):
        form, why = kind.__name__.lower(), f"compute is {spec.precision.compute}"
        for name in settings_of(kind) if used is None else ():
            _warn(spec, f"precision.{form}.{name}", why, f"write `compute = {form} {{ … }}`, or remove it", found)
    if spec.precision.rounded is None:
        for name in settings_of(type(spec.precision.qat)).keys() - {"weights"}:
            why = "qat.weights is none, so nothing is rounded"
            _warn(spec, f"precision.qat.{name}", why, "write `qat { weights = int4 }`, or remove it", found)
    elif (rounded := spec.precision.rounded).floats:
        why = f"{rounded.weights} has a scale for each {rounded.group} numbers"
        _warn(spec, "precision.qat.group", why, "remove it", found)
    published = spec.checkpoint.enabled or any(action.publishes for _, action in spec.actions)
    if ema is not None and not published:
        _warn(spec, "ema.publish", "checkpoint.enabled is false, so no weights are saved", "remove it", found)
    looks = any(action.uses_averages for _, action in spec.actions)
    if ema is not None and not looks and not any(dataset.holdout.value for dataset in spec.datasets.values()):
        _warn(spec, "ema.eval", "nothing is evaluated or generated", "leave it out, or set a holdout", found)


def _check_idle_restarts(spec: Spec, layout: Layout, found: Findings) -> None:
    """Warn of idle restarts: xtrain itself restarts a single machine and replica groups; a launcher restarts several
    machines."""
    launcher, chosen = spec.launcher, spec.fault_tolerance
    if (
        layout.nodes == 1
        or spec.parallel.execution.groups
        or not chosen.restarts
        or chosen.elastic
        or (launcher and launcher.obeys_restarts)
    ):
        return
    own = launcher.own_restarts() if launcher else None
    hint = f"set {own[0]}, or remove it" if own else f"use launcher {obeying_launchers()}, or remove it"
    why = "several machines are restarted by their launcher"
    _warn(spec, "fault_tolerance.restarts", why, hint, found)


def _check_idle_actions(spec: Spec, layout: Layout, found: Findings) -> None:
    """Warn of idle settings of ticks and events."""
    for path, action in spec.actions:
        for name, (why, hint) in planned(action, PlannedAction).idle(spec, layout.mesh.world_size).items():
            _warn(spec, f"{path}.{name}", why, hint, found)


def _check_idle_watching(spec: Spec, found: Findings) -> None:
    """Warn of idle settings of trackers and alerts."""
    for tracker in spec.log.written():
        for name, (why, hint) in tracker.idle().items():
            _warn(spec, f"log.{tracker.kind}.{name}", why, hint, found)
    if spec.alerts.loss_above is None:
        _warn(spec, "alerts.loss_patience", "no `loss_above` is given", "give loss_above, or remove it", found)
    if spec.alerts.memory is not None and device_kind(spec) == "cpu":
        why = "on a CPU there is no planned memory to compare with"
        _warn(spec, "alerts.memory", why, "remove it", found)


def _check_idle_axes(spec: Spec, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Warn of settings of an axis with one rank, and of gradient sums without sharding."""
    sizes = {"tp": layout.size("tp"), "pp": layout.size("pp"), "cp": layout.size("ring") * layout.size("ulysses")}
    for axis, names in OF_AXIS.items():
        if sizes[axis] == 1:
            for name in names:
                _warn(spec, f"parallel.{axis}.{name}", f"{axis} is 1", f"leave it out, or use {axis} 2", found)
    if not _shards(spec, layout):
        for name in ("reduce", "reshard", "sync", "prefetch"):
            if name not in spec.parallel.execution.unsupported:
                _warn(spec, f"parallel.fsdp.{name}", "nothing is sharded", "leave it out, or use fsdp 2", found)
        return
    if not _gathers(spec, layout):
        _warn(spec, "parallel.fsdp.prefetch", "nothing is gathered", "leave it out, or use fsdp 2", found)
    if batch.accumulate == 1 and spec.parallel.fsdp.sync == "microbatch" and spec.fault_tolerance.elastic is None:
        _warn(spec, "parallel.fsdp.sync", "a step has one microbatch", "leave it out, or accumulate several", found)


def check_idle_accumulation(spec: Spec, found: Findings) -> None:
    """Warn of an accumulation that the rows of a step decide, in a run that may resume on fewer ranks."""
    why = "rows are given, and every number of ranks that elastic allows accumulates what they need"
    _warn(spec, "batch.accumulate", why, "remove it", found)


def check_idle_saving(spec: Spec, found: Findings) -> None:
    """Warn of settings of `checkpoint` that have no effect because of another one."""
    chosen = spec.checkpoint
    if chosen.from_ is not None and chosen.pretrained is not None:
        hint = "keep one: `from` resumes the whole state, `pretrained` loads only weights"
        _warn(spec, "checkpoint.pretrained", "checkpoint.from loads the weights as well", hint, found)
    if not chosen.enabled:
        for name in OF_WRITING:
            _warn(spec, f"checkpoint.{name}", "checkpoint.enabled is false", "remove it", found)
    elif chosen.mode == "sync":
        _warn(spec, "checkpoint.overlap", "training waits for every save", "use mode async", found)
    elif chosen.mode == "async_pinned" and device_kind(spec) == "cpu":
        _warn(spec, "checkpoint.mode", "memory is page-locked only for GPUs", "use mode async", found)
    if chosen.enabled and chosen.best is None:
        _warn(spec, "checkpoint.best_is", "no `best` is set", "add `best = eval.DATASET.loss`", found)


def _writes(spec: Spec, block: str) -> bool:
    """Return True if the text has a setting of the block. Settings of all clusters take long to load."""
    return any(path.startswith(f"{block}.") and _is_written(origin) for path, origin in spec.origins.items())


def _is_written(origin: Origin | None) -> bool:
    return origin is not None and origin.kind not in ("default", "config")


def _warn(spec: Spec, path: str, why: str, hint: str, found: Findings) -> None:
    if _is_written(spec.origins.get(path)):
        name = path.rpartition(".")[2]
        found.warn(f"idle.{path}", "W401", path, f"{name} has no effect: {why}", hint)


def _shards(spec: Spec, layout: Layout) -> bool:
    """Return True if FSDP manages any parameter, as `Resolved.dense_fsdp` does later."""
    formats = resolve_formats(spec.precision, spec.parallel)
    copies = set() if spec.parallel.execution.groups else {"replicate"}
    copies |= {"ep_replicate"} if spec.model.experts > 0 else set()
    wide = _gathers(spec, layout) or any(_sizes(layout)[axis] > 1 for axis in copies)
    return wide or formats.compute != formats.params or spec.parallel.fsdp.offload


def _gathers(spec: Spec, layout: Layout) -> bool:
    """Return True if other ranks hold pieces of a parameter of FSDP, as `Resolved.prefetch` does later."""
    axes = {*shard_axes(spec.parallel, layout.mesh), *(("ep_fsdp",) if spec.model.experts > 0 else ())}
    return any(_sizes(layout)[axis] > 1 for axis in axes)


def _sizes(layout: Layout) -> dict[str, int]:
    return {axis.name: axis.size for axis in (*layout.mesh.axes, *layout.mesh.expert_axes)}


@checks("usual.*", reads="*")
def check_usual(spec: Spec, schedule: Schedule, batch: Arithmetic, found: Findings) -> None:
    """Warn of written values that are far from the usual ones of their settings."""
    blocks = {f"{group}optimizer": chosen for group, chosen in written_optimizers(spec).items()}
    for path, block in {**blocks, "model": spec.model, "launch": spec.launch}.items():
        for name, (attribute, meta) in settings_of(type(block)).items():
            value = getattr(block, attribute.name)
            number = value.value if isinstance(value, Quantity) else value
            searched = name == "lr" and spec.scheduler.searches
            if meta.usual is None or searched or not isinstance(number, int | float):
                continue
            if _is_written(spec.origins.get(f"{path}.{name}")) and meta.usual.is_far(number):
                seconds = "seconds" in meta.units
                _warn_far(f"{path}.{name}", name, float(number), meta.usual, found, seconds=seconds)
    for tick, path in zip(schedule.ticks, schedule.paths, strict=True):
        if not path or not any(action.saves for action in tick.actions):
            continue
        known = recurring(tick, batch)
        if known.seconds is not None and SECONDS_BETWEEN.is_far(known.seconds):
            _warn_far(path, "the time between checkpoints", known.seconds, SECONDS_BETWEEN, found, seconds=True)
        elif batch.steps is not None and batch.steps > LONG and (known.steps or known.tokens):
            between = batch.steps / max(1, times_due(known, batch.steps, batch.sizes))
            if between * STEPS_BETWEEN.margin < STEPS_BETWEEN.low:
                _warn_far(path, "the number of steps between checkpoints", between, STEPS_BETWEEN, found)


def _warn_far(path: str, name: str, value: float, usual: UsualRange, found: Findings, *, seconds: bool = False) -> None:
    text = seconds_text if seconds else "{:g}".format
    message = f"{name} is {text(value)}, more than {usual.margin:g} times beyond the usual range"
    found.warn(f"usual.{path}", "W433", path, message, f"usual are {usual.words(text)}")
