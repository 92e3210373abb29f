"""`xtrain export`: what is said of a run, a checkpoint and a folder that are not as they should be."""

from pathlib import Path

import pytest
from small_runs import drawn, make_run, plan_of, save

from xtrain.cli.export import file_size
from xtrain.cli.main import main
from xtrain.runtime.store.checkpoints import CheckpointFolder, Publisher


@pytest.fixture
def run(tmp_path: Path) -> Path:
    plan = plan_of()
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, drawn(plan))
    return directory


def test_an_export_says_what_it_has_written(run: Path, tmp_path: Path, capsys):
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--dtype", "bf16", "--shard-size", "30kB"]) == 0
    said = capsys.readouterr()
    assert f"exported to {tmp_path / 'out'}: 21 tensors, " in said.out and " of bf16 in 3 files, read back" in said.out
    assert "ckpt-s000000000020: step 20, trained weights" in said.err
    assert (tmp_path / "out" / "model-00003-of-00003.safetensors").exists()


@pytest.mark.parametrize("options", [["--checkpoint", "latest"], []])
def test_a_run_that_saves_and_removes_meanwhile_leaves_what_is_exported(run: Path, tmp_path, monkeypatch, options):
    plan, folder = plan_of(), CheckpointFolder(run / "checkpoints")

    def check_sound(tensors: Path) -> None:
        save(plan, run, drawn(plan), step=30)
        assert Publisher(folder).retain(1) == []

    monkeypatch.setattr("xtrain.runtime.store.adapter_export.check_sound", check_sound)
    assert main(["export", str(run), "--to", str(tmp_path / "out"), *options]) == 0
    assert [path.name for path in Publisher(folder).retain(1)] == ["ckpt-s000000000020"]


@pytest.mark.parametrize(("options", "said"), [
    (["--checkpoint", "best"], "error[X720]: {run} has no checkpoint best; there are latest, ckpt-s000000000020"),
    (["--checkpoint", "21"], "error[X720]: {run} has no checkpoint 21; there are latest, ckpt-s000000000020"),
    (["--ema"], "error[X723]: ckpt-s000000000020 has no averaged weights: its run has no `ema`"),
    (["--to", "{run}"], "error[X723]: {run} already exists"),
])  # fmt: skip
def test_what_cannot_be_exported(run: Path, tmp_path: Path, options: list[str], said: str, capsys):
    words = [word.format(run=run) for word in options]
    assert main(["export", str(run), "--to", str(tmp_path / "out"), *words]) == 3
    assert said.format(run=run) in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_what_is_no_run_and_a_run_without_a_checkpoint(run: Path, tmp_path: Path, capsys):
    assert main(["export", str(tmp_path / "other"), "--to", str(tmp_path / "out")]) == 2
    assert "there is no run at" in capsys.readouterr().err
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 3
    assert "error[X708]" in capsys.readouterr().err


def test_a_size_is_a_number_of_bytes(run: Path, tmp_path: Path, capsys):
    sizes = {"5GB": 5 * 10**9, "1.5 GiB": 3 * 2**29, "700": 700, "2MB": 2 * 10**6}
    assert {text: file_size(text) for text in sizes} == sizes
    for wrong in (["--shard-size", "0"], ["--shard-size", "5 apples"], ["--dtype", "int3"]):
        with pytest.raises(SystemExit) as exit:
            main(["export", str(run), "--to", str(tmp_path / "out"), *wrong])
        assert exit.value.code == 2
    assert "`5 apples` is not a size; write 5GB or 500MB" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["runs", "tiny", "ab12", "@1", ".", "runs/tiny/ab12cd34"])
@pytest.mark.parametrize("command", [
    ["export", "{}", "--to", "out"],
    ["generate", "{}", "--prompt", "a", "--tokens", "1"],
    ["merge", "{}", "--to", "out"],
    ["diff", "{}", "{}"],
    ["checkpoint", "ls", "{}"],
    ["checkpoint", "verify", "{}"],
    ["runs", "{}"],
    ["doctor", "{}"],
], ids=lambda command: command[0])  # fmt: skip
def test_every_verb_takes_a_run_as_watch_does(tmp_path: Path, monkeypatch, capsys, command, named):
    monkeypatch.chdir(tmp_path)
    plan = plan_of()
    directory = make_run(plan, tmp_path / "runs" / "tiny" / "ab12cd34", tmp_path)
    save(plan, directory, drawn(plan))
    code = main([word.format(named) for word in command])
    said = capsys.readouterr()
    assert "there is no" not in said.err and "cannot be read" not in said.err
    if command[0] == "merge":
        assert "adapter" in said.err  # it found the run, which has none
    elif command[0] == "doctor":
        assert f"plan {plan.id}" in said.out  # whose data is not here
    else:
        assert code == 0, said
