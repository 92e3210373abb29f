"""Rules between the settings of `parallel` and those around it: stacks, schedules, offloading."""

from xtrain.dsl.schema.setting import AUTO, Auto
from xtrain.dsl.schema.stacks import STACKS
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.installed_packages import is_installed
from xtrain.planner.mesh.cluster import device_kind
from xtrain.planner.mesh.pipeline import ZERO_BUBBLE
from xtrain.planner.resolved import resolve_formats


def check_stack(spec: Spec, found: Findings) -> None:
    """Report settings that torch cannot combine, or of which one leaves the other without effect."""
    _check_support(spec, found)
    for each in spec.parallel.execution.conflicts(spec):
        found.fail(f"mesh.stack.with.{each.setting}", "X415", each.setting, each.message, each.hint)
    _check_zero_bubble(spec, found)
    _check_sync(spec, found)
    _check_offload(spec, found)
    _check_bodies(spec, found)


def check_installed(spec: Spec, found: Findings) -> None:
    """Report a stack whose package is not here: no other rule depends on what a machine has."""
    stack = spec.parallel.execution
    if stack.package and not is_installed(stack.package):
        message = f"stack {stack.kind} needs the package {stack.package}, which is not installed here"
        hint = f"install it with `pip install '{stack.install}'`, or use stack parallel"
        found.fail("mesh.stack.package", "X715", "parallel.stack", message, hint)


def _check_bodies(spec: Spec, found: Findings) -> None:
    """The schedule of a pipeline decides when which microbatch goes forward and backward through which stage."""
    for name, body in (("step", spec.step), ("evaluation_step", spec.evaluation_step)):
        if body is not None and spec.parallel.pp.size != 1:
            message = f"{body.function} takes whole microbatches through the model, and pp is {spec.parallel.pp.size}"
            found.fail(f"mesh.pp.{name}", "X431", f"{name}.name", message, f"use pp 1, or remove `{name}`")


def _check_support(spec: Spec, found: Findings) -> None:
    """Report what the stack of the spec does not support."""
    parallel, fsdp = spec.parallel, spec.parallel.fsdp
    formats = resolve_formats(spec.precision, parallel)
    lacks = parallel.execution.unsupported

    def refuse(name: str, path: str, what: str, hint: str) -> None:
        """name: of what is unsupported. what: the value that the spec has, behind the reason."""
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


def _check_zero_bubble(spec: Spec, found: Findings) -> None:
    """A backward in two parts looks for gathered parameters after FSDP has freed them, torch refuses compiled blocks,
    and a stage that comes back to the rank of the first one would share its embedding."""
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
    if pp.schedule == "zbv" and spec.model.tie_embeddings and spec.loss.head == "vocabulary":
        message = "schedule zbv has the first and the last stage on one rank, and fsdp cannot shard one matrix in both"
        found.fail("mesh.pp.tied", "X416", "model.tie_embeddings", message, f"use tie_embeddings false, {others}")


def _check_sync(spec: Spec, found: Findings) -> None:
    if spec.parallel.pp.size != 1 and spec.parallel.fsdp.sync == "microbatch":
        message = "pipeline schedules sum gradients once a step, and sync is microbatch"
        found.fail("mesh.pp.sync", "X427", "parallel.fsdp.sync", message, "use sync auto, or pp 1")


def _check_offload(spec: Spec, found: Findings) -> None:
    if not spec.parallel.fsdp.offload:
        return
    if device_kind(spec) == "cpu":
        message = "offload moves model states from cuda to host memory, and launch.device is cpu"
        found.fail("mesh.offload", "X417", "parallel.fsdp.offload", message, "use offload false, or device cuda")
    elif device_kind(spec) == "cuda":
        found.passed("mesh.offload", "model states of cuda devices lie in host memory")
    else:
        found.unknown("mesh.offload", "launch.device is auto: on a machine without cuda the run ends with an error")
