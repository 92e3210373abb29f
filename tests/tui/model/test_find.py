"""Which run is meant."""

import os
from pathlib import Path

import pytest

from xtrain.tui.model.find import NoRun, run_at, runs_at


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
    (".", "quick/abd-2"),
    ("runs", "quick/abd-2"),
    ("runs/large", "large/xyz-3"),
    ("runs/quick/abc-1", "quick/abc-1"),
    ("runs/quick/abc-1/metadata/attempts", "quick/abc-1"),
    ("abc", "quick/abc-1"),
    ("large", "large/xyz-3"),
    ("lar", "large/xyz-3"),
    ("quick/", "quick/abd-2"),  # as shells complete the name of a folder
    ("quick/@2", "quick/abc-1"),
    ("quick/abc-1/", "quick/abc-1"),
    ("xyz-3", "large/xyz-3"),
    ("3", "large/xyz-3"),
    ("quick/abc", "quick/abc-1"),
    ("quick·1", "quick/abc-1"),
    ("@1", "quick/abd-2"),
    ("@2", "large/xyz-3"),
    ("@3", "quick/abc-1"),
    ("quick@2", "quick/abc-1"),
    ("runs/quick@2", "quick/abc-1"),
    ("ab@2", "quick/abc-1"),
])  # fmt: skip
def test_the_run_that_is_meant(runs: dict[str, Path], text: str | None, name: str) -> None:
    assert run_at(text).resolve() == runs[name]


def test_a_path_of_any_place(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert runs_at(str(runs["quick/abc-1"].parent)) == [runs["quick/abd-2"], runs["quick/abc-1"]]
    assert run_at(str(runs["quick/abc-1"])) == runs["quick/abc-1"]
    monkeypatch.chdir(runs["quick/abc-1"] / "metadata")
    assert run_at(".") == runs["quick/abc-1"]


def test_a_plan_that_was_saved_in_the_project_is_no_run(runs: dict[str, Path]) -> None:
    Path("plan.json").write_text("{}")
    assert run_at(".").resolve() == runs["quick/abd-2"]


@pytest.mark.parametrize(("folder", "name"), [("quick", "quick/abd-2"), ("xyz-3", "large/xyz-3"), ("lar", None)])
def test_a_folder_of_other_files_hides_no_name(runs: dict[str, Path], folder: str, name: str | None) -> None:
    Path(folder).mkdir()
    if name is None:
        with pytest.raises(NoRun, match="there is no run at lar or below it"):
            run_at(folder)
    else:
        assert run_at(folder).resolve() == runs[name]


@pytest.mark.parametrize(("text", "message"), [
    ("ab", "`ab` names 2 runs: quick/abd-2, quick/abc-1; write more of a name, or ab@1 for the newest"),
    ("quick·ab", "`quick·ab` names 2 runs: quick/abd-2, quick/abc-1; write more"),
    ("other", "no run of that name below runs: it has quick/abd-2, large/xyz-3, quick/abc-1"),
    ("@4", "there is no run @4: runs has 3"),
    ("quick@0", "there is no run quick@0: quick has 2"),
    ("other@1", "there is no run at other, and"),
    ("@" + "9" * 5000, "there is no run at @999"),
])  # fmt: skip
def test_candidates(runs: dict[str, Path], text: str, message: str) -> None:
    with pytest.raises(NoRun) as raised:
        run_at(text)
    assert message in str(raised.value)


@pytest.mark.parametrize("text", [None, "runs", "nothing", "quick·", "large·abc", "some/where", "/nowhere", "x" * 5000])
def test_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoRun, match="there is no run at"):
        run_at(text)
