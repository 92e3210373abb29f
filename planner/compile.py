"""`compile_plan`: compile a typed spec and a number of ranks into a `Plan`, or into all the errors that prevent one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from attrs import evolve

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, shows_color
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.amounts import trained_on
from xtrain.plan.arithmetic import Counts
from xtrain.plan.canonical import fingerprint, portable
from xtrain.plan.estimates import Estimates, Hardware
from xtrain.plan.findings import Findings
from xtrain.plan.graph import launcher_args
from xtrain.plan.mesh import Layout, cuts_of, device_kind
from xtrain.plan.parameters import count_parameters, frozen_names, quantised_names
from xtrain.plan.plan import Counted, ElasticWorld, Plan
from xtrain.plan.resolved import Resolved, resolve_formats
from xtrain.plan.serialise import plan_id
from xtrain.plan.timeline import epoch_rows, waits
from xtrain.planner.costs.estimates import estimate
from xtrain.planner.derive.layout import resolve_cluster
from xtrain.planner.graph.graph import build_graph
from xtrain.planner.graph.provenance import derived_provenance, merge, settings_provenance
from xtrain.planner.graph.server import build_server, check_room
from xtrain.planner.identity import config_of
from xtrain.planner.rules.costs import check_costs, check_failures
from xtrain.planner.rules.elastic import ValidatedSpec
from xtrain.planner.rules.validate import check_installed, validate


@frozen
class Compiled:
    """Plan with diagnostics, or None with at least one error among them. Warnings may come with a plan.

    directory: the run directory that holds a saved plan; the run then uses it.
    """

    plan: Plan | None
    diagnostics: Diagnostics
    directory: Path | None = None

    @property
    def resolved_text(self) -> str:
        """Resolved spec, stored with a run."""
        return self.plan.spec_text if self.plan else ""

    def report_to(self, stream: TextIO) -> bool:
        """Write the diagnostics; return True if there is a plan."""
        stream.write(self.diagnostics.render(color=shows_color(stream)))
        return self.plan is not None


# Counts the data of a plan that waits for it; returns None if it is not counted.
Count = Callable[[Plan], Counted | None]


def compile_plan(spec: Spec, *, world: int | None = None, spec_text: str = "", count: Count | None = None) -> Compiled:
    """Compile `spec` for `world` ranks (None: the number that the spec gives).

    `spec_text` is the resolved text stored with the plan. Every rule is checked before the verdict, so that a user sees
    all mistakes at once. Only tokenizer.json and the names of data files are read.

    With `count`, rules that wait for the data are also checked if it has been counted. The plan is the same.
    """
    found = Findings(spec)
    valid = validate(spec, world, found)
    check_installed(spec, found)
    if valid is None or found.diagnostics.has_errors:
        return Compiled(None, found.diagnostics)
    of_costs = Findings(spec)
    plan = _assemble(spec, valid, spec_text, of_costs)
    if valid.elastic.worlds:
        plan = _with_worlds(plan, valid)
    counted = count(plan) if count is not None and waits(plan) else None
    if counted is not None:  # the rules then check the spec against this data
        found = Findings(spec)
        if validate(spec, world, found, Counts(epoch_rows=epoch_rows(plan, counted.rows))) is None:
            return Compiled(None, found.diagnostics)
    found.diagnostics.extend(of_costs.diagnostics)
    return Compiled(evolve(plan, checks=(*found.checks, *of_costs.checks), counted=counted), found.diagnostics)


@frozen
class Appraisal:
    """Costs of a spec without the rest of its plan; None with at least one error among the diagnostics."""

    estimates: Estimates | None
    diagnostics: Diagnostics


def appraise(spec: Spec, world: int | None = None) -> Appraisal:
    """Return the estimates of `compile_plan` several times as fast, to compare many layouts."""
    found = Findings(spec)
    valid = validate(spec, world, found)
    if valid is None:
        return Appraisal(None, found.diagnostics)
    run = resolve(valid.elastic.spec, valid)
    return Appraisal(estimate(run, cluster_of(run)), found.diagnostics)


def resolve(spec: Spec, valid: ValidatedSpec) -> Resolved:
    """Return the spec with every choice made."""
    arch, mesh, base = valid.shape.architecture, valid.layout.mesh, spec.precision.base
    frozen = frozen_names(arch, spec.model.frozen)
    quantised = quantised_names(arch, base, frozen)
    run = Resolved(
        spec=spec,
        architecture=arch,
        layout=valid.layout,
        batch=valid.batch,
        training=trained_on(valid.phases) if valid.phases else (),
        phases=valid.phases,
        formats=resolve_formats(spec.precision, spec.parallel),
        inventory=count_parameters(arch, frozen, quantised),
        cuts=cuts_of(spec.parallel, mesh, arch, base if base.stores else None),
        staging=valid.staging,
        weights=valid.shape.weights,
        adapter_files=valid.shape.adapter_files,
        scorer=valid.scorer,
    )
    return run if valid.teacher is None else evolve(run, teacher=valid.teacher.resolved(run))


def cluster_of(resolved: Resolved) -> Hardware:
    """Return the machines of a run."""
    return resolve_cluster(
        resolved.spec, resolved.formats.compute, resolved.layout.nodes, resolved.layout.mesh.ranks_per_node
    )


def _with_worlds(plan: Plan, valid: ValidatedSpec) -> Plan:
    """Return the plan with the other worlds on which its run may resume; each world has a plan that lists all of
    them."""
    elastic = valid.elastic
    plans = {
        world: plan if world == plan.mesh.world_size else _assemble(elastic.spec, each, "", Findings(elastic.spec))
        for world, each in elastic.worlds.items()
    }
    worlds = tuple(_world(each, elastic.worlds[world]) for world, each in plans.items())
    plans = {world: evolve(each, elastic=worlds, refused=elastic.refused) for world, each in plans.items()}
    worlds = tuple(evolve(each, id=plan_id(plans[each.world])) for each in worlds)
    plan = evolve(plan, elastic=worlds, refused=elastic.refused)
    return evolve(plan, id=plan_id(plan))


def _world(plan: Plan, valid: ValidatedSpec) -> ElasticWorld:
    times = plan.estimates.times
    return ElasticWorld(
        world=plan.mesh.world_size,
        axes={axis.name: axis.size for axis in plan.mesh.axes},
        accumulate=valid.batch.accumulate,
        memory_bytes=plan.estimates.fullest.memory.total_bytes,
        seconds=times.step if times is not None else None,
    )


def _assemble(spec: Spec, valid: ValidatedSpec, spec_text: str, found: Findings) -> Plan:
    run = resolve(valid.elastic.spec, valid)
    layout, mesh, schedule = valid.layout, valid.layout.mesh, valid.schedule
    cluster = cluster_of(run)
    estimates = estimate(run, cluster)
    if spec.serve is None:
        estimates = check_costs(
            run, cluster, estimates, found, lambda other: appraise(other, mesh.world_size).estimates
        )
        graph = build_graph(run, schedule, estimates)
    else:
        check_room(run, cluster, estimates, found)
        graph = build_server(run, estimates)
    found.passed("graph", graph.proof)
    derived = derived_provenance(run, valid.shape.reasons, schedule)
    config = config_of(run)
    plan = Plan(
        name=spec.experiment.name,
        spec=spec.path,
        spec_text=spec_text,
        seed=spec.experiment.seed,
        architecture=run.architecture,
        mesh=mesh,
        nodes=graph.nodes,
        edges=graph.edges,
        timeline=graph.timeline,
        parameters=run.inventory,
        estimates=estimates,
        provenance=merge(settings_provenance(spec), derived),
        checks=(),
        workspace=_workspace(spec),
        launch=_launch(spec, layout),
        cluster=cluster,
        config=config,
        config_id=fingerprint(config),
    )
    if spec.serve is None:
        check_failures(plan, found)
    return evolve(plan, id=plan_id(plan))


def _workspace(spec: Spec) -> dict[str, Any]:
    """Return root (folder of all runs), lineage (folder below it) and run (name of the run's folder, None to create
    one)."""
    workspace = spec.workspace
    return {
        "root": portable(workspace.root),
        "lineage": workspace.lineage or spec.experiment.name,
        "run": workspace.run,
    }


def _launch(spec: Spec, layout: Layout) -> dict[str, Any]:
    """Return the launch settings. nodes · ranks_per_node = world_size; threads None: shared evenly;
    stop_deadline_seconds: after a stop request; launcher: where `xtrain launch` gets the machines, and certificate:
    `required`, if the spec says so."""
    launch = spec.launch
    return {
        "world_size": layout.mesh.world_size,
        "nodes": layout.nodes,
        "ranks_per_node": layout.mesh.ranks_per_node,
        "device": device_kind(spec),
        "threads": None if isinstance(launch.threads, Auto) else launch.threads,
        "stop_deadline_seconds": launch.stop_deadline.value,
        "restarts": spec.fault_tolerance.restarts,
        **({} if spec.launcher is None else {"launcher": launcher_args(spec.launcher)}),
        **({} if launch.certificate == "none" else {"certificate": launch.certificate}),
    }
