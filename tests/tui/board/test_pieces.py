"""Lines that fit, whatever there is to say: the tab line, the header and the keys."""

from pathlib import Path

import pytest
from rich.cells import cell_len

from xtrain.records.training_events import RunStartEvent
from xtrain.tui.board.head import Piece, head, line, tabs
from xtrain.tui.board.help import app_keys, hint
from xtrain.tui.board.terminal import NUMBERS, pane_classes
from xtrain.tui.model.board import Alert, Board
from xtrain.tui.model.life import Life
from xtrain.tui.state import RunState


def test_of_pieces_that_do_not_fit_the_lightest_are_left_out():
    pieces = [Piece("heavy", weight=3), Piece("light", weight=1), Piece("middle", weight=2)]
    assert line(pieces, 40).plain == " heavy  light  middle"
    assert line(pieces, 20).plain == " heavy  middle"
    assert line(pieces, 7).plain == " heavy"
    assert line(pieces, 4).plain == " he…"


def test_of_equal_pieces_the_last_goes_first():
    assert line([Piece("one"), Piece("two")], 6).plain == " one"


# No run has both of overview and server, and no server is a trial of a sweep or has charts.
@pytest.mark.parametrize("without", [("overview", "charts", "sweep"), ("server", "sweep"), ("server",)])
def test_all_tabs_fit_in_sixty_columns(without):
    classes = pane_classes()
    numbered = sorted(((number, name, classes[name]) for name, number in NUMBERS.items()), key=lambda each: each[0])
    screens = tuple(each for each in numbered if each[1] not in without)
    for number, visited, cls in screens:
        said = tabs(screens, visited, 60).plain
        assert cell_len(said) <= 60
        for other, name, its in screens:
            label = f"{other} {its.short[: {2: 3, 3: 5}.get(len(without), 2)]}"
            assert (f"[{label}]" if name == visited else f" {label} ") in said
        assert f"[{number} {cls.title}]" in tabs(screens, visited, 120).plain


def board(**fields) -> Board:
    start = RunStartEvent(
        step=0,
        run_id="8f14e45f-c4ca4238a0b92382", plan_id="p", name="a_long_name_of_an_experiment", world_size=4,
        device="cpu", steps=1_000_000, attempt=12, directory="d", resumed_step=876_543, time=0.0,
    )  # fmt: skip
    given = {"run": RunState(start=start), "life": Life(state="training")} | fields
    return Board(directory=Path("runs/x/8f14e45f-c4ca4238a0b92382"), now=0.0, **given)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_header_fits_and_keeps_what_matters(width):
    alerts = (Alert(id="a", kind="memory", message="m"),)
    said = head(board(alerts=alerts), width, frozen_at="12:34:56").plain
    assert cell_len(said) <= width
    assert "training" in said
    if width >= 100:
        assert "876,543/1,000,000" in said and "1 alert" in said
    if width >= 60:
        assert "1 alert" in said and "frozen" in said


@pytest.mark.parametrize("status", ["done", "stopped", "interrupted", "failed", "complete"])
def test_an_end_is_said_in_words(status):
    assert status.upper() in head(board(life=Life(state="ended", status=status)), 60).plain
    assert "LOST" in head(board(life=Life(state="lost")), 60).plain


@pytest.mark.parametrize("width", [40, 60, 80])
def test_keys_fit_and_the_ways_out_are_never_left_out(width):
    keys = (*app_keys(None, view_is_frozen=False), hint("l", "log scale", weight=3))
    said = line(keys, width).plain
    assert cell_len(said) <= width
    assert said.startswith(" ? help  q quit")


def test_a_key_that_does_nothing_now_stands_in_parentheses():
    live = line(app_keys(board(), view_is_frozen=False), 120).plain
    assert "S save  E eval  P profile  W pause  X stop" in live
    over = line(app_keys(board(life=Life(state="ended", status="done")), view_is_frozen=True), 120).plain
    assert "space unfreeze  (S save)  (E eval)  (P profile)  (W pause)  (X stop)" in over
    paused = line(app_keys(board(life=Life(state="paused")), view_is_frozen=False), 120).plain
    assert "W resume" in paused
