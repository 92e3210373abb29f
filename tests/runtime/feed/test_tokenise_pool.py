"""Tokenising by several processes: the same store as by one, whatever happens to them."""

import gzip
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tokenising import BytesEncoder, contents, lines_of, write_lines

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.dsl.user_parts.files import find_module, module_digest
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.documents import DocumentEncoder
from xtrain.runtime.feed.prepared import build_store
from xtrain.runtime.feed.sources.source import DataSource, open_source
from xtrain.runtime.feed.token_store import TokenStore
from xtrain.runtime.feed.tokenizing import workers as tokenise_pool
from xtrain.runtime.feed.tokenizing.workers import Pool, encoded_units

MANY = [[f"{number} {'ab ' * (number % 7)}", "#", "? masked"] for number in range(12)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in", MANY)


def stores_alike(source: DataSource, tmp_path: Path, encoder=None) -> TokenStore:
    one, two = (build_store(source, encoder or BytesEncoder(), tmp_path / f"{jobs}", jobs=jobs) for jobs in (1, 2))
    assert contents(tmp_path / "1" / one.key) == contents(tmp_path / "2" / two.key)
    return one


def test_the_number_of_jobs_does_not_show(folder: Path, tmp_path: Path):
    with gzip.open(folder / "packed.jsonl.gz", "wt") as file:
        file.write("".join(f"{json.dumps({'text': text})}\n" for text in ("x", "? y")))
    source = open_source(
        "jsonl", patterns=("*.jsonl", "*.gz"), base=folder, reads={"form": "text"}, bad_record_limit=99
    )
    stores_alike(source, tmp_path)


def parquet(folder: Path) -> DataSource:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"body": [None if number % 9 == 5 else f"text {number}" for number in range(40)]})
    pq.write_table(table, folder / "x.parquet", row_group_size=7)
    reads = {"form": "text", "text": "body"}
    return open_source("parquet", patterns=("*.parquet",), base=folder, reads=reads, bad_record_limit=9)


def tokens(folder: Path) -> DataSource:
    np.save(folder / "x.npy", np.tile(np.arange(2, 9, dtype=np.uint16), 50))
    options = {"dtype": "uint16", "separator": 4}
    return open_source("tokens", patterns=("*.npy",), options=options, base=folder)


def synthetic(folder: Path) -> DataSource:
    options = {"documents": 300, "length": 50, "spread": 0.5, "seed": 1}
    return open_source("synthetic", options=options, base=folder)


def chat(folder: Path) -> DataSource:
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    for number in range(5):
        (folder / f"{number}.jsonl").write_text(json.dumps({"messages": talk * (number + 1)}) + "\n[]\n")
    return open_source("jsonl", patterns=("*.jsonl",), reads=CHAT, base=folder, bad_record_limit=5)


def own(folder: Path) -> DataSource:
    lines = "from xtrain import source\n@source\ndef mine():\n    for n in range(3000):\n        yield f'text {n}'\n"
    (folder / "parts.py").write_text(lines)
    digest = module_digest(find_module("parts.py", folder))
    options = {"module": "parts.py", "function": "mine", "digest": digest, "arguments": {}}
    return open_source("python", options=options, base=folder)


def saved(folder: Path) -> DataSource:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": [f"text {number}" for number in range(2500)]}).save_to_disk(folder / "saved")
    options = {"name": "saved", "config": None, "split": "train"}
    return open_source("huggingface", options=options, base=folder)


CHAT = {"form": "chat", "messages": "messages", "template": "chatml", "train_on": "assistant"}


@pytest.mark.parametrize(
    "make", [parquet, chat, *(pytest.param(make, marks=pytest.mark.slow) for make in (own, tokens, synthetic, saved))]
)
def test_of_no_source_the_number_of_jobs_shows(make, tmp_path: Path):
    (tmp_path / "in").mkdir()
    source = make(tmp_path / "in")
    encoder = DocumentEncoder(ByteTokenizer(), CHAT if make is chat else {"form": "text"})
    store = stores_alike(source, tmp_path, encoder)
    assert store.num_documents > 1 and (store.trained is not None) == (make is chat)


def test_a_tokenizer_travels(tiny_tokenizer: Path, tmp_path: Path):
    folder = write_lines(tmp_path / "in", [["one two", "three < one"], ["two </ one"]])
    encoder = DocumentEncoder(HuggingFaceTokenizer(tiny_tokenizer), {"form": "text"})
    stores_alike(lines_of(folder), tmp_path, encoder)


def test_little_is_done_without_processes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenise_pool, "Pool", None)
    monkeypatch.setattr(tokenise_pool, "_cores", lambda: 2)
    build_store(lines_of(folder), BytesEncoder(), tmp_path / "cache")
    monkeypatch.setattr(tokenise_pool, "SMALL", 100)
    with pytest.raises(TypeError):
        build_store(lines_of(folder), BytesEncoder(), tmp_path / "other")


def test_a_worker_that_dies_is_replaced(tmp_path: Path):
    texts = [*MANY[:3], [f"!die_once {tmp_path / 'died'}", "#", "b"], *MANY[3:], [f"!die_once {tmp_path / 'again'}"]]
    source = lines_of(write_lines(tmp_path / "in", texts))
    cache = tmp_path / "cache"
    key = build_store(source, BytesEncoder(), cache, jobs=2).key
    assert (tmp_path / "died").exists() and (tmp_path / "again").exists()
    build_store(source, BytesEncoder(), tmp_path / "alone", jobs=1)  # the files are there: nothing dies
    assert contents(cache / key) == contents(tmp_path / "alone" / key)


def test_where_workers_die_again_and_again_is_reported(tmp_path: Path):
    folder = write_lines(tmp_path / "in", [*MANY[:4], ["a", "!die x"], *MANY[4:]])
    with pytest.raises(DataError, match=r"004\.jsonl:1: the process .* killed by signal 9, 3 times"):
        build_store(lines_of(folder), BytesEncoder(), tmp_path / "cache", jobs=2)


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_unit_raises_is_raised_at_its_turn(jobs: int, tmp_path: Path):
    folder, cache = write_lines(tmp_path / "in", [*MANY, ["!raise by hand"], ["!memory"]]), tmp_path / "cache"
    with pytest.raises(ZeroDivisionError, match="by hand") as caught:
        build_store(lines_of(folder), BytesEncoder(), cache, jobs=jobs)
    assert jobs == 1 or "in _encode" in caught.value.__notes__[0]
    (folder / "012.jsonl").write_text('{"text": "repaired"}\n')
    with pytest.raises(DataError, match=r"013\.jsonl:1: not enough memory"):
        build_store(lines_of(folder), BytesEncoder(), cache, jobs=jobs)
    # The broken end of an archive is met early by the process that reads, and told when all before it is done.
    (folder / "013.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:-9])
    (folder / "013.jsonl").write_text("{\n" * 9)
    source = open_source("jsonl", patterns=("*",), base=folder, reads={"form": "text"}, bad_record_limit=len(MANY) + 8)
    with pytest.raises(DataError, match="21 bad records, but the limit is 20"):
        build_store(source, BytesEncoder(), cache, jobs=jobs)


def test_memory_is_bounded_by_a_window(tmp_path: Path):
    taken: list[int] = []

    def units(source: DataSource):
        for number, unit in enumerate(source.units()):
            taken.append(number)
            yield unit

    source = lines_of(write_lines(tmp_path / "in", [[f"{number}"] for number in range(40)]))
    results = encoded_units(source, BytesEncoder(), units(source), np.dtype(np.uint16), jobs=2)
    for number, (unit, result) in enumerate(results):
        # One more than the window is read ahead.
        assert len(taken) <= number + 2 * tokenise_pool.WINDOW + 1
        assert unit.path is not None and result.tokens[1:-1].tobytes()[::2].decode() == f"{int(unit.path.stem)}"
    assert number == 39


def test_no_more_bytes_are_in_memory_than_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenise_pool, "WINDOW_BYTES", 600)
    texts = [["x" * 450] for _ in range(10)] + [["y" * 5000], ["z"]]
    source = lines_of(write_lines(tmp_path / "in", texts))
    sizes = []
    with Pool(source, BytesEncoder(), np.dtype(np.uint16), 2) as pool:
        real = pool._deal

        def deal() -> None:
            sizes.append(sum(tokenise_pool._bytes(slot.unit) for worker in pool._workers for slot in worker.slots))
            real()

        pool._deal = deal
        assert len(list(pool.encoded(source.units()))) == 12
    # Two of them, or the large one alone.
    assert max(size for size in sizes if size < 5000) <= 1200
    assert max(sizes) < 5100


def test_workers_end_with_the_process_that_builds(folder: Path, tmp_path: Path):
    source = lines_of(folder)
    others = set(children_of(os.getpid()))  # other tests have processes of their own
    results = encoded_units(source, BytesEncoder(seconds=0.05), source.units(), np.dtype(np.uint16), jobs=2)
    next(results)
    children = set(children_of(os.getpid())) - others
    assert len(children) >= 2
    results.close()
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def test_what_does_not_travel_is_reported(folder: Path):
    source, encoder = lines_of(folder), BytesEncoder()
    encoder.seconds = Unwelcome()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="it cannot be unpacked"):
        list(encoded_units(source, encoder, source.units(), np.dtype(np.uint16), jobs=2))


class Unwelcome:
    def __reduce__(self):
        return int, ("it cannot be unpacked",)


def test_workers_that_do_not_start_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    source = lines_of(folder)
    with pytest.raises(RuntimeError, match="do not start: ended with status 1"):
        list(encoded_units(source, BytesEncoder(), source.units(), np.dtype(np.uint16), jobs=2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_workers_killed_at_random_lose_and_repeat_nothing(seed: int, tmp_path: Path):
    texts = [[f"{number} {line}" for line in range(20)] for number in range(120)]
    source = lines_of(write_lines(tmp_path / "in", texts))
    key = build_store(source, BytesEncoder(), tmp_path / "alone", jobs=1).key
    chance, over, log, killed = np.random.default_rng(seed), threading.Event(), tmp_path / "log", []
    others = set(children_of(os.getpid()))  # of other tests

    def kill() -> None:
        seen = 0
        while not over.wait(chance.uniform(0.02, 0.3)):
            # Ten units later, more than are under way at once: one at which three workers die is given up, rightly.
            done = len(log.read_text().splitlines()) if log.exists() else 0
            children = [each for each in children_of(os.getpid()) if each not in others]
            if children and done >= seen + 200:
                seen = done
                with suppress(ProcessLookupError):
                    os.kill(int(chance.choice(children)), signal.SIGKILL)
                    killed.append(done)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        build_store(source, BytesEncoder(log, seconds=0.002), tmp_path / "cache", jobs=2)
    finally:
        over.set()
        killer.join()
    assert killed
    assert contents(tmp_path / "cache" / key) == contents(tmp_path / "alone" / key)


def children_of(process: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found
