"""Which run is meant."""

import os
from pathlib import Path

import pytest

from xtrain.tui.model.find import NoRun, newest_run, run_at


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Three runs of two lineages, the middle one started last."""
    found = {}
    for age, name in ((30, "quick/abc-1"), (10, "quick/abd-2"), (20, "large/xyz-3")):
        run = tmp_path / "runs" / name
        (run / "metadata" / "attempts" / "1").mkdir(parents=True)
        for plan in (run / "plan.json", run / "metadata" / "attempts" / "1" / "plan.json"):
            plan.write_text("{}")
            os.utime(plan, (1e9 - age, 1e9 - age))
        found[name] = run
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize(("text", "name"), [
    (None, "quick/abd-2"),
    ("runs", "quick/abd-2"),
    ("runs/large", "large/xyz-3"),
    ("runs/quick/abc-1", "quick/abc-1"),
    ("abc", "quick/abc-1"),
    ("ab", "quick/abd-2"),
    ("large", "large/xyz-3"),
    ("xyz-3", "large/xyz-3"),
    ("3", "large/xyz-3"),
    ("quick·1", "quick/abc-1"),
    ("quick·ab", "quick/abd-2"),
])  # fmt: skip
def test_the_run_that_is_meant(runs: dict[str, Path], text: str | None, name: str) -> None:
    assert run_at(text).resolve() == runs[name]


def test_a_path_of_any_place(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert newest_run(runs["quick/abc-1"].parent) == runs["quick/abd-2"]
    assert run_at(str(runs["quick/abc-1"])) == runs["quick/abc-1"]


@pytest.mark.parametrize("text", [None, "runs", "nothing", "quick·", "large·abc", "some/where", "/nowhere", "x" * 5000])
def test_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoRun, match="there is no run at"):
        run_at(text)
