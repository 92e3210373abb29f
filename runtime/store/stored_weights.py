"""Weights of a folder, read into the shards of a rank: each rank reads the bytes of its own shards only."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite, prod
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtrain.plan.coded_weights import Codes
from xtrain.plan.plan import Plan
from xtrain.plan.weight_files import EMBEDDING_WEIGHT, HEAD_WEIGHT, SIZES, StoredPart, StoredTensor, WeightFiles
from xtrain.plan.weight_layout import Assignment, assign
from xtrain.runtime.nn.build import DTYPES
from xtrain.runtime.nn.weights import own_indices

TYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
SCALE_TYPES: Final = {**TYPES, "U8": torch.uint8, "F8_E8M0": torch.float8_e8m0fnu}
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # followed by their negatives
# Bytes of a tensor in host memory at a time.
CHUNK_BYTES: Final = 2**24
PAUSE_SECONDS: Final = 10.0  # between two progress reports


@define
class WeightReader:
    """Reader of pieces of stored tensors; files are opened on first use.

    report: called with the bytes read so far, every PAUSE_SECONDS.
    """

    files: WeightFiles
    assignment: Assignment
    report: Callable[[int], None]
    bytes: int = 0
    _open: dict[str, int] = field(factory=dict)
    _buffer: bytearray = field(factory=bytearray)
    _reported: float = field(factory=time.monotonic)

    @classmethod
    def of(cls, plan: Plan, files: WeightFiles, report: Callable[[int], None]) -> "WeightReader":
        return cls(files, assign(plan.architecture, files), report)

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def has(self, name: str) -> bool:
        """Return True if the files have a parameter or buffer."""
        return name in self.assignment.parts

    def total(self, parameters: Iterable[tuple[str, Tensor]]) -> int:
        """Return the bytes to read for this rank's pieces of these parameters."""
        total = 0
        for name, parameter in parameters:
            piece = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            stored = self.files.tensors[self.assignment.parts[name][0].name]
            twice = 2 if name == EMBEDDING_WEIGHT and self.assignment.twin else 1
            total += twice * piece.numel() * stored.all_bytes // max(1, prod(stored.shape))
        return total

    def read(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Fill this rank's pieces of parameters. Raises OSError that names file and tensor."""
        together: dict[str, dict[str, Tensor]] = {}
        for name, parameter in parameters:
            part = self.assignment.parts[name][0]
            # Parameters interleaved in one tensor are read together, so that no byte is read twice.
            together.setdefault(part.name if part.step > 1 else name, {})[name] = parameter
        for group in together.values():
            self._read(group)

    def read_whole(self, name: str, into: Tensor, expert: int | None = None) -> None:
        """Fill `into` [R, C] with a whole matrix, or with one expert's matrix of a stack. Raises OSError."""
        indices = [torch.arange(extent) for extent in into.shape]
        for part in self.assignment.parts[name]:
            if part.expert == expert:
                self._read_parts([part], [into], indices)
            elif len(part.shape) == 3 and expert is not None:
                self._read_parts([part], [into], indices, expert)

    def _read(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill the pieces of one parameter, or of several alike ones that are interleaved in the same tensors."""
        name, parameter = next(iter(parameters.items()))
        indices = [own_indices(parameter, dim) for dim in range(parameter.ndim)]
        pieces = [
            parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters.values()
        ]
        assert {piece.shape for piece in pieces} == {pieces[0].shape}
        if parameter.ndim == 0:
            pieces, indices = [piece.view(1) for piece in pieces], [torch.arange(1)]
        if pieces[0].numel() == 0:
            return
        stored = self.assignment.parts[name][0]
        if name in (EMBEDDING_WEIGHT, HEAD_WEIGHT) and (own := int((indices[0] < stored.shape[0]).sum())) < len(
            indices[0]
        ):
            (piece,) = pieces
            self._grow(stored, piece[own:], indices[1])
            pieces, indices = [piece[:own]], [indices[0][:own], indices[1]]
        for parts in zip(*(self.assignment.parts[parameter_name] for parameter_name in parameters), strict=True):
            if (expert := parts[0].expert) is not None:
                if expert in (mine := indices[0].tolist()):
                    self._read_parts(parts, [piece[mine.index(expert)] for piece in pieces], indices[1:])
            elif (matrix := _as_matrix(parts[0], pieces[0])) is not None:
                (piece,) = pieces
                self._read_parts(parts, [piece.view(len(piece), -1)], [indices[0], matrix], width=len(matrix))
            elif len(parts[0].shape) == 3:
                for place, expert in enumerate(indices[0].tolist()):
                    self._read_parts(parts, [piece[place] for piece in pieces], indices[1:], expert)
            else:
                self._read_parts(parts, pieces, indices)
        if name == EMBEDDING_WEIGHT and self.assignment.twin:
            twin, (piece,) = self.files.tensors[self.assignment.twin], pieces
            for place, chunk in self._chunks(self.assignment.twin, twin, indices[0], indices[1], 0):
                if not torch.equal(piece[place].cpu(), chunk[..., 0].to(piece.dtype)):
                    message = f"{self._path(twin.file)}: `{self.assignment.twin}` differs from the embedding, to which "
                    raise OSError(f"{message}config.json ties it")

    def _grow(self, part: StoredPart, new: Tensor, columns: Tensor) -> None:
        """Fill rows [r, c] that the files lack with the mean of the stored rows, summed in fp64."""
        stored = self.files.tensors[part.name]
        sums = torch.zeros(len(columns), dtype=torch.float64)
        for (_, place), chunk in self._chunks(part.name, stored, torch.arange(part.shape[0]), columns, 0):
            sums[place] += chunk[..., 0].double().sum(0)
        self._put((sums / part.shape[0]).expand(new.shape), new, part.name, stored)

    def _read_parts(
        self,
        parts: Sequence[StoredPart],
        pieces: Sequence[Tensor],
        indices: list[Tensor],
        matrix: int = 0,
        width: int = 0,
    ) -> None:
        """Fill pieces [r, c] of a matrix, [r] of a vector; transposed: [c, r]. matrix: index in the stored tensor.
        width: as in `_chunks`."""
        part, stored = parts[0], self.files.tensors[parts[0].name]
        if part.rows is not None:
            begin, end = (int((indices[0] < bound).sum()) for bound in part.rows)
            if begin == end:
                return
            pieces = [piece[begin:end] for piece in pieces]
            indices = [indices[0][begin:end] - part.rows[0], *indices[1:]]
        skipped = matrix * stored.bytes // part.shape[0] if matrix else 0
        indices = [*indices[:-1], indices[-1] + (part.first if part.step == 1 else 0)]
        if part.transposed:
            pieces, indices = [piece.t() for piece in pieces], indices[::-1]
        rows, columns = indices[0] + part.top, indices[1] if len(indices) > 1 else None
        for place, chunk in self._chunks(part.name, stored, rows, columns, skipped, part.step, width):
            for stored_part, piece in zip(parts, pieces, strict=True):
                self._put(chunk[..., stored_part.first if stored_part.step > 1 else 0], piece[place], part.name, stored)

    def _put(self, values: Tensor, to: Tensor, name: str, stored: StoredTensor) -> None:
        """Copy values and check that they are finite in the parameters' number format."""
        if torch.finfo(to.dtype).max < torch.finfo(values.dtype).max:
            values = values.to(to.dtype)
            if not _is_finite(values):
                format = next(format for format, dtype in DTYPES.items() if dtype == to.dtype)
                message = f"{self._path(stored.file)}: `{name}` has a value that is too large for {format}"
                raise OSError(f"{message}, the format of the parameters")
        to.copy_(values)

    def _chunks(
        self,
        name: str,
        stored: StoredTensor,
        rows: Tensor,
        columns: Tensor | None,
        skipped: int,
        step: int = 1,
        width: int = 0,
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield (place in the piece, values) for the given rows, and columns of a matrix, in order.

        step: adjacent numbers that form one column, the last dimension of the values; of codes adjacent rows. skipped:
        bytes of the tensor before the matrix. width: columns of the matrix; 0: the last dimension of the tensor.
        """
        if stored.codes is not None and columns is not None:
            yield from self._decoded(name, stored, stored.codes, rows, columns, skipped, step)
            return
        width = 1 if columns is None else width or stored.shape[-1] // step
        size, type = SIZES[stored.format] * step, TYPES[stored.format]
        start, row_bytes = stored.start + skipped, width * size
        for first, end in runs(columns if columns is not None else torch.zeros(1, dtype=torch.int64)):
            # If all columns are wanted, consecutive rows are one range of the file.
            begin = 0 if columns is None else int(columns[first])
            whole = end - first == width
            wide, most = (end - first) * size, max(1, CHUNK_BYTES // ((end - first) * size))
            for top, bottom in runs(rows, most):
                count, at = bottom - top, start + int(rows[top]) * row_bytes + begin * size
                view = memoryview(self._room(count * wide))
                if whole:
                    self._fill(view, at, name, stored)
                else:
                    for row in range(count):
                        self._fill(view[row * wide : (row + 1) * wide], at + row * row_bytes, name, stored)
                chunk = torch.frombuffer(view, dtype=type)
                if not _is_finite(chunk):
                    kind = "NaN" if bool(torch.isnan(chunk).any()) else "an infinite value"
                    raise OSError(f"{self._path(stored.file)}: `{name}` has {kind}")
                self._progress()
                if columns is None:
                    yield slice(top, bottom), chunk.view(count, step)
                else:
                    yield (slice(top, bottom), slice(first, end)), chunk.view(count, end - first, step)

    def _decoded(
        self, name: str, stored: StoredTensor, codes: Codes, rows: Tensor, columns: Tensor, skipped: int, step: int
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield as `_chunks`, for a tensor of codes: values in fp32, which holds them exactly."""
        extent, width = stored.shape[-2:]
        row_bytes = width * codes.bits // 8
        above = skipped // row_bytes  # rows of other matrices
        tall, wide = codes.block
        for first, end in runs(columns):
            begin, count = int(columns[first]), end - first
            least, most = begin * codes.bits // 8, -(-(begin + count) * codes.bits // 8)
            groups = torch.arange(begin, begin + count) // wide
            for top, bottom in runs(rows, max(1, CHUNK_BYTES // (4 * count * step))):
                row, height = int(rows[top]) * step, (bottom - top) * step
                view = memoryview(bytearray(height * (most - least)))
                at = stored.start + (above + row) * row_bytes
                for line in range(1 if most - least == row_bytes else height):
                    part = view if most - least == row_bytes else view[line * (most - least) :][: most - least]
                    self._fill(part, at + line * row_bytes + least, name, stored)
                first_scale = above // extent * -(-extent // tall) + row // tall
                scales = self._scales(name, codes, first_scale, (row + height - 1) // tall - row // tall + 1)
                lines = torch.arange(row, row + height) // tall - row // tall
                packed = torch.frombuffer(view, dtype=torch.uint8).view(height, -1)
                values = decode(codes, packed, scales[lines][:, groups], begin % 2)
                if not _is_finite(values):
                    raise OSError(f"{self._path(stored.file)}: `{name}` has a value that is not finite")
                self._progress()
                yield (slice(top, bottom), slice(first, end)), values.view(bottom - top, step, count).transpose(1, 2)

    def _scales(self, name: str, codes: Codes, first: int, count: int) -> Tensor:
        """Return `count` rows of the scales from row `first` on, as stored."""
        width, size = codes.shape[-1], SIZES[codes.format]
        view = memoryview(bytearray(count * width * size))
        tensor = StoredTensor(codes.file, codes.format, codes.shape, codes.start)
        self._fill(view, codes.start + first * width * size, name, tensor)
        return torch.frombuffer(view, dtype=SCALE_TYPES[codes.format]).view(count, width)

    def _room(self, size: int) -> memoryview:
        """Return memory of the buffer, which grows to the largest chunk so far."""
        if size > len(self._buffer):
            self._buffer = bytearray()  # free the old buffer first
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def _fill(self, view: memoryview, at: int, name: str, stored: StoredTensor) -> None:
        """Read as many bytes as the view has. Raises OSError."""
        if stored.file not in self._open:
            self._open[stored.file] = os.open(self._path(stored.file), os.O_RDONLY | os.O_CLOEXEC)
        done = 0
        while done < len(view):
            count = os.preadv(self._open[stored.file], [view[done:]], at + done)
            if count == 0:
                raise OSError(f"{self._path(stored.file)} is cut off in `{name}`")
            done += count
        self.bytes += done

    def _path(self, file: str) -> Path:
        return Path(self.files.folder) / file

    def _progress(self) -> None:
        if time.monotonic() - self._reported >= PAUSE_SECONDS:
            self._reported = time.monotonic()
            self.report(self.bytes)


def decode(codes: Codes, packed: Tensor, scales: Tensor, odd: int) -> Tensor:
    """Return the values [r, c], fp32. packed: bytes [r, …] of codes. scales: of every value, as stored. odd: the first
    code is the upper half of its byte."""
    if codes.coding == "fp8":
        return packed.view(torch.float8_e4m3fn).float() * scales.float()
    table = torch.tensor([*E2M1, *(-each for each in E2M1)])
    both = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    numbers = table[both[:, odd : odd + scales.shape[1]].int()]
    return torch.ldexp(numbers, scales.int() - 127)


def _as_matrix(part: StoredPart, piece: Tensor) -> Tensor | None:
    """Return the columns of a tensor of more than two dimensions as a matrix, with all but the first dimension as
    one; None if it is stored in another form, or cut in one of them."""
    extents = tuple(part.shape[1:])
    whole = tuple(piece.shape[1:]) == extents and len(extents) > 1 and piece.is_contiguous()
    return torch.arange(prod(extents)) if whole and not part.transposed and part.step == 1 else None


def _is_finite(values: Tensor) -> bool:
    """Return True if no value is NaN or infinite, without a temporary tensor."""
    least, most = torch.aminmax(values)
    return isfinite(least) and isfinite(most)


def runs(indices: Tensor, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield [first, end) of each stretch of consecutive indices, split at `most`."""
    breaks = (indices.diff() != 1).nonzero().flatten().add(1).tolist()
    bounds = [0, *breaks, len(indices)]
    for first, end in pairwise(bounds):
        step = most or end - first or 1
        for begin in range(first, end, step):
            yield begin, min(begin + step, end)
