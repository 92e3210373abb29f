"""The token store: layout, cache hits and misses, damage of every kind, and what is said of bad records."""

import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tokenising import BytesEncoder, contents, lines_of, write_lines

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.files import PARTIAL_PREFIX as PARTIAL
from xtrain.runtime.base.files import STALE_SECONDS
from xtrain.runtime.feed.documents import DocumentEncoder, TokenDocument
from xtrain.runtime.feed.prepared import build_store, identify
from xtrain.runtime.feed.sources.source import DataSource, open_source
from xtrain.runtime.feed.token_store import TokenStore, damage, open_store
from xtrain.runtime.feed.tokenizing import store_writer
from xtrain.runtime.feed.tokenizing import tokenize as tokenise

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


def source_of(corpus: Path, limit: int = 0) -> DataSource:
    return open_source("text", patterns=("*.txt",), reads={"form": "text"}, base=corpus, bad_record_limit=limit)


def built(corpus: Path, cache: Path, *, limit: int = 0, tokenizer: ByteTokenizer | None = None, **more) -> TokenStore:
    encoder = DocumentEncoder(tokenizer or ByteTokenizer(), {"form": "text"})
    return build_store(source_of(corpus, limit), encoder, cache, **more)


def texts_of(store: TokenStore) -> list[str]:
    documents = [store.document(index) for index in range(store.num_documents)]
    assert all(document[0] == 256 and document[-1] == 257 for document in documents)
    return [ByteTokenizer().decode(document) for document in documents]


def stores_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {"files.json"}


def test_documents_lie_one_behind_the_other(corpus: Path, tmp_path: Path):
    store = built(corpus, tmp_path / "cache")
    assert store.tokens[:9].tolist() == [256, 97, 98, 257, 256, 0xC3, 0xBC, 257, 256]
    assert store.tokens.dtype == np.uint16
    assert store.lengths().tolist() == [4, 4, 102]
    assert (store.num_documents, store.num_tokens, store.num_files, store.trained) == (3, 110, 3, None)
    assert texts_of(store) == TEXTS
    assert set(contents(tmp_path / "cache" / store.key)) == {"tokens.bin", "offsets.npy", "meta.json"}


def test_masks_are_kept_where_there_are_any(tmp_path: Path):
    folder = write_lines(tmp_path / "in", [["ab", "c"], ["? d", "ef"], ["? gh"]])
    store = build_store(lines_of(folder), BytesEncoder(), tmp_path / "cache")
    assert store.trained is not None and store.trained.dtype == np.uint8
    every = np.ones(store.num_tokens, bool)
    for document in (2, 4):
        part = slice(int(store.offsets[document]), int(store.offsets[document + 1]))
        every[part] = np.arange(part.stop - part.start) % 3 == 0
    assert np.array_equal(store.trained, every)
    meta = json.loads((tmp_path / "cache" / store.key / "meta.json").read_text())
    assert meta["trained_tokens"] == every.sum()


def test_a_mask_of_ones_is_none(corpus: Path, tmp_path: Path):
    class Everything(BytesEncoder):
        def _encode(self, record):
            ids = np.array([256, 257], np.uint16)
            return TokenDocument(ids=ids, trained=np.ones(2, bool))

    assert build_store(source_of(corpus), Everything(), tmp_path / "cache").trained is None


def test_large_vocabularies_take_32_bits(corpus: Path, tmp_path: Path):
    class Wide(ByteTokenizer):
        vocab_size = (1 << 16) + 1
        eos = 1 << 16

    store = built(corpus, tmp_path / "cache", tokenizer=Wide())
    assert store.tokens.dtype == np.uint32
    assert store.document(0)[-1] == 1 << 16


def test_the_second_build_reads_the_cache(corpus: Path, tmp_path: Path):
    first, second = CountingTokenizer(), CountingTokenizer()
    built(corpus, tmp_path / "cache", tokenizer=first)
    store = built(corpus, tmp_path / "cache", tokenizer=second)
    assert (first.texts, second.texts) == (TEXTS, [])
    assert texts_of(store) == TEXTS


def test_changed_content_or_tokenizer_misses_the_cache(corpus: Path, tmp_path: Path):
    built(corpus, tmp_path / "cache")
    stamp = (corpus / "0.txt").stat()
    (corpus / "0.txt").write_text("AB")
    os.utime(corpus / "0.txt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same size and time: only content tells
    assert texts_of(built(corpus, tmp_path / "cache"))[0] == "AB"

    other = CountingTokenizer()
    other.fingerprint = "another"
    built(corpus, tmp_path / "cache", tokenizer=other)
    assert len(other.texts) == 3


def test_the_key_is_a_digest_of_what_is_shown(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    encoder = DocumentEncoder(ByteTokenizer(), {"form": "text"})
    identity = identify(source_of(corpus), encoder, tmp_path)
    assert identity.key == built(corpus, tmp_path / "cache").key
    assert identity.key == identify(source_of(corpus, limit=7), encoder, tmp_path).key
    assert identity.covers["code"] == "format 2" and identity.covers["source"] == "text"
    moved = tmp_path / "moved"
    corpus.rename(moved)
    assert identity.key == identify(source_of(moved), encoder, tmp_path).key
    monkeypatch.setattr("xtrain.runtime.feed.prepared.FORMAT", 3)
    assert identity.key != identify(source_of(moved), encoder, tmp_path).key


def rewrite(name: str, change) -> None:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return apply


def change_meta(**values):
    return rewrite("meta.json", lambda content: json.dumps(json.loads(content) | values).encode())


def change_offsets(change):
    def apply(folder: Path) -> None:
        np.save(folder / "offsets.npy", change(np.load(folder / "offsets.npy")))

    return apply


def equal_offsets(offsets: np.ndarray) -> np.ndarray:
    offsets[1] = offsets[2]
    return offsets


def leave_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("in the way")


DAMAGES = {
    "tokens cut": rewrite("tokens.bin", lambda data: data[:-2]),
    "tokens added": rewrite("tokens.bin", lambda data: data + b"xx"),
    "half a token": rewrite("tokens.bin", lambda data: data[:-1]),
    "no tokens": rewrite("tokens.bin", lambda data: b""),
    "masks cut": rewrite("trained.bin", lambda data: data[:-1]),
    "masks gone": lambda folder: (folder / "trained.bin").unlink(),
    "bad records gone": lambda folder: (folder / "bad_records.jsonl").unlink(),
    "offsets cut": change_offsets(lambda offsets: offsets[:-1]),
    "offsets equal": change_offsets(equal_offsets),
    "offsets begin late": change_offsets(lambda offsets: np.maximum(offsets, 1)),
    "offsets of 32 bits": change_offsets(lambda offsets: offsets.astype(np.int32)),
    "offsets torn": rewrite("offsets.npy", lambda data: data[:100]),
    "offsets gone": lambda folder: (folder / "offsets.npy").unlink(),
    "meta empty": rewrite("meta.json", lambda data: b"{}"),
    "meta torn": rewrite("meta.json", lambda data: data[:9]),
    "other format": change_meta(format=1),
    "other dtype": change_meta(dtype="uint32"),
    "floats": change_meta(dtype="float16"),
    "other count": change_meta(documents=3),
    "a file": leave_a_file,
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_store_is_built_again(what: str, tmp_path: Path):
    folder, cache, log = write_lines(tmp_path / "in", [["a b", "#", "? c"]]), tmp_path / "cache", tmp_path / "log"
    store = build_store(lines_of(folder), BytesEncoder(), cache)
    expected = contents(cache / store.key)
    assert open_store(cache / store.key) is not None
    DAMAGES[what](cache / store.key)
    assert open_store(cache / store.key) is None
    build_store(lines_of(folder), BytesEncoder(log), cache)
    assert len(log.read_text().splitlines()) == 2
    assert stores_in(cache) == {store.key}
    assert contents(cache / store.key) == expected


@pytest.mark.parametrize("name", ["tokens.bin", "trained.bin", "offsets.npy", "bad_records.jsonl"])
def test_content_that_has_changed_is_found_by_reading_it(name: str, tmp_path: Path):
    cache = tmp_path / "cache"
    store = build_store(lines_of(write_lines(tmp_path / "in", [["a b", "#", "? c"]])), BytesEncoder(), cache)
    folder = cache / store.key
    assert damage(folder) == []
    data = bytearray((folder / name).read_bytes())
    data[-1 if name != "offsets.npy" else 90] ^= 1
    (folder / name).write_bytes(data)
    assert damage(folder) == [name]
    (folder / name).unlink()
    assert damage(folder) == [name]
    (folder / "meta.json").write_text("{}")
    assert damage(folder) == ["meta.json"]


def test_old_leftovers_are_swept(corpus: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    ages = {
        f"{PARTIAL}old": STALE_SECONDS + 60,
        f"{PARTIAL}recent": 60,
        ".building-other-old": tokenise.UNFINISHED_SECONDS + 60,
        ".building-other-recent": STALE_SECONDS + 60,
    }
    for name, age in ages.items():
        (cache / name).mkdir(parents=True)
        (cache / name / "tokens.bin").write_bytes(b"x")
        for path in (cache / name / "tokens.bin", cache / name):
            os.utime(path, (time.time() - age,) * 2)
    key = built(corpus, cache).key
    assert stores_in(cache) == {key, f"{PARTIAL}recent", ".building-other-recent"}


def test_bad_records_are_judged_by_the_limit_of_each_reader(corpus: Path, tmp_path: Path):
    (corpus / "3.txt").write_bytes(b"\xff")
    cache = tmp_path / "cache"
    built(corpus, cache, limit=1)
    counting = CountingTokenizer()
    store = built(corpus, cache, limit=1, tokenizer=counting)
    assert counting.texts == []
    assert store.bad_records.count == 1
    assert store.bad_records.first[0].origin == str(corpus / "3.txt")
    with pytest.raises(DataError, match=r"limit is 0:\n.*3\.txt: invalid UTF-8"):
        built(corpus, cache, limit=0)


def test_every_bad_record_is_listed_with_its_line(tmp_path: Path):
    texts = [["a", *("#",) * 14, "!bad x", "b"], ["#", "c"]]
    folder, cache = write_lines(tmp_path / "in", texts), tmp_path / "cache"
    store = build_store(lines_of(folder), BytesEncoder(), cache)
    assert (store.num_documents, store.bad_records.count, len(store.bad_records.first)) == (3, 16, 10)
    lines = (cache / store.key / "bad_records.jsonl").read_text().splitlines()
    origins = [json.loads(line)["origin"] for line in lines]
    first, second = folder / "000.jsonl", folder / "001.jsonl"
    assert origins == [f"{first}:{number}" for number in range(2, 17)] + [f"{second}:1"]
    assert json.loads(lines[14])["reason"] == "as the text says"


def test_beyond_the_limit_a_higher_one_goes_on(tmp_path: Path):
    texts = [["a", "b"], ["c", "#"], ["d", "#"], ["e"]]
    folder, cache, log = write_lines(tmp_path / "in", texts), tmp_path / "cache", tmp_path / "log"
    with pytest.raises(
        DataError, match=r"2 bad records, but the limit is 1:\n    .*001\.jsonl:2: .*\n    .*002\.jsonl:2"
    ):
        build_store(lines_of(folder, limit=1), BytesEncoder(log), cache)
    assert len(log.read_text().splitlines()) == 4  # the rest is not read
    log.unlink()
    with pytest.raises(DataError, match=r"1 bad record, but the limit is 0:\n    .*001\.jsonl:2"):
        build_store(lines_of(folder, limit=0), BytesEncoder(log), cache)
    assert not log.exists()  # it is known without reading on
    store = build_store(lines_of(folder, limit=2), BytesEncoder(log), cache)
    assert len(log.read_text().splitlines()) == 2
    assert contents(cache / store.key) == contents(alone(folder, tmp_path) / store.key)


def alone(folder: Path, tmp_path: Path) -> Path:
    build_store(lines_of(folder), BytesEncoder(), tmp_path / "alone")
    return tmp_path / "alone"


def test_a_source_without_documents_is_an_error(tmp_path: Path):
    folder, cache = write_lines(tmp_path / "in", [["#"], ["!bad x"]]), tmp_path / "cache"
    with pytest.raises(DataError, match=r"no documents: 2 files, 2 bad records:\n    .*: .*\n    .*: .*"):
        build_store(lines_of(folder), BytesEncoder(), cache)
    assert stores_in(cache) == set()


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path):
    folder = write_lines(tmp_path / "in", [["a"], ["b", "!alien x"]])
    with pytest.raises(DataError, match=r"001\.jsonl:1: token 300 is outside the vocabulary of 258"):
        build_store(lines_of(folder), BytesEncoder(), tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(corpus: Path, tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cache.*cannot write the token store"):
        built(corpus, tmp_path / "cache")
    with pytest.raises(DataError, match=r"cannot write the token store"):
        built(corpus, Path("/proc/nowhere"))


def test_of_a_cache_that_cannot_be_written_a_store_is_read(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = tmp_path / "cache"
    built(corpus, cache)
    (cache / "files.json").unlink(missing_ok=True)

    def refuse(*args, **kwargs):
        raise PermissionError(30, "Read-only file system")

    for name in ("mkdir", "rename", "replace", "unlink", "write"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("xtrain.runtime.feed.digests.TICK_NS", -(10**15))  # there is something to remember
    assert texts_of(built(corpus, cache)) == TEXTS
    (corpus / "0.txt").write_text("new")
    with pytest.raises(DataError, match=r"cannot write the token store: .*Read-only"):
        built(corpus, cache)


def test_a_full_disk_is_reported_and_what_was_done_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = [[f"{number} {'x' * 3000}"] for number in range(8)]
    folder, cache, log = write_lines(tmp_path / "in", texts), tmp_path / "cache", tmp_path / "log"
    monkeypatch.setattr(tokenise, "COMMIT_SECONDS", 0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(DataError, match=r"cannot write the token store: .*too large") as caught:
            build_store(lines_of(folder), BytesEncoder(), cache, jobs=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the finished part is kept" in str(caught.value)
    store = build_store(lines_of(folder), BytesEncoder(log), cache, jobs=1)
    assert len(log.read_text().splitlines()) == 5  # three of 6,004 bytes had been written
    assert contents(cache / store.key) == contents(alone(folder, tmp_path) / store.key)


def test_files_that_change_while_they_are_read_are_reported(tmp_path: Path):
    folder, cache = write_lines(tmp_path / "in", [["a"], ["b"]]), tmp_path / "cache"

    def meddle(now) -> None:
        if now.stage == "tokens":
            write_lines(folder, [["A"], ["b"]])

    with pytest.raises(DataError, match="files of this source have changed while they were read"):
        build_store(lines_of(folder), BytesEncoder(), cache, progress=meddle)
    assert stores_in(cache) == set()
    assert build_store(lines_of(folder), BytesEncoder(), cache).tokens[1] == ord("A")


def test_offsets_are_summed_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_lines(tmp_path / "in", [["? a" * number for number in range(1, 20)]])
    whole = build_store(lines_of(folder), BytesEncoder(), tmp_path / "whole")
    monkeypatch.setattr(store_writer, "_AT_ONCE", 3)
    monkeypatch.setattr("xtrain.runtime.feed.token_store._AT_ONCE", 3)
    build_store(lines_of(folder), BytesEncoder(), tmp_path / "parts")
    assert contents(tmp_path / "whole" / whole.key) == contents(tmp_path / "parts" / whole.key)
