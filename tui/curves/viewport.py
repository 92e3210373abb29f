"""Viewport of a plot: the reader's choices of scale, smoothing, range and cursor."""

from typing import Literal

from attrs import evolve, frozen

SMOOTHINGS = (0.0, 0.9, 0.99, 0.999)
# Zooming in ends where a millionth of the run is left, or one step.
_MOST_ZOOM = 1e6

Extent = tuple[float, float]
Fit = Literal["auto", "percentile", "fixed"]
# Percentiles of the visible values that the scale `percentile` covers.
PERCENTILES = (1, 99)


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
    fit: Fit = "auto"
    """Scale of the values: all visible values, PERCENTILES of them, or `limits`."""
    limits: Extent | None = None
    """Ends of a fixed scale, as decimal logarithms if `log`."""

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
        return evolve(self, log=not self.log, **({"fit": "auto", "limits": None} if self.fit == "fixed" else {}))

    def refitted(self, drawn: Extent | None) -> "Viewport":
        """Return the viewport with the next scale of values. drawn: ends of the scale now, which a fixed one keeps."""
        if self.fit == "auto":
            return evolve(self, fit="percentile")
        if self.fit == "percentile" and drawn is not None:
            return evolve(self, fit="fixed", limits=drawn)
        return evolve(self, fit="auto", limits=None)

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
            (self.fit == "percentile", f"{PERCENTILES[0]} to {PERCENTILES[1]}%"),
            (self.fit == "fixed", "fixed"),
        )
        return tuple(word for said, word in words if said)
