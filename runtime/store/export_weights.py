"""Weights of a checkpoint in safetensors files, with adapters merged and quantized matrices dequantized."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Final
from zlib import crc32

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from xtrain.blocks.adapted import adapted_matrices
from xtrain.plan.mesh import base_of_plan
from xtrain.plan.parameters import name_of
from xtrain.plan.plan import Plan
from xtrain.plan.weight_files import INDEX, SIZES, StoredTensor, read_file
from xtrain.plan.weight_layout import FP8_BLOCK, BlockForm, IntegerForm, WrittenFile, WrittenTensor
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault, ExportFailed
from xtrain.runtime.nn.adapters import begun_part, merged
from xtrain.runtime.nn.number_formats import QuantisedMatrix
from xtrain.runtime.store.base_weights import BaseWeights
from xtrain.runtime.store.checkpoints import CheckpointEntry
from xtrain.runtime.store.reading import WholeTensors
from xtrain.runtime.store.stored_weights import CHUNK_BYTES, TYPES


@frozen
class Dequantised:
    """Checkpoint tensors with quantized matrices dequantized. matrices: name in the checkpoint → how it is stored."""

    source: WholeTensors
    matrices: Mapping[str, QuantisedMatrix]

    @classmethod
    def of(cls, plan: Plan, source: WholeTensors, prefix: str) -> "Dequantised":
        """Find the quantized matrices of a plan. prefix: of weight names in the checkpoint."""
        base, quantised = base_of_plan(plan), {}
        for tensor in plan.parameters.tensors if base is not None else ():
            if tensor.quantised:
                assert base is not None
                first, scales = (0,) * len(tensor.shape), f"{prefix}{tensor.name}_scales" if base.double else ""
                quantised[f"{prefix}{tensor.name}"] = QuantisedMatrix(base, tensor.shape, tensor.shape, first, scales)
        return cls(source, quantised)

    def read(self, name: str) -> Tensor:
        """Read a whole tensor in its own number format, or in fp32 if it is quantized. Raises OSError."""
        stored = self.source.read(name)
        if (matrix := self.matrices.get(name)) is None:
            return stored
        beside = self.source.read(matrix.scales) if matrix.scales else None
        return matrix.values(stored, beside, torch.float32)


@frozen(kw_only=True)
class MergedMatrix:
    """Measures of one merged matrix. rms: of the elements of its change. error: of the written values, relative to the
    change. unchanged: share of elements written unchanged."""

    name: str
    rms: float
    error: float
    unchanged: float


@define
class Merging:
    """Merge of a checkpoint's adapter into its base. plan: of the run; folder: where it was started. names: parameter →
    its name in the checkpoint, where the two differ. matrices: filled during the merge."""

    plan: Plan
    folder: Path
    entry: CheckpointEntry
    names: Mapping[str, str] = field(factory=dict)
    matrices: list[MergedMatrix] = field(factory=list)

    @contextmanager
    def into(
        self, trained: Callable[[str], Tensor], files: tuple[WrittenFile, ...]
    ) -> Iterator[Callable[[str], Tensor]]:
        """Yield a function that reads a whole parameter of the merged model. trained: reads parameters of the
        checkpoint."""
        exact = torch.float64 if self.plan.node("setup.build_model").args["params"] == "fp64" else torch.float32
        matrices = {
            name_of(layer, matrix.name): (layer, matrix) for layer, matrix in adapted_matrices(self.plan.architecture)
        }
        written = (tensor for file in files for tensor in file.tensors if tensor.copied is None)
        formats = {name: TYPES[tensor.format] for tensor in written for name, _ in tensor.parts}
        factors: dict[str, list[str]] = {}
        for tensor in self.plan.parameters.tensors:
            if tensor.adapter:
                factors.setdefault(tensor.adapter, []).append(tensor.name)

        def read(name: str) -> Tensor:
            held = name not in base.specs  # by the checkpoint
            if name not in matrices:
                return trained(name) if held else base.read(name)
            layer, matrix = matrices[name]
            start = name_of(layer, "")
            beside = {
                factor.removeprefix(start): trained(self.names.get(factor, factor)).to(exact)
                for factor in factors[name]
            }
            before = weight = (trained(name) if held else base.read(name)).to(exact)
            if matrix.decomposes:
                weight = base.read(name, less=begun_part(matrix, beside)).to(exact)
            whole = merged(matrix, weight, beside)
            self.matrices.append(_compared(name, before, whole, formats[name]))
            return whole

        with self._base() as base:
            yield read

    def check(self) -> None:
        """Read all of the base. Raises ResumeRefused if the adapter was trained on another base, EnvironmentFault if
        the base cannot be read."""
        try:
            with self._base() as base:
                base.check(self.entry)
        except OSError as error:
            raise EnvironmentFault("X524", f"the model under the adapter cannot be read: {error}") from error

    def _base(self) -> BaseWeights:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where the run has drawn it
        return BaseWeights.of(self.plan, self.folder, device)


def _compared(name: str, before: Tensor, after: Tensor, format: torch.dtype) -> MergedMatrix:
    change, written = after - before, after.to(format)
    size = float(change.norm())
    lost = float((written.to(after.dtype) - after).norm())
    unchanged = float((written == before.to(format)).float().mean())
    return MergedMatrix(
        name=name, rms=size / change.numel() ** 0.5, error=lost / size if size else 0.0, unchanged=unchanged
    )


# Progress: (WRITING or READING_BACK, bytes done, total bytes, file, files).
Report = Callable[[str, int, int, int, int], None]
WRITING: Final = "writing"
READING_BACK: Final = "reading back"


@define(eq=False)
class WeightsWriter:
    """Writer of the files of a model.

    whole: reads a whole parameter by name, or raises OSError. origin: folder of copied tensors. Memory holds the
    parameters of one tensor and one chunk of output.
    """

    files: tuple[WrittenFile, ...]
    whole: Callable[[str], Tensor]
    folder: Path
    report: Report
    origin: Path | None = None
    compute: torch.dtype = torch.float32
    """Number format in which training rounds matrices."""
    _sums: dict[str, int] = field(factory=dict)
    _read: dict[str, Tensor] = field(factory=dict)

    @property
    def total(self) -> int:
        return sum(file.bytes for file in self.files)

    def write(self) -> None:
        """Write and sync all files, and an index for several files. Raises ExportFailed or OSError."""
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
        """Read the files back and compare every tensor with what was written. Raises ExportFailed or OSError."""
        stored_tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            stored_tensors |= read_file(str(self.folder), file.name).tensors
        if stored_tensors.keys() != self._sums.keys():
            raise ExportFailed(f"{self.folder} has other tensors than were written")
        numbers, done = {file.name: number for number, file in enumerate(self.files, start=1)}, 0
        for name, tensor in stored_tensors.items():
            with (self.folder / tensor.file).open("rb", buffering=0) as file:
                sum = 0
                for piece in _pieces(file.fileno(), tensor):
                    sum = crc32(piece, sum)
                    done += len(piece)
                    self.report(READING_BACK, done, self.total, numbers[tensor.file], len(self.files))
            if sum != self._sums[name]:
                raise ExportFailed(
                    f"`{name}` in {tensor.file} does not match what was written: the disk has changed it"
                )

    def _index(self) -> dict[str, object]:
        sizes = [tensor.bytes // SIZES[tensor.format] for file in self.files for tensor in file.tensors]
        places = {tensor.name: file.name for file in self.files for tensor in file.tensors}
        return {
            "metadata": {"total_parameters": sum(sizes), "total_size": self.total},
            "weight_map": dict(sorted(places.items())),
        }

    def _chunks(self, tensor: WrittenTensor) -> Iterator[memoryview]:
        """Yield the bytes of a tensor as it is stored, some rows at a time."""
        if tensor.copied is not None:
            yield from self._copy(tensor.copied, tensor.name)
            return
        if tensor.form is not None:
            form = tensor.form
            integers = isinstance(form, IntegerForm)
            part = self._integers(tensor, form) if integers else self._in_blocks(tensor, form)
            content = part.view(torch.uint8).numpy().data.cast("B")
            self._sums[tensor.name] = crc32(content)
            yield content
            return
        views, type, sum = self._views(tensor), TYPES[tensor.format], 0
        row_bytes = prod(tensor.shape[1:]) * SIZES[tensor.format]
        rows, chunk_rows = tensor.shape[0] if tensor.shape else 1, max(1, CHUNK_BYTES // max(1, row_bytes))
        for begin in range(0, rows, chunk_rows):
            stored = _rows(tensor, views, begin, min(begin + chunk_rows, rows))
            written = stored.to(type).contiguous()
            if not bool(torch.isfinite(written).all()):
                raise ExportFailed(_not_finite(tensor, stored))
            content = written.view(torch.uint8).numpy().data.cast("B")
            sum = crc32(content, sum)
            yield content
        self._sums[tensor.name] = sum

    def _integers(self, tensor: WrittenTensor, form: IntegerForm) -> Tensor:
        """Return a part of a matrix of integers: the ones of training, whose products take the matrix in `compute`."""
        from xtrain.runtime.nn.rounding import packed, weight_grid  # most runs round nothing

        ((_, part), *_) = tensor.parts
        if form.suffix == "weight_shape":
            return torch.tensor(part.shape)
        whole = self._matrix(tensor)
        groups_NGM = whole.to(self.compute).unflatten(-1, (-1, form.group))
        grid = weight_grid(groups_NGM, form.bits)
        if form.suffix == "weight_scale":
            return grid.scale.squeeze(-1).to(TYPES[tensor.format]).contiguous()
        integers_NK = grid.integers(groups_NGM).clamp_(grid.low, grid.high).flatten(1).to(torch.int8)
        return integers_NK if form.suffix == "weight" else packed(integers_NK, form.bits)

    def _in_blocks(self, tensor: WrittenTensor, form: BlockForm) -> Tensor:
        """Return the fp8 numbers of a matrix, or the scales of its blocks."""
        codes, scales = in_blocks(self._matrix(tensor))
        return codes if form.suffix == "weight" else scales

    def _matrix(self, tensor: WrittenTensor) -> Tensor:
        """Return the whole matrix that a tensor is a form of. Raises ExportFailed unless it is finite."""
        ((_, part), *_) = tensor.parts
        whole = _rows(evolve(tensor, form=None), self._views(tensor), 0, part.shape[0])
        if not bool(torch.isfinite(whole).all()):
            raise ExportFailed(_not_finite(evolve(tensor, format="F32"), whole))
        return whole

    def _copy(self, stored: StoredTensor, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor of the folder that the model began with."""
        assert self.origin is not None
        sum = 0
        with (self.origin / stored.file).open("rb", buffering=0) as file:
            for piece in _pieces(file.fileno(), stored):
                sum = crc32(piece, sum)
                yield memoryview(piece)
        self._sums[name] = sum

    def _views(self, tensor: WrittenTensor) -> list[Tensor]:
        """Return a view of each parameter of a tensor, in the layout of the file."""
        names = [parameter for parameter, _ in tensor.parts]
        for name in self._read.keys() - names:  # free earlier parameters before the next are read
            del self._read[name]
        views = []
        for name, part in tensor.parts:
            if name not in self._read:
                self._read[name] = self.whole(name)
            value = self._read[name] if part.expert is None else self._read[name][part.expert]
            if part.rows is not None:
                dim = 0 if value.shape[1:] == part.shape[1:] else value.ndim - 2
                value = value.narrow(dim, part.rows[0], part.rows[1] - part.rows[0])
            views.append(value.transpose(-1, -2) if part.transposed else value)
        return views


def in_blocks(matrix_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 numbers [N, K] and the fp32 scales [N / FP8_BLOCK, K / FP8_BLOCK] that they are multiplied by.

    The largest absolute value of a block becomes 448; a block of zeros has scale 1. Bit for bit what transformers'
    `Fp8Quantize` writes.
    """
    blocks_RBCB = matrix_NK.float().unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
    largest_RC = blocks_RBCB.abs().amax(dim=(1, 3))
    most = torch.finfo(torch.float8_e4m3fn).max
    factors_RC = torch.where(largest_RC > 0, most / largest_RC, 1.0)
    codes = (blocks_RBCB * factors_RC[:, None, :, None]).clamp(-most, most).to(torch.float8_e4m3fn)
    return codes.flatten(2).flatten(0, 1).contiguous(), (1 / factors_RC).contiguous()


def _rows(tensor: WrittenTensor, views: list[Tensor], begin: int, end: int) -> Tensor:
    """Return some rows of a tensor, assembled if several parameters share it."""
    if any(part.top for _, part in tensor.parts):
        return torch.cat([
            view[max(0, begin - part.top) : max(0, end - part.top)]
            for view, (_, part) in sorted(zip(views, tensor.parts, strict=True), key=lambda each: each[1][1].top)
        ])  # fmt: skip
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
            raise ExportFailed(f"{tensor.file} is truncated: the disk has lost data")
        at += len(piece)
        yield piece
