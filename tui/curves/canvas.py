"""Curves prepared for drawing, dots in terminal cells, and the viewport of a plot."""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from attrs import evolve, frozen

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


Span = tuple[str, str]
"""Text, and the name of its style: `axis`, `title`, `note`, `cursor`, `line3`, `dim3` or empty."""
Row = tuple[Span, ...]

# The bit of each of the 4 x 2 dots of a braille sign.
_BRAILLE = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.int32)
_NOBODY, _DIM, _CURSOR = -1, 100, 200
_BLANK, _FIRST_BRAILLE = ord(" "), 0x2800


@frozen(kw_only=True)
class Glyphs:
    """Signs of a plot. markers: one for each line; bits: of the dots in one cell."""

    markers: str
    bits: np.ndarray
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
    upright="|",
    upright_tick="+",
    corner="+",
    level="-",
    level_tick="+",
    at_most="<=",
    more="..",
    apart=", ",
)
MOST_LINES = len(UNICODE.markers)


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
        """Draw a curve between the values `low` (lowest dot) and `high`; lines in the background come last."""
        dots_high, dots_wide = self._glyphs.bits.shape
        filled = _filled(columns, low, high, self.height * dots_high)
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


SMOOTHINGS = (0.0, 0.9, 0.99, 0.999)
# Zooming in ends where a millionth of the run is left, or one step.
_MOST_ZOOM = 1e6

Extent = tuple[float, float]


@frozen(kw_only=True)
class Viewport:
    """The reader's choices in a plot. All positions are in units of its x axis."""

    log: bool = False
    smoothing: float = 0.0
    """Weight that the moving average keeps per step; 0: no average is drawn."""
    span: float | None = None
    """Width of the visible range; None: everything."""
    right: float | None = None
    """Right end of the visible range; None: the newest point, also as points arrive."""
    cursor: float | None = None
    """Position of the cursor."""

    def seen(self, extent: Extent) -> Extent:
        """Return the visible range of `extent`."""
        low, high = extent
        if self.span is None or not high > low:
            return extent
        span = min(self.span, high - low)
        right = high if self.right is None else min(high, max(self.right, low + span))
        return right - span, right

    def toggled_log(self) -> "Viewport":
        """Return the viewport with logarithmic instead of linear values, or back."""
        return evolve(self, log=not self.log)

    def smoother(self) -> "Viewport":
        """Return the viewport with the next smoothing; none after the strongest."""
        place = SMOOTHINGS.index(self.smoothing) if self.smoothing in SMOOTHINGS else 0
        return evolve(self, smoothing=SMOOTHINGS[(place + 1) % len(SMOOTHINGS)])

    def whole(self) -> "Viewport":
        """Return the viewport of the whole run, which follows new points."""
        return evolve(self, span=None, right=None)

    def zoomed(self, factor: float, extent: Extent, about: float | None = None) -> "Viewport":
        """Return the viewport zoomed in by `factor` (below 1: out).

        `about` keeps its place. Default: the cursor, else the newest point if it is visible, else the middle.
        """
        low, high = self.seen(extent)
        least = max(min(1.0, extent[1] - extent[0]), (extent[1] - extent[0]) / _MOST_ZOOM)
        span = max(least, (high - low) / factor)
        if not high > low:
            return self
        if span >= (extent[1] - extent[0]) * (1 - 1e-9):
            return self.whole()
        if about is None:
            about = self.cursor if self.cursor is not None and low <= self.cursor <= high else None
        if about is None:
            if self.right is None:
                return evolve(self, span=span)
            about = (low + high) / 2
        return evolve(self, span=span)._ending_at(about + (high - about) * span / (high - low), extent)

    def panned(self, share: float, extent: Extent) -> "Viewport":
        """Return the viewport moved right by a share of the visible range; left if negative."""
        low, high = self.seen(extent)
        if self.span is None:
            return self
        return self._ending_at(high + share * (high - low), extent)

    def _ending_at(self, right: float, extent: Extent) -> "Viewport":
        low, high = extent
        right = max(right, low + (self.span or 0))
        return evolve(self, right=None if right >= high else right)

    def pointing(self, place: float | None, extent: Extent) -> "Viewport":
        """Return the viewport with the cursor at `place`, or without one; the visible range follows the cursor."""
        if place is None:
            return evolve(self, cursor=None)
        place = min(max(place, extent[0]), extent[1])
        moved = evolve(self, cursor=place)
        low, high = self.seen(extent)
        if self.span is None or low <= place <= high:
            return moved
        return moved._ending_at(place if place > high else place + (high - low), extent)

    def describe(self) -> tuple[str, ...]:
        """Return the choices that change how a curve looks, in words."""
        words: tuple[tuple[bool, str], ...] = (
            (self.log, "log"),
            (self.smoothing > 0, f"smoothed {self.smoothing:g}"),
            (self.span is not None, "zoomed"),
        )
        return tuple(word for said, word in words if said)
