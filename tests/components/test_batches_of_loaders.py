"""A DataLoader of the user as a source: rows of its batches are documents, without padding."""

import pytest
from projects import Project, curve

PARTS = """
import torch
from torch.utils.data import DataLoader

from xtrain import source

ROWS = [[(7 * n + i) % 250 for i in range(5 + n % 17)] for n in range(40)]

def together(rows):
    longest = max(map(len, rows))
    batch = {"input_ids": torch.zeros(len(rows), longest, dtype=torch.int64)}
    batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    batch["weight"] = torch.tensor([float(len(row)) for row in rows])
    for number, row in enumerate(rows):
        place = (number, slice(len(row)))
        batch["input_ids"][place] = batch["labels"][place] = torch.tensor(row)
        batch["attention_mask"][place] = 1
        batch["labels"][number, 0:2] = -100
    return batch

@source
def loaded(batch: int = 4):
    \"\"\"Batches as the collators of transformers give them.\"\"\"
    return DataLoader(ROWS, batch_size=batch, collate_fn=together)

@source
def single():
    for row in ROWS:
        yield {"input_ids": row, "labels": [-100, -100, *row[2:]], "weight": float(len(row))}

@source
def wrong():
    for batch in loaded(4):
        batch["attention_mask"] = batch["attention_mask"][:, :2]
        yield batch
"""
SPEC = """
use "parts.py"
experiment tiny {{ seed = 3, budget = 6 steps }}
model llama {{ dim = 16, layers = 1, heads = 2, ffn = 16 }}
tokenizer bytes
dataset made {{ source = {source}, tokens = "input_ids", mask = "labels", values = {{ weight: "weight" }} }}
batch {{ sequence = 32, rows = 4 }}
optimizer adamw {{ lr = 1e-2 }}
every 1 step log
"""


def run(folder, source, expect=0):
    folder.mkdir()
    project = Project(folder)
    (project.folder / "parts.py").write_text(PARTS)
    (project.folder / "own.xtrain").write_text(SPEC.format(source=source))
    return project.start("own.xtrain", "--ui", "plain") if expect else curve(project.run("own.xtrain"))


@pytest.mark.slow
def test_batches_are_read_row_by_row(tmp_path):
    expected = run(tmp_path / "single", "single()")
    for number, source in enumerate(("loaded()", "loaded(7)", "loaded(40)")):
        assert run(tmp_path / str(number), source) == expected


@pytest.mark.slow
def test_a_mask_of_another_shape_is_said(tmp_path):
    command = run(tmp_path / "wrong", "wrong()", expect=1)
    said = "".join(command.communicate(timeout=120))
    assert command.returncode != 0
    assert "gave a batch whose `attention_mask` has not the shape [4, " in said, said
