"""The weights of a checkpoint into the safetensors files of a folder, tensor by tensor, and read back."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from zlib import crc32

import torch
from attrs import define, field
from torch import Tensor

from ...planner.weights.files import INDEX, SIZES, StoredTensor, read_weight_files
from ...planner.weights.written import WrittenFile, WrittenTensor
from ..checkpoint.stored_weights import CHUNK_BYTES, TYPES
from ..checkpoint.whole_tensors import WholeTensors
from ..errors import ExportFailed
from ..files import durable

# What is told of the progress: (what is done, bytes so far, bytes in all, file, files).
Report = Callable[[str, int, int, int, int], None]
WRITING: Final = "writing"
READING_BACK: Final = "reading back"


@define(eq=False)
class WeightsWriter:
    """Writes the files of a model into a folder.

    prefix: of the names of its parameters in the checkpoint. Of the whole model one parameter is in memory at a time,
    and of what is written one chunk.
    """

    files: tuple[WrittenFile, ...]
    source: WholeTensors
    prefix: str
    folder: Path
    report: Report
    _sums: dict[str, int] = field(factory=dict)
    _read: tuple[str, Tensor] | None = None

    @property
    def total(self) -> int:
        return sum(file.bytes for file in self.files)

    def write(self) -> None:
        """All files, and the index if there are several; they are on the disk then. Raises ExportFailed or OSError."""
        done = 0
        for number, file in enumerate(self.files, start=1):
            path = self.folder / file.name
            fd = durable.create(path)
            try:
                durable.append(fd, file.header)
                for tensor in file.tensors:
                    for chunk in self._chunks(tensor):
                        durable.append(fd, chunk)
                        done += len(chunk)
                        self.report(WRITING, done, self.total, number, len(self.files))
            finally:
                os.close(fd)
            durable.sync(path)
        self._read = None
        if len(self.files) > 1:
            durable.write(self.folder / INDEX, json.dumps(self._index(), indent=2) + "\n")

    def verify(self) -> None:
        """Read the files and hold every tensor against what was written. Raises ExportFailed or OSError."""
        found = read_weight_files(str(self.folder)).tensors
        if found.keys() != self._sums.keys():
            raise ExportFailed(f"{self.folder} has other tensors than were written")
        numbers, done = {file.name: number for number, file in enumerate(self.files, start=1)}, 0
        for name, tensor in found.items():
            with (self.folder / tensor.file).open("rb", buffering=0) as file:
                sum = 0
                for piece in _pieces(file.fileno(), tensor):
                    sum = crc32(piece, sum)
                    done += len(piece)
                    self.report(READING_BACK, done, self.total, numbers[tensor.file], len(self.files))
            if sum != self._sums[name]:
                raise ExportFailed(f"`{name}` in {tensor.file} is not what was written: the disk has changed it")

    def _index(self) -> dict[str, object]:
        sizes = [tensor.bytes // SIZES[tensor.format] for file in self.files for tensor in file.tensors]
        places = {tensor.name: file.name for file in self.files for tensor in file.tensors}
        return {
            "metadata": {"total_parameters": sum(sizes), "total_size": self.total},
            "weight_map": dict(sorted(places.items())),
        }

    def _chunks(self, tensor: WrittenTensor) -> Iterator[memoryview]:
        """The bytes of a tensor as it is stored, some rows at a time."""
        stored = self._stored(tensor)
        type, sum = TYPES[tensor.format], 0
        rows = stored if stored.ndim else stored[None]
        each = max(1, CHUNK_BYTES // max(1, rows[:1].numel() * SIZES[tensor.format]))
        for part in rows.split(each):
            written = part.to(type).contiguous()
            if not bool(torch.isfinite(written).all()):
                raise ExportFailed(_not_finite(tensor, part))
            content = written.view(torch.uint8).numpy().data.cast("B")
            sum = crc32(content, sum)
            yield content
        self._sums[tensor.name] = sum

    def _stored(self, tensor: WrittenTensor) -> Tensor:
        """A view of its parameter, as files have it."""
        if self._read is None or self._read[0] != tensor.parameter:
            self._read = None  # the parameter before makes room for the next
            self._read = tensor.parameter, self.source.read(f"{self.prefix}{tensor.parameter}")
        part, found = tensor.part, self._read[1]
        found = found if part.expert is None else found[part.expert]
        found = found.t() if part.transposed else found
        assert tuple(found.shape) == part.shape, f"{part.name} is one part of a stored tensor"
        return found


def _not_finite(tensor: WrittenTensor, part: Tensor) -> str:
    if bool(torch.isfinite(part).all()):
        most = torch.finfo(TYPES[tensor.format]).max
        return f"`{tensor.name}` has values above {most:g}, the largest of this format; use bf16 or fp32"
    kind = "NaN" if bool(torch.isnan(part).any()) else "an infinite value"
    return f"`{tensor.name}` has {kind} in the checkpoint; export one that was saved before the run failed"


def _pieces(fd: int, tensor: StoredTensor) -> Iterator[bytes]:
    at, end = tensor.start, tensor.start + tensor.bytes
    while at < end:
        piece = os.pread(fd, min(CHUNK_BYTES, end - at), at)
        if not piece:
            raise ExportFailed(f"{tensor.file} is cut off: the disk has lost what was written")
        at += len(piece)
        yield piece
