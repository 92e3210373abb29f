"""Reading pieces of stored tensors: any rows and columns, in chunks of any size, as no more bytes than they have."""

import json
import os
from itertools import product
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from torch import Tensor

from xtrain.plan.weight_files import StoredPart, read_weight_files
from xtrain.plan.weight_layout import Assignment
from xtrain.runtime.nn.build import DTYPES
from xtrain.runtime.store import stored_weights
from xtrain.runtime.store.stored_weights import WeightReader, runs

STORED = {
    "vector": torch.randn(29),
    "matrix": torch.randn(13, 37).bfloat16(),
    "stacked": torch.randn(3, 10, 7, dtype=torch.float64),
    "stacked in turns": torch.randn(3, 7, 10).bfloat16(),
    "vectors in turns": torch.randn(3, 10),
    "expert.0": torch.randn(5, 6).half(),
    "expert.1": torch.randn(5, 6).half(),
}
# Parameter → its whole value, and where it is read.
PARTS = {
    "vector": (STORED["vector"], (StoredPart("vector", (29,)),)),
    "matrix": (STORED["matrix"], (StoredPart("matrix", (13, 37)),)),
    "up": (STORED["stacked"][:, 6:].transpose(1, 2), (StoredPart("stacked", (3, 10, 7), transposed=True, first=6),)),
    "experts": (torch.stack([STORED["expert.0"].t(), STORED["expert.1"].t()]),
        tuple(StoredPart(f"expert.{e}", (5, 6), expert=e, transposed=True) for e in range(2))),
}  # fmt: skip
# Parameters that lie in turns in one tensor, and are read together.
IN_TURNS = {
    name: (STORED[stored][..., first::2], (StoredPart(stored, tuple(STORED[stored].shape), first=first, step=2),))
    for stored in ("stacked in turns", "vectors in turns")
    for first, name in enumerate((f"gate of {stored}", f"up of {stored}"))
}
# Which indices of a dimension a piece has: all, one half, those of a shard that is cut again, none.
CUTS = (lambda n: range(n), lambda n: range(n // 2, n), lambda n: range(0, n, 2), lambda n: range(0))


@pytest.mark.parametrize("chunk", [1, 16, 64, 2**24])
def test_pieces_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int):
    save_file({name: value.contiguous() for name, value in STORED.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    files = read_weight_files(str(tmp_path))
    assignment = Assignment({name: parts for name, (_, parts) in (PARTS | IN_TURNS).items()})
    monkeypatch.setattr(stored_weights, "CHUNK_BYTES", chunk)
    turns = list(IN_TURNS)
    for names in (*((name,) for name in PARTS), turns[:2], turns[2:]):
        wholes = [(PARTS | IN_TURNS)[name][0] for name in names]
        whole = wholes[0]
        for cuts in product(CUTS, repeat=whole.ndim):
            indices = [torch.tensor(list(cut(n)), dtype=torch.int64) for cut, n in zip(cuts, whole.shape, strict=True)]
            expected = wholes
            for dim, chosen in enumerate(indices):
                expected = [each.index_select(dim, chosen) for each in expected]
            monkeypatch.setattr(stored_weights, "own_indices", lambda parameter, dim, own=indices: own[dim])
            pieces = [(name, torch.full(each.shape, float("nan"))) for name, each in zip(names, expected, strict=True)]
            with WeightReader(files, assignment, report=lambda done: None) as reader:
                reader.read(pieces)
            for (_, piece), each in zip(pieces, expected, strict=True):
                assert torch.equal(piece, each.float()), (names, indices)
            assert reader.bytes == sum(each.numel() for each in expected) * whole.element_size()
            assert reader.total(pieces) == reader.bytes
            longest = max(size for tensor in STORED.values() for size in (tensor.shape[-1] * tensor.element_size(),))
            assert len(reader._buffer) <= min(max(chunk, longest), reader.bytes)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says what memory was at its peak")
def test_reading_needs_no_more_memory_than_a_chunk(tmp_path: Path):
    """Resident memory at its peak, beside the parameter, in fp32 from bf16."""
    stored = torch.ones(5 * 2**10, 2**12, dtype=torch.bfloat16)  # 40 MiB
    piece = torch.full(stored.shape, 2.0)  # in memory, as zeros would not be
    more = 0
    for _ in range(2):  # the first time code is loaded too
        with _reader(tmp_path, stored) as reader:
            Path("/proc/self/clear_refs").write_text("5")
            before = _memory("VmRSS")
            reader.read([("w", piece)])
            more = _memory("VmHWM") - before
    assert torch.equal(piece, stored.float())
    assert more < 1.25 * stored_weights.CHUNK_BYTES


def _memory(name: str) -> int:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize(
    ("value", "dtype", "format"),
    [(1e39, torch.float64, "fp32"), (-1e39, torch.float64, "bf16"), (3.4e38, torch.float32, "bf16")],
)
def test_a_value_that_the_parameters_cannot_have_is_refused(tmp_path: Path, value: float, dtype, format: str):
    stored = torch.zeros(3, 5, dtype=dtype)
    stored[1, 2] = value
    with _reader(tmp_path, stored) as reader:
        with pytest.raises(OSError, match=f"safetensors: `matrix` has a value that is too large for {format}"):
            reader.read([("w", torch.empty(3, 5, dtype=DTYPES[format]))])
        exact = torch.empty(3, 5, dtype=dtype)
        reader.read([("w", exact)])
        assert torch.equal(exact, stored)


@pytest.mark.parametrize(
    ("value", "said"), [("nan", "has NaN"), ("inf", "has an infinite value"), ("-inf", "has an infinite value")]
)
def test_a_value_that_is_no_number_is_refused(tmp_path: Path, value: str, said: str):
    stored = torch.zeros(3, 5, dtype=torch.bfloat16)
    stored[2, 4] = float(value)
    with _reader(tmp_path, stored) as reader, pytest.raises(OSError, match=f"model.safetensors: `matrix` {said}"):
        reader.read([("w", torch.empty(3, 5))])


def test_a_file_that_is_cut_off_while_it_is_read_is_refused(tmp_path: Path):
    with _reader(tmp_path, torch.zeros(3, 5)) as reader:
        file = tmp_path / "model.safetensors"
        os.truncate(file, file.stat().st_size - 1)
        with pytest.raises(OSError, match=r"model\.safetensors is cut off in `matrix`"):
            reader.read([("w", torch.empty(3, 5))])


def _reader(folder: Path, matrix: Tensor) -> WeightReader:
    """Of the parameter `w`, which is that matrix."""
    save_file({"matrix": matrix}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    assignment = Assignment({"w": (StoredPart("matrix", tuple(matrix.shape)),)})
    return WeightReader(read_weight_files(str(folder)), assignment, report=lambda done: None)


def test_runs_are_stretches_of_neighbours():
    def found(*indices: int, most: int | None = None) -> list[tuple[int, int]]:
        return list(runs(Tensor(indices).long(), most))

    assert found(3, 4, 5) == [(0, 3)] and found(3, 5, 6) == [(0, 1), (1, 3)] and found() == []
    assert found(0, 1, 2, 3, 4, 9, most=2) == [(0, 2), (2, 4), (4, 5), (5, 6)]


def fp8_codes(shape: tuple[int, ...]) -> Tensor:
    """Random E4M3 numbers that are finite."""
    codes = torch.randint(0, 255, shape, dtype=torch.uint8)
    return torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)


def pieces_are_read(
    folder: Path, parts: dict[str, tuple[StoredPart, ...]], expected: dict[str, Tensor], *, cut: bool
) -> None:
    """Whole or as cut pieces of every dimension, bit for bit."""
    files = read_weight_files(str(folder))
    first = next(iter(expected.values()))
    for cuts in product((*CUTS, lambda n: range(1, n)) if cut else CUTS[:1], repeat=first.ndim):
        indices = [torch.tensor(list(own(n)), dtype=torch.int64) for own, n in zip(cuts, first.shape, strict=True)]
        with WeightReader(files, Assignment(parts), lambda done: None) as reader:
            pieces = {name: torch.empty([len(each) for each in indices], dtype=first.dtype) for name in expected}
            read_cut(reader, pieces, indices)
        for name, value in expected.items():
            for dim, chosen in enumerate(indices):
                value = value.index_select(dim, chosen)
            assert torch.equal(value.view(torch.uint8), pieces[name].view(torch.uint8))


def read_cut(reader: WeightReader, pieces: dict[str, Tensor], indices: list[Tensor]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_weights, "own_indices", lambda parameter, dim: indices[dim])
        reader.read(pieces.items())


@pytest.mark.parametrize("chunk", [64, 2**24])
def test_fp8_is_dequantised_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int):
    """20 matrices whose scales have 4 rows and 8 columns each, to fp32."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    monkeypatch.setattr(stored_weights, "CHUNK_BYTES", chunk)
    torch.manual_seed(0)
    stored, expected = dict[str, Tensor](), dict[str, Tensor]()
    for number in range(20):
        rows, columns = (int(each) for each in torch.randint(1, 6, (2,)))
        codes, scales = fp8_codes((4 * rows, 8 * columns)), torch.rand(rows, columns) / 100
        stored |= {f"{number}.weight": codes, f"{number}.weight_scale_inv": scales}
        expected[f"{number}.weight"] = Fp8Dequantize(None)._dequantize_one(codes, scales)
    save_file(stored, tmp_path / "model.safetensors")
    form = {"quant_method": "fp8", "weight_block_size": [4, 8]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": form}))
    for number, (name, value) in enumerate(expected.items()):
        pieces_are_read(tmp_path, {name: (StoredPart(name, tuple(value.shape)),)}, {name: value}, cut=number < 1)


@pytest.mark.parametrize("chunk", [64, 2**24])
def test_mxfp4_is_dequantised_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int):
    """20 stacks with rows of gate and up in turns, to bf16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    monkeypatch.setattr(stored_weights, "CHUNK_BYTES", chunk)
    torch.manual_seed(0)
    stored, expected = dict[str, Tensor](), dict[str, Tensor]()
    for number in range(20):
        experts, rows, groups = (int(each) for each in torch.randint(1, 4, (3,)))
        blocks = torch.randint(0, 256, (experts, 2 * rows, groups, 16), dtype=torch.uint8)
        scales = torch.randint(90, 160, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{number}_blocks": blocks, f"{number}_scales": scales}
        expected[f"{number}_blocks"] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    for number, (name, value) in enumerate(expected.items()):
        experts, columns, rows = value.shape
        part = StoredPart(name, (experts, rows, columns), transposed=True, step=2)
        both = {each: (evolve(part, first=first),) for first, each in enumerate(("gate", "up"))}
        pieces_are_read(tmp_path, both, {"gate": value[..., ::2], "up": value[..., 1::2]}, cut=number < 1)
