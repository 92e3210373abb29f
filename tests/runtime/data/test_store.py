"""The token store: layout, cache hits and misses, damage, and processes that build it at the same time."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from xtrain.runtime.data import store_writer
from xtrain.runtime.data.cache_folder import PARTIAL, STALE_SECONDS
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.sources import Source, open_source
from xtrain.runtime.data.store import TokenStore, build_store
from xtrain.runtime.data.tokenizers import ByteTokenizer

TEXTS = ["ab", "ü", "x" * 100]


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode_batch(self, texts):
        self.texts.extend(texts)
        return super().encode_batch(texts)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index, text in enumerate(TEXTS):
        (folder / f"{index}.txt").write_text(text)
    return folder


def source_of(corpus: Path, limit: int = 0) -> Source:
    return open_source("text", patterns=("*.txt",), base=corpus, bad_record_limit=limit)


def texts_of(store: TokenStore) -> list[str]:
    documents = [store.document(index) for index in range(store.num_documents)]
    assert all(document[0] == 256 and document[-1] == 257 for document in documents)
    return [ByteTokenizer().decode(document) for document in documents]


def test_documents_lie_between_bos_and_eos(corpus: Path, tmp_path: Path):
    store = build_store(source_of(corpus), ByteTokenizer(), tmp_path / "cache")
    assert store.tokens[:9].tolist() == [256, 97, 98, 257, 256, 0xC3, 0xBC, 257, 256]
    assert store.tokens.dtype == np.uint16
    assert store.lengths().tolist() == [4, 4, 102]
    assert (store.num_documents, store.num_tokens, store.num_files) == (3, 110, 3)
    assert texts_of(store) == TEXTS


def test_batches_do_not_show_in_the_result(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = build_store(source_of(corpus), ByteTokenizer(), tmp_path / "whole")
    monkeypatch.setattr(store_writer, "BATCH_DOCUMENTS", 1)
    single = build_store(source_of(corpus), ByteTokenizer(), tmp_path / "single")
    assert np.array_equal(whole.tokens, single.tokens)
    assert np.array_equal(whole.offsets, single.offsets)


def test_large_vocabularies_take_32_bits(corpus: Path, tmp_path: Path):
    class Wide(ByteTokenizer):
        vocab_size = (1 << 16) + 1
        eos = 1 << 16

    store = build_store(source_of(corpus), Wide(), tmp_path / "cache")
    assert store.tokens.dtype == np.uint32
    assert store.document(0)[-1] == 1 << 16


def test_the_second_build_reads_the_cache(corpus: Path, tmp_path: Path):
    first, second = CountingTokenizer(), CountingTokenizer()
    build_store(source_of(corpus), first, tmp_path / "cache")
    store = build_store(source_of(corpus), second, tmp_path / "cache")
    assert (first.texts, second.texts) == (TEXTS, [])
    assert texts_of(store) == TEXTS


def test_changed_content_or_tokenizer_misses_the_cache(corpus: Path, tmp_path: Path):
    build_store(source_of(corpus), ByteTokenizer(), tmp_path / "cache")
    stamp = (corpus / "0.txt").stat()
    (corpus / "0.txt").write_text("AB")
    os.utime(corpus / "0.txt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same size and time: only content tells
    assert texts_of(build_store(source_of(corpus), ByteTokenizer(), tmp_path / "cache"))[0] == "AB"

    other = CountingTokenizer()
    other.fingerprint = "another"
    build_store(source_of(corpus), other, tmp_path / "cache")
    assert len(other.texts) == 3


def cut_tokens(folder: Path) -> None:
    data = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(data[:-2])


def cut_offsets(folder: Path) -> None:
    np.save(folder / "offsets.npy", np.load(folder / "offsets.npy")[:-1])


def scramble_offsets(folder: Path) -> None:
    offsets = np.load(folder / "offsets.npy")
    offsets[1] = offsets[2]
    np.save(folder / "offsets.npy", offsets)


def empty_meta(folder: Path) -> None:
    (folder / "meta.json").write_text("{}")


def garble_meta(folder: Path) -> None:
    (folder / "meta.json").write_text('{"format"')


def other_format(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"format": 0}))


def empty_tokens(folder: Path) -> None:
    (folder / "tokens.bin").write_bytes(b"")


def lose_offsets(folder: Path) -> None:
    (folder / "offsets.npy").unlink()


def leave_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("in the way")


@pytest.mark.parametrize(
    "damage",
    [
        cut_tokens,
        cut_offsets,
        scramble_offsets,
        empty_meta,
        garble_meta,
        other_format,
        empty_tokens,
        lose_offsets,
        leave_a_file,
    ],
)
def test_a_damaged_store_is_built_again(damage, corpus: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    key = build_store(source_of(corpus), ByteTokenizer(), cache).key
    damage(cache / key)
    counting = CountingTokenizer()
    store = build_store(source_of(corpus), counting, cache)
    assert counting.texts == TEXTS
    assert texts_of(store) == TEXTS
    assert [path.name for path in cache.iterdir()] == [key]


def test_a_failed_build_leaves_nothing_behind(corpus: Path, tmp_path: Path):
    class Failing(ByteTokenizer):
        def encode_batch(self, texts):
            raise RuntimeError("tokenizer broke")

    with pytest.raises(RuntimeError):
        build_store(source_of(corpus), Failing(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_a_killed_build_left_is_swept_after_a_day(corpus: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    for name, age in (("old", STALE_SECONDS + 60), ("recent", 60)):
        folder = cache / f"{PARTIAL}{name}"
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(b"x")
        for path in (folder / "tokens.bin", folder):
            os.utime(path, (time.time() - age,) * 2)
    key = build_store(source_of(corpus), ByteTokenizer(), cache).key
    assert {path.name for path in cache.iterdir()} == {key, f"{PARTIAL}recent"}


def test_bad_records_are_remembered_and_judged_by_the_limit_of_each_reader(corpus: Path, tmp_path: Path):
    (corpus / "3.txt").write_bytes(b"\xff")
    cache = tmp_path / "cache"
    build_store(source_of(corpus, limit=1), ByteTokenizer(), cache)
    counting = CountingTokenizer()
    store = build_store(source_of(corpus, limit=1), counting, cache)
    assert counting.texts == []
    assert store.bad_records.count == 1
    assert store.bad_records.first[0].origin == str(corpus / "3.txt")
    with pytest.raises(DataError, match=r"limit is 0:\n.*3\.txt: invalid UTF-8"):
        build_store(source_of(corpus, limit=0), ByteTokenizer(), cache)


def test_a_source_without_documents_is_an_error(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text("\n\n")
    source = open_source("jsonl", patterns=("*.jsonl",), base=tmp_path)
    with pytest.raises(DataError, match="no documents"):
        build_store(source, ByteTokenizer(), tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(corpus: Path, tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cache.*cannot write the token store"):
        build_store(source_of(corpus), ByteTokenizer(), tmp_path / "cache")


def test_the_first_of_two_builds_stays(corpus: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    places: list[int] = []

    class Overtaken(ByteTokenizer):
        def encode_batch(self, texts):
            other = build_store(source_of(corpus), ByteTokenizer(), cache)
            places.append((cache / other.key).stat().st_ino)
            return super().encode_batch(texts)

    store = build_store(source_of(corpus), Overtaken(), cache)
    assert [(cache / store.key).stat().st_ino] == places
    assert [path.name for path in cache.iterdir()] == [store.key]


BUILDER = """
import sys, time
from pathlib import Path
from xtrain.runtime.data.sources import open_source
from xtrain.runtime.data.store import build_store
from xtrain.runtime.data.tokenizers import ByteTokenizer

corpus, cache, peers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

class Meeting(ByteTokenizer):
    # Waits until every process is inside its build, so that all of them publish.
    def encode_batch(self, texts):
        deadline = time.monotonic() + 30
        while len(list(cache.glob(".partial-*/tokens.bin"))) < peers and not (cache / "met").exists():
            assert time.monotonic() < deadline, "the others never came"
            time.sleep(0.005)
        (cache / "met").touch()
        return super().encode_batch(texts)

store = build_store(open_source("text", patterns=("*.txt",), base=corpus), Meeting(), cache)
print(store.tokens.tolist())
assert not {"torch", "numba", "tokenizers"} & set(sys.modules)
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_build_at_once_all_get_the_store(damaged: bool, corpus: Path, tmp_path: Path):
    expected = build_store(source_of(corpus), ByteTokenizer(), tmp_path / "alone")
    cache = tmp_path / "cache"
    if damaged:
        (cache / expected.key).mkdir(parents=True)
        (cache / expected.key / "meta.json").write_text("{}")
    command = [sys.executable, "-c", BUILDER, str(corpus), str(cache), "3"]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    results = [builder.communicate(timeout=60) for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0, 0], results
    assert [json.loads(out) for out, _ in results] == [expected.tokens.tolist()] * 3
    assert {path.name for path in cache.iterdir()} == {expected.key, "met"}
