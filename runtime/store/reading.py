"""Reading of the tensors of a checkpoint, without executing anything that its files contain."""

import pickle
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from xtrain.regular_files import open_regular, read_regular
from xtrain.runtime.base.errors import StorageFailed
from xtrain.runtime.base.mesh import CollectiveErrors, reason
from xtrain.runtime.nn.weights import quiet_alone
from xtrain.runtime.store.checkpoints import METADATA, TENSORS


def mapped(folder: Path) -> dict[str, Tensor]:
    """Return name → tensor, each read from disk on first use. Raises OSError."""
    try:
        tensors = torch.load(folder / TENSORS, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, UnpicklingError) as error:
        raise OSError(f"{folder / TENSORS} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise OSError(f"{folder / TENSORS} holds something else than tensors by name")
    return tensors


class FileReader(StorageReader):
    """Reader of a single-file checkpoint; each tensor is one piece."""

    def __init__(self, folder: Path) -> None:
        self._tensors = mapped(folder)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **rest: Any) -> Metadata:
        return Metadata(state_dict_metadata={name: _whole_tensor(tensor) for name, tensor in self._tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **rest: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            piece = self._tensors[cast(MetadataIndex, item.storage_index).fqn]
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return (Path(checkpoint_id) / TENSORS).is_file()


def _whole_tensor(tensor: Tensor) -> TensorStorageMetadata:
    origin = torch.Size([0] * tensor.dim())
    return TensorStorageMetadata(
        properties=TensorProperties.create_from_tensor(tensor),
        size=tensor.size(),
        chunks=[ChunkStorageMetadata(offsets=origin, sizes=tensor.size())],
    )


T = TypeVar("T")
MOST_BYTES: Final = 2**31  # of `.metadata`: about 20 million shards
MOST_DIMENSIONS: Final = 64  # torch's limit
# Packages whose classes torch writes into `.metadata`.
_PACKAGES: Final = ("torch", "pathlib")
# Pickle instructions (`pickletools.opcodes`) that build plain data, with the bytes of their arguments, then those with
# a length before their data. LONG_BINPUT is left out: one such instruction can take gigabytes of memory.
_PLAIN: Final = re.compile(rb"(?:[(0NRabdestu})\]\x81\x85-\x89\x93\x94]|[Kh\x80].|M..|[Jj]....|\x95.{8})++", re.DOTALL)
_COUNTED: Final = {b"\x8c": 1, b"\x8a": 1, b"X": 4}
_LONG: Final = b"\x8a"
_END: Final = b"."


class _StandIn:
    """Stand-in for a class that a pickle names: stores its arguments and state, and does nothing."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler that makes stand-ins, one class for each name."""

    def __init__(self, content: bytes) -> None:
        super().__init__(BytesIO(content))
        self._classes: dict[str, type[_StandIn]] = {}

    def find_class(self, module_name: str, global_name: str) -> type[_StandIn]:
        name = f"{module_name}.{global_name}"
        if module_name.partition(".")[0] not in _PACKAGES:
            raise pickle.UnpicklingError(f"it names `{name}`, which was not executed")
        if name not in self._classes:
            self._classes[name] = type(global_name, (_StandIn,), {})
        return self._classes[name]


class ShardReader(FileSystemReader):
    """Reader of a sharded checkpoint. Raises OSError if `.metadata` is not what torch writes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = _read_metadata(folder)

    def read_metadata(self, *args: Any, **rest: Any) -> Metadata:
        return self._metadata


def reader_of(folder: Path) -> StorageReader:
    """Open a checkpoint of either form. Raises OSError."""
    return FileReader(folder) if (folder / TENSORS).is_file() else ShardReader(folder)


def _read_metadata(folder: Path) -> Metadata:
    content = read_regular(folder / METADATA, MOST_BYTES)
    try:
        _check_instructions(content)
        return _Records(folder, len(content)).metadata(_Unpickler(content).load())
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, OverflowError, RecursionError,
            MemoryError, pickle.UnpicklingError) as error:  # fmt: skip
        raise OSError(f"{folder / METADATA} is not what torch writes: {error or type(error).__name__}") from error


def _check_instructions(content: bytes) -> None:
    """Raise ValueError for instructions that torch's records do not need."""
    place = 0
    while content[place : place + 1] != _END:
        if (plain := _PLAIN.match(content, place)) is not None:
            place = plain.end()
            continue
        sign = content[place : place + 1]
        if sign not in _COUNTED:
            raise ValueError(f"byte {place:,} is no instruction of it" if sign else "it is cut off")
        start = place + 1 + _COUNTED[sign]
        length = int.from_bytes(content[place + 1 : start], "little")
        place = start + length
        # Larger numbers can be chosen to collide in their hashes.
        if place >= len(content) or (sign == _LONG and length > 8):
            raise ValueError(f"a length before byte {start:,} is too large")


class _Records:
    """Builder of torch's records from stand-ins. Raises ValueError, TypeError or KeyError for invalid content.

    most: shards that a file of this size can have; a pickle may repeat one list many times.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._left = folder, most
        self._bytes: dict[str, int] = {}

    def metadata(self, root: Any) -> Metadata:
        fields = _fields(root, "Metadata")
        places = {
            self._index(index): self._place(place) for index, place in _checked(fields["storage_data"], dict).items()
        }  # fmt: skip
        tensors = {
            name: self._tensor(name, record) for name, record in _checked(fields["state_dict_metadata"], dict).items()
        }
        for name, tensor in tensors.items():
            for chunk in tensor.chunks:
                if MetadataIndex(name, chunk.offsets) not in places:
                    raise ValueError(f"it does not say where `{name}` from {list(chunk.offsets)} lies")
        # torch declares the value type as a union, and dict is invariant.
        return Metadata(state_dict_metadata={**tensors}, storage_data=places)

    def _tensor(self, name: Any, record: Any) -> TensorStorageMetadata:
        if not isinstance(name, str):
            raise TypeError("a name is no text")
        if type(record).__name__ == "BytesStorageMetadata":
            raise ValueError(f"`{name}` is no tensor but an object of Python, which can run code when read")
        fields = _fields(record, "TensorStorageMetadata")
        dtype = _state(fields["properties"], "TensorProperties")[0]
        dtype = getattr(torch, dtype.__name__, None) if isinstance(dtype, type) else None
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"`{name}` has no dtype")
        size = _size(fields["size"])
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [*self._chunks(name, fields["chunks"], size)])

    def _chunks(self, name: str, records: Any, size: torch.Size) -> Iterator[ChunkStorageMetadata]:
        for record in _checked(records, list):
            self._left -= 1
            fields = _fields(record, "ChunkStorageMetadata")
            offsets, sizes = _size(fields["offsets"]), _size(fields["sizes"])
            ends = [offset + length for offset, length in zip(offsets, sizes, strict=True)]
            if self._left < 0 or any(end > whole for end, whole in zip(ends, size, strict=True)):
                raise ValueError(f"`{name}` has shards that are not of it")
            yield ChunkStorageMetadata(offsets, sizes)

    def _index(self, record: Any) -> MetadataIndex:
        fields = _fields(record, "MetadataIndex")
        offset = fields.get("offset")
        return MetadataIndex(_checked(fields["fqn"], str), None if offset is None else _size(offset))

    def _place(self, record: Any) -> _StorageInfo:
        fields = _fields(record, "_StorageInfo")
        file = _checked(fields["relative_path"], str)
        offset, length = _checked_int(fields["offset"]), _checked_int(fields["length"])
        if fields.get("transform_descriptors"):
            raise ValueError("it has shards that are compressed")
        if file not in self._bytes:
            if Path(file).name != file:
                raise ValueError(f"it names {file!r}, which is no file of the checkpoint")
            with open_regular(self._folder / file) as opened:
                self._bytes[file] = opened.seek(0, 2)
        if offset + length > self._bytes[file]:
            raise ValueError(f"{file} ends before a shard that it should have")
        return _StorageInfo(file, offset, length)


def _checked(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"it has {type(value).__name__} instead of {kind.__name__}")
    return value


def _state(record: Any, name: str) -> Any:
    if not isinstance(record, _StandIn) or type(record).__name__ != name:
        raise TypeError(f"it has {type(record).__name__} instead of {name}")
    return record.state


def _fields(record: Any, name: str) -> dict[str, Any]:
    return _checked(_state(record, name), dict)


def _checked_int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("a size or place is no whole number")
    return value


def _size(record: Any) -> torch.Size:
    if not isinstance(record, _StandIn) or type(record).__name__ != "Size":
        raise TypeError(f"it has {type(record).__name__} instead of Size")
    (extents,) = record.arguments
    if len(_checked(extents, tuple)) > MOST_DIMENSIONS:
        raise ValueError("a tensor has too many dimensions")
    return torch.Size(map(_checked_int, extents))


def read_tensors(tensors: dict[str, Any], folder: Path, collective: CollectiveErrors | None = None) -> None:
    """Fill name → tensor, of any layout, from a checkpoint of any layout and form.

    Collective; without `collective` this process is alone. Raises StorageFailed on all ranks alike, also if a name is
    missing or its shape differs.
    """
    collective = collective or CollectiveErrors(0, 1, None)
    group, readers = collective.group, list[StorageReader]()
    collective.all(lambda: readers.append(reader_of(folder)))
    with quiet_alone():
        try:
            load(tensors, checkpoint_id=folder, storage_reader=readers[0], process_group=group, no_dist=group is None)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            if any(isinstance(cause, torch.OutOfMemoryError | torch.AcceleratorError) for cause in causes):
                raise
            raise StorageFailed(f"{folder} cannot be read: {'; '.join(dict.fromkeys(map(reason, causes)))}") from error


class WholeTensors:
    """Reader of whole tensors from a checkpoint of any layout and form. The index is read once. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._reader = reader_of(folder)
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        except Exception as error:  # torch raises many kinds of errors for a damaged file
            raise OSError(f"{folder} cannot be read: {error}") from error

    def read(self, name: str) -> Tensor:
        """Read a whole tensor in its own number format. Memory also holds one shard. Raises OSError."""
        stored = self._metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise OSError(f"{self._folder} has no tensor {name}")
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: tensor}, self._metadata, is_coordinator=True)
        try:
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            self._reader.read_data(plan, planner).wait()
        except Exception as error:
            raise OSError(f"{self._folder}: `{name}` cannot be read: {error}") from error
        return tensor
