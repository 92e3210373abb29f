"""The weights of a checkpoint into the safetensors files of a folder, tensor by tensor, and read back."""

import json
import os
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Final
from zlib import crc32

import torch
from attrs import define, field
from torch import Tensor

from xtrain.planner.weights.files import INDEX, SIZES, StoredTensor, read_file
from xtrain.planner.weights.written import WrittenFile, WrittenTensor
from xtrain.runtime.checkpoint.stored_weights import CHUNK_BYTES, TYPES
from xtrain.runtime.errors import ExportFailed
from xtrain.runtime.files import durable

# What is told of the progress: (what is done, bytes so far, bytes in all, file, files).
Report = Callable[[str, int, int, int, int], None]
WRITING: Final = "writing"
READING_BACK: Final = "reading back"


@define(eq=False)
class WeightsWriter:
    """Writes the files of a model into a folder.

    whole: gives all of a parameter by its name, or raises OSError. Of the whole model the parameters of one tensor are
    in memory at a time, and of what is written one chunk.
    """

    files: tuple[WrittenFile, ...]
    whole: Callable[[str], Tensor]
    folder: Path
    report: Report
    _sums: dict[str, int] = field(factory=dict)
    _read: dict[str, Tensor] = field(factory=dict)

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
        self._read.clear()
        if len(self.files) > 1:
            durable.write(self.folder / INDEX, json.dumps(self._index(), indent=2) + "\n")

    def verify(self) -> None:
        """Read the files and hold every tensor against what was written. Raises ExportFailed or OSError."""
        found: dict[str, StoredTensor] = {}
        for file in self.files:
            found |= read_file(str(self.folder), file.name).tensors
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
        views, type, sum = self._views(tensor), TYPES[tensor.format], 0
        row_bytes = prod(tensor.shape[1:]) * SIZES[tensor.format]
        rows, each = tensor.shape[0] if tensor.shape else 1, max(1, CHUNK_BYTES // max(1, row_bytes))
        for begin in range(0, rows, each):
            stored = _rows(tensor, views, begin, min(begin + each, rows))
            written = stored.to(type).contiguous()
            if not bool(torch.isfinite(written).all()):
                raise ExportFailed(_not_finite(tensor, stored))
            content = written.view(torch.uint8).numpy().data.cast("B")
            sum = crc32(content, sum)
            yield content
        self._sums[tensor.name] = sum

    def _views(self, tensor: WrittenTensor) -> list[Tensor]:
        """Of its parameters, as files have each part."""
        names = [parameter for parameter, _ in tensor.parts]
        for name in self._read.keys() - names:  # the parameters before make room for the next
            del self._read[name]
        found = []
        for name, part in tensor.parts:
            if name not in self._read:
                self._read[name] = self.whole(name)
            value = self._read[name] if part.expert is None else self._read[name][part.expert]
            found.append(value.transpose(-1, -2) if part.transposed else value)
        return found


def _rows(tensor: WrittenTensor, views: list[Tensor], begin: int, end: int) -> Tensor:
    """Some rows of a tensor, put together where several parameters lie in it."""
    pieces = [view[begin:end] if view.ndim else view[None] for view in views]
    if len(pieces) == 1:
        assert views[0].shape == tensor.shape, f"{tensor.name} lacks a parameter"
        return pieces[0]
    whole = pieces[0].new_empty(end - begin, *tensor.shape[1:])
    assert sum(piece.numel() for piece in pieces) == whole.numel(), f"{tensor.name} lacks a parameter"
    for piece, (_, part) in zip(pieces, tensor.parts, strict=True):
        width = piece.shape[-2 if part.transposed else -1]
        place = slice(part.first, part.first + width * part.step, part.step)
        (whole[..., place, :] if part.transposed else whole[..., place]).copy_(piece)
    return whole


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
