"""Rules between the settings of `parallel` and those around it: stacks, schedules, offloading."""

from ...dsl.schema.setting import Auto
from ...dsl.spec import Spec
from ..findings import Findings
from ..mesh.cluster import device_kind
from ..mesh.pipeline import ZERO_BUBBLE
from ..resolved import resolve_formats


def check_stack(spec: Spec, found: Findings) -> None:
    """Report settings that torch cannot combine, or of which one leaves the other without effect."""
    if spec.parallel.stack == "ddp":
        _check_ddp(spec, found)
    _check_zero_bubble(spec, found)
    _check_sync(spec, found)
    _check_offload(spec, found)
    _check_bodies(spec, found)


def _check_bodies(spec: Spec, found: Findings) -> None:
    """The schedule of a pipeline decides when which microbatch goes forward and backward through which stage."""
    for name, body in (("step", spec.step), ("evaluation_step", spec.evaluation_step)):
        if body is not None and spec.parallel.pp.size != 1:
            message = f"{body.function} takes whole microbatches through the model, and pp is {spec.parallel.pp.size}"
            found.fail(f"mesh.pp.{name}", "X431", f"{name}.name", message, f"use pp 1, or remove `{name}`")


def _check_ddp(spec: Spec, found: Findings) -> None:
    """Every rank holds a whole copy of the model, as it is stored."""
    parallel, fsdp = spec.parallel, spec.parallel.fsdp
    formats = resolve_formats(spec.precision, parallel)
    for axis in ("tp", "pp", "cp", "ep"):
        if (size := getattr(parallel, axis).size) != 1:
            message = f"stack ddp keeps a full replica of the model on every rank, and {axis} is {size}"
            _refuse_ddp(found, f"{axis}.size", message, f"use {axis} 1")
    if fsdp.size != 1 and not isinstance(fsdp.size, Auto):
        copies = fsdp.size * fsdp.replicate
        message = f"stack ddp shards nothing, and fsdp is {fsdp.size}"
        hint = "use fsdp auto: all ranks are then replicas"
        _refuse_ddp(found, "fsdp.size", message, f"{hint}, or fsdp 1 {{ replicate = {copies} }}")
    if formats.compute != formats.params:
        message = f"stack ddp computes in the format of the parameters, {formats.params}, not in {formats.compute}"
        _refuse_ddp(found, "precision.compute", message, f"use compute {formats.params}")
    if formats.reduce != formats.params:
        message = f"stack ddp sums gradients in the format of the parameters, {formats.params}, not in {formats.reduce}"
        _refuse_ddp(found, "fsdp.reduce", message, f"use reduce {formats.params}")
    if not isinstance(fsdp.reshard, Auto):
        _refuse_ddp(found, "fsdp.reshard", "stack ddp gathers nothing that reshard could free", "use reshard auto")
    if fsdp.sync != "auto":
        _refuse_ddp(found, "fsdp.sync", "stack ddp sums gradients once a step", "use sync auto")
    if fsdp.offload:
        _refuse_ddp(found, "fsdp.offload", "stack ddp keeps model states where they are used", "use offload false")


def _refuse_ddp(found: Findings, name: str, message: str, hint: str) -> None:
    path = name if name.startswith("precision") else f"parallel.{name}"
    found.fail(f"mesh.ddp.{name}", "X415", path, message, f"{hint}, or stack parallel")


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
    if pp.schedule == "zbv" and spec.model.tie_embeddings:
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
