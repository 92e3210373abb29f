"""What a run takes of its datasets: shares against the plan, epochs, and the table of them."""

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from made_runs import made_run
from read_records import reduce_all
from rich.cells import cell_len

from xtrain.records.training_events import EvalEvent
from xtrain.tui.model.board import Board
from xtrain.tui.model.planned import PlannedPhase
from xtrain.tui.model.reader import RunReader
from xtrain.tui.model.series import Series
from xtrain.tui.pages.mixture import DatasetFacts, MixtureTable, in_words, mixture, page, several
from xtrain.tui.pages.sheet import ListPage, ListView, moved, plain
from xtrain.tui.state import RunState

PHASES = (
    PlannedPhase(name="train", first=0, fraction=None, shares={"code": 0.5, "web": 0.5}, lr_scale=1.0),
    PlannedPhase(name="late", first=100, fraction=None, shares={"code": 0.75, "web": 0.25}, lr_scale=0.5),
)


class Plan:
    """As much of a plan as is asked for."""

    phases = PHASES


def board(*records: dict[str, Any]) -> Board:
    series = Series()
    series.extend([record for record in records if "event" not in record])
    state = reduce_all(RunState(), records)
    return evolve(Board(directory=Path("r"), now=0.0), series=series, run=state, planned=Plan())  # type: ignore[arg-type]


def logged(step: int, code: int, web: int, **fields: Any) -> dict[str, Any]:
    rows = {"rows/code": code, "rows/web": web, "tokens": (code + web) * 256}
    return {"step": step, "time": float(step), "loss": 2.0, "loss/code": 1.5, "loss/web": 2.5, **rows, **fields}


def named(found: MixtureTable, name: str) -> DatasetFacts:
    return next(one for one in found.datasets if one.name == name)


def test_shares_are_those_of_the_phase_under_way() -> None:
    data = {"event": "data", "time": 0.0, "step": 0, "steps": 200, "rows": {"code": 400, "web": 10_000}}
    records = [
        data,
        logged(50, 400, 400),
        logged(100, 800, 800),
        logged(120, 1040, 880, data_seconds=0.1, step_seconds=0.4),
    ]
    found = mixture(board(*records))
    code, web = named(found, "code"), named(found, "web")
    assert found.phase == PHASES[1] and found.following is None and found.until == 200
    assert (code.share, web.share) == (0.75, 0.25) and (code.target, web.target) == (0.75, 0.25)
    assert code.run_share == pytest.approx(1040 / 1920)
    assert code.epochs == pytest.approx(2.6) and web.epochs == pytest.approx(0.088)
    assert code.rows == 1040 and code.tokens == 1040 * 256
    assert (code.loss, web.loss) == (1.5, 2.5)
    assert found.wait_share == pytest.approx(0.25)


def test_shares_of_epochs_follow_from_the_rows_of_the_run() -> None:
    class Often(Plan):
        phases = (evolve(PHASES[0], shares={}, passes={"code": 3.0, "web": 0.5}),)

    assert several(evolve(board(), planned=Often()))
    before = mixture(evolve(board(), planned=Often()))
    assert [(one.name, one.target) for one in before.datasets] == [("code", None), ("web", None)]
    data = {"event": "data", "time": 0.0, "step": 0, "steps": 200, "rows": {"code": 100, "web": 200}}
    found = mixture(evolve(board(data, logged(50, 300, 100)), planned=Often()))
    code, web = named(found, "code"), named(found, "web")
    assert (code.target, web.target) == (0.75, 0.25) and (code.epochs, web.epochs) == (3.0, 0.5)


def test_a_phase_between_two_records_begins_where_its_rows_would_have_been() -> None:
    found = mixture(board(logged(90, 720, 720), logged(110, 940, 820)))
    # At step 100 half of the rows between the two records had been taken.
    assert named(found, "code").share == pytest.approx((940 - 830) / (940 - 830 + 820 - 770))


def test_the_first_phase_begins_at_nothing() -> None:
    found = mixture(board(logged(50, 300, 500)))
    assert found.phase == PHASES[0] and found.following == PHASES[1] and found.until == 100
    assert named(found, "code").share == 0.375


def test_before_the_first_step_there_is_the_plan() -> None:
    found = mixture(board())
    assert [one.name for one in found.datasets] == ["code", "web"]
    code = named(found, "code")
    assert (code.target, code.rows, code.share, code.epochs, code.loss) == (0.5, None, None, None, None)
    assert several(board()) and not several(Board(directory=Path("r"), now=0.0))


def test_what_is_only_evaluated_comes_last() -> None:
    evaluated = {"event": "eval", "time": 51.0, "step": 50, "dataset": "other", "loss": 1.25}
    found = mixture(board(logged(50, 300, 500), evaluated))
    other = found.datasets[-1]
    assert other.name == "other" and other.share is None
    assert other.evaluation is not None and other.evaluation.loss == 1.25


def test_in_words() -> None:
    near = MixtureTable(datasets=(
        DatasetFacts(name="code", share=0.51, target=0.5, rows=500.0, of=200),
    ), phase=PHASES[1], until=200, num_phases=2, wait_seconds=0.2, wait_share=0.25)  # fmt: skip
    assert in_words(near) == [
        ("Phase late since step 100, until step 200, learning rate × 0.5.", ""),
        ("Rows come as planned, within 1.0 points.", "good"),
        ("Seen more than once: code 2.5 times.", ""),
        ("A step waits 200 ms for its rows, 25.0% of it.", "warn"),
    ]
    far = evolve(near, datasets=(DatasetFacts(name="code", share=0.3, target=0.5),))
    assert ("code has 30.0% of the rows of this phase; 50.0% are planned.", "warn") in in_words(far)
    assert in_words(MixtureTable()) == []


def text(found: ListPage) -> list[str]:
    return [plain(row).rstrip() for row in found.rows]


def facts(count: int) -> MixtureTable:
    datasets = [DatasetFacts(
        name=f"dataset-{number}",
        loss=2.5,
        evaluation=EvalEvent(step=1, node="", dataset="", weights="trained", loss=2.25, tokens=None, batches=None,
            seconds=None),
        rows=1200.0,
        tokens=307_200.0,
        of=600,
        share=1 / count,
        run_share=1 / count,
        target=1 / count,
    ) for number in range(count)]  # fmt: skip
    return MixtureTable(datasets=tuple(datasets), phase=PHASES[0], until=100, following=PHASES[1], num_phases=2)


@pytest.mark.parametrize(("width", "most"), [(200, 40), (120, 30), (80, 15), (60, 10), (40, 4), (20, 3)])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_every_size_is_kept(width: int, most: int, count: int) -> None:
    found = page(facts(count), ListView(), width, most)
    assert len(found.rows) <= most and {cell_len(plain(row)) for row in found.rows} == {width}


def test_a_wide_table_has_all_columns_and_a_narrow_one_the_first() -> None:
    wide = text(page(facts(2), ListView(), 120, 20, step=50))
    assert wide[0].endswith("2 datasets · phase train · step 50")
    assert wide[1].split()[:8] == ["loss", "held", "out", "share", "plan", "epochs", "rows", "tokens"]
    assert wide[2].startswith("dataset-0   2.5000   2.2500  50.0%  50.0%    2.00       1,200  307.2k  50.0% ██████")
    narrow = text(page(facts(2), ListView(), 60, 12))
    assert narrow[2] == "dataset-0   2.5000   2.2500  50.0%  50.0%    2.00 █████"


def test_many_datasets_are_scrolled() -> None:
    found = page(facts(40), ListView(), 80, 14)
    assert "more: up and down" in "\n".join(text(found))
    found = page(facts(40), moved(found, 39), 80, 14)
    assert found.view.place == 39 and any(line.startswith("dataset-39") for line in text(found))
    assert moved(found, 5).place == 39 and moved(found, -500).place == 0


def test_a_made_run(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "datasets", logged=100)
    found = mixture(RunReader(run.directory).poll(5.0))
    assert [one.name for one in found.datasets] == ["code", "drills", "noise"]
    last = run.metrics(100)
    for one in found.datasets:
        assert one.rows == last[f"rows/{one.name}"] and one.loss == last[f"loss/{one.name}"]
    assert found.phase is not None and found.phase.name == "drill"
    assert {one.name: one.target for one in found.datasets} == run.plan["timeline"]["phases"][1]["shares"]
