"""Documents that are held out are worked out once, and mapped from then on."""

import numpy as np
import pytest

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.packing.stored_rows import FILES, cached_split, split_holdout


@pytest.mark.parametrize("holdout", [0.0, 0.3, 1.0])
def test_the_split_is_that_of_the_documents_and_lies_in_files(make_store, tmp_path, holdout):
    store = make_store([3, 9, 4, 30, 5, 8])
    for _ in range(2):
        for found, expected in zip(
            cached_split(store, tmp_path, holdout, 7), split_holdout(store.offsets, holdout, 7), strict=True
        ):
            assert found.tolist() == expected.tolist() and found.dtype == np.int64
            assert isinstance(found.base, np.memmap) or not len(found)


def test_each_store_fraction_and_seed_has_its_own(make_store, tmp_path):
    store, other = make_store([3, 9, 4, 30, 5, 8]), make_store([3, 9, 4, 30, 5])
    for given in ((store, 0.3, 1), (store, 0.3, 2), (store, 0.5, 1), (other, 0.3, 1)):
        found = cached_split(given[0], tmp_path, *given[1:])
        assert [part.tolist() for part in found] == [
            part.tolist() for part in split_holdout(given[0].offsets, *given[1:])
        ]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_damaged_one_is_made_anew(make_store, tmp_path):
    store = make_store([3, 9, 4, 30, 5, 8])
    expected = [part.tolist() for part in cached_split(store, tmp_path, 0.3, 1)]
    (folder,) = tmp_path.iterdir()
    for damage in (
        lambda file: file.write_bytes(b""),
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b"x" * 200),
    ):
        damage(folder / FILES[0])
        assert [part.tolist() for part in cached_split(store, tmp_path, 0.3, 1)] == expected


def test_a_cache_that_cannot_be_written_is_said(make_store, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write which documents are held out"):
        cached_split(make_store([3, 4]), tmp_path / "file" / "cache", 0.0, 1)
