"""DeepSpeed state in host memory or files instead of device memory: ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840)
and ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from xtrain.components.stacks._deepspeed_settings import OFFLOADING, DeepspeedSettings
from xtrain.contracts.stacks import OwnedBytes
from xtrain.dsl.schema.setting import Conflict
from xtrain.dsl.spec import Spec
from xtrain.text.units import BYTES, bytes_text

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved

BUCKET: Final = 2**24  # maximum of numbers reduced together; one larger parameter is reduced alone
ALIGNED: Final = 1024  # numbers of a file: DeepSpeed reads and writes in units of 1 KiB
# DeepSpeed's defaults: deepspeed/runtime/swap_tensor/constants.py.
AIO: Final = {
    "block_size": 2**20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}
PARAMETERS_AT_ONCE: Final = 5
_WHAT: Final = {"offload_optimizer": "the optimizer state", "offload_param": "the parameters"}


def conflicts_of_offload(spec: Spec, chosen: DeepspeedSettings) -> Iterator[Conflict]:
    """Yield offloading conflicts: a stage that does not shard the state, and files before stage 3."""
    for name, place in chosen.offloading.items():
        path, least = f"parallel.deepspeed.{name}", 3 if name == "offload_param" else 1
        if chosen.stage < least:
            message = f"stage {chosen.stage} of stack deepspeed does not shard {_WHAT[name]}, and offloads only shards"
            yield Conflict(path, message, f"use deepspeed.stage {least}, {name} none, or use stack parallel")
        elif place == "nvme" and chosen.stage < 3:
            message = f"stage {chosen.stage} of stack deepspeed offloads only to host memory"
            yield Conflict(path, message, f"use {name} cpu, deepspeed.stage 3, or use stack parallel")
        elif place == "nvme" and chosen.nvme_path is None:
            message = f"{name} is nvme, and stack deepspeed needs a folder for it"
            hint = "give deepspeed { nvme_path } a folder on a disk of the machine, or use stack parallel"
            yield Conflict("parallel.deepspeed.nvme_path", message, hint)
    states = getattr(spec.optimizer, "states", "auto") if chosen.offload_optimizer == "nvme" else "auto"
    if states not in ("auto", spec.precision.params):
        message = f"stack deepspeed writes moments to files only as fp32, and optimizer.states is {states}"
        yield Conflict("optimizer.states", message, "remove it, use offload_optimizer cpu, or use stack parallel")


def idle_offload(spec: Spec, chosen: DeepspeedSettings) -> Iterator[tuple[str, str]]:
    """Yield settings without effect, and why."""
    from xtrain.plan.mesh import device_kind

    places = set(chosen.offloading.values())
    if "nvme" not in places:
        yield "nvme_path", "nothing is offloaded to nvme"
    if not places:
        yield "pin_memory", "nothing is offloaded"
    if device_kind(spec) == "cpu":
        for name in OFFLOADING:
            if getattr(chosen, name) == "cpu":
                yield name, "the device of the ranks is the host itself"


def offload_config(resolved: "Resolved", chosen: DeepspeedSettings) -> dict[str, Any]:
    """Return the part of `zero_optimization`."""
    found: dict[str, Any] = {}
    for name, place in chosen.offloading.items():
        found[name] = {"device": place, "pin_memory": chosen.pin_memory}
        if place == "nvme":
            found[name] |= {"nvme_path": chosen.nvme_path, **_buffers(resolved, name)}
    return found


def aio_config(chosen: DeepspeedSettings) -> dict[str, Any]:
    """Return the engine's settings of asynchronous file I/O, if files are used."""
    return {"aio": dict(AIO)} if "nvme" in chosen.offloading.values() else {}


def file_bytes(resolved: "Resolved", chosen: DeepspeedSettings) -> int:
    """Return the maximum size of a rank's files: its piece of the updated weights, of their gradients and moments, and
    of the parameters in the compute format."""
    trained = sum(tensor.size for tensor in resolved.inventory.tensors if tensor.trained)
    numbers = _aligned(-(-trained // resolved.size("replicate")))
    updated = BYTES[resolved.formats.params] * _optimizer_buffers(resolved) if chosen.offload_optimizer == "nvme" else 0
    computed = BYTES[resolved.formats.compute] if chosen.offload_param == "nvme" else 0
    return numbers * (updated + computed)


def offload_text(resolved: "Resolved", chosen: DeepspeedSettings) -> str:
    """Return a clause that says where state is kept and what is transferred between device and host."""
    text, ranks = "", resolved.size("replicate")
    piece = -(-sum(tensor.size for tensor in resolved.inventory.tensors if tensor.trained) // ranks)
    width, computed = BYTES[resolved.formats.params], BYTES[resolved.formats.compute]
    where = {"cpu": "in host memory", "nvme": f"in files below {chosen.nvme_path}"}
    if (place := chosen.offload_optimizer) != "none":
        text += f"; weights and moments are stored {where[place]} and updated on the CPU: in a step "
        text += f"a rank sends {bytes_text(piece * width)} of gradients and gets back {bytes_text(piece * computed)} "
        text += "of weights"
    if (place := chosen.offload_param) != "none":
        text += f"; parameters are stored {where[place]} and fetched by each forward and backward"
    if size := file_bytes(resolved, chosen):
        text += f"; files of at most {bytes_text(size)} a rank"
    return text


def moved(resolved: "Resolved", chosen: DeepspeedSettings, states: OwnedBytes, piece: int, computed: int) -> OwnedBytes:
    """Return a rank's bytes on the device and in host memory, from the `states` of its stage. piece: bytes of its shard
    of the updated weights; computed: bytes of its shard in the compute format."""
    from xtrain.plan.mesh import device_kind

    device, weights, gradients, moments = states, 0, 0, 0
    if chosen.offload_optimizer != "none":
        device = evolve(device, parameters=device.parameters - piece, moments=0)
        on_device, gradients = _gradients(resolved, chosen, states, piece)
        device = evolve(device, trained=on_device)
        if chosen.offload_optimizer == "cpu":
            # In stages 1 and 2 updated weights pass through a tensor in the parameter format.
            passing = (
                piece * BYTES[resolved.formats.compute] // BYTES[resolved.formats.params] if chosen.stage < 3 else 0
            )
            weights, moments = piece + passing, states.moments
    if chosen.offload_param != "none":
        device = evolve(device, parameters=device.parameters - computed)
        weights += computed if chosen.offload_param == "cpu" else 0
    if device_kind(resolved.spec) != "cpu":
        return evolve(device, host=weights + gradients + moments)
    return evolve(
        device,
        parameters=device.parameters + weights,
        trained=device.trained + gradients,
        moments=device.moments + moments,
    )


def _gradients(resolved: "Resolved", chosen: DeepspeedSettings, states: OwnedBytes, piece: int) -> tuple[int, int]:
    """Return the bytes of gradients on the device and in host memory with an offloaded update."""
    if chosen.offload_optimizer == "nvme":
        return 0, piece + BYTES[resolved.formats.params] * _optimizer_buffers(resolved) * _group_numbers(
            resolved, piece
        )
    if chosen.stage == 3:  # summed over microbatches in one tensor, and updated from another
        return 0, 2 * piece
    # Each parameter is moved separately, through a tensor on either side.
    passing = BYTES[resolved.formats.compute] * _largest(resolved)
    if (
        chosen.stage == 1 or resolved.formats.compute != resolved.formats.params
    ):  # microbatches are summed on the device
        return states.trained + passing, piece + passing
    # Sums over microbatches are in host memory too: whole parameters, even those of which a rank has a shard.
    whole = BYTES[resolved.formats.params] * resolved.inventory.total
    return passing, piece + passing + (min(whole, piece + 2 * passing) if resolved.batch.accumulate > 1 else 0)


def bucket_numbers(resolved: "Resolved") -> int:
    """Return the numbers per bucket, also the maximum of a group that stage 3 updates at once, not counting its last
    parameter; even, as DeepSpeed requires."""
    numbers = sum(tensor.size for tensor in resolved.inventory.tensors if tensor.trained)
    return min(BUCKET, numbers + numbers % 2)


def _buffers(resolved: "Resolved", name: str) -> dict[str, Any]:
    """Return the settings of file buffers: for the optimizer one for weights, gradients and each moment of a parameter
    group; for parameters one for each that a module needs at once."""
    if name == "offload_optimizer":
        more = {"pipeline_read": False, "pipeline_write": False, "fast_init": False}
        return {"buffer_count": _optimizer_buffers(resolved), **more}
    size = _aligned(-(-_largest(resolved) // resolved.size("replicate")))
    return {"buffer_count": PARAMETERS_AT_ONCE, "buffer_size": size, "max_in_cpu": 0}


def _optimizer_buffers(resolved: "Resolved") -> int:
    return 2 + max(resolved.moment_counts)


def _group_numbers(resolved: "Resolved", piece: int) -> int:
    """Return the numbers in the largest parameter group that is updated at once, for a piece of `piece` bytes."""
    most = bucket_numbers(resolved) + -(-_largest(resolved) // resolved.size("replicate"))
    return _aligned(min(piece // BYTES[resolved.formats.params], most))


def _largest(resolved: "Resolved") -> int:
    return max(tensor.size for tensor in resolved.inventory.tensors if tensor.trained)


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNED) * ALIGNED
