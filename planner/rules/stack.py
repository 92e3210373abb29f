"""Rules on the execution stack, split backwards, gradient synchronization and offloading."""

from xtrain.contracts.stacks import stack_of
from xtrain.dsl.schema.parallel import STACKS
from xtrain.dsl.schema.setting import AUTO, Auto
from xtrain.dsl.spec import Spec
from xtrain.plan.findings import Findings, checks
from xtrain.plan.hardware import is_installed
from xtrain.plan.mesh import device_kind
from xtrain.plan.pipeline import ZERO_BUBBLE
from xtrain.plan.resolved import resolve_formats


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
