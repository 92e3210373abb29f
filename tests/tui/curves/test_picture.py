"""Curves as SVG: what is drawn, where, and what a reader of values gets."""

import math
import re
import xml.dom.minidom

import numpy as np
import pytest

from xtrain.tui.curves.canvas import Line
from xtrain.tui.curves.picture import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Level, picture, standalone
from xtrain.tui.curves.viewport import Viewport


def line(y: list[float] | np.ndarray, name: str = "loss", **options) -> Line:
    return Line(name, np.arange(len(y), dtype=float), np.asarray(y, dtype=float), **options)


def paths(svg: str, style: str = "curve c0") -> list[list[tuple[float, float]]]:
    found = re.findall(rf'class="{style}" d="M([^"Z]+)', svg)
    return [[tuple(map(float, point.split())) for point in path.split("L")] for path in found]


def test_corners_of_the_values_are_corners_of_the_plot() -> None:
    found = picture([line([1, 3, 2])], title="loss")
    assert found is not None
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    assert paths(found.svg) == [[(LEFT, bottom), ((LEFT + right) / 2, TOP), (right, (TOP + bottom) / 2)]]
    assert found.points["lines"] == [{"name": "loss", "color": 0, "x": [0, 1, 2], "y": [1, 3, 2], "last": "2"}]


def test_a_label_that_is_longer_than_the_margin_is_written_narrower() -> None:
    found = picture([line([1_300_000_000, 1_300_030_000])], title="memory_bytes", unit="bytes")
    short = picture([line([1, 3])], title="loss")
    assert found is not None and short is not None
    said = re.findall(rf'text-anchor="end" textLength="{LEFT - 8}" lengthAdjust="spacingAndGlyphs">([^<]+)<', found.svg)
    assert len(said) >= 2 and all(label.endswith("GiB") and len(label) > 7 for label in said)
    assert "textLength" not in short.svg


def test_gaps_and_lone_points() -> None:
    found = picture([line([1, math.nan, 3, 2, math.inf])], title="loss")
    assert found is not None and found.svg.count("<circle") == 1
    assert [len(path) for path in paths(found.svg)] == [2]
    assert found.points["lines"][0]["y"] == [1, None, 3, 2, None]


def test_without_values_there_is_no_plot() -> None:
    for lines in ([], [line([])], [line([math.nan])]):
        assert picture(lines, title="loss") is None and standalone(lines, title="loss") is None
    assert picture([line([-1, 0])], Viewport(log=True), title="loss") is None


def test_a_dense_curve_is_a_median_over_a_band() -> None:
    values = np.where(np.arange(50_000) % 4 == 0, 9.0, 3.0)
    found = picture([line(values)], title="loss")
    assert found is not None and len(found.svg) < 20_000
    points = found.points["lines"][0]
    assert set(points["y"]) == {3} and set(points["low"]) == {3} and set(points["high"]) == {9}
    assert 'class="band c0"' in found.svg


def test_planned_values_are_within_the_scale() -> None:
    found = picture([line([1, 2])], title="memory_bytes", levels=[Level(name="planned", value=8.0)])
    assert found is not None and 'class="level" d="M58 8.0H' in found.svg and "planned 8" in found.svg
    log = picture([line([1, 2])], Viewport(log=True), title="x", levels=[Level(name="planned", value=-1.0)])
    assert log is not None


@pytest.mark.parametrize("view", [None, Viewport(), Viewport(log=True), Viewport(smoothing=0.99), Viewport(span=50),
                                  Viewport(fit="percentile"), Viewport(fit="fixed", limits=(0.0, 1.0))])  # fmt: skip
def test_every_view_is_valid_xml(view: Viewport | None) -> None:
    lines = [
        line(2 + np.sin(np.arange(5000) / 90), f"a\x00<b>\ud800&\uffff{number}", color=number) for number in range(8)
    ]
    found = standalone([*lines, line([1.0] * 9, "behind", dim=True)], view, title="</svg><script>\x1b")
    assert found is not None
    document = xml.dom.minidom.parseString(found.encode())
    assert not document.getElementsByTagName("script") and len(document.getElementsByTagName("b")) == 0
    assert all(f'class="dot c{number}"' in found for number in range(8))
