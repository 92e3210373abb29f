"""Dots in the cells of a terminal: braille where it can be shown, one sign a cell where not."""

import numpy as np
from attrs import frozen

from xtrain.tui.curves.curve import CurveColumns

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
