"""`xtrain checkpoint`: what is listed, what is found damaged, what is removed and what never is."""

import json
from pathlib import Path

import pytest
from small_checkpoints import save, save_model

from xtrain.cli.main import main
from xtrain.runtime.base.locks import LAUNCHER_LOCK, hold
from xtrain.runtime.store.checkpoints import TENSORS, CheckpointFolder, Publisher
from xtrain.runtime.store.writing import Backend


@pytest.fixture(params=["dcp", "file"])
def backend(request) -> Backend:
    return request.param


@pytest.fixture
def lineage(tmp_path, backend) -> Path:
    """Two runs: one of four saves, the second the best, with weights of the last; one with a single save."""
    long, short = (CheckpointFolder(tmp_path / name / "checkpoints") for name in ("a", "b"))
    for step in (100, 200, 300, 400):
        metrics = {"eval/web/loss": 2.0 + step / 1000}
        pointers = ["best"] if step == 200 else []
        save(long, step, *pointers, backend=backend, metrics=metrics, tokens=step * 7, model={"dim": 8})
    save_model(long, 400, backend)
    made_by = {"code_id": "1a2b3c4d", "xtrain": "0.1.0", "torch": "2.13.0", "python": "3.11.9", "source": "00"}
    begun_from = {"from": "../a", "path": "/runs/a", "step": 400}
    save(short, 10, backend=backend, begun_from=begun_from, made_by=made_by)
    return tmp_path


def lines(capsys, *arguments: object) -> list[dict]:
    assert main(["checkpoint", *map(str, arguments), "--json"]) in (0, 1)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def large(path: Path) -> Path:
    """The file with the tensors; it may lie beside the pointers under another name as well."""
    return next(file for file in (path / "__0_0.distcp", path / TENSORS) if file.exists())


def damage(path: Path) -> None:
    large(path).write_bytes(b"tensorz")


def test_a_lineage_is_listed_by_run_and_step(lineage, backend, capsys):
    found = lines(capsys, "ls", lineage)
    assert [(Path(each["run"]).name, each["step"], each["kind"], each["pointers"]) for each in found] == [
        ("a", 100, "full", []),
        ("a", 200, "full", ["best"]),
        ("a", 300, "full", []),
        ("a", 400, "full", ["latest"]),
        ("a", 400, "weights", ["model"]),
        ("b", 10, "full", ["latest"]),
    ]
    assert found[1]["metrics"] == {"eval/web/loss": 2.2} and found[1]["tokens"] == 1400
    assert found[1]["bytes"] == {"dcp": 21, "file": 7}[backend]
    assert main(["checkpoint", "ls", str(lineage / "a")]) == 0
    text = capsys.readouterr().out
    assert "best · eval/web/loss 2.2000" in text and "ckpt-s000000000400" in text and str(lineage / "b") not in text


@pytest.mark.parametrize("path", ["a", "a/checkpoints", ".", "a/checkpoints/ckpt-s000000000200"])
def test_every_kind_of_path_is_understood(lineage, capsys, path):
    assert 200 in [each["step"] for each in lines(capsys, "ls", lineage / path)]


def test_show_says_where_a_run_began_and_what_made_it(lineage, capsys):
    assert main(["checkpoint", "show", str(lineage / "b")]) == 0
    text = capsys.readouterr().out
    assert "made by     code 1a2b3c4d, xtrain 0.1.0, torch 2.13.0, python 3.11.9" in text
    assert lines(capsys, "ls", lineage / "b")[0]["made_by"]["source"] == "00"
    assert "begun from  /runs/a, step 400" in text and "the full state" in text and "after 10 steps" in text


def test_verify_reads_content_and_sizes_do_not(lineage, capsys):
    assert main(["checkpoint", "verify", str(lineage)]) == 0
    damage(lineage / "a/checkpoints/ckpt-s000000000300")
    assert main(["checkpoint", "verify", str(lineage), "--sizes"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(lineage)]) == 1
    name = large(lineage / "a/checkpoints/ckpt-s000000000300").name
    assert f"{name} has changed since it was written" in capsys.readouterr().out
    assert [each["step"] for each in lines(capsys, "verify", lineage) if not each["sound"]] == [300]


def test_a_broken_sidecar_is_no_traceback(lineage, capsys):
    (lineage / "a/checkpoints/ckpt-s000000000300/state.json").write_text("{")
    for action in ("ls", "show", "verify"):
        assert main(["checkpoint", action, str(lineage)]) in (0, 1)
        assert "state.json cannot be read" in capsys.readouterr().out


def test_prune_says_what_would_go_and_removes_it_on_yes(lineage, capsys):
    folder = CheckpointFolder(lineage / "a/checkpoints")
    Publisher(folder).begin(folder.path(500))
    large(folder.path(300)).write_bytes(b"short")
    arguments = ["checkpoint", "prune", str(lineage), "--keep", "1", "--damaged"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    gone = ("ckpt-s000000000500.partial", "ckpt-s000000000300", "ckpt-s000000000100")
    assert all(f"would remove  {folder.root / name}" in printed.out for name in gone) and "--yes" in printed.err
    assert len(folder.published()) == 4
    assert main([*arguments, "--yes"]) == 0
    assert [entry.step for entry in folder.published()] == [200, 400] and folder.remains() == []
    assert folder.pointed("model") is not None and folder.pointed("best") is not None
    assert CheckpointFolder(lineage / "b/checkpoints").latest().step == 10


def test_more_to_keep_than_there_are_removes_nothing(lineage, capsys):
    assert lines(capsys, "prune", lineage, "--keep", "9") == []


def test_a_run_that_is_under_way_is_left_alone(lineage, capsys):
    with hold(lineage / "a", LAUNCHER_LOCK):
        assert main(["checkpoint", "prune", str(lineage), "--keep", "1", "--yes"]) == 3
    assert "another process is running" in capsys.readouterr().err
    assert len(CheckpointFolder(lineage / "a/checkpoints").published()) == 4


def test_where_there_is_nothing(tmp_path, capsys):
    assert main(["checkpoint", "ls", str(tmp_path)]) == 3
    assert "no checkpoint below" in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        main(["checkpoint", "prune", str(tmp_path), "--keep", "0"])
    assert wrong.value.code == 2
