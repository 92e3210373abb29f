"""How much memory a slot takes, and how many slots there is room for."""

from xtrain.planner.findings import Findings
from xtrain.planner.plan import Estimates, Hardware, Plan
from xtrain.planner.resolved import Resolved
from xtrain.planner.serving.slots import slots_of
from xtrain.planner.units import BYTES, bytes_text, plural


def slot_bytes(run: Resolved) -> int:
    """Of one slot on a rank: its parameters, their gradients and what Adam keeps for each."""
    assert run.spec.serve is not None
    trained = [tensor for tensor in run.inventory.tensors if tensor.trained]
    moments = sum(run.moment_bytes(each, run.cuts.shape(each)) for each in trained)
    return (2 * BYTES[run.formats.params] * run.cuts.largest(trained) + moments) // run.spec.serve.places


def check_room(run: Resolved, cluster: Hardware, estimates: Estimates, found: Findings) -> None:
    """Whether the slots that are asked for fit, and how many would."""
    assert run.spec.serve is not None
    rule, slots, device = "memory.device", run.spec.serve.places, cluster.memory_bytes
    need = max(each.memory.total_bytes for each in estimates.classes)
    if device is None:
        found.unknown(rule, f"the fullest rank needs {bytes_text(need)}, and the memory of a device is unknown")
        return
    room, share = _room(device, need, slots, slot_bytes(run)), f"{bytes_text(need)} of {bytes_text(device)}"
    if room >= slots:
        more = f"; there is room for {plural(room, 'adapter')}" if run.spec.tasks else ""
        found.passed(rule, f"{share} on the fullest rank{more}")
    elif room:
        message = f"the server does not fit: {share} on the fullest rank"
        found.warn(rule, "W423", "serve.adapters", message, f"use adapters {room}")
    else:
        alone = ", even with a single adapter" if run.spec.tasks else ""
        message = f"the server does not fit{alone}: {share} on the fullest rank"
        hint = "use more ranks, fewer `rows`, a smaller `max_tokens` or rank, or store the model in codes"
        if not run.spec.tasks:
            hint = "use more ranks, fewer `rows` or a smaller `max_tokens`, or train adapters"
        found.warn(rule, "W423", "serve", message, hint)


def slots_that_fit(plan: Plan) -> int | None:
    """On the fullest rank; None where the memory of a device is not known, or the server trains the model itself."""
    if plan.cluster.memory_bytes is None or not slots_of(plan):
        return None
    fullest = max((each.memory for each in plan.estimates.classes), key=lambda memory: memory.total_bytes)
    slots, own = len(slots_of(plan)), fullest.gradients * 2 + fullest.optimizer
    return _room(plan.cluster.memory_bytes, fullest.total_bytes, slots, own // len(slots_of(plan)))


def _room(device: int, need: int, slots: int, each: int) -> int:
    return max(0, (device - need + slots * each) // each)
