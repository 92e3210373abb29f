"""Runs of the real command on one rank and on several; the table of layouts is in test_topologies.py."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from projects import Project, curve, events, worst
from torch.distributed.checkpoint import FileSystemReader

from xtrain.runtime.nn.weights import quiet_alone
from xtrain.runtime.store.checkpoints import CheckpointFolder

TOLERANCE = 1e-5


def tensors(directory) -> dict[str, torch.Tensor]:
    path = CheckpointFolder(directory / "checkpoints").latest().path
    entries = FileSystemReader(path).read_metadata().state_dict_metadata.items()
    entries = [(name, e) for name, e in entries if not name.startswith("rng.")]  # of which each rank has its own
    state = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries}
    with quiet_alone():
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_the_command_on_two_ranks_computes_the_run_and_saves_the_checkpoint_of_one(tmp_path):
    project = Project(tmp_path)
    spec = project.spec(more="on finish eval lines { batches = none }")
    alone = project.run(spec, root="alone")
    directory = project.run(spec, "--world", "2")
    loss, norm = worst(curve(directory), curve(alone))
    assert loss < TOLERANCE and norm < TOLERANCE
    ours, theirs = tensors(directory), tensors(alone)
    assert ours.keys() == theirs.keys()
    gaps = {
        name: float((ours[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        for name, expected in theirs.items()
    }
    assert not {name: gap for name, gap in gaps.items() if gap > TOLERANCE}
    (ours,), (theirs,) = events(directory, "eval"), events(alone, "eval")
    assert ours["tokens"] == theirs["tokens"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
