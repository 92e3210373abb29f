"""Runs side by side: how they stand, in what they differ, and which runs there are."""

import json
import re
from pathlib import Path

import pytest
from attrs import evolve
from made_runs import made_run
from rich.cells import cell_len

from xtrain.tui.board.pane import Sheet
from xtrain.tui.board.plot import Plot
from xtrain.tui.curves.canvas import UNICODE
from xtrain.tui.model.find import found_runs
from xtrain.tui.model.reader import RunReader
from xtrain.tui.pages.comparison import (
    Compared,
    Difference,
    RunColors,
    common_place,
    difference_rows,
    differences,
    fitted,
    labels,
    lines,
    metric_keys,
    run_items,
    standing_rows,
    standings,
)
from xtrain.tui.pages.sheet import plain

WIDTHS = (200, 120, 80, 60, 40)
SIGNS = [(sign, f"line{number}") for number, sign in enumerate(UNICODE.markers[:3])]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    made_run(root / "curriculum" / "aaaa", "datasets", logged=200)
    made_run(root / "curriculum" / "bbbb", "datasets", logged=150, end="killed", steps=400)
    made_run(root / "dense" / "cccc", "dense", logged=120, end="failed")
    made_run(root / "dense" / "dddd", "dense", end="waiting")
    return root


@pytest.fixture(scope="module")
def compared(root: Path) -> list[Compared]:
    paths = [root / "curriculum" / "aaaa", root / "curriculum" / "bbbb", root / "dense" / "cccc"]
    boards = [RunReader(path).poll(5.0) for path in paths]
    return [
        Compared(label=path.name, directory=path, board=board, color=color)
        for color, (path, board) in enumerate(zip(paths, boards, strict=True))
    ]


def test_labels_name_experiment_and_run_and_no_two_are_the_same() -> None:
    assert labels([]) == [] and labels([Path("runs/a/50b6f4bd-ab8dd4a3d04ab139")]) == ["a·ab8d"]
    of_one_code = [Path("r/a/50b6f4bd-ab8dd4a3d04ab139"), Path("r/a/50b6f4bd-ab8dd4a4d04ab139")]
    assert labels(of_one_code) == ["a·ab8dd4a3", "a·ab8dd4a4"]
    assert labels([*of_one_code, Path("r/a/60b6f4bd-ab8dd4a3d04ab139")])[0] == "a·50b6f4bd-ab8dd4a3d04"
    assert labels([Path("r/a/run"), Path("r/b/run")]) == ["a·run", "b·run"]
    assert labels([Path("r/a/run"), Path("r/b/run")], ["same", "same"]) == ["a·run", "b·run"]
    assert labels([Path("p/a/run"), Path("r/a/run")]) == ["p/a·run", "r/a·run"]
    assert labels([Path("r/a/same-1"), Path("r/b/same-2")], ["x", None]) == ["x·same-1", "b·same-2"]


def test_a_long_label_keeps_its_id() -> None:
    assert fitted("quickstart·ab8d", 14) == "quicksta…·ab8d"
    assert fitted("quickstart·ab8d", 15) == "quickstart·ab8d"
    assert fitted("quickstart·ab8d", 4) == "qui…"


def test_a_run_keeps_its_color() -> None:
    colors, (a, b, c) = RunColors(), map(Path, "abc")
    assert colors.of([a, b]) == [0, 1]
    assert colors.of([a, c]) == [0, 2]
    assert colors.of([c, b, a]) == [2, 1, 0]
    many = [Path(str(number)) for number in range(8)]
    assert sorted(colors.of([a, *many[:7]])) == list(range(8)) and colors.of([a])[0] == 0
    assert len(colors.of([a, *many])) == 9


def test_how_runs_stand(compared: list[Compared]) -> None:
    curves = lines(compared, "loss", "step")
    assert common_place(curves) == 120
    first, second, third = standings(compared, "loss", curves)
    records = map(json.loads, (compared[1].directory / "metrics.jsonl").read_text().splitlines())
    record = next(record for record in records if record["step"] == 120 and "loss" in record)
    assert (second.common, second.step, second.last) == (record["loss"], 150, curves[1].y[-1])
    assert (first.difference, second.difference) == (None, 0.0) and third.last == third.common
    assert first.best == min(curves[0].y) and first.best_at == curves[0].x[curves[0].y.argmin()]
    # Of a rate, more is better.
    rates = standings(compared, "tokens_per_second", curves)
    assert rates[0].best == max(curves[0].y) != first.best
    assert (first.run.state, third.run.state) == ("done", "failed")


def test_by_tokens_runs_are_held_at_the_same_number_of_tokens(compared: list[Compared]) -> None:
    curves = lines(compared, "loss", "tokens")
    common = common_place(curves)
    per_step = compared[2].board.planned.tokens_per_step  # type: ignore[union-attr]
    assert common == 120 * per_step
    assert curves[0].steps is not None and curves[0].steps[-1] == 200
    first, _, third = standings(compared, "loss", curves)
    assert third.difference == pytest.approx(third.common - first.common)  # type: ignore[operator]


def test_runs_without_the_metric_or_any_step_stand_with_a_dash(root: Path, compared: list[Compared]) -> None:
    waiting = RunReader(root / "dense" / "dddd").poll(5.0)
    runs = [
        *compared,
        Compared(label="d", directory=root, board=waiting, color=0),
        Compared(label="e", directory=root, board=None, color=1),
    ]
    found = standings(runs, "loss/code", lines(runs, "loss/code", "step"))
    assert [one.last is None for one in found] == [False, False, True, True, True]
    assert found[-1].run.state == "reading"
    assert "loss/code" in metric_keys(runs) and "tokens" not in metric_keys(runs)
    for width in WIDTHS:
        rows = standing_rows(found, "loss/code", "step", 150.0, width, markers=UNICODE.markers)
        assert {cell_len(plain(row)) for row in rows} == {width}


def test_the_table_says_the_difference_with_its_sign(compared: list[Compared]) -> None:
    found = standings(compared, "loss", lines(compared, "loss", "step"))
    found[1] = evolve(found[1], common=3.5, difference=0.046)
    rows = [plain(row) for row in standing_rows(found, "loss", "step", 120.0, 120, markers=UNICODE.markers)]
    assert rows[1].split() == ["run", "step", "last", "best", "at", "at", "120", "difference", "state"]
    assert "this run" in rows[2] and rows[2].startswith("● aaaa")
    assert rows[3].startswith("○ bbbb") and "+0.0460" in rows[3]


def test_settings_that_differ(compared: list[Compared]) -> None:
    same = differences(compared[:2])
    assert same is not None and {each.key for each in same} == {"steps"}
    assert same[0].values == ("200", "400")
    found = {each.key: each.values for each in differences(compared) or []}
    assert found["model.dim"] == ("128", "128", "64")
    assert found["collate.Pack.method"] == ("multipack", "multipack", "sequential")
    # A dataset that is not there is one difference.
    assert found["datasets.code"] == ("is there", "is there", None)
    assert not any(key.startswith("datasets.code.") for key in found)
    assert "optimizer.lr" not in found
    assert differences([*compared, Compared(label="x", directory=Path("x"), board=None, color=1)]) is None


def test_a_plan_without_settings_differs_in_that(compared: list[Compared]) -> None:
    board = compared[1].board
    assert board is not None and board.planned is not None
    content = {key: value for key, value in board.planned.content.items() if key != "config"}
    older = evolve(compared[1], board=evolve(board, planned=evolve(board.planned, content=content)))
    found = {each.key: each.values for each in differences([compared[0], older]) or []}
    assert found == {"settings": ("in its plan", "not in its plan"), "steps": ("200", "400")}


def test_differences_are_grouped_by_value_with_the_signs_of_the_runs() -> None:
    found = [
        Difference(key="optimizer.lr", values=("0.003", "0.001", "0.003")),
        Difference(key="x", values=("1", None, "1")),
    ]
    rows = [plain(row).rstrip() for row in difference_rows(found, 60, 4, signs=SIGNS)]
    assert rows[0].startswith("Settings that differ ─") and rows[0].endswith("2 differences")
    assert rows[1:3] == ["optimizer.lr  ●■ 0.003  ○ 0.001", "x             ●■ 1  ○ not set"]
    for width in WIDTHS:
        for given in (found * 20, [], None):
            drawn = difference_rows(given, width, 9, top=3, signs=SIGNS)
            assert len(drawn) == 9 and {cell_len(plain(row)) for row in drawn} == {width}


def test_runs_below_the_same_folder_are_found(root: Path, tmp_path: Path) -> None:
    found = found_runs(root / "curriculum" / "aaaa")
    assert [run.name for run in found] == ["curriculum/bbbb", "dense/cccc", "dense/dddd"]
    second, third, waiting = found
    assert (second.step, second.status) == (150, "") and (third.step, third.status) == (120, "failed")
    assert (waiting.step, waiting.time, waiting.age(0.0)) == (None, None, "")
    assert third.age((third.time or 0) + 65) == "1m05s ago"
    alone = made_run(tmp_path / "deep" / "only" / "run", "dense", end="waiting").directory
    assert found_runs(alone) == []
    assert found_runs(tmp_path / "nowhere" / "run") == []
    (alone / "metrics.jsonl").write_bytes(b'{"torn')
    assert [run.step for run in found_runs(tmp_path / "deep" / "only" / "other")] == [None]


def test_a_search_ends_with_its_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtrain.tui.model.find._PATIENCE_SECONDS", -1.0)
    assert found_runs(root / "curriculum" / "aaaa") == []


def test_runs_to_choose_from_show_which_are_chosen_and_how_far_they_are(root: Path) -> None:
    items = dict(run_items(found_runs(root / "curriculum" / "aaaa"), [root / "dense" / "cccc"], 1_795_000_200.0))
    assert len(items) == 3
    assert items[str(root / "dense" / "cccc")].startswith("[x] dense/cccc  step 120  loss 3.4540  failed")
    assert items[str(root / "dense" / "dddd")].startswith("[ ] dense/dddd  no step")


def test_the_sign_of_a_run_has_the_color_of_its_curve(compared: list[Compared]) -> None:
    curves = lines(compared, "loss", "step")
    rows = standing_rows(standings(compared, "loss", curves), "loss", "step", None, 120, markers="●○■□▲△◆◇")
    assert [style for row in rows[2:] for text, style in row if style.startswith("line")] == ["line0", "line1", "line2"]
    assert {f"sheet--line{number}" for number in range(8)} <= Sheet.COMPONENT_CLASSES
    colors = [re.findall(r"--line(\d) \{ color: (.*?); \}", each.DEFAULT_CSS) for each in (Sheet, Plot)]
    assert colors[0] == colors[1] and len(colors[0]) == 8
