"""One run, started in every way there is, one after the other: what is tokenized once is there for all of them."""

import pytest
from projects import Project, events

from xtrain.cli.main import main

SPEC = """
experiment tiny { seed = 3, budget = 3 steps }
model qwen3 { dim = 32, layers = 1, heads = 2, ffn = 48 }
tokenizer bytes
dataset words { source = synthetic(documents = 400, length = 40, spread = 1.0), holdout = 10% }
batch { sequence = 64, rows = 4 }
optimizer adamw { lr = 3e-3 }
every 1 step log
"""


# What torchrun starts is forked by default; that fresh processes can import what a run needs, test_quickstart.py shows.
@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_goes_on_however_it_is_started(project: Project, monkeypatch: pytest.MonkeyPatch, fresh: bool):
    monkeypatch.chdir(project.folder)
    (project.folder / "words.xtrain").write_text(SPEC)
    assert main(["data", "build", "words.xtrain", "--jobs", "1"]) == 0
    assert main(["plan", "words.xtrain", "--out", "saved.json"]) == 0
    starts = (
        ("words.xtrain", 0, ("--set", "launch.stop_at=1 steps"), (75,)),
        ("words.xtrain", 1, ("--set", "launch.stop_at=2 steps"), (0, 1)),
        ("saved.json", 0, (), (0,)),
    )
    for name, ranks, settings, expected in starts:
        process = project.start(name, *settings, "--ui", "none", torchrun=ranks, fresh=fresh and ranks > 0)
        _, err = process.communicate(timeout=240)
        assert process.returncode in expected, err
    directory = project.directory()
    assert [event["step"] for event in events(directory, "resumed")] == [1, 2]
    assert [event["status"] for event in events(directory, "run_end")] == ["stopped", "stopped", "done"]
    assert not events(directory, "tokenise") and not events(directory, "warning")
    assert len([*(project.folder / "runs/cache/tokens").iterdir()]) == 1
