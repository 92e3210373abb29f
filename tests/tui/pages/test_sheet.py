"""Rows of text in cells of a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from xtrain.tui.board.app import in_ascii
from xtrain.tui.pages.sheet import (
    CURSOR,
    CUT,
    DEAD,
    DONE,
    DOWN,
    EIGHTHS,
    FOLDED,
    LINE,
    OPEN,
    OVER_SIGN,
    SHADES,
    SILENT_SIGN,
    STUCK_SIGN,
    UNDER_WAY,
    UP,
    WALL,
    bar,
    beside,
    block,
    cells,
    cut,
    fit,
    joined,
    left,
    plain,
    restyled,
    right,
    row,
    rule,
    window,
    wrapped,
)

TEXTS = st.text(alphabet=st.sampled_from("abc 猫é…\t\n\x1b"), max_size=30)


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["", "dim"])), max_size=5), st.integers(0, 40))
def test_a_row_is_as_wide_as_it_is_asked_to_be(spans: list[tuple[str, str]], width: int) -> None:
    assert cells(fit(row(*spans), width)) == width


def test_what_is_cut_says_so() -> None:
    assert plain(fit(row("abc", ("def", "dim")), 5)) == "abcd…"
    assert plain(fit(row("abc", ("def", "dim")), 6)) == "abcdef"
    assert fit(row("abc", ("def", "dim")), 4) == (("abc…", ""),)
    assert cut("猫猫猫", 4) == "猫 …" and cell_len(cut("猫猫猫", 4)) == 4
    assert cut("abc", 0) == "" and in_ascii(cut("abcdef", 3)) == "ab~"


def test_texts_of_others_cannot_steer_the_terminal() -> None:
    assert plain(row("a\x1b[31mb\nc")) == "a\ufffd[31mb c"


def test_columns() -> None:
    assert left("ab", 4) == "ab  " and right("ab", 4) == "  ab"
    assert left("abcdef", 4) == "abc…" and right("abcdef", 4) == "abc…"


def test_blocks_stand_beside_each_other() -> None:
    first, second = block([row("a")], 3, 2), block([row("b"), row("c"), row("d")], 2, 2)
    assert [plain(each) for each in beside(first, second)] == ["a   │ b ", "    │ c "]


@given(st.text(alphabet="ab 猫\n", max_size=80), st.integers(2, 20))
def test_wrapped_lines_hold_every_word_and_fit(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_wrapped_lines_are_indented() -> None:
    assert wrapped("name = one two three", 10, "  ") == ["name = one", "  two", "  three"]


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0, "    "), (None, "    "), (1.0, "████"), (2.0, "████"), (0.5, "██  "), (1e-9, "▏   "), (0.28, "█▏  ")],
)
def test_bars(share: float | None, shown: str) -> None:
    assert bar(share, 4) == shown


def test_a_rule_leaves_out_the_note_before_the_title() -> None:
    assert plain(rule("rank 3", 16, note="slow")) == "rank 3 ──── slow"
    assert plain(rule("rank 3", 9, note="slow")) == "rank 3 ──"
    assert plain(rule("a long title", 6)) == "a lon…"


@pytest.mark.parametrize(
    ("count", "height", "top", "cursor", "first"),
    [(10, 4, 0, 0, 0), (10, 4, 0, 5, 2), (10, 4, 5, 3, 3), (10, 4, 9, 9, 6), (3, 4, 2, 2, 0), (0, 4, 0, 0, 0)],
)
def test_the_window_follows_the_cursor(count: int, height: int, top: int, cursor: int, first: int) -> None:
    assert window(count, height, top, cursor) == first


def test_empty_parts_leave_no_dot() -> None:
    assert joined(["a", "", "b"]) == "a · b"
    assert in_ascii(joined(["a", "b"])) == "a - b"


def test_the_cursor_keeps_the_style_below_it() -> None:
    assert restyled((("a", "dim"), ("b", "")), "cursor") == (("a", "dim cursor"), ("b", "cursor"))


def test_signs_differ_in_shape() -> None:
    states = [DEAD, STUCK_SIGN, SILENT_SIGN, OVER_SIGN, " ", *SHADES]
    for shapes in (
        states,
        [in_ascii(sign) for sign in states],
        [in_ascii(sign) for sign in (UNDER_WAY, DONE, CURSOR)],
    ):
        assert len(set(shapes)) == len(shapes) and all(cell_len(sign) == 1 for sign in shapes)
    for sign in (DOWN, UP, OPEN, FOLDED, CUT, LINE, WALL, *EIGHTHS):
        assert in_ascii(sign).isascii() and in_ascii(sign) != "?"
