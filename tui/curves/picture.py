"""Curves as SVG: plots of reports, and those that the dashboard saves."""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, Final

import numpy as np
from attrs import evolve, field, frozen

from xtrain.text.units import printable
from xtrain.tui.curves.axis import Unit, labels, log_ticks, one_label, own_labels, short_label, ticks
from xtrain.tui.curves.canvas import MOST_LINES, Curve, Line
from xtrain.tui.curves.drawing import extent_of, value_range
from xtrain.tui.curves.viewport import Extent, Viewport

# Size of a plot in its own units, which a page scales; and the borders around its curves.
WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 8, 8, 36
_LABEL_SIGNS = 7  # as many of a usual font fit left of the axis; longer labels are written narrower
# Pixels of a column in which the points of a dense curve are summed up.
_COLUMN = 2
# Times the range of the percentiles from which on a plot shows that range alone.
_SPIKED = 4
# Colors of lines on light and dark ground, with the hues of the dashboard.
COLORS: Final = (
    ("#0b57d0", "#7aa2f7"), ("#b45309", "#e0af68"), ("#15803d", "#73c991"), ("#b3261e", "#f7768e"),
    ("#6a3fb5", "#bb9af7"), ("#0e7490", "#7dcfff"), ("#57534e", "#c8ccd4"), ("#be185d", "#ff9ecf"),
)  # fmt: skip
STYLE: Final = "\n".join(
    (
        "svg text { font-family: system-ui, sans-serif; font-size: 12px; fill: currentColor; }",
        ".axis { stroke: currentColor; opacity: 0.2; } .curve { fill: none; stroke-width: 1.6; }",
        ".band { stroke: none; opacity: 0.22; } .dim { opacity: 0.25; } .level { stroke-dasharray: 5 4; }",
        # A viewer that does not know `light-dark` takes the color of the light ground.
        *(f".c{n} {{ color: {light}; color: light-dark({light}, {dark}); }}" for n, (light, dark) in enumerate(COLORS)),
        ".curve, .level { stroke: currentColor; } .band, .dot { fill: currentColor; }",
    )
)
"""CSS of plots, for a page with `color-scheme: light dark`."""


@frozen(kw_only=True)
class Level:
    """Value that is drawn across a plot, such as a planned one. color: number of its color; None: the color of text."""

    name: str
    value: float
    color: int | None = None


@frozen(kw_only=True)
class Picture:
    """Plot as SVG. view: the view that is drawn. points: the drawn points of every line, to read single values."""

    svg: str
    view: Viewport
    points: dict[str, Any] = field(repr=False)


def picture(
    lines: Sequence[Line],
    view: Viewport | None = None,
    *,
    title: str,
    x_label: str = "step",
    unit: Unit = "number",
    x_unit: Unit = "count",
    levels: Sequence[Level] = (),
) -> Picture | None:
    """Return the plot of some lines; None without a value. Lines beyond MOST_LINES are in the background.

    view: default: all values, or where spikes would flatten everything else, the percentiles of a `percentile` scale.
    """
    view, chosen = view or Viewport(), view is not None
    curves = [Curve(line) for line in lines]
    curves = [curve.positive if view.log else curve for curve in curves if len(curve)]
    extent = extent_of(curves)
    if extent is None:
        return None
    low, high = view.seen(extent)
    seen = (low, high) if high > low else (low - 0.5, high + 0.5)
    number = (WIDTH - LEFT - RIGHT) // _COLUMN
    ends = [curve.columns(*seen, number, log=view.log) for curve in curves]
    heights = [math.log10(each.value) if view.log else each.value for each in levels if each.value > 0 or not view.log]
    span = value_range(ends, curves, view, seen)
    if span is None:
        return None
    if not chosen:
        most = evolve(view, fit="percentile")
        narrow = value_range(ends, curves, most, seen)
        if narrow is not None and span[1] - span[0] > _SPIKED * (narrow[1] - narrow[0]):
            view, span = most, narrow
    if view.fit == "auto" and heights:
        span = min(span[0], *heights), max(span[1], *heights)
    plot = _Plot(seen, span, view, unit)
    drawn = [_points(curve, view, seen, number) for curve in curves]
    places = [curve.line.number(place) for place, curve in enumerate(curves)]
    hidden = [curve.line.dim or place >= MOST_LINES for place, curve in enumerate(curves)]
    parts = [*plot.axes(x_label, x_unit), *plot.levels(levels)]
    order = sorted(range(len(curves)), key=lambda place: (not hidden[place], -place))
    for place in order:
        parts += plot.line(drawn[place], "dim" if hidden[place] else f"c{places[place]}", curves[place].line.name)
    spoken = f"{_text(title)} by {_text(x_label)}"
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{spoken}"'
    shown = [place for place in range(len(curves)) if not hidden[place]]
    points = {
        "x": x_label, "left": LEFT, "width": WIDTH - LEFT - RIGHT, "seen": seen,
        "lines": [
            {"name": printable(curves[place].line.name), "color": places[place], **drawn[place],
             "last": "" if (last := curves[place].last) is None else one_label(last, unit)}
            for place in shown
        ],
    }  # fmt: skip
    return Picture(
        svg=f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>', view=view, points=points
    )


def standalone(
    lines: Sequence[Line], view: Viewport | None = None, *, title: str, unit: Unit = "number", **options: Any
) -> str | None:
    """Return the plot as the text of an SVG file, with a title and the names of its lines; None without a value."""
    found = picture(lines, view, title=title, unit=unit, **options)
    if found is None:
        return None
    named, x = [f'<text x="{LEFT}" y="16" font-weight="bold">{_text(title)}</text>'], LEFT
    rows = 0
    for each in found.points["lines"]:
        said = f"{each['name']} {each['last']}"
        wide = 22 + 7 * len(said)
        if not rows or x + wide > WIDTH:
            rows, x = rows + 1, LEFT
        y = 16 + 18 * rows
        named.append(f'<circle class="dot c{each["color"]}" cx="{x + 4}" cy="{y - 4}" r="4"/>')
        named.append(f'<text x="{x + 13}" y="{y}">{_text(said)}</text>')
        x += wide
    above = 26 + 18 * rows
    inner = found.svg.replace("<svg ", f'<svg y="{above}" width="{WIDTH}" height="{HEIGHT}" ', 1)
    style = f":root {{ color-scheme: light dark; color: #1b1c1f; color: light-dark(#1b1c1f, #d5d9e0); }}\n{STYLE}"
    ground = '<rect width="100%" height="100%" fill="#fff" style="fill: light-dark(#fff, #15171c)"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{2 * (HEIGHT + above)}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT + above}"><style>{style}</style>{ground}{"".join(named)}{inner}</svg>\n'
    )


def _text(text: str) -> str:
    """Return a text of a file or person as XML, which takes no control characters at all."""
    return escape(printable(text).replace("\n", " "))


def _points(curve: Curve, view: Viewport, seen: Extent, number: int) -> dict[str, list[float | None]]:
    """Return the drawn points: all of them, or the medians of columns with the least and largest values of each."""
    if view.smoothing and len(curve) > 1:
        curve = curve.smoothed(view.smoothing, *seen, number)
    first, end = int(np.searchsorted(curve.x, seen[0])), int(np.searchsorted(curve.x, seen[1], "right"))
    if end - first <= 2 * number:
        return {"x": _numbers(curve.x[first:end]), "y": _numbers(curve.y[first:end])}
    medians = curve.medians(*seen, number)
    ends = curve.columns(*seen, number)
    places = np.clip(((medians.x - seen[0]) / (seen[1] - seen[0]) * number).astype(int), 0, number - 1)
    values = {"x": medians.x, "y": medians.y, "low": ends.low[places], "high": ends.high[places]}
    return {name: _numbers(each) for name, each in values.items()}


def _numbers(values: np.ndarray) -> list[float | None]:
    """Return values with six digits, whole ones exactly; None where they are not finite."""
    return [
        None if not math.isfinite(value) else int(value) if value == int(value) else float(f"{value:.6g}")
        for value in values.tolist()
    ]


@frozen
class _Plot:
    """Place of values in a plot."""

    seen: Extent
    span: Extent
    view: Viewport
    unit: Unit

    def x(self, value: float) -> float:
        return LEFT + (value - self.seen[0]) / (self.seen[1] - self.seen[0]) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the height of a value, at most at the border."""
        if self.view.log:
            value = math.log10(value) if value > 0 else -math.inf
        share = (value - self.span[0]) / (self.span[1] - self.span[0])
        return HEIGHT - BOTTOM - min(1.0, max(0.0, share)) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_label: str, x_unit: Unit) -> Iterator[str]:
        low, high = (10**end for end in self.span) if self.view.log else self.span
        values = log_ticks(low, high, 6, self.unit) if self.view.log else ticks(low, high, 6, self.unit)
        said = [short_label(value, self.unit) for value in values] if self.view.log else labels(values, self.unit)
        for value, label in zip(values, said, strict=True):
            y = self.y(value)
            yield f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            narrow = f' textLength="{LEFT - 8}" lengthAdjust="spacingAndGlyphs"' if len(label) > _LABEL_SIGNS else ""
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end"{narrow}>{label}</text>'
        values = ticks(*self.seen, 5, x_unit)
        for value, label in zip(values, own_labels(values, x_unit), strict=True):
            x = self.x(value)
            anchor = "end" if x > WIDTH - 30 else "middle"
            yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{label}</text>'
        yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end" opacity="0.7">{_text(x_label)}</text>'
        yield f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'

    def levels(self, levels: Iterable[Level]) -> Iterator[str]:
        for level in levels:
            y, color = self.y(level.value), "" if level.color is None else f" c{level.color}"
            said = f"{_text(level.name)} {one_label(level.value, self.unit)}"
            yield f'<path class="level{color}" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"><title>{said}</title></path>'
            above = y - 4 if y > TOP + 16 else y + 14
            yield f'<text x="{WIDTH - RIGHT}" y="{above:.1f}" text-anchor="end" opacity="0.8">{said}</text>'

    def line(self, points: dict[str, list[float | None]], style: str, name: str) -> Iterator[str]:
        """Yield the band of a line, the line, and the signs of values outside the scale."""
        xs, ys = points["x"], points["y"]
        if "low" in points:
            top, bottom = points["high"], points["low"]
            for stretch in _stretches(top):
                edge = [(xs[n], top[n]) for n in stretch] + [(xs[n], bottom[n]) for n in reversed(stretch)]
                yield f'<path class="band {style}" d="M{self._path(edge)}Z"/>'
        title = f"<title>{_text(name)}</title>"
        for stretch in _stretches(ys):
            if len(stretch) == 1:
                x, y = self._at(xs[stretch[0]], ys[stretch[0]])
                yield f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">{title}</circle>'
                continue
            path = self._path([(xs[n], ys[n]) for n in stretch])
            yield f'<path class="curve {style}" d="M{path}">{title}</path>'
        if self.view.fit != "auto":
            yield from self._outside(points, style)

    def _outside(self, points: dict[str, list[float | None]], style: str) -> Iterator[str]:
        low, high = (10**end for end in self.span) if self.view.log else self.span
        for x, least, most in zip(
            points["x"], points.get("low", points["y"]), points.get("high", points["y"]), strict=True
        ):
            if x is not None and most is not None and most > high:
                yield f'<path class="dot {style}" d="M{self.x(x):.1f} {TOP}l4 7h-8Z"/>'
            if x is not None and least is not None and least < low:
                yield f'<path class="dot {style}" d="M{self.x(x):.1f} {HEIGHT - BOTTOM}l4 -7h-8Z"/>'

    def _at(self, x: float | None, y: float | None) -> tuple[float, float]:
        assert x is not None and y is not None
        return self.x(x), self.y(y)

    def _path(self, points: Sequence[tuple[float | None, float | None]]) -> str:
        return "L".join(f"{x:.1f} {y:.1f}" for x, y in (self._at(*point) for point in points))


def _stretches(values: Sequence[float | None]) -> Iterator[list[int]]:
    """Yield the places of adjacent values that are known."""
    found: list[int] = []
    for place, value in enumerate(values):
        if value is not None:
            found.append(place)
        elif found:
            yield found
            found = []
    if found:
        yield found
