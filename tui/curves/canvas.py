"""Curves prepared for drawing, and dots in terminal cells."""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from attrs import frozen

# Colors and signs of lines.
MOST_LINES = 8
# A weight below e^-45 changes no digit of a double.
_NEGLIGIBLE = 45.0
# Points a column from which on a curve is drawn as its median over the band of its values.
DENSE = 5
SAMPLES = 101


@frozen(eq=False)
class Line:
    """Curve of `y` over `x`, of equal length, with a gap where `y` is not finite.

    steps: the optimizer step of each point, used for smoothing; default: `x`. dim: drawn in the background, without a
    sign and a name. color: number of its color and sign; default: its place among the lines.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    dim: bool = False
    steps: np.ndarray | None = None
    color: int | None = None

    def number(self, place: int) -> int:
        """Return the number of its color and sign. place: of the line among those that are drawn."""
        return (place if self.color is None else self.color) % MOST_LINES


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

    def within(self, low: float, high: float) -> np.ndarray:
        """Return the finite values from `low` to `high`."""
        first, end = self._edges(low, high, 1)
        values = self.y[first:end]
        return values[np.isfinite(values)] if self.broken else values

    def is_dense(self, low: float, high: float, number: int) -> bool:
        """Return True if `number` columns have so many points each that a line through all of them is a block."""
        first, end = self._edges(low, high, 1)
        return end - first >= DENSE * number

    def medians(self, low: float, high: float, number: int) -> "Curve":
        """Return the median of each of `number` columns, at the middle one of its points; of a column with more than
        SAMPLES points, the median of so many evenly spaced ones."""
        edges = self._edges(low, high, number)
        first, count = edges[:-1], np.diff(edges)
        first, count = first[count > 0, None], count[count > 0, None]
        values = np.sort(self.y[first + np.arange(SAMPLES) * count // SAMPLES], axis=1)  # NaN come last
        known = np.isfinite(values).sum(axis=1)
        y = values[np.arange(len(values)), np.maximum(known - 1, 0) // 2]
        middle = (first + count // 2)[:, 0]
        return Curve(Line(self.line.name, self.x[middle], y, self.line.dim, self.steps[middle]))

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


Span = tuple[str, str]
"""Text, and the name of its style: `axis`, `title`, `note`, `cursor`, `line3`, `dim3` or empty."""
Row = tuple[Span, ...]

# The bit of each of the 4 x 2 dots of a braille sign.
_BRAILLE = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.int32)
_NOBODY, _DIM, _CURSOR = -1, 100, 200
_BLANK, _FIRST_BRAILLE = ord(" "), 0x2800


@frozen(kw_only=True)
class Glyphs:
    """Signs of a plot. markers: one for each line; bits: of the dots in one cell; higher, lower: values outside the
    scale."""

    markers: str
    bits: np.ndarray
    higher: str
    lower: str
    upright: str
    upright_tick: str
    corner: str
    level: str
    level_tick: str
    at_most: str
    more: str
    apart: str


UNICODE = Glyphs(
    markers="●○■□▲△◆◇",
    bits=_BRAILLE,
    higher="↑",
    lower="↓",
    upright="│",
    upright_tick="┤",
    corner="└",
    level="─",
    level_tick="┬",
    at_most="≤",
    more="…",
    apart=" · ",
)
ASCII = Glyphs(
    markers="*o+x#@%=",
    bits=np.ones((1, 1), dtype=np.int32),
    higher="^",
    lower="v",
    upright="|",
    upright_tick="+",
    corner="+",
    level="-",
    level_tick="+",
    at_most="<=",
    more="..",
    apart=", ",
)


class Canvas:
    """Canvas of `height` x `width` cells, empty at first. A line that is added earlier is drawn over later ones."""

    def __init__(self, height: int, width: int, glyphs: Glyphs) -> None:
        self.height, self.width = height, width
        self._glyphs = glyphs
        self._bits = np.zeros((height, width), dtype=np.int32)
        self._owner = np.full((height, width), _NOBODY, dtype=np.int32)
        self._over: dict[tuple[int, int], tuple[str, int]] = {}

    @property
    def num_columns(self) -> int:
        """The number of dot columns, into which curves are to be divided."""
        return self.width * self._glyphs.bits.shape[1]

    def add(self, columns: CurveColumns, low: float, high: float, line: int, *, dim: bool = False) -> None:
        """Draw a curve between the values `low` (lowest dot) and `high`, with signs at the border for values outside;
        lines in the background come last."""
        dots_high, dots_wide = self._glyphs.bits.shape
        with np.errstate(invalid="ignore"):
            over, under = columns.high > high, columns.low < low
            inside = (columns.low <= high) & (columns.high >= low)
        if line < MOST_LINES:
            self._mark_border(0, over, self._glyphs.higher, line)
            self._mark_border(self.height - 1, under, self._glyphs.lower, line)
        shown_low, shown_high = (np.where(inside, ends, np.nan) for ends in (columns.low, columns.high))
        shown = CurveColumns(shown_low, shown_high, columns.joined)
        filled = _filled(shown, low, high, self.height * dots_high)
        cells = filled.reshape(self.height, dots_high, self.width, dots_wide)
        bits = np.einsum("hawb,ab->hw", cells.astype(np.int32), self._glyphs.bits)
        free = self._owner == _NOBODY
        # A smoothed line has nothing under it: without color it would be lost in the raw curve.
        taken = bits * (free | (self._owner >= _DIM)) if dim else bits
        self._owner[free & (bits > 0)] = line + _DIM * dim
        self._bits |= taken

    def mark(self, row: int, column: int, line: int) -> None:
        """Draw the sign of a line in a cell, unless the cell has a sign."""
        if 0 <= row < self.height and 0 <= column < self.width:
            self._over.setdefault((row, column), (self._glyphs.markers[line], line))

    def _mark_border(self, row: int, columns: np.ndarray, sign: str, line: int) -> None:
        dots_wide = self._glyphs.bits.shape[1]
        for column in np.unique(np.flatnonzero(columns) // dots_wide).tolist():
            self._over.setdefault((row, column), (sign, line))

    def row_of(self, value: float, low: float, high: float) -> int:
        """Return the row of cells that a value lies in."""
        dots_high = self._glyphs.bits.shape[0]
        dots = self.height * dots_high
        return int(_dot_rows(np.array([value]), low, high, dots)[0]) // dots_high

    def upright(self, column: int) -> None:
        """Draw a vertical line, under everything else."""
        for row in range(self.height):
            if 0 <= column < self.width and not self._bits[row, column]:
                self._over.setdefault((row, column), (self._glyphs.upright, _CURSOR))

    def rows(self) -> list[Row]:
        """Return all cells; adjacent cells of one style are one piece of text."""
        codes, owners = self._signs(), self._owner.copy()
        for place, (sign, owner) in self._over.items():
            codes[place], owners[place] = ord(sign), owner
        found = []
        for row_signs, row_owners in zip(codes, owners, strict=True):
            text = row_signs.tobytes().decode("utf-32-le")
            ends = [*(np.flatnonzero(np.diff(row_owners)) + 1).tolist(), self.width]
            styles = row_owners[[0, *ends[:-1]]].tolist()
            starts = [0, *ends[:-1]]
            found.append(tuple((text[a:b], _style(s)) for a, b, s in zip(starts, ends, styles, strict=True)))
        return found

    def _signs(self) -> np.ndarray:
        """Return the code point of every cell."""
        if self._glyphs.bits.size > 1:
            drawn = _FIRST_BRAILLE + self._bits
        else:
            markers = np.array([ord(sign) for sign in self._glyphs.markers])
            drawn = np.where(self._owner >= _DIM, ord("."), markers[self._owner % _DIM % len(markers)])
        return np.where(self._bits > 0, drawn, _BLANK).astype("<u4")


def _style(owner: int) -> str:
    if owner in (_NOBODY, _CURSOR):
        return "" if owner == _NOBODY else "cursor"
    return f"line{owner}" if owner < _DIM else f"dim{owner - _DIM}"


def _dot_rows(values: np.ndarray, low: float, high: float, number: int) -> np.ndarray:
    """Return the row of dots of each value, from the top; -1 where there is none."""
    with np.errstate(invalid="ignore", over="ignore"):
        share = (values - low) / (high - low)
    known = np.isfinite(share)
    from_top = number - 1 - np.rint(np.where(known, share, 0).clip(0, 1) * (number - 1)).astype(np.int64)
    return np.where(known, from_top, -1)


def _filled(columns: CurveColumns, low: float, high: float, number: int) -> np.ndarray:
    """Return a mask of the dots, in `number` rows, that belong to the curve."""
    top, bottom = (_dot_rows(values, low, high, number) for values in (columns.high, columns.low))
    here = (top >= 0) & (bottom >= 0)
    through = columns.joined & here[:-1] & here[1:]
    falls = through & (top[1:] > bottom[:-1] + 1)
    rises = through & (bottom[1:] < top[:-1] - 1)
    first, last = top.copy(), bottom.copy()
    # Each of two adjacent columns goes half of the way, so that a line is one dot thick and has no holes.
    half = (bottom[:-1] + top[1:]) // 2
    last[:-1] = np.where(falls, half, last[:-1])
    first[1:] = np.where(falls, half + 1, first[1:])
    half = (top[:-1] + bottom[1:]) // 2
    first[:-1] = np.where(rises, np.minimum(first[:-1], half + 1), first[:-1])
    last[1:] = np.where(rises, np.maximum(last[1:], half), last[1:])
    steps = np.zeros((number + 1, len(here)), dtype=np.int32)
    places = np.flatnonzero(here)
    steps[first[places], places] += 1
    steps[last[places] + 1, places] -= 1
    return steps.cumsum(axis=0)[:number] > 0
