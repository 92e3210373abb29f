"""`.metadata` of a checkpoint: what torch writes is read as torch reads it, and nothing else that a file may hold."""

import os
import pickle
import struct
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from xtrain.runtime.base.errors import StorageFailed
from xtrain.runtime.store.reading import ShardReader, WholeTensors, read_tensors, reader_of

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.ones(300, dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "none": torch.empty(0, 4),
}


class Runs:
    """Runs a command when it is unpickled by Python alone."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.file}'",)


def saved(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(tensors), checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("sound") / "checkpoint")


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    for file in sound.iterdir():
        (tmp_path / "checkpoint" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "checkpoint"


def test_records_are_those_that_torch_reads(sound):
    ours, theirs = ShardReader(sound).read_metadata(), FileSystemReader(sound).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


@pytest.mark.parametrize("protocol", [4, 5])
def test_every_protocol_that_torch_writes_with(folder, protocol):
    metadata = FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    found = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    read_tensors(found, folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(
    "place", ["state_dict_metadata", "storage_data", "planner_data", "storage_meta", "version", "own"]
)
def test_no_code_of_a_file_is_executed(folder, tmp_path, place):
    metadata = FileSystemReader(folder).read_metadata()
    setattr(metadata, place, Runs(tmp_path / "ran"))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for read in (reader_of, WholeTensors, lambda path: read_tensors({"a": torch.empty(2, 3)}, path)):
        with pytest.raises((OSError, StorageFailed), match=r"it names `posix.system`, which was not executed"):
            read(folder)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Runs(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()  # Python alone would have run it


def test_an_object_in_place_of_a_tensor_is_not_unpickled(folder, tmp_path):
    """torch's planner loads such an object without limits."""
    metadata = FileSystemReader(folder).read_metadata()
    metadata.state_dict_metadata["a"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(StorageFailed, match="`a` is no tensor but an object of Python"):
        read_tensors({"a": torch.empty(2, 3)}, folder)


def _first_place(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


def _chunk(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["a"].chunks[0]  # type: ignore[union-attr]


WRONG: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "no records": (lambda found: found.__dict__.clear(), "NoneType instead of dict"),
    "a file elsewhere": (lambda found: setattr(_first_place(found), "relative_path", "../x"), "no file of"),
    "a file of the system": (lambda found: setattr(_first_place(found), "relative_path", "/dev/zero"), "no file of"),
    "a file that is missing": (lambda found: setattr(_first_place(found), "relative_path", "x"), "No such file"),
    "a pipe": (lambda found: setattr(_first_place(found), "relative_path", "pipe"), "not a regular file"),
    "behind the end": (lambda found: setattr(_first_place(found), "offset", 10**9), "ends before"),
    "a negative place": (lambda found: setattr(_first_place(found), "offset", -1), "no whole number"),
    "compressed": (lambda found: setattr(_first_place(found), "transform_descriptors", ["zstd"]), "compressed"),
    "another shape": (lambda found: setattr(_chunk(found), "sizes", torch.Size([2, 4])), "not of it"),
    "fewer dims": (lambda found: setattr(_chunk(found), "sizes", torch.Size([2])), "zip"),
    "a place that is missing": (lambda found: found.storage_data.clear(), "does not say where"),
    "no list": (lambda found: setattr(found.state_dict_metadata["a"], "chunks", {}), "dict instead of list"),
    "a number as name": (lambda found: found.state_dict_metadata.update({1: 1}), "no text"),  # type: ignore[dict-item]
    "no dtype": (lambda found: setattr(found.state_dict_metadata["a"].properties, "dtype", torch.Size), "no dtype"),  # type: ignore[union-attr]
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_records_that_torch_does_not_write(folder, wrong):
    os.mkfifo(folder / "pipe")
    change, said = WRONG[wrong]
    metadata = deepcopy(FileSystemReader(folder).read_metadata())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(OSError, match=said):
        ShardReader(folder)


BYTES: dict[str, bytes] = {
    "nothing": b"",
    "text": b"hello",
    "cut off": pickle.dumps({"a": 1})[:-2],
    "no record": pickle.dumps([1, 2]),
    "a place far away": b"\x80\x04}r" + struct.pack("<I", 2**31) + b".",
    "a length without end": b"\x80\x04\x8d" + b"\xff" * 8 + b".",
    "a long name": b"\x80\x04X" + b"\xff" * 4 + b".",
    "numbers of one hash": b"\x80\x04\x8a\x10" + b"\x01" * 16 + b".",
    "an old instruction": b"cposix\nsystem\n(S'true'\ntR.",
    "an extension": b"\x80\x04\x82\x01.",
    "an empty stack": b"\x80\x04R.",
    "a name without an end": b"\x80\x04\x8c\x05posix",
    "a number that is called": b"\x80\x04K\x01)R.",
    "nested lists": b"\x80\x04" + b"](" * 50_000 + b"e" * 50_000 + b".",
}


@pytest.mark.parametrize("content", BYTES)
def test_bytes_that_are_no_metadata(folder, content):
    (folder / ".metadata").write_bytes(BYTES[content])
    with pytest.raises(OSError, match="is not what torch writes"):
        ShardReader(folder)


def test_a_list_that_is_named_again_and_again(folder):
    """A pickle of a few bytes can stand for shards without number."""
    metadata = FileSystemReader(folder).read_metadata()
    tensor = metadata.state_dict_metadata["a"]
    tensor.chunks = tensor.chunks * 10_000  # type: ignore[union-attr]
    metadata.state_dict_metadata = dict.fromkeys([f"t{number}" for number in range(10_000)], tensor)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(OSError, match="shards that are not of it"):
        ShardReader(folder)


def test_a_file_that_is_missing_or_no_regular_file(folder):
    (folder / ".metadata").unlink()
    with pytest.raises(FileNotFoundError):
        ShardReader(folder)
    os.mkfifo(folder / ".metadata")
    with pytest.raises(OSError, match="not a regular file"):
        ShardReader(folder)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [({"x": torch.empty(1)}, "Missing key"), ({"a": torch.empty(3, 3)}, "ize mismatch"),
        ({"b": torch.empty(2)}, "ize")],
)  # fmt: skip
def test_names_and_shapes_that_the_checkpoint_does_not_have(sound, tensors, said):
    with pytest.raises(StorageFailed, match=said):
        read_tensors(dict(tensors), sound)


def test_shards_that_are_no_tensors(folder, tmp_path):
    """torch reads the shards themselves without executing anything; what it says of others is told."""
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(pickle.dumps(Runs(tmp_path / "ran")).ljust(shard.stat().st_size, b" "))
    with pytest.raises(StorageFailed, match="cannot be read"):
        read_tensors({"a": torch.empty(2, 3)}, folder)
    with pytest.raises(OSError, match="`a` cannot be read"):
        WholeTensors(folder).read("a")
    assert not (tmp_path / "ran").exists()
