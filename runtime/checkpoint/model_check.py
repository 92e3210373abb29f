"""Whether a checkpoint is of the model that a plan speaks of."""

from ...planner.plan import Plan
from ..errors import ResumeRefused
from .layout import Entry


def check_model(plan: Plan, entry: Entry) -> None:
    """Raise ResumeRefused unless the checkpoint holds the plan's parameters, by name and shape."""
    saved = entry.state()["tensors"]
    planned = {p.name: list(p.shape) for p in plan.parameters.tensors}
    if saved != planned:
        raise ResumeRefused(f"{entry.path} holds another model: {_difference(saved, planned)}")


def _difference(saved: dict[str, list[int]], planned: dict[str, list[int]]) -> str:
    names = [n for n in {**saved, **planned} if saved.get(n) != planned.get(n)]
    parts = [f"{n} is {saved.get(n, 'absent')} there and {planned.get(n, 'absent')} in the plan" for n in names[:3]]
    return "; ".join(parts) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
