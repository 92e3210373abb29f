"""Actions before the first step, and on ranks that fail."""

import json

import torch
from projects import Project, events

PARTS = """
from pathlib import Path

from xtrain import action, hook

@hook("after_backward")
def breaks(context):
    if context.step == 3 and not Path("last").exists():
        raise ValueError("on purpose")

@action
def last(context):
    with open("last", "w") as file:
        print(context.step, type(context.failure).__name__, file=file)
"""
SPEC = """
use "parts.py"
experiment tiny { seed = 3, budget = 6 steps }
model llama { dim = 16, layers = 1, heads = 2, ffn = 16 }
tokenizer bytes
dataset made { source = synthetic(documents = 50), holdout = 10% }
batch { sequence = 32, rows = 4, micro = 2 }
optimizer adamw { lr = 1e-2 }
every 2 steps checkpoint
hook breaks
on start eval made
on failure dump { batches = 2 } then notify("echo $XTRAIN_ALERT > notified") then last
"""


def test_a_run_that_fails_writes_its_memory_and_rows_and_resumes_with_an_evaluation(tmp_path):
    project = Project(tmp_path)
    (project.folder / "parts.py").write_text(PARTS)
    (project.folder / "own.xtrain").write_text(SPEC)
    command = project.start("own.xtrain", "--ui", "plain")
    said = "".join(command.communicate(timeout=120))
    assert command.returncode == 1 and "ValueError: on purpose" in said
    directory = project.directory()
    assert (project.folder / "last").read_text() == "2 PartFailed\n"
    assert (project.folder / "notified").read_text() == "failure\n"
    folder = directory / "logs" / "dump-1"
    own = json.loads((folder / "rank-00000.json").read_text())
    assert own["held"]["parameters"] == own["planned"]["parameters"] > 0
    assert "on purpose" in own["error"] and "failed in step 3" in (folder / "rank-00000.md").read_text()
    dumped = torch.load(folder / "rank-00000.pt")
    assert [step["step"] for step in dumped["steps"]] == [2, 3] and "on purpose" in dumped["failure"]
    shapes = [batch["input_ids_BS"].shape for step in dumped["steps"] for batch in step["microbatches"]]
    assert shapes == [(2, 32)] * 4
    project.run("own.xtrain")
    assert [event["step"] for event in events(directory, "eval") if "start" in event["node"]] == [0, 2]
