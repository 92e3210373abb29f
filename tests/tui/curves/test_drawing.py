"""Curves as text: what people see, without colours."""

import math
import time

import numpy as np
import pytest

from xtrain.tui.curves.canvas import ASCII, UNICODE, Curve, Glyphs, Line
from xtrain.tui.curves.drawing import Drawing, draw
from xtrain.tui.curves.viewport import Viewport


def curve(y: list[float] | np.ndarray, name: str = "loss", every: float = 1.0, *, dim: bool = False) -> Curve:
    values = np.asarray(y, dtype=float)
    return Curve(Line(name, every * np.arange(len(values)), values, dim))


def text(drawing: Drawing) -> str:
    return "\n".join("".join(part for part, _ in row).rstrip() for row in drawing.rows)


def cells(drawing: Drawing) -> list[tuple[str, str]]:
    """All signs with the names of their styles."""
    return [(sign, style) for row in drawing.rows for part, style in row for sign in part]


def test_a_falling_line() -> None:
    line = curve([4, 3, 2, 1, 0])
    assert text(draw([line], Viewport(), 28, 9, title="loss")).split("\n") == [
        "loss  0", "4 ┤⠑⠢⢄⣀", "  │    ⠉⠒⠤⣀", "2 ┤        ⠉⠒⠢⢄⣀", "  │             ⠑⠢⠤⣀", "  │                 ⠉⠒⠤⣀",
        "0 ┤                     ⠉⠑⠢⢄", "  └┬───────────┬───────────┬", "   0           2           4",
    ]  # fmt: skip
    assert text(draw([line], Viewport(), 28, 9, title="loss", glyphs=ASCII)).split("\n") == [
        "loss  0", "4 +**", "  |  ******", "  |        ****", "2 +            ******", "  |                  ****",
        "0 +                      ***", "  ++-----------+-----------+", "   0           2           4",
    ]  # fmt: skip


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize(("width", "height"), [(200, 50), (80, 24), (60, 20), (20, 5), (12, 3), (9, 2), (3, 1), (1, 1)])
@pytest.mark.parametrize("num_lines", [0, 1, 8])
def test_any_size_is_filled_exactly(glyphs: Glyphs, width: int, height: int, num_lines: int) -> None:
    rng = np.random.default_rng(0)
    curves = [curve(rng.normal(number, 1, 100), f"dataset{number}") for number in range(num_lines)]
    for view in (Viewport(), Viewport(log=True, smoothing=0.99, span=20, right=70, cursor=60)):
        drawing = draw(curves, view, width, height, title="loss by dataset", glyphs=glyphs)
        assert [sum(len(part) for part, _ in row) for row in drawing.rows] == [width] * height
        if glyphs is ASCII:
            assert text(drawing).isascii()


def test_no_size_at_all() -> None:
    assert draw([curve([1])], Viewport(), 0, 5, title="loss").rows == ()
    assert draw([curve([1])], Viewport(), 5, 0, title="loss").rows == ()


def test_small_ones_label_both_ends() -> None:
    rows = text(draw([curve([2.31, 2.39, 2.35])], Viewport(), 20, 5, title="loss")).split("\n")
    assert rows[0] == "loss  2.3500"
    assert rows[1].startswith("2.39 ┤") and rows[2].startswith("2.31 ┤")


def test_eight_lines_are_distinguished_by_their_signs() -> None:
    curves = [curve(np.full(50, float(number)), f"set{number}") for number in range(9)]
    drawing = draw(curves, Viewport(), 100, 24, title="loss by dataset")
    shown = text(drawing)
    for number, marker in enumerate(UNICODE.markers):
        assert f"{marker} set{number}" in shown
        on_line = [style for sign, style in cells(drawing)[200:] if sign == marker]
        assert len(on_line) >= 3 and set(on_line) == {f"line{number}"}
    assert "set8" not in shown and "1 more lines not drawn" in shown


def test_plain_signs_draw_each_line_with_its_own() -> None:
    drawing = draw([curve([0] * 9, "a"), curve([5] * 9, "b")], Viewport(), 40, 10, title="x", glyphs=ASCII)
    rows = text(drawing).split("\n")
    assert rows[0] == "x  * a 0  o b 5"
    assert rows[1].strip(" 5+|") == "o" * 37 and rows[7].strip(" 0+|") == "*" * 37


def test_a_lone_point_is_seen() -> None:
    assert "●" in text(draw([curve([2.5])], Viewport(), 40, 8, title="loss"))
    lone = curve([math.nan] * 30 + [2.5] + [math.nan] * 30)
    assert "●" in text(draw([lone], Viewport(), 40, 8, title="loss"))


def test_a_constant_line_lies_in_the_middle() -> None:
    drawing = draw([curve([3.0] * 50)], Viewport(), 40, 9, title="lr")
    drawn = [number for number, row in enumerate(drawing.rows) if any(style == "line0" for _, style in row)]
    assert len(drawn) == 1 and 3 <= drawn[0] <= 5
    for value in (0.0, -4.0, 1e-12, 1e300):
        assert "line0" in {style for _, style in cells(draw([curve([value] * 9)], Viewport(), 40, 9, title="lr"))}


def test_nothing_to_draw_is_said() -> None:
    assert "no values yet" in text(draw([], Viewport(), 40, 6, title="loss"))
    assert "no values yet" in text(draw([curve([])], Viewport(), 40, 6, title="loss"))
    assert "no values here" in text(draw([curve([math.nan, math.inf])], Viewport(), 40, 6, title="loss"))
    assert "no values here" in text(draw([curve([-1, 0])], Viewport(log=True), 40, 6, title="loss"))


def test_no_number_breaks_it() -> None:
    wild = curve([1e308, -1e308, math.nan, math.inf, -math.inf, 5e-324, 0, 1])
    for view in (Viewport(), Viewport(log=True), Viewport(smoothing=0.9), Viewport(log=True, smoothing=0.999)):
        assert len(draw([wild], view, 60, 12, title="loss").rows) == 12


def test_a_gap_is_empty() -> None:
    values = np.ones(60)
    values[20:40] = math.nan
    drawing = draw([curve(values)], Viewport(), 68, 8, title="loss")
    row = next(row for row in drawing.rows if any(style == "line0" for _, style in row))
    drawn = "".join(part for part, _ in row)[drawing.left :]
    assert set(drawn[:20]) != {" "} and " " not in drawn[:20]
    assert set(drawn[22:39]) == {" "}
    assert " " not in drawn[42:]


def test_a_logarithmic_scale_says_what_it_leaves_out() -> None:
    drawing = draw([curve([100, 10, 0, -1, 1])], Viewport(log=True), 50, 12, title="loss")
    assert text(drawing).startswith("loss  log · 2 ≤ 0 left out  1")
    labels = [row[0][0].strip(" ┤│") for row in drawing.rows[1:-2]]
    assert [label for label in labels if label] == ["100", "10", "1"]


def test_smoothing_lies_before_what_it_is_the_average_of() -> None:
    noisy = curve(np.random.default_rng(0).normal(3, 1, 4000))
    plain = {style for _, style in cells(draw([noisy], Viewport(span=300), 60, 12, title="loss"))}
    assert "line0" in plain and "dim0" not in plain
    drawing = draw([noisy], Viewport(smoothing=0.99), 60, 12, title="loss")
    styles = [style for _, style in cells(drawing)]
    assert styles.count("dim0") > styles.count("line0") > 50
    assert "smoothed 0.99" in text(drawing)
    # In a cell of the smooth line there is none of the other: it is seen without colours.
    dots = [(ord(sign) - 0x2800).bit_count() for sign, style in cells(drawing) if style == "line0"]
    assert max(dots) <= 4


def test_the_cursor_reads_all_digits() -> None:
    first, second = curve([1.5, 1.3476035594940186, 1.25], "a"), curve([0.1, math.nan, 0.3], "b")
    drawing = draw([first, second], Viewport(cursor=1.0), 80, 10, title="loss")
    assert text(drawing).startswith("loss  step 1  ● a 1.3476035594940186  ○ b 0.1 at 0")
    assert any(style == "cursor" for sign, style in cells(drawing) if sign == "│")


def test_a_part_is_drawn_to_its_own_scale() -> None:
    falling = curve(np.concatenate((np.linspace(100, 3, 100), np.linspace(3, 2, 900))))
    shown = text(draw([falling], Viewport(span=500), 60, 12, title="loss"))
    assert "100" not in shown and "2.2" in shown and "zoomed" in shown
    assert "500" in shown and "900" in shown


def test_places_of_columns() -> None:
    drawing = draw([curve(np.arange(101))], Viewport(), 60, 12, title="loss")
    assert drawing.seen == (0, 100)
    assert drawing.place_at(0) == pytest.approx(0, abs=2) and drawing.place_at(10_000) == 100
    middle = drawing.left + drawing.width // 2
    assert drawing.place_at(middle) == pytest.approx(50, abs=2)


def test_names_cannot_steer_the_terminal() -> None:
    shown = text(draw([curve([1], "a\x1b[2J"), curve([2], "b")], Viewport(), 60, 8, title="x\x07"))
    assert "\x1b" not in shown and "\x07" not in shown


def test_units_of_both_axes() -> None:
    memory = draw([curve(np.linspace(1, 8, 50) * 2**30, every=1e6)], Viewport(), 70, 14, title="memory", unit="bytes",
                  x_label="tokens")  # fmt: skip
    shown = text(memory)
    assert "GiB" in shown and "20M" in shown and "tokens" in shown


def test_a_million_points_are_drawn_in_milliseconds() -> None:
    values = np.random.default_rng(0).normal(3, 0.2, 1_000_000)
    values[500_000] = 14
    long = curve(values)

    def seconds() -> float:
        begin = time.thread_time()
        drawing = draw([long], Viewport(), 150, 20, title="loss")
        taken = time.thread_time() - begin
        assert any(style == "dim0" for _, style in drawing.rows[1])  # the spike reaches the top
        return taken

    def passes() -> float:
        begin = time.thread_time()
        values.cumsum()
        return time.thread_time() - begin

    # Processors differ by a factor of four: a sum over the points, one after the other, takes a millisecond or more.
    assert min(seconds() for _ in range(10)) < 4 * min(passes() for _ in range(10))


def test_a_dense_curve_is_its_median_over_the_band_of_its_values() -> None:
    values = np.where(np.arange(6000) % 3 == 0, 9.0, 3.0)
    values[::7] = math.nan
    median = curve(values).medians(0, 5999, 100)
    assert len(median) == 100 and set(median.y) == {3.0} and 0 <= median.x[0] < median.x[-1] <= 5999
    assert math.isnan(curve([math.nan] * 9).medians(0, 8, 1).y[0])
    assert curve([1, 2, 3, 4, 9]).medians(0, 4, 1).y == [3.0]
    drawing = draw([curve(values)], Viewport(), 60, 12, title="loss")
    styles = [{style for _, style in row if style} for row in drawing.rows[drawing.heads : -2]]
    assert "line0" in styles[-1] and "dim0" in styles[0] and "line0" not in styles[0]


@pytest.mark.parametrize("log", [False, True])
def test_values_outside_the_scale_are_marked_at_the_border(log: bool) -> None:
    values = 3 + np.sin(np.arange(120.0) / 9)
    values[60], values[90] = 9e9, 1e-9
    whole = draw([curve(values)], Viewport(log=log), 60, 12, title="loss")
    cut = draw([curve(values)], Viewport(log=log, fit="percentile"), 60, 12, title="loss")
    assert "↑" not in text(whole) and text(cut).split("\n")[cut.heads].count("↑") == 1
    assert text(cut).split("\n")[-3].count("↓") == 1 and "1 to 99%" in text(cut)
    assert whole.span is not None and whole.span[1] > cut.span[1] > (0 if log else 3.9)  # type: ignore[index]
    held = Viewport(log=log, fit="percentile").refitted(cut.span)
    same = draw([curve(values)], held, 60, 12, title="loss")
    assert same.span == cut.span and "fixed" in text(same)
    assert "^" in text(draw([curve(values)], held, 60, 12, title="loss", glyphs=ASCII))
    assert held.refitted(cut.span) == Viewport(log=log)
    assert held.toggled_log() == Viewport(log=not log)  # limits of one scale are none of the other


def test_a_line_has_the_color_that_it_is_given() -> None:
    lines = [Curve(Line("a", np.arange(9.0), np.arange(9.0), color=5)), curve([8] * 9, "b")]
    drawn = draw(lines, Viewport(), 60, 12, title="loss")
    assert {"line5", "line1"} <= {style for _, style in cells(drawn)} and "△ a" in text(drawn) and "○ b" in text(drawn)


def test_lines_in_the_background_are_neither_counted_nor_named() -> None:
    behind = [curve([9, 8, 7.5 + number / 300], f"old{number}", dim=True) for number in range(250)]
    front = [curve([4, 3, number / 10], f"new{number}") for number in range(8)]
    drawn = draw([*front[:1], *behind, *front[1:]], Viewport(), 90, 20, title="loss")
    head = "".join(part for row in drawn.rows[: drawn.heads] for part, _ in row)
    assert all(f"new{number}" in head for number in range(8)) and "old" not in head and "more" not in head
    styles = {style for _, style in cells(drawn)}
    assert {f"line{number}" for number in range(8)} <= styles and any(style.startswith("dim") for style in styles)
    assert "cursor" not in styles
    assert any(style.startswith("dim") for _, style in drawn.rows[drawn.heads]), "the axis holds them too"
