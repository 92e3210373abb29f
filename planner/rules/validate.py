"""Every rule of the planner on a spec, without making a plan of it."""

from functools import partial

from attrs import evolve

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.spec import Spec
from xtrain.planner.data.data_rules import check_data
from xtrain.planner.data.rollout_rules import check_replay
from xtrain.planner.graph.alerts import check_alerts
from xtrain.planner.graph.averaging import check_average
from xtrain.planner.graph.nonfinite import check_nan
from xtrain.planner.graph.saving import check_backend, check_saving
from xtrain.planner.graph.spans import check_profiles
from xtrain.planner.graph.timeline import NOTHING_SCHEDULED, check_ticks, fill_schedule
from xtrain.planner.graph.trackers import check_trackers
from xtrain.planner.mesh.layout import build_layout
from xtrain.planner.mesh.pipeline import assign_stages, check_microbatches
from xtrain.planner.model.derive import derive_architecture
from xtrain.planner.model.scorer import read_scorer
from xtrain.planner.model.teacher import check_teacher
from xtrain.planner.rules.base_rules import check_base
from xtrain.planner.rules.beginning import check_beginning, resumed_batch
from xtrain.planner.rules.elastic import Elastic, ValidatedSpec, settle_worlds
from xtrain.planner.rules.fp8_rules import check_fp8
from xtrain.planner.rules.further_rules import check_further
from xtrain.planner.rules.idle_rules import check_idle, check_idle_accumulation
from xtrain.planner.rules.launcher_rules import check_launcher
from xtrain.planner.rules.live_teacher import fit_teacher
from xtrain.planner.rules.module_rules import check_modules
from xtrain.planner.rules.optimizer_rules import check_loss, check_optimizer
from xtrain.planner.rules.phase_rules import check_phases
from xtrain.planner.rules.rule_inputs import Verdicts
from xtrain.planner.rules.stack_rules import check_stack
from xtrain.planner.rules.topology import check_topology
from xtrain.planner.schedule.arithmetic import Counts, derive_arithmetic
from xtrain.planner.schedule.learning_rate import check_schedule
from xtrain.planner.schedule.mixing import build_phases
from xtrain.planner.schedule.stops import check_events, check_stops
from xtrain.planner.serving.rules import check_server
from xtrain.planner.serving.slots import architecture_with_slots, as_training, with_slots


def check_spec(spec: Spec, world: int | None = None, unknown_settings: frozenset[str] = frozenset()) -> Diagnostics:
    """All that `compile_plan` would say, without the plan.

    unknown_settings: paths of settings that are wrong; what the spec has in their place, and all that follows from
    it, is not reported.
    """
    found = Verdicts(spec, unknown_settings)
    validate(spec, world, found)
    return found.diagnostics


def validate(spec: Spec, world: int | None, found: Verdicts, counted: Counts | None = None) -> ValidatedSpec | None:
    """Derive and check everything; None if any rule fails.

    counted: what is known of the data. What comes of it is no part of a plan, which does not know its data.
    """
    if spec.serve is not None:
        return _validate_server(spec, world, found)
    elastic = settle_worlds(spec, world, found, partial(validate, counted=counted))
    spec, world = elastic.spec, elastic.world
    shape = derive_architecture(spec, found)
    check_data(spec, found)
    arch = shape.architecture
    layout = build_layout(spec, world, heads=arch.heads, kv_heads=arch.kv_heads, found=found)
    if layout.unsettled:
        found.mark_unknown("parallel.fsdp.size")  # and with it the number of data ranks
    batch = derive_arithmetic(spec, layout.mesh, found, counted)
    staging = assign_stages(spec, arch, layout, found)
    check_microbatches(spec, layout, batch, found)
    check_topology(spec, arch, layout, batch, found)
    check_base(spec, arch, layout, found)
    check_fp8(spec, arch, layout, found)
    check_stack(spec, found)
    check_modules(spec, arch, layout, batch, found)
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
    check_beginning(spec, batch, found)
    check_average(spec, ahead, found)
    check_backend(spec, layout.mesh.world_size, found)
    check_nan(spec, schedule, ahead, found)
    phases = check_phases(spec, ahead, found)
    phases = phases if ahead is batch else build_phases(spec, batch)
    if found.failed or layout.unsettled:
        return None
    check_idle(spec, shape, layout, batch, found)
    if elastic.worlds and not elastic.why_rows:
        check_idle_accumulation(spec, found)
    if elastic.why_rows:
        batch = evolve(batch, reasons={**batch.reasons, "batch.rows": elastic.why_rows})
    return ValidatedSpec(shape, layout, staging, batch, phases, schedule, elastic, scorer, teacher)


def _validate_server(spec: Spec, world: int | None, found: Verdicts) -> ValidatedSpec | None:
    """The same of a server, which has neither data nor steps."""
    assert spec.serve is not None
    training = as_training(spec)
    shape = derive_architecture(training, found)
    arch = shape.architecture
    layout = build_layout(spec, world, heads=arch.heads, kv_heads=arch.kv_heads, found=found)
    batch = derive_arithmetic(training, layout.mesh, found)
    staging = assign_stages(training, arch, layout, found)
    check_topology(training, arch, layout, batch, found)
    check_base(training, arch, layout, found)
    check_fp8(training, arch, layout, found)
    check_stack(training, found)
    check_modules(training, arch, layout, batch, found)
    check_further(training, layout, found)
    check_server(spec, arch, layout, found)
    if found.failed or layout.unsettled:
        return None
    if arch.adapter is None and spec.serve.mode == "adapters":  # where a draft says nothing of it
        return None
    check_idle(training, shape, layout, batch, found)
    shape = evolve(shape, architecture=architecture_with_slots(arch, spec.serve.adapters))
    elastic = Elastic(spec=with_slots(spec), world=world)
    return ValidatedSpec(shape, layout, staging, batch, (), NOTHING_SCHEDULED, elastic)
