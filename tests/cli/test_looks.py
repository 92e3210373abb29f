"""Verbs that only look: trials of a sweep, layouts that fit, functions of a file."""

import csv
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from xtrain.cli.main import main

ROOT = Path(__file__).parents[2]
ASKED = {"event": "trial_asked", "sameness": "", "config_id": "c", "same_as": None}
MEASURED = {"event": "trial_measured", "rung": None}
# Trial 2 has the least value and is not finished; 1 and 3 are equal; 4 is 1 again.
SWEEP = [
    {"event": "sweep_begin", "sweep_id": "s", "attempt": "a", "lag": 1, "objective": "eval/web/loss"},
    *({**ASKED, "trial": number, "name": f"00{number}-x", "point": {"optimizer.lr": f"{number}e-3", "model.ffn": "64"}}
      for number in range(4)),
    {**ASKED, "trial": 4, "name": "004-x", "point": {"optimizer.lr": '"auto"', "model.ffn": "64"}, "same_as": 1},
    {**MEASURED, "trial": 0, "trained": 40, "tokens": 400, "value": 2.75},
    {**MEASURED, "trial": 1, "trained": 1_040, "tokens": 410, "value": 2.5},
    {**MEASURED, "trial": 2, "rung": 0, "trained": 20, "tokens": 200, "value": 1.5},
    {**MEASURED, "trial": 3, "trained": 40, "tokens": 400, "value": 2.5},
]  # fmt: skip
ROW = {
    "trial": 1, "status": "done", "run": "001-x", "optimizer.lr": 1e-3, "model.ffn": 64, "value": 2.5, "steps": 1_040,
    "tokens": 410, "rungs": 0, "config_id": "c", "same_as": None,
}  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/s"
    folder.mkdir(parents=True)
    (folder / "sweep.jsonl").write_text("".join(json.dumps({"step": 0, "time": 0, **line}) + "\n" for line in SWEEP))
    return folder


def test_the_best_trial(sweep: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["sweep", "best", "s"]) == 0
    assert capsys.readouterr().out == (
        "trial 001: 2.5000 after 1,040 steps, in runs/s/001-x\n  --set optimizer.lr=1e-3\n  --set model.ffn=64\n"
    )
    assert main(["sweep", "best", str(sweep), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ROW | {"directory": str(sweep / "001-x")}


def test_no_best_trial_yet(sweep: Path, capsys: pytest.CaptureFixture[str]):
    lines = (sweep / "sweep.jsonl").read_text().splitlines(keepends=True)
    (sweep / "sweep.jsonl").write_text("".join(line for line in lines if '"rung": null' not in line))
    assert main(["sweep", "best", "s"]) == 1
    assert "no trial has finished training yet" in capsys.readouterr().err
    assert main(["sweep", "show", str(ROOT / "specs")]) == 2
    assert "is not a sweep: it has no sweep.jsonl" in capsys.readouterr().err


def test_trials_for_other_programs(sweep: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["sweep", "show", "s", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    # The best first, equal ones by number, those without a finished value by what they have.
    assert [(row["trial"], row["value"], row["status"]) for row in rows] == [
        (2, 1.5, "paused"), (1, 2.5, "done"), (3, 2.5, "done"), (4, 2.5, "same"), (0, 2.75, "done"),
    ]  # fmt: skip
    assert rows[1] == ROW and rows[3]["run"] == "001-x"
    assert main(["sweep", "show", "s", "--csv", "t.csv", "--parquet", "t.parquet"]) == 0
    assert capsys.readouterr().out == ""
    with Path("t.csv").open(newline="") as file:
        assert list(csv.DictReader(file))[1] == {
            name: "" if value is None else str(value) for name, value in ROW.items()
        }
    found = pq.read_table("t.parquet").to_pylist()
    mixed = ("optimizer.lr", "status", "run", "config_id")  # of one type in each column
    assert found == [row | {name: str(row[name]) for name in mixed} for row in rows]
    assert main(["sweep", "show", "s", "--csv", "no/t.csv"]) == 3
    assert "no/t.csv cannot be written: No such file or directory" in capsys.readouterr().err


def test_layouts_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec = tmp_path / "fit.xtrain"
    cluster = "cluster other { nodes = 1, devices = 2, memory = 8 GiB, flops = 0.01T, link = 1 GiB, network = 1 GiB }"
    spec.write_text(f'include "{ROOT}/specs/two_ranks_cpu.xtrain"\n{cluster}\n')
    assert main(["plan", str(spec), "--fit", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["world_size"] == 2 and found["best"] and all(each["sets"] for each in found["best"])
    assert main(["plan", str(spec), "--fit"]) == 0
    page = capsys.readouterr().out
    assert all(each["name"] in page for each in found["best"])
    assert main(["plan", str(ROOT / "specs/serve_cpu.xtrain"), "--fit"]) == 2
    assert "--fit" in capsys.readouterr().err


def test_functions_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(
        "from xtrain import source\n\n\n"
        '@source\ndef letters(count: int = 3):\n    """Some letters."""\n    yield "abc"[:count]\n'
    )
    assert main(["docs", "parts.py"]) == 0
    page = capsys.readouterr().out
    assert "letters" in page and "Some letters." in page and "count" in page
    assert main(["docs", "none.py"]) == 2
    assert "cannot read `none.py`: No such file or directory" in capsys.readouterr().err
    Path("parts.py").write_bytes(b"\xff")
    assert main(["docs", "parts.py"]) == 2
    assert "cannot read `parts.py`: it is not UTF-8 text" in capsys.readouterr().err
