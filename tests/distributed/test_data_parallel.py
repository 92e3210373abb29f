"""Runs of the real command on one rank and on several; the table of layouts is in test_topologies.py."""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from projects import Project, curve, events, worst
from topologies import Topology
from torch.distributed.checkpoint import FileSystemReader

from xtrain.runtime.checkpoint.layout import CheckpointFolder
from xtrain.runtime.models.tensors import quiet_alone

pytestmark = pytest.mark.distributed

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


def test_bf16_compute_follows_fp32_and_is_the_same_on_two_ranks(lab):
    exact = lab.alone(Topology().trial("fp32", shallow=True))
    trial = Topology(shared=("precision.compute=bf16",)).trial("fp32", shallow=True)
    one, two = lab.alone(trial), lab.run(trial, Topology(fsdp=2).layout, saves=False)
    assert 1e-6 < worst(one.curve, exact.curve)[0] < 5e-3, "it computes in bf16"
    assert worst(two.curve, one.curve)[0] < 5e-3
    assert {value.dtype for value in one.tensors.values()} == {np.dtype("float32")}
