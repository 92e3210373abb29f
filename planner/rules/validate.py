"""All rules on a spec, checked without making a plan, and again once its data is counted."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from attrs import evolve

from xtrain.contracts.actions import PlannedLauncher, PlannedTracker
from xtrain.contracts.optimizers import PlannedOptimizer
from xtrain.contracts.stacks import stack_of
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText
from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.blocks import KINDS
from xtrain.dsl.schema.component import UserComponent, planned, registry_of
from xtrain.dsl.schema.parallel import STACKS
from xtrain.dsl.schema.setting import AUTO, Auto
from xtrain.dsl.spec import Origin, Spec
from xtrain.plan.amounts import build_phases, check_events, check_stops
from xtrain.plan.architecture import Architecture
from xtrain.plan.arithmetic import Counts, derive_arithmetic
from xtrain.plan.findings import Findings, checks
from xtrain.plan.groups import written_optimizers
from xtrain.plan.hardware import is_installed
from xtrain.plan.learning_rate import check_schedule
from xtrain.plan.mesh import Layout, device_kind
from xtrain.plan.pipeline import ZERO_BUBBLE
from xtrain.plan.plan import Plan
from xtrain.plan.resolved import resolve_formats
from xtrain.planner.data.rules import check_data
from xtrain.planner.data.training import check_replay
from xtrain.planner.derive.further_models import check_teacher, read_scorer
from xtrain.planner.derive.layout import build_layout
from xtrain.planner.derive.model import derive_architecture
from xtrain.planner.derive.pipeline import assign_stages, check_microbatches
from xtrain.planner.derive.serving import architecture_with_slots, as_training, check_server, with_slots
from xtrain.planner.graph.saving import check_average, check_backend, check_nan
from xtrain.planner.graph.timeline import NOTHING_SCHEDULED, check_alerts, check_ticks, fill_schedule
from xtrain.planner.rules.elastic import Elastic, ValidatedSpec, settle_worlds
from xtrain.planner.rules.idle import check_idle, check_idle_accumulation, check_usual
from xtrain.planner.rules.layout import check_further, check_topology, fit_teacher
from xtrain.planner.rules.modules import check_base, check_code, check_modules
from xtrain.planner.rules.products import check_fp8, check_fp16, check_qat
from xtrain.planner.rules.schedule import (
    check_awaited,
    check_beginning,
    check_phases,
    check_profiles,
    check_saving,
    resumed_batch,
)

# Settings that decide whether an optimizer can update the model.
_UPDATES: Final = "optimizer.* precision.params scheduler.kind model.* parallel.tp.size {world}"


@checks("launcher.*", reads="launcher launcher.* launch.stop_deadline")
def check_launcher(spec: Spec, found: Findings) -> None:
    """Report settings of the launcher that conflict; each launcher knows its own."""
    if spec.launcher is None:
        return
    for name, what, hint in planned(spec.launcher, PlannedLauncher).mistakes(spec):
        message = f"launcher.{name}: {what}"
        found.fail(f"launcher.{name}", "X460", f"launcher.{name}", message, hint)


@checks("mesh.stack.with.*", reads="parallel.* {} {}.*")
def check_stack(spec: Spec, found: Findings) -> None:
    """Report settings that torch cannot combine, or that have no effect next to each other."""
    _check_support(spec, found)
    for each in stack_of(spec).conflicts(spec):
        found.fail(f"mesh.stack.with.{each.setting}", "X415", each.setting, each.message, each.hint)
    _check_zero_bubble(spec, found)
    _check_sync(spec, found)
    _check_offload(spec, found)


@checks("mesh.stack.package", reads="parallel.stack")
def check_installed(spec: Spec, found: Findings) -> None:
    """Report a stack whose package is missing; no other rule depends on this machine."""
    stack = spec.parallel.execution
    if stack.package and not is_installed(stack.package):
        message = f"stack {stack.kind} needs the package {stack.package}, which is not installed here"
        hint = f"install it with `pip install '{stack.install}'`, or use stack parallel"
        found.fail("mesh.stack.package", "X715", "parallel.stack", message, hint)


@checks("mesh.stack.*", reads="parallel.stack parallel.{} precision.params precision.compute")
def _check_support(spec: Spec, found: Findings) -> None:
    """Report settings that the stack does not support."""
    parallel, fsdp = spec.parallel, spec.parallel.fsdp
    formats = resolve_formats(spec.precision, parallel)
    lacks = parallel.execution.unsupported

    def refuse(name: str, path: str, what: str, hint: str) -> None:
        """Report an unsupported setting. name: of the unsupported feature. what: the value in the spec, appended to the
        reason."""
        other = next((kind for kind, stack in STACKS.items() if name not in stack.unsupported), None)
        hint = hint if other is None else f"{hint}, or stack {other}"
        message = f"stack {parallel.stack} {lacks[name]}{what}"
        rule = path if path.startswith("precision") else path.removeprefix("parallel.")
        found.fail(f"mesh.stack.{rule}", "X415", path, message, hint)

    for axis in ("tp", "pp", "cp", "ep"):
        if axis in lacks and (size := getattr(parallel, axis).size) != 1:
            refuse(axis, f"parallel.{axis}.size", f", and {axis} is {size}", f"use {axis} 1")
    if "fsdp" in lacks and fsdp.size != 1 and not isinstance(fsdp.size, Auto):
        hint = f"use fsdp auto: all ranks are then replicas, or fsdp 1 {{ replicate = {fsdp.size * fsdp.replicate} }}"
        refuse("fsdp", "parallel.fsdp.size", f", and fsdp is {fsdp.size}", hint)
    if "compute" in lacks and formats.compute != formats.params:
        what = f", {formats.params}, not in {formats.compute}"
        refuse("compute", "precision.compute", what, f"use compute {formats.params}")
    if "reduce" in lacks and formats.reduce != formats.params:
        what = f", {formats.params}, not in {formats.reduce}"
        refuse("reduce", "parallel.fsdp.reduce", what, f"use reduce {formats.params}")
    for name, usual in (("reshard", AUTO), ("sync", "auto"), ("prefetch", AUTO), ("offload", False)):
        if name in lacks and getattr(fsdp, name) != usual:
            refuse(name, f"parallel.fsdp.{name}", "", f"use {name} {str(usual).lower()}")


@checks("mesh.pp.reshard", reads="parallel.pp.size parallel.pp.schedule parallel.fsdp.reshard")
@checks("mesh.pp.tied", reads="parallel.pp.size parallel.pp.schedule model.tie_embeddings loss.kind")
@checks("mesh.pp.tile_mlp", reads="parallel.pp.size parallel.pp.schedule activation.tile_mlp")
@checks("mesh.pp.compile", reads="parallel.pp.size parallel.pp.schedule compile.mode")
def _check_zero_bubble(spec: Spec, found: Findings) -> None:
    """Report conflicts of a split backward: it needs gathered parameters after FSDP freed them, torch refuses compiled
    blocks, and a stage on the rank of the first one would share its embedding."""
    pp, fsdp = spec.parallel.pp, spec.parallel.fsdp
    if pp.size == 1 or pp.schedule not in ZERO_BUBBLE:
        return
    others = "or schedule interleaved_1f1b"
    if fsdp.reshard is True:
        message = f"schedule {pp.schedule} loses the gradients of parameters that reshard has freed"
        found.fail("mesh.pp.reshard", "X416", "parallel.fsdp.reshard", message, f"use reshard false, {others}")
    else:
        found.passed("mesh.pp.reshard", f"schedule {pp.schedule} finds parameters gathered")
    if spec.compile.mode != "none":
        message = f"schedule {pp.schedule} splits the backward of a block, which torch.compile does not support"
        found.fail("mesh.pp.compile", "X416", "compile.mode", message, f"use mode none, {others}")
    if spec.activation.tile_mlp != 1:
        message = f"schedule {pp.schedule} takes gradients of weights later, and tile_mlp takes all of a piece together"
        found.fail("mesh.pp.tile_mlp", "X416", "activation.tile_mlp", message, f"use tile_mlp 1, {others}")
    if pp.schedule == "zbv" and spec.model.tie_embeddings and spec.loss.of_logits:
        message = "schedule zbv has the first and the last stage on one rank, and fsdp cannot shard one matrix in both"
        found.fail("mesh.pp.tied", "X416", "model.tie_embeddings", message, f"use tie_embeddings false, {others}")


@checks("mesh.pp.sync", reads="parallel.pp.size parallel.fsdp.sync")
def _check_sync(spec: Spec, found: Findings) -> None:
    if spec.parallel.pp.size != 1 and spec.parallel.fsdp.sync == "microbatch":
        message = "pipeline schedules sum gradients once a step, and sync is microbatch"
        found.fail("mesh.pp.sync", "X427", "parallel.fsdp.sync", message, "use sync auto, or pp 1")


@checks("mesh.offload", reads="parallel.fsdp.offload launch.device cluster.preset")
def _check_offload(spec: Spec, found: Findings) -> None:
    if not spec.parallel.fsdp.offload:
        return
    if device_kind(spec) == "cpu":
        message = "offload moves model states from cuda to host memory, and launch.device is cpu"
        found.fail("mesh.offload", "X417", "parallel.fsdp.offload", message, "use offload false, or device cuda")
    elif device_kind(spec) == "cuda":
        found.passed("mesh.offload", "model states of cuda devices are in host memory")
    else:
        found.unknown("mesh.offload", "launch.device is auto: on a machine without cuda the run ends with an error")


@checks("log.*", reads="log.{}")
def check_trackers(spec: Spec, found: Findings) -> None:
    """Run each tracker's own check of its settings."""
    for tracker in spec.log.written():
        planned(tracker, PlannedTracker).check(found)


@checks("mesh.pp.step", reads="step.name parallel.pp.size")
@checks("mesh.pp.evaluation_step", reads="evaluation_step.name parallel.pp.size")
def check_bodies(spec: Spec, found: Findings) -> None:
    """Check that a user's step is not combined with a pipeline, whose schedule decides when a microbatch passes which
    stage."""
    for name, body in (("step", spec.step), ("evaluation_step", spec.evaluation_step)):
        if body is not None and spec.parallel.pp.size != 1:
            message = f"{body.function} takes whole microbatches through the model, and pp is {spec.parallel.pp.size}"
            found.fail(f"mesh.pp.{name}", "X431", f"{name}.name", message, f"use pp 1, or remove `{name}`")


@checks("actions.token_losses", reads="every.*.actions step.name rollout")
def check_row_losses(spec: Spec, found: Findings) -> None:
    """Check that the built-in loop over microbatches computes the losses that `row_losses` writes."""
    for path, action in spec.actions:
        if not action.reads_token_losses:
            continue
        if spec.step is not None:
            message = f"{spec.step.function} computes microbatches itself, so the loss of a row is unknown"
            found.fail("actions.token_losses", "X431", path, message, "remove `row_losses`, or `step`")
        elif spec.rollout is not None:
            message = "the rows of a rollout are sampled completions, not rows of a dataset"
            found.fail("actions.token_losses", "X431", path, message, "remove `row_losses`")


@checks("hook.*.place", reads="hook.{} step.name parallel.pp.size")
def check_loss_hooks(spec: Spec, found: Findings) -> None:
    """Check that the built-in loop over microbatches calls the hooks around their loss."""
    if not spec.hooks:
        return
    from xtrain.dsl.user_parts.kinds import AROUND_LOSS

    other = None
    if spec.parallel.pp.size != 1:
        other = f"with pp {spec.parallel.pp.size} the schedule of the pipeline computes microbatches", "use pp 1"
    elif spec.step is not None:
        other = f"{spec.step.function} computes microbatches itself", f"call it in {spec.step.function}"
    for hook in spec.hooks.values():
        if (place := hook.declared.get("place")) in AROUND_LOSS and other is not None:
            why, hint = other
            message = f"the hook {hook.name} is called {place}, and {why}"
            found.fail(f"hook.{hook.name}.place", "X431", f"hook.{hook.name}", message, f"{hint}, or remove the hook")


@checks(
    "own.goes_with",
    reads="model.* optimizer.* scheduler.* loss.* adapter adapter.* reward reward.* parallel.stack hook hook.* step.* "
    "evaluation_step.* train.* epoch.* group.* task.* dataset dataset.* collate every.*.actions on.*.actions log.*",
)
def check_goes_with(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Check that parts of the user stand next to the kinds that they declare."""
    parts = [(path, part.function, part.goes_with) for path, part in spec.own_parts]
    if isinstance(spec.model, UserComponent):
        from xtrain.blocks.user_layer import UserFunction

        declared = spec.model.declaration.body.module.layers
        layers = (layer for kind in arch.kinds for layer in kind.block.layers() if isinstance(layer, UserFunction))
        names = dict.fromkeys(layer.function for layer in layers)
        parts += [("model.family", name, declared[name].goes_with) for name in names]
    for path, function, goes_with in parts:
        for choice, kinds in goes_with.items():
            chosen, known = _chosen(spec, choice)
            if chosen not in kinds:
                message = f"{function} goes with {choice} {' or '.join(kinds)}, and this spec has {chosen}"
                meant = (did_you_mean(kind, known) for kind in kinds if kind not in known)
                hint = next(filter(None, meant), f"choose {choice} {' or '.join(kinds)}, or another function")
                found.fail("own.goes_with", "X450", path, message, hint)


def _chosen(spec: Spec, choice: str) -> tuple[str, Sequence[str]]:
    """Return the kind that a spec has chosen, and all kinds."""
    if choice == "stack":
        return spec.parallel.stack, list(STACKS)
    registry = registry_of(KINDS[choice])
    assert registry is not None
    block = getattr(spec, choice)
    return "none" if block is None else getattr(block, registry.key), [*registry, "none"]


@checks("optimizer.*", reads=_UPDATES)
@checks("task.*.settings", reads=f"task.{{}}.* {_UPDATES}")
@checks("group.*.settings", reads=f"group.{{}}.* {_UPDATES}")
def check_optimizer(spec: Spec, arch: Architecture, layout: Layout, found: Findings) -> None:
    """Report conflicts of an optimizer with other settings."""
    for group, chosen in written_optimizers(spec).items():
        for each in planned(chosen, PlannedOptimizer).conflicts(spec, arch, layout):
            path = f"{group}optimizer.{each.setting}"
            rule = f"{group}settings" if group else path
            found.fail(rule, "X437", path, each.message, each.hint)


@checks("loss.*", reads="loss.*")
def check_loss(spec: Spec, found: Findings) -> None:
    """Report conflicting settings of the loss."""
    for each in spec.loss.conflicts():
        path = f"loss.{each.setting}"
        found.fail(path, "X439", path, each.message, each.hint)


def check_spec(spec: Spec, world: int | None = None, unknown_settings: frozenset[str] = frozenset()) -> Diagnostics:
    """Return the diagnostics of `compile_plan` without making the plan.

    unknown_settings: paths of invalid settings; stand-in values for them, and everything that follows from those, are
    not reported.
    """
    found = Findings(spec, unknown_settings)
    validate(spec, world, found)
    return found.diagnostics


def validate(spec: Spec, world: int | None, found: Findings, counted: Counts | None = None) -> ValidatedSpec | None:
    """Derive and check everything; None if any rule fails.

    counted: numbers of the data. What follows from them is not part of a plan, which does not know its data.
    """
    if spec.serve is not None:
        return _validate_server(spec, world, found)
    elastic = settle_worlds(spec, world, found, partial(validate, counted=counted))
    spec, world = elastic.spec, elastic.world
    shape = derive_architecture(spec, found)
    check_data(spec, found)
    arch = shape.architecture
    layout = build_layout(spec, world, heads=arch.heads, kv_heads=arch.key_heads, found=found)
    if layout.unsettled:
        found.mark_unknown("parallel.fsdp.size")  # and therefore the number of data ranks
    batch = derive_arithmetic(spec, layout.mesh, found, counted)
    staging = assign_stages(spec, arch, layout, found)
    check_microbatches(spec, layout, batch, found)
    check_topology(spec, arch, layout, batch, found)
    check_base(spec, arch, layout, found)
    check_fp16(spec, found)
    check_fp8(spec, arch, layout, found)
    check_qat(spec, arch, layout, found)
    check_stack(spec, found)
    check_bodies(spec, found)
    check_row_losses(spec, found)
    check_loss_hooks(spec, found)
    check_goes_with(spec, arch, found)
    check_modules(spec, arch, layout, batch, found)
    check_code(spec, arch, layout, found)
    check_optimizer(spec, arch, layout, found)
    check_loss(spec, found)
    check_further(spec, layout, found)
    teacher = fit_teacher(spec, check_teacher(spec, arch, found), layout, batch, found)
    scorer = read_scorer(spec, arch, found)
    check_replay(spec, arch, found)
    ahead = resumed_batch(spec, batch)
    check_schedule(spec, ahead, found)
    schedule = fill_schedule(spec, batch.declared_steps)
    check_ticks(schedule, ahead, spec.launch, found)
    check_events(spec, found)
    check_profiles(spec, ahead, found)
    check_alerts(spec, found)
    check_trackers(spec, found)
    check_stops(spec.launch, ahead, found)
    check_launcher(spec, found)
    check_saving(spec, schedule, ahead, found)
    check_awaited(spec, schedule, ahead, found)
    check_beginning(spec, batch, found)
    check_average(spec, ahead, found)
    check_backend(spec, layout.mesh.world_size, found)
    check_nan(spec, schedule, ahead, found)
    phases = check_phases(spec, ahead, found)
    phases = phases if ahead is batch else build_phases(spec, batch)
    if found.failed or layout.unsettled:
        return None
    check_idle(spec, shape, layout, batch, found)
    check_usual(spec, schedule, ahead, found)
    if elastic.worlds and not elastic.why_rows:
        check_idle_accumulation(spec, found)
    if elastic.why_rows:
        batch = evolve(batch, reasons={**batch.reasons, "batch.rows": elastic.why_rows})
    return ValidatedSpec(shape, layout, staging, batch, phases, schedule, elastic, scorer, teacher)


def _validate_server(spec: Spec, world: int | None, found: Findings) -> ValidatedSpec | None:
    """Derive and check everything of a server, which has neither data nor steps."""
    assert spec.serve is not None
    training = as_training(spec)
    shape = derive_architecture(training, found)
    arch = shape.architecture
    layout = build_layout(spec, world, heads=arch.heads, kv_heads=arch.key_heads, found=found)
    batch = derive_arithmetic(training, layout.mesh, found)
    staging = assign_stages(training, arch, layout, found)
    check_topology(training, arch, layout, batch, found)
    check_base(training, arch, layout, found)
    check_fp16(spec, found)
    check_fp8(training, arch, layout, found)
    check_qat(training, arch, layout, found)
    check_stack(training, found)
    check_modules(training, arch, layout, batch, found)
    check_further(training, layout, found)
    check_code(spec, arch, layout, found)
    check_server(spec, arch, layout, found)
    if found.failed or layout.unsettled:
        return None
    if arch.adapter is None and spec.serve.mode == "adapters":  # a draft does not have it
        return None
    check_idle(training, shape, layout, batch, found)
    shape = evolve(shape, architecture=architecture_with_slots(arch, spec.serve.adapters))
    elastic = Elastic(spec=with_slots(spec), world=world)
    return ValidatedSpec(shape, layout, staging, batch, (), NOTHING_SCHEDULED, elastic)


class Unreadable(Exception):
    """Spec of a plan that cannot be loaded here; the text says why."""


def check_counted(plan: Plan, counts: Counts) -> Diagnostics:
    """Return the diagnostics that appear only with the data counted, at their places in the user's spec.

    Raises Unreadable.
    """
    name = f"{plan.spec} (as planned)"
    loaded = load_spec(name, (), {name: plan.spec_text})
    if loaded.spec is None:
        raise Unreadable(loaded.diagnostics.errors[0].message)
    found = Findings(_placed(loaded.spec, plan))
    validate(found.spec, plan.mesh.world_size, found, counts)
    said = {(check.code, check.evidence) for check in plan.checks}
    new = Diagnostics()
    new.extend(each for each in found.diagnostics if (each.code, f"{each.message}; {each.hint}") not in said)
    return new


def _placed(spec: Spec, plan: Plan) -> Spec:
    """Return the spec of a plan, with each value at the place that the plan records for it."""
    places, of_config = {}, {entry.path for entry in plan.provenance if entry.origin == "config"}
    for entry in plan.provenance:
        path, _, column = entry.place.rpartition(":")
        path, _, line = path.rpartition(":")
        if line.isdecimal() and column.isdecimal():
            places[entry.path] = (path, int(line), int(column))
    origins = {}
    for path in {path for path, *_ in places.values()}:
        own = {name: place[1:] for name, place in places.items() if place[0] == path}
        # The file may have changed and only the places are known, so its lines are blank.
        wide = max(column for _, column in own.values())
        source = SourceText(path, f"{' ' * wide}\n" * max(line for line, _ in own.values()))
        for name, (line, column) in own.items():
            at = source.line_start(line) + column - 1
            origins[name] = Origin("config" if name in of_config else "text", source.span(at, at))
    return evolve(spec, origins=origins)
