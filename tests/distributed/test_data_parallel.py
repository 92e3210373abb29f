"""Any number of data ranks computes the run that one rank computes."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from projects import Project, curve, events, worst
from torch.distributed.checkpoint import FileSystemReader

from xtrain.runtime.checkpoint.layout import CheckpointFolder
from xtrain.runtime.checkpoint.tensors import quiet_alone

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "fsdp 2": ("--world", "2"),
    "fsdp 4": ("--world", "4"),
    "replicate 2 · fsdp 2": ("--world", "4", "--set", "parallel.fsdp.replicate=2"),
    "replicate 2": ("--world", "2", "--set", "parallel.fsdp.replicate=2"),
    "fsdp 2, gathered parameters kept": ("--world", "2", "--set", "parallel.fsdp.reshard=false"),
}
FP64 = ("--set", "precision.params=fp64")
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}


def tensors(directory) -> dict[str, torch.Tensor]:
    path = CheckpointFolder(directory / "checkpoints").latest().path
    entries = FileSystemReader(path).read_metadata().state_dict_metadata.items()
    state = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries}
    with quiet_alone():
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def alone(shared):
    """The run of one rank in either format."""
    spec = shared.spec(more="on finish eval lines { batches = none }")
    return {
        "fp64": shared.run(spec, *FP64, root="alone64"),
        "fp32": shared.run(spec, root="alone32"),
    }


# fp64 and fp32 take different paths through FSDP's reduction; the layouts of the second list cover both kinds of mesh.
CASES = [*((layout, "fp64") for layout in LAYOUTS), ("fsdp 2", "fp32"), ("replicate 2 · fsdp 2", "fp32")]


@pytest.mark.parametrize(("layout", "params"), CASES)
def test_losses_norms_and_parameters_are_those_of_one_rank(shared, alone, layout, params):
    more = FP64 if params == "fp64" else ()
    directory = shared.run("tiny.xtrain", *LAYOUTS[layout], *more, root=f"{params}-{layout}".replace(" ", "_"))
    loss, norm = worst(curve(directory), curve(alone[params]))
    assert loss < TOLERANCE[params] and norm < TOLERANCE[params]
    ours, theirs = tensors(directory), tensors(alone[params])
    assert ours.keys() == theirs.keys()
    gaps = {
        name: float((ours[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        for name, expected in theirs.items()
    }
    assert not {name: gap for name, gap in gaps.items() if gap > TOLERANCE[params]}
    (ours,), (theirs,) = events(directory, "eval"), events(alone[params], "eval")
    assert ours["tokens"] == theirs["tokens"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE[params])


def test_rows_are_unevenly_filled(alone):
    """The parity above would prove nothing of the normalisation if all ranks had as many valid tokens."""
    from xtrain.runtime.data.packing import pack_sequential
    from xtrain.runtime.data.store import open_store

    (key,) = (p for p in (alone["fp64"].parents[1] / "cache" / "tokens").iterdir())
    rows = pack_sequential(open_store(key).lengths(), 64, "split")
    filled = [rows.length[a:b].sum() for a, b in zip(rows.row_offsets[:-1], rows.row_offsets[1:], strict=True)]
    assert len(set(map(int, filled))) > 10


def test_bf16_compute_follows_fp32_and_is_the_same_on_two_ranks(shared, alone):
    bf16 = ("--set", "precision.compute=bf16")
    one = shared.run("tiny.xtrain", *bf16, root="bf16-1")
    two = shared.run("tiny.xtrain", *bf16, "--world", "2", root="bf16-2")
    assert worst(curve(one), curve(alone["fp32"]))[0] < 5e-3
    assert worst(curve(two), curve(one))[0] < 5e-3
    assert tensors(one)["model.norm.weight"].dtype == torch.float32
