"""One curve made ready for being drawn: what of it falls into each column, however many points it has."""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from attrs import frozen

# A weight below e^-45 changes no digit of a double.
_NEGLIGIBLE = 45.0


@frozen(eq=False)
class Line:
    """Curve of `y` over `x`, of equal length, with a gap where `y` is not finite.

    steps: the optimizer step of each point, used for smoothing; default: `x`. dim: drawn in the background, without a
    sign and a name.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    dim: bool = False
    steps: np.ndarray | None = None


@frozen(eq=False)
class CurveColumns:
    """Curve in columns of equal width: lowest and highest value of each, NaN without values.

    joined: True where the curve continues to the next column.
    """

    low: np.ndarray
    high: np.ndarray
    joined: np.ndarray


class Curve:
    """Line with ascending `x`, all values finite or NaN. Raises ValueError if the lengths differ."""

    def __init__(self, line: Line) -> None:
        x, y = np.asarray(line.x, dtype=np.float64), np.asarray(line.y, dtype=np.float64)
        steps = x if line.steps is None else np.asarray(line.steps, dtype=np.float64)
        if not x.shape == y.shape == steps.shape or x.ndim != 1:
            raise ValueError(f"{line.name}: {x.shape} places, {y.shape} values and {steps.shape} steps")
        if len(x) and not (np.isfinite(x[-1]) and bool(np.all(x[1:] >= x[:-1]))):
            order = np.flatnonzero(np.isfinite(x))
            order = order[np.argsort(x[order], kind="stable")]
            steps = steps[order]
            x, y = x[order], y[order]
        finite = np.isfinite(y)
        self.broken = not bool(finite.all())
        self.line, self.x, self.steps = line, x, steps
        self.y = np.where(finite, y, np.nan) if self.broken else y

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def positive(self) -> "Curve":
        """The curve with a gap wherever the logarithm is undefined."""
        if not len(self) or (not self.broken and self.y.min() > 0):
            return self
        with np.errstate(invalid="ignore"):
            y = np.where(self.y > 0, self.y, np.nan)
        return Curve(Line(self.line.name, self.x, y, self.line.dim, self.steps))

    @cached_property
    def left_out(self) -> int:
        """The number of values without a logarithm (zero or negative)."""
        with np.errstate(invalid="ignore"):
            return int(np.count_nonzero(self.y <= 0))

    @cached_property
    def last(self) -> float | None:
        """The last finite value."""
        if len(self) and math.isfinite(self.y[-1]):
            return float(self.y[-1])
        found = np.flatnonzero(np.isfinite(self.y))
        return float(self.y[found[-1]]) if len(found) else None

    @property
    def places(self) -> np.ndarray:
        """The x of all points that have a value."""
        return self._known[0] if self.broken else self.x

    def at(self, x: float) -> tuple[float, float] | None:
        """Return the point with a value nearest to `x`, as (x, y)."""
        x_known, y_known = (self.x, self.y) if not self.broken else self._known
        if not len(x_known):
            return None
        right = int(np.searchsorted(x_known, x))
        near = [place for place in (right - 1, right) if 0 <= place < len(x_known)]
        place = min(near, key=lambda place: abs(x_known[place] - x))
        return float(x_known[place]), float(y_known[place])

    @cached_property
    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        found = np.isfinite(self.y)
        return self.x[found], self.y[found]

    def columns(self, low: float, high: float, number: int, *, log: bool = False) -> CurveColumns:
        """Return the curve from `low` to `high` in `number` columns; `log`: as decimal logarithms.

        No point is left out: each counts for the lowest or highest value of its column. Columns between two points hold
        the straight line that joins them.
        """
        x, y = self.x, self.y
        edges = self._edges(low, high, number)
        lowest, highest = np.full(number, np.nan), np.full(number, np.nan)
        filled = edges[1:] > edges[:-1]
        if filled.any():
            least, most = (np.fmin, np.fmax) if self.broken else (np.minimum, np.maximum)
            starts, seen = edges[:-1][filled], y[: edges[-1]]
            lowest[filled], highest[filled] = least.reduceat(seen, starts), most.reduceat(seen, starts)
        if log:
            lowest, highest = np.log10(lowest), np.log10(highest)
        between = np.flatnonzero(~filled & (edges[:-1] > 0) & (edges[:-1] < len(x)))
        if len(between):
            right = edges[between]
            middle = low + (between + 0.5) * (high - low) / number
            x_a, x_b, y_a, y_b = x[right - 1], x[right], y[right - 1], y[right]
            if log:
                y_a, y_b = np.log10(y_a), np.log10(y_b)
            share = (middle - x_a) / (x_b - x_a)
            line = np.clip(y_a * (1 - share) + y_b * share, np.minimum(y_a, y_b), np.maximum(y_a, y_b))
            lowest[between] = highest[between] = line
        inner = edges[1:-1]
        joined = (inner > 0) & (inner < len(x))
        if self.broken and len(x):
            left, right = (np.clip(place, 0, len(x) - 1) for place in (inner - 1, inner))
            joined &= np.isfinite(y[left]) & np.isfinite(y[right])
        return CurveColumns(lowest, highest, joined)

    def _edges(self, low: float, high: float, number: int) -> np.ndarray:
        """Return the index of the first point of each column, and of the first one after the last column."""
        edges = np.searchsorted(self.x, np.linspace(low, high, number + 1), side="left")
        edges[-1] = np.searchsorted(self.x, high, side="right")
        return edges

    def smoothed(self, weight: float, low: float, high: float, number: int) -> "Curve":
        """Return the moving average at the last point of each of `number` columns from `low` to `high`.

        A value `n` steps back has the weight `weight**n`; the sum is divided by the sum of the weights. This is the
        bias-corrected average of TensorBoard, but by steps: a run that logs half as often looks no smoother.
        """
        fade = -math.log(weight)
        edges = self._edges(low, high, number)
        ends = np.unique(edges)
        ends = ends[ends > 0]
        if not len(ends):
            return self
        if ends[-1] < len(self.x):  # the point that the line leaves the columns for
            ends = np.append(ends, ends[-1] + 1)
        # Points before the first column are a group of their own, as far back as they count.
        first = int(np.searchsorted(self.steps, self.steps[ends[0] - 1] - _NEGLIGIBLE / fade))
        starts = np.concatenate(([min(first, ends[0] - 1)], ends[:-1]))
        end_steps = self.steps[ends - 1]
        steps, y = self.steps[starts[0] : ends[-1]], self.y[starts[0] : ends[-1]]
        weights = np.exp(np.maximum(fade * (steps - np.repeat(end_steps, ends - starts)), -700.0))
        if self.broken:
            known = np.isfinite(y)
            weights, y = np.where(known, weights, 0.0), np.where(known, y, 0.0)
        starts = starts - starts[0]
        sums = np.add.reduceat(weights * y, starts).tolist()
        totals = np.add.reduceat(weights, starts).tolist()
        fades = np.exp(-fade * np.diff(end_steps, prepend=end_steps[0])).tolist()
        averages, total, divisor = [], 0.0, 0.0
        for added, more, keep in zip(sums, totals, fades, strict=True):
            total, divisor = total * keep + added, divisor * keep + more
            averages.append(total / divisor if more > 0 and divisor > 0 else math.nan)
        return Curve(Line(self.line.name, self.x[ends - 1], np.array(averages), steps=end_steps))


def next_point(curves: Sequence[Curve], place: float, by: float) -> float:
    """Return the x of the point next to `place + by`, but at least one point after `place`; `place` at the end."""
    target, found = place + by, []
    for curve in curves:
        places = curve.places
        right = int(np.searchsorted(places, target))
        near = [float(places[index]) for index in range(right - 1, right + 2) if 0 <= index < len(places)]
        found += [x for x in near if (x > place if by > 0 else x < place)]
    return min(found, key=lambda x: abs(x - target), default=place)
