"""Packed rows on disk: what was packed comes back, mapped; whatever is damaged is packed again."""

import json
from pathlib import Path

import numpy as np
import pytest

from xtrain.components.packings.multipack_run import pack as pack_multipack
from xtrain.components.packings.sequential_run import pack as pack_sequential
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.packing.rows import Rows
from xtrain.runtime.feed.packing.stored_rows import ARRAYS, NUMBERS, cached_rows, open_rows, rows_key

LENGTHS = np.random.default_rng(2).integers(2, 60, 500)


def rows() -> Rows:
    return pack_multipack(LENGTHS, 40, "split", 2, group=100)


def unexpected() -> Rows:
    raise AssertionError("packed again")


def test_what_was_packed_comes_back_and_is_not_packed_again(tmp_path: Path):
    packed = cached_rows(tmp_path / "cache" / "key", rows)
    again = cached_rows(tmp_path / "cache" / "key", unexpected)
    for one in (packed, again):
        assert one.fingerprint() == rows().fingerprint()
        assert all(np.array_equal(getattr(one, name), getattr(rows(), name)) for name in ARRAYS)
        assert all(getattr(one, name) == getattr(rows(), name) for name in NUMBERS)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["key"]


def test_rows_are_read_by_memory_map(tmp_path: Path):
    packed = cached_rows(tmp_path / "key", rows)
    assert not packed.document.flags.owndata and not packed.document.flags.writeable
    assert packed.document.dtype == packed.row_offsets.dtype == np.int32


def test_no_rows_at_all(tmp_path: Path):
    empty = cached_rows(tmp_path / "key", lambda: pack_sequential(LENGTHS[:0], 40, "split"))
    assert empty.num_rows == 0 and len(cached_rows(tmp_path / "key", unexpected).document) == 0


@pytest.mark.parametrize("name", [*(f"{array}.npy" for array in ARRAYS), "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_damaged_rows_are_packed_again(tmp_path: Path, name: str, damage: str):
    folder = tmp_path / "key"
    cached_rows(folder, rows)
    content = (folder / name).read_bytes()
    if damage == "gone":
        (folder / name).unlink()
    elif damage == "cut":
        (folder / name).write_bytes(content[: len(content) * 2 // 3])
    elif name == "meta.json":
        (folder / name).write_text(json.dumps({**json.loads(content), "align": 1}))
    else:
        (folder / name).write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])
    assert open_rows(folder) is None
    assert cached_rows(folder, rows).fingerprint() == rows().fingerprint()
    assert cached_rows(folder, unexpected).num_rows == rows().num_rows


@pytest.mark.parametrize(
    "meta",
    ["", "[]", "{}", "{", '{"format": 1}', "null", "\x00\x00", '{"format": "2", "fingerprint": 3}'],
)
def test_a_meta_file_that_is_none(tmp_path: Path, meta: str):
    folder = tmp_path / "key"
    cached_rows(folder, rows)
    (folder / "meta.json").write_text(meta)
    assert open_rows(folder) is None
    assert cached_rows(folder, rows).num_rows == rows().num_rows


@pytest.mark.parametrize("name", ["format", *NUMBERS, "fingerprint"])
def test_a_meta_file_that_lacks_something_or_says_something_else(tmp_path: Path, name: str):
    folder = tmp_path / "key"
    cached_rows(folder, rows)
    whole = json.loads((folder / "meta.json").read_text())
    for changed in ({**whole, name: "x"}, {key: value for key, value in whole.items() if key != name}):
        (folder / "meta.json").write_text(json.dumps(changed))
        assert open_rows(folder) is None


def test_arrays_of_another_kind(tmp_path: Path):
    folder = tmp_path / "key"
    cached_rows(folder, rows)
    for array in (np.array([object()]), rows().document.astype(np.int64), rows().document[:, None]):
        np.save(folder / "document.npy", array, allow_pickle=True)
        assert open_rows(folder) is None


def test_a_file_in_place_of_the_folder(tmp_path: Path):
    (tmp_path / "key").write_text("not a folder")
    assert cached_rows(tmp_path / "key", rows).fingerprint() == rows().fingerprint()


def test_a_cache_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write packed rows"):
        cached_rows(tmp_path / "file" / "key", rows)


def test_the_key_follows_everything_rows_depend_on():
    base = {
        "store": "a", "holdout": 0.1, "seed": 1, "part": "training", "capacity": 8, "align": 1, "oversized": "split",
    }  # fmt: skip
    others = [{**base, name: "else"} for name in base] + [{**base, "group": 5}, {**base, "group": 6}]
    assert rows_key(**base) == "f992ee41da4ebd75e31be155b7157104", "packed rows of earlier versions are not found"
    assert len({rows_key(**one) for one in [base, *others]}) == 1 + len(others)
