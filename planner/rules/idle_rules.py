"""Settings that are written and change nothing here: said, so that nobody waits for what they would do."""

from ...dsl.schema.actions import MemorySnapshotAction
from ...dsl.schema.model import MOE
from ...dsl.schema.setting import AUTO
from ...dsl.spec import Spec
from ..cluster import device_kind
from ..layouts.layout import Layout
from ..layouts.sharding import shard_axes
from ..resolved import resolve_formats
from ..saving import OF_WRITING
from .findings import Findings

# Axis → the settings that only speak of it.
OF_AXIS = {
    "tp": ("sequence", "loss"),
    "pp": ("schedule", "stages_per_rank", "layers", "embedding_cost", "head_cost"),
    "cp": ("fold",),
}
# What says nothing without a project.
OF_WANDB = ("entity", "name", "group", "tags", "notes", "mode")


def check_idle(spec: Spec, layout: Layout, found: Findings) -> None:
    """Warn of what is written for an axis of one rank, or of how gradients are summed where nothing is sharded."""
    check_idle_saving(spec, found)
    _check_idle_history(spec, found)
    if spec.log.wandb.project is None:
        for name in OF_WANDB:
            _warn(spec, f"log.wandb.{name}", "log.wandb.project is none", "name a project, or leave it out", found)
    sizes = {"tp": layout.size("tp"), "pp": layout.size("pp"), "cp": layout.size("ring") * layout.size("ulysses")}
    for axis, names in OF_AXIS.items():
        if sizes[axis] == 1:
            for name in names:
                _warn(spec, f"parallel.{axis}.{name}", f"{axis} is 1", f"leave it out, or use {axis} 2", found)
    if spec.batch.workers and not spec.batch.prefetch:
        _warn(spec, "batch.workers", "nothing is read ahead", "use prefetch 2, or leave it out", found)
    if spec.parallel.stack != "ddp" and not _shards(spec, layout):
        for name in ("reduce", "reshard", "sync"):
            _warn(spec, f"parallel.fsdp.{name}", "nothing is sharded", "leave it out, or use fsdp 2", found)


def check_idle_saving(spec: Spec, found: Findings) -> None:
    """Warn of settings of `checkpoint` that another one makes idle."""
    chosen = spec.checkpoint
    if chosen.from_ is not None and chosen.pretrained is not None:
        hint = "keep one: `from` goes on with the whole state, `pretrained` takes weights alone"
        _warn(spec, "checkpoint.pretrained", "checkpoint.from gives weights and all else", hint, found)
    if not chosen.enabled:
        for name in OF_WRITING:
            _warn(spec, f"checkpoint.{name}", "checkpoint.enabled is false", "leave it out", found)
    elif chosen.mode == "sync":
        _warn(spec, "checkpoint.overlap", "training waits for every save", "use mode async", found)
    elif chosen.mode == "async_pinned" and device_kind(spec) == "cpu":
        _warn(spec, "checkpoint.mode", "memory is page-locked for GPUs alone", "use mode async", found)


def _check_idle_history(spec: Spec, found: Findings) -> None:
    """Warn of a history of allocations where nobody writes one."""
    if device_kind(spec) != "cpu":
        return
    occasions = [(f"every.{number}", tick.actions) for number, tick in enumerate(spec.ticks)]
    occasions += [(f"on.{number}", event.actions) for number, event in enumerate(spec.events)]
    for path, actions in occasions:
        for number, action in enumerate(actions):
            if isinstance(action, MemorySnapshotAction) and action.history not in (0, AUTO):
                place = f"{path}.actions.{number}.history"
                _warn(spec, place, "only a GPU's allocator writes down what it does", "leave it out", found)


def _warn(spec: Spec, path: str, why: str, hint: str, found: Findings) -> None:
    origin = spec.origins.get(path)
    if origin is not None and origin.kind != "default":
        name = path.rpartition(".")[2]
        found.warn(f"idle.{path}", "W401", path, f"{name} changes nothing, as {why}", hint)


def _shards(spec: Spec, layout: Layout) -> bool:
    """Whether any parameter is FSDP's; the same question as `Resolved.dense_fsdp` asks, before there is one."""
    formats = resolve_formats(spec.precision, spec.parallel)
    axes = {"replicate", *shard_axes(spec.parallel, layout.mesh)}
    if spec.model.family in MOE:
        axes |= {"ep_replicate", "ep_fsdp"}
    sizes = {axis.name: axis.size for axis in (*layout.mesh.axes, *layout.mesh.expert_axes)}
    wide = any(sizes[axis] > 1 for axis in axes)
    return wide or formats.compute != formats.params or spec.parallel.fsdp.offload
