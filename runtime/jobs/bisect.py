"""The first step, quantity and tensors in which two runs that should agree part."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import frozen

from xtrain.plan.plan import Plan
from xtrain.records.events import events_since
from xtrain.records.metrics import StepMetrics
from xtrain.records.names import EVENTS_FILE
from xtrain.records.training_events import DigestsEvent
from xtrain.runtime.jobs.replay import recorded

# Quantities of a step in the order in which a step computes them → nodes of a plan, the first one that it has.
_FORWARD: Final = ("step.forward_backward",)
_NODES: Final = {
    "loss": _FORWARD,
    "objective": _FORWARD,
    "gradients": _FORWARD,
    "grad_norm": ("step.clip", "step.task_gradients", "step.gradient_norm"),
    "lr": ("step.schedule",),
    "parameters": ("step.optimizer",),
}


@frozen(kw_only=True)
class Trace:
    """Recorded numbers and digests of a run by step, counted from 1."""

    lines: Mapping[int, StepMetrics]
    digests: Mapping[int, DigestsEvent]

    @classmethod
    def of(cls, directory: Path) -> "Trace":
        """Read the records of a run; of several of a step the last one, but no digests of a start, which lack
        gradients, instead of the step's own. Raises OSError."""
        events = [each for each in events_since(directory / EVENTS_FILE, 0) if isinstance(each, DigestsEvent)]
        events.sort(key=lambda each: bool(each.gradients))
        digests = {each.step: each for each in events if each.step is not None}
        return cls(lines={line.step: line for line in recorded(directory) if line.step is not None}, digests=digests)


@frozen(kw_only=True)
class Parting:
    """First step in which two runs differ. quantity: the first one in the step's order that differs. values: of a
    number, in both runs. tensors: with other digests, in the order of the model. before: the last step before it that
    both have recorded, and that is equal; None without one. traced: digests of both runs show the step, and the
    parameters before it as equal."""

    step: int
    quantity: str
    values: tuple[float | None, float | None] | None
    tensors: tuple[str, ...]
    before: int | None
    traced: bool

    def node(self, plan: Plan) -> str:
        """Return the id of the node that computes the quantity."""
        ids = {node.id for node in plan.nodes}
        return next((name for name in _NODES[self.quantity] if name in ids), _NODES[self.quantity][0])


def common_steps(a: Trace, b: Trace) -> list[int]:
    """Return the steps that both runs have recorded in the same way, in order."""
    return sorted((a.lines.keys() & b.lines.keys()) | (a.digests.keys() & b.digests.keys()))


def parting(a: Trace, b: Trace) -> Parting | None:
    """Return the first difference of two runs in the steps that both have recorded; None if all of them are equal."""
    before = None
    for step in common_steps(a, b):
        for quantity, values, tensors in _compared(a, b, step):
            both = [trace.digests.get(step) for trace in (a, b)]
            last = [trace.digests.get(step - 1) for trace in (a, b)]
            traced = None not in both and (None not in last or (quantity == "parameters" and step == 0))
            return Parting(step=step, quantity=quantity, values=values, tensors=tensors, before=before, traced=traced)
        before = step
    return None


def _compared(
    a: Trace, b: Trace, step: int
) -> Iterator[tuple[str, tuple[float | None, float | None] | None, tuple[str, ...]]]:
    """Yield the quantities of a step that differ, with their values and tensors, in the order of the step."""
    lines = (a.lines.get(step), b.lines.get(step))
    digests = (a.digests.get(step), b.digests.get(step))
    for quantity in _NODES:
        if quantity in ("gradients", "parameters"):
            one, other = ({} if each is None else getattr(each, quantity) for each in digests)
            if one and other and one != other:
                yield quantity, None, tuple(name for name in {**one, **other} if one.get(name) != other.get(name))
        elif lines[0] is not None and lines[1] is not None:
            values = (getattr(lines[0], quantity), getattr(lines[1], quantity))
            if values[0] != values[1]:
                yield quantity, values, ()
