"""Differences between a layout and one process: losses, gradient norms, evaluations and all tensors."""

from typing import Any, Final

import numpy as np
from attrs import frozen

from xtrain.runtime.inspect.rank_jobs import Outcome

TOLERANCE: Final = {"fp64": 1e-10, "fp32": 1e-5}


class NotComparable(Exception):
    """Two outcomes that do not have the same steps, tensors or tokens."""


@frozen(kw_only=True)
class Gaps:
    """Largest differences from one process: of numbers relative to each, of tensors relative to the largest element.

    routing: of the balance loss and the experts' loads. tensors: by name, parameters, buffers and moments.
    """

    loss: float
    norm: float
    eval: float
    routing: float
    tensors: dict[str, float]
    seconds: float

    @property
    def worst_tensor(self) -> float:
        return max(self.tensors.values())

    @property
    def worst(self) -> float:
        return max(self.loss, self.norm, self.eval, self.routing, self.worst_tensor)

    def beyond(self, limit: float) -> dict[str, float]:
        """Return the gaps that are not below a limit, by name; NaN is not."""
        each = {"loss": self.loss, "norm": self.norm, "eval": self.eval, "routing": self.routing, **self.tensors}
        return {name: gap for name, gap in each.items() if not gap < limit}


def gaps(ours: Outcome, theirs: Outcome) -> Gaps:
    """Compare a layout with one process; every rank's view of a tensor counts. Raises NotComparable."""
    expected = theirs.tensors
    if other := ours.tensors.keys() ^ expected.keys():
        raise NotComparable(f"only one of them has {', '.join(sorted(other)[:3])}")
    distances: dict[str, float] = dict.fromkeys(expected, 0.0)
    for state in ours.whole:
        for name, value in state.items():
            distances[name] = max(distances[name], _distance(value, expected[name]))
    steps = [[step for step, *_ in each.curve] for each in (ours, theirs)]
    if steps[0] != steps[1] or not steps[0]:
        raise NotComparable(f"they record different steps: {steps[0]} and {steps[1]}")
    counts = [[_counts(e) for e in each.evals] for each in (ours, theirs)]
    if counts[0] != counts[1]:
        raise NotComparable(f"their evaluations are of different tokens: {counts[0]} and {counts[1]}")
    return Gaps(
        loss=_relative([c[1] for c in ours.curve], [c[1] for c in theirs.curve]),
        norm=_relative([c[2] for c in ours.curve], [c[2] for c in theirs.curve]),
        eval=_relative(*([value for e in one.evals for value in _evaluated(e)] for one in (ours, theirs))),
        routing=_routing(ours, theirs),
        tensors=distances,
        seconds=ours.seconds,
    )


def _counts(evaluation: dict[str, Any]) -> list[int]:
    """Return the tokens, and their bytes if a cross-entropy is measured."""
    return [evaluation[name] for name in ("tokens", *(() if _has_rewards(evaluation) else ("bytes",)))]


def _evaluated(evaluation: dict[str, Any]) -> list[float]:
    """Return the measured numbers."""
    if _has_rewards(evaluation):
        return [evaluation["loss"], evaluation["objective"], *evaluation["metrics"].values()]
    return [evaluation["loss"], evaluation["bits_per_byte"]]


def _has_rewards(evaluation: dict[str, Any]) -> bool:
    """Return True if the model gives rewards, which have no bits."""
    return "bytes" not in evaluation and evaluation.get("objective") == evaluation["loss"]


def _relative(ours: list[float], theirs: list[float]) -> float:
    return max((_worse(abs(a - b) / max(abs(b), 1e-30)) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _routing(ours: Outcome, theirs: Outcome) -> float:
    pairs = list(zip(ours.routing, theirs.routing, strict=True))
    if any(a.keys() != b.keys() for a, b in pairs):
        raise NotComparable("only one of them records the loads of experts")
    return max((_distance(np.array(a[key]), np.array(b[key])) for a, b in pairs for key in b), default=0.0)


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.size:  # a rank may have no rows of a shard
        return 0.0
    return _worse(float(np.abs(ours - theirs).max() / max(float(np.abs(theirs).max()), 1e-30)))


def _worse(gap: float) -> float:
    """Return the gap; NaN is larger than any."""
    return gap if gap == gap else float("inf")
