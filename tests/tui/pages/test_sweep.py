"""The Sweep screen: rows of every size, the best so far, and which settings matter."""

import json
from pathlib import Path

import pytest
from rich.cells import cell_len

from xtrain.records.sweep import SWEEP_FILE, SweepState
from xtrain.tui.curves.canvas import MOST_LINES
from xtrain.tui.model.reader import RunReader
from xtrain.tui.model.series import Series
from xtrain.tui.pages.sheet import ListView, moved, plain
from xtrain.tui.pages.sweeps import _BLOCKS, _glance, best_so_far, importance, page, ranked, trial_lines


def lines(trials: int) -> list[dict]:
    """Of a sweep in which the loss follows from the rate alone; every third trial is stopped at the first rung."""
    found = [{"event": "sweep_begin", "sweep_id": "s", "attempt": "a", "lag": 1}]
    for number in range(trials):
        rate, width = 10 ** (-4 + 3 * ((number * 7) % trials) / trials), ("64", "128")[number % 2]
        point = {"optimizer.lr": repr(rate), "model.ffn": width}
        asked = {"event": "trial_asked", "name": f"{number:03d}-x", "point": point, "sameness": str(number)}
        found.append({**asked, "trial": number, "config_id": "c", "same_as": None})
        stopped = number % 3 == 2
        rung = 0 if stopped else None
        value = 1.0 + rate
        measured = {"event": "trial_measured", "rung": rung, "trained": 10, "tokens": 1000, "value": value}
        found.append({**measured, "trial": number})
        if stopped:
            found.append({"event": "trial_decided", "trial": number, "rung": 0, "goes_on": False, "place": 3, "of": 3})
    return [{"step": 0, "time": 1.0, **each} for each in found]


def measured(folder: Path, trials: int, points: int = 5) -> dict[str, Series]:
    """Numbers of the runs of such a sweep: two evaluations a trial, and a loss in each step."""
    found = {}
    for number in range(trials):
        series = found[f"{number:03d}-x"] = Series()
        rows = [{"step": s, "time": 1.0, "tokens": 100 * s, "loss": 5.0 - s / 10 + number / 100} for s in range(points)]
        series.extend([{**row, "eval/web/loss": row["loss"]} if row["step"] % 2 == 0 else row for row in rows])
    return found


def state_of(folder: Path, trials: int) -> SweepState:
    (folder / SWEEP_FILE).write_text("".join(json.dumps(each) + "\n" for each in lines(trials)))
    return SweepState.read(folder)


@pytest.mark.parametrize("trials", [0, 1, 3, 12, 60])
@pytest.mark.parametrize("size", [(20, 3), (40, 8), (60, 20), (80, 24), (120, 40)])
def test_every_size_is_filled(tmp_path: Path, trials: int, size: tuple[int, int]):
    width, height = size
    drawn = page(state_of(tmp_path, trials), "000-x", ListView(), width, height)
    assert len(drawn.rows) == height and {cell_len(plain(each)) for each in drawn.rows} == {width}


def test_what_is_shown(tmp_path: Path):
    state = state_of(tmp_path, 12)
    text = "\n".join(plain(each) for each in page(state, "001-x", ListView(), 100, 40).rows)
    best = state.best()
    assert best is not None and f"trial {best.number:03d}" in text
    assert "8 done · 4 stopped early" in text and "001*" in text
    assert [each.number for each in ranked(state)][:1] == [best.number]
    curve = best_so_far(state)
    assert len(curve) == 8 and curve == sorted(curve, reverse=True) and curve[-1] == best.value


@pytest.mark.parametrize(("width", "points"), [(20, 1), (31, 1), (32, 2), (40, 8), (100, 8)])
def test_the_curve_has_the_newest_points_that_fit(tmp_path: Path, width: int, points: int):
    (row,) = (row for row in map(plain, _glance(state_of(tmp_path, 12), width)) if "so far" in row)
    assert sum(sign in _BLOCKS for sign in row) == points


def test_the_setting_that_the_loss_follows_from_matters_most(tmp_path: Path):
    found = importance(state_of(tmp_path, 30), ["optimizer.lr", "model.ffn"])
    assert found["optimizer.lr"] > 0.3 > 0.1 > found["model.ffn"]
    assert importance(state_of(tmp_path, 4), ["optimizer.lr"]) == {}


def test_the_least_value_is_at_the_left_of_an_axis(tmp_path: Path):
    state = state_of(tmp_path, 12)
    rows = [plain(each) for each in page(state, "", ListView(), 100, 40).rows]
    by_number = {line[:3]: line for line in rows if line[:3].isdigit()}
    rates = {f"{each.number:03d}": float(each.point["optimizer.lr"]) for each in state.trials.values()}
    least, largest = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    assert by_number[least].index("●") < by_number[largest].index("●")


def test_the_cursor_stays_among_the_trials(tmp_path: Path):
    drawn = page(state_of(tmp_path, 60), "", ListView(), 80, 24)
    assert moved(drawn, -1).place == 0
    assert page(state_of(tmp_path, 60), "", moved(drawn, 1000), 80, 24).view.place == 59


def test_a_trial_knows_the_sweep_that_it_is_of(tmp_path: Path):
    state_of(tmp_path, 3)
    for name in ("001-x", "other"):
        (tmp_path / name).mkdir()
    board = RunReader(tmp_path / "001-x").poll()
    assert board.sweep is not None and len(board.sweep.trials) == 3
    assert RunReader(tmp_path / "other").poll().sweep is None


def test_the_best_curve_is_in_front_and_those_stopped_early_behind(tmp_path: Path):
    state, series = state_of(tmp_path, 30), measured(tmp_path, 30)
    gone = ranked(state)[20].number
    del series[f"{gone:03d}-x"]  # not begun yet
    found = trial_lines(state, series, "eval/web/loss")
    best = state.best()
    assert best is not None and found[0].name == f"{best.number:03d} best"
    assert found[0].x.tolist() == [0.0, 200.0, 400.0] and len(found[0].y) == 3
    named = [each.name[:3] for each in found if not each.dim]
    assert len(found) == 29 and len(named) == MOST_LINES
    early = {f"{each.number:03d}" for each in state.trials.values() if each.stopped_early}
    assert early and early - {f"{gone:03d}"} <= {each.name for each in found if each.dim}
    assert named == [f"{each.number:03d}" for each in ranked(state)][:MOST_LINES]
    assert len(trial_lines(state, series, "loss")[0].x) == 5 and trial_lines(state, series, "nothing") == []


def test_a_trial_that_is_trained_comes_before_those_that_are_done(tmp_path: Path):
    state = state_of(tmp_path, 6)
    state.trials[4].finished, state.trials[4].value = False, None
    names = [each.name for each in trial_lines(state, measured(tmp_path, 6), "loss")]
    assert names[0].endswith("best") and names[1] == "004"
