"""Epochs from the spec to the checkpoint, by the real command: counted, checked, named, and gone on with."""

import json
import os
from pathlib import Path

import pytest
from forking import ForkedCommand

from xtrain.cli.main import main
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.store.beginning import find, find_named

SPEC = """
experiment tiny { budget = 2 epochs }
model llama { dim = 16, layers = 1, heads = 2 }
tokenizer bytes
dataset a { source = text("*.txt"), holdout = 5% }
batch { sequence = 32, micro = 4 }
optimizer adamw { lr = 1e-3 }
launch { device = cpu }
checkpoint { keep = none }
"""
GOOD = """
scheduler cosine { warmup = 0.5 epochs }
phase late { from = 1.5 epochs, lr_scale = 0.5 }
every 1 epoch checkpoint
every 0.5 epochs log
every 25% eval a
"""
LATE = """
scheduler cosine { warmup = 50 steps }
phase late { from = 500 steps, lr_scale = 0.5 }
every 300 steps eval a
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in range(40):
        Path(f"{number:02}.txt").write_text("abcdefgh" * (number % 7 + 1))
    Path("good.xtrain").write_text(SPEC + GOOD)
    Path("late.xtrain").write_text(SPEC + LATE)
    return tmp_path


def started(*arguments: str) -> tuple[int, str, str]:
    """The exit code of the command, and what it printed to either stream."""
    command = ForkedCommand(["run", *arguments, "--ui", "plain"], Path.cwd(), {**os.environ, "OMP_NUM_THREADS": "1"})
    out, err = command.communicate(timeout=300)
    return command.wait(), out, err


def records(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def test_what_does_not_fit_is_reported_by_the_run_that_counts_and_by_the_plan_from_then_on(folder, capsys):
    assert main(["plan", "late.xtrain", "--part", "checks"]) == 0
    assert "W601" not in (before := capsys.readouterr().out) and "unknown until the data is counted" in " ".join(
        before.split()
    )
    code, out, err = started("late.xtrain")
    said = out + err
    assert code == 3, said
    (run,) = (folder / "runs" / "tiny").iterdir()
    (failure,) = (each for each in records(run, "events.jsonl") if each["event"] == "failure")
    assert failure["code"] == "X602" and "late.xtrain:11:29: warmup 50 steps" in failure["error"]
    assert "X607: late.xtrain:12:21: phase late begins at 500 steps" in failure["error"]
    assert "late.xtrain:13:7: every 300 steps never happens" in said and "step 1" not in said
    assert not (run / "metrics.jsonl").exists()
    # Now that the rows are in the cache the plan hears all of it, and data build need not be asked.
    assert main(["plan", "late.xtrain"]) == 2
    errors = capsys.readouterr().err
    assert all(f"[{code}]" in errors for code in ("X602", "X607", "W601"))


def test_a_run_in_epochs_stops_goes_on_and_names_its_checkpoints(folder, capsys):
    assert main(["data", "build", "good.xtrain", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]["training"]
    steps, half = -(-2 * rows // 4), -(-rows // 2 // 4)
    assert main(["plan", "good.xtrain", "--part", "training"]) == 0
    page = capsys.readouterr().out
    assert f"{steps}  2 epochs of {rows} rows" in page and "every 1 epoch" in page

    code, out, err = started("good.xtrain", "--set", "launch.stop_at=1 epoch")
    assert code == 75, out + err
    code, out, err = started("good.xtrain")
    assert code == 0, out + err
    assert f"/{steps}  epoch 2.0" in out
    (run,) = (folder / "runs" / "tiny").iterdir()
    metrics = records(run, "metrics.jsonl")
    logged = [each for each in metrics if "lr" in each]
    assert [each["epoch"] for each in logged] == [round(each["step"] * 4 / rows, 6) for each in logged]
    assert [int(each["epoch"] / 0.5) for each in logged] == [1, 2, 3, 4] and logged[0]["step"] == half
    phases = [each for each in records(run, "events.jsonl") if each["event"] == "phase" and each["name"] == "late"]
    assert [each["step"] for each in phases] == [-(-3 * rows // 2 // 4)] and phases[0]["epoch"] >= 1.5

    assert find(run / "epoch-1").step == find_named(run, "epoch-1").step == -(-rows // 4)
    assert find(run / "checkpoints" / "epoch-2").step == steps
    with pytest.raises(EnvironmentFault, match=r"no checkpoint epoch-3; there are .*epoch-1, epoch-2, ckpt-s"):
        find_named(run, "epoch-3")
    assert main(["checkpoint", "ls", str(run)]) == 0
    assert "epoch-1" in (listed := capsys.readouterr().out) and "latest · epoch-2" in listed


TOKENS = """
experiment tiny { budget = 1_280 tokens }
model llama { dim = 16, layers = 1, heads = 2 }
tokenizer bytes
dataset a { source = text("*.txt"), holdout = 5% }
batch { sequence = 32, micro = 2 }
optimizer adamw { lr = 1e-2 }
scheduler linear { warmup = 192 tokens }
phase late { from = 1_100 tokens, lr_scale = 0.5 }
launch { device = cpu }
every 1 step log
every 256 tokens checkpoint
"""


def test_lengths_in_tokens_count_from_the_checkpoint_whatever_the_batch(folder, capsys):
    """64 tokens a step up to step 8, then 128 for one step, then 256 on two ranks of a run that begins there."""
    Path("tokens.xtrain").write_text(TOKENS)
    code, out, err = started("tokens.xtrain", "--set", "launch.stop_at=512 tokens", "--set", "workspace.run=r")
    assert code == 75, out + err
    assert main(["diff", "runs/tiny/r", "tokens.xtrain", "--set", "batch.rows=4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "20 → 14 steps: 768 of 1,280 tokens are left after step 8, at 128 tokens a step" in said
    more = ("batch.rows=4", "launch.stop_at=640 tokens", "workspace.run=r")
    code, out, err = started("tokens.xtrain", *(word for each in more for word in ("--set", each)))
    assert code == 75 and "768 of 1,280 tokens are left" in err and "rate jumps" not in out + err, out + err
    more = ("batch.micro=4", "checkpoint.from=runs/tiny/r", "workspace.run=s")
    code, out, err = started("tokens.xtrain", "--world", "2", *(word for each in more for word in ("--set", each)))
    assert code == 0 and "W608" not in err, out + err

    logged = [each for run in "rs" for each in records(folder / "runs" / "tiny" / run, "metrics.jsonl") if "lr" in each]
    tokens = [*range(64, 513, 64), 640, 896, 1152, 1408]
    assert [(each["step"], each["tokens"]) for each in logged] == list(enumerate(tokens, 1))
    rates = [t / 192 if t <= 192 else max(0, 1 - (t - 192) / (1280 - 192)) for t in tokens]
    rates[-1] *= 0.5  # 1,152 tokens are the first 1,100, before the last step
    assert [each["lr"] for each in logged] == pytest.approx([1e-2 * rate for rate in rates])
    (counted,) = (each for each in records(folder / "runs/tiny/s", "events.jsonl") if each["event"] == "horizon")
    assert counted["steps"] == 12 and counted["phases"] == {"train": 0, "late": 11}
    assert [each["first"] for each in counted["stretches"]] == [0, 8, 9]
    saved = [each["step"] for each in records(folder / "runs/tiny/s", "events.jsonl") if each["event"] == "checkpoint"]
    assert saved == [10, 11, 12]


def test_an_epoch_that_was_stopped_goes_on_with_other_rows(folder):
    Path("epoch.xtrain").write_text(SPEC.replace("2 epochs", "1 epoch") + "scheduler linear\nevery 1 step log\n")
    code, out, err = started("epoch.xtrain", "--set", "launch.stop_at=75%", "--set", "workspace.run=r")
    assert code == 75, out + err
    code, out, err = started("epoch.xtrain", "--set", "batch.rows=8", "--set", "workspace.run=r")
    assert code == 0, out + err
    run = folder / "runs/tiny/r"
    (data,) = [each for each in records(run, "events.jsonl") if each["event"] == "data"][-1:]
    whole = data["epoch_rows"]
    logged = [each for each in records(run, "metrics.jsonl") if "lr" in each]
    assert logged[-1]["epoch"] >= 1 > logged[-2]["epoch"]
    assert [each["lr"] for each in logged] == pytest.approx(
        [1e-3 * max(0, 1 - each["tokens"] / 32 / whole) for each in logged], abs=1e-9
    )
