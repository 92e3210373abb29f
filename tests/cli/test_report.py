"""`xtrain report`: which runs it takes, and where the page goes."""

from pathlib import Path

import pytest
from made_runs import made_run, made_sweep

from xtrain.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("aaaa1111", "bbbb2222"):
        made_run(Path("runs/dense") / name, logged=4)
    return tmp_path


def test_the_newest_run_is_reported_to_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0
    assert capsys.readouterr().out == f"report  report.html  {folder}/runs/dense/bbbb2222\n"
    first = Path("report.html").read_text()
    assert "two_ranks_cpu·bbbb" in first and "two_ranks_cpu·aaaa" not in first
    assert main(["report", "aaaa1111", "bbbb", "--html", "report.html"]) == 0  # a report replaces a report
    assert all(name in Path("report.html").read_text() for name in ("two_ranks_cpu·aaaa", "two_ranks_cpu·bbbb"))


def test_to_standard_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "aaaa", "--html", "-"]) == 0
    assert "two_ranks_cpu·aaaa" in capsys.readouterr().out and not Path("report.html").exists()


def test_a_sweep_with_its_best_trial(folder: Path) -> None:
    made_sweep(folder / "sweep")
    assert main(["report", "sweep"]) == 0
    found = Path("report.html").read_text()
    assert "<h2>Sweep</h2>" in found and "<section>" in found


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["nowhere"], 3, "there is no run at nowhere"),
    (["--html", "own.xtrain"], 2, "own.xtrain exists and is not a report, so it is not replaced"),
    (["--html", "runs"], 2, "runs exists and is not a report"),
    (["--html", "no/such.html"], 2, "no/such.html: No such file or directory"),
    (["sweep", "aaaa"], 2, "sweep is a sweep, which has a page of its own; name it alone"),
    ([f"runs/dense/{name}" for name in "abcdefghi"], 2, "9 runs; a page can compare at most 8"),
])  # fmt: skip
def test_what_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], arguments, code, words) -> None:
    Path("own.xtrain").write_text("experiment a { }")
    made_sweep(folder / "sweep")
    for name in "abcdefghi":
        made_run(Path("runs/dense") / name, end="waiting")
    assert main(["report", *arguments]) == code
    assert words in capsys.readouterr().err
    assert Path("own.xtrain").read_text() == "experiment a { }"
