"""A teacher that computes beside the model of a run: which of the run's axes cut it, and what it is a run of."""

from attrs import evolve, frozen

from xtrain.dsl.schema.parallel import Ep
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import parameters
from xtrain.planner.findings import Findings
from xtrain.planner.mesh.layout import Layout
from xtrain.planner.mesh.mesh import AXES, build_mesh
from xtrain.planner.mesh.pipeline import assign_stages
from xtrain.planner.mesh.sharding import cuts_of
from xtrain.planner.model.inventory import count_parameters
from xtrain.planner.model.teacher import PATH, RULE, TeacherShape
from xtrain.planner.resolved import Formats, Resolved
from xtrain.planner.rules.topology import check_topology
from xtrain.planner.schedule.arithmetic import Arithmetic


@frozen
class FittedTeacher:
    """spec: of a run of the teacher alone, with the axes that cut it. layout: of the ranks that compute it together:
    those of one pipeline stage, and one rank of tp where that does not cut it."""

    spec: Spec
    shape: TeacherShape
    layout: Layout

    def resolved(self, run: Resolved) -> Resolved:
        """As nodes and estimates take a model: nothing of it is trained, and all is in the format that the run computes
        in."""
        arch, compute = self.shape.architecture, run.formats.compute
        everything = frozenset(tensor.name for tensor in parameters(arch))
        return Resolved(
            spec=self.spec,
            architecture=arch,
            layout=self.layout,
            batch=run.batch,
            training=(),
            phases=(),
            formats=Formats(params=compute, compute=compute, reduce=compute),
            inventory=count_parameters(arch, everything),
            cuts=cuts_of(self.spec.parallel, self.layout.mesh, arch),
            staging=assign_stages(self.spec, arch, self.layout, Findings(self.spec)),
            weights=self.shape.weights,
        )


def fit_teacher(
    spec: Spec, shape: TeacherShape | None, layout: Layout, batch: Arithmetic, found: Findings
) -> FittedTeacher | None:
    """The teacher cut as the model is, or, where tp does not cut it, whole on the ranks of tp; None if there is none,
    or if it fits in neither way."""
    teacher = spec.loss.learns_from
    if teacher is None or not teacher.live or shape is None or found.failed or layout.unsettled:
        return None
    tp, sparse = layout.size("tp"), shape.architecture.is_moe
    first = None
    for each in dict.fromkeys((tp,) if sparse else (tp, 1)):
        fitted = _fitted(spec, shape, layout, each)
        own = Findings(fitted.spec)
        check_topology(fitted.spec, shape.architecture, fitted.layout, batch, own)
        if not own.failed:
            found.passed(f"{RULE}.layout", f"{teacher.folder} is cut by {_axes(fitted)}")
            return fitted
        first = first or own.diagnostics.errors[0]
    assert first is not None
    message = f"the teacher {teacher.folder} cannot compute beside the model: {first.message}"
    hint = "store what it holds probable, without `live`, or use a layout that cuts both models"
    found.fail(f"{RULE}.layout", first.code, PATH, message, hint)
    return None


def _fitted(spec: Spec, shape: TeacherShape, layout: Layout, tp: int) -> FittedTeacher:
    arch, mesh = shape.architecture, layout.mesh
    sizes = {axis: layout.size(axis) for axis in AXES} | {"pp": 1, "tp": tp}
    ep = layout.ep if arch.is_moe else 1
    parallel = spec.parallel
    parallel = evolve(parallel, ep=Ep(size=ep), tp=evolve(parallel.tp, size=tp), pp=evolve(parallel.pp, size=1))
    own = build_mesh(sizes, ep=ep, ranks_per_node=mesh.ranks_per_node)
    alone = evolve(shape.spec, parallel=parallel, launch=spec.launch, cluster=spec.cluster, collate=spec.collate)
    return FittedTeacher(alone, shape, evolve(layout, mesh=own, ep=ep, reasons={}))


def _axes(fitted: FittedTeacher) -> str:
    wide = [f"{axis} {fitted.layout.size(axis)}" for axis in AXES if fitted.layout.size(axis) > 1]
    return " · ".join(wide) or "no axis"
