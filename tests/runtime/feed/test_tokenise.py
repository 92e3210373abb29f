"""Building a store: interrupted at any moment, by several processes at once, and told of on the way."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tokenising
from tokenising import BytesEncoder, contents, lines_of, write_lines

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.documents import DocumentEncoder
from xtrain.runtime.feed.prepared import build_store, identify
from xtrain.runtime.feed.sources.source import open_source
from xtrain.runtime.feed.token_store import CHOICES, JOURNAL, DataProgress, open_store
from xtrain.runtime.feed.tokenizing import tokenize as tokenise
from xtrain.runtime.feed.tokenizing import tokenize as tokenise_claims
from xtrain.runtime.feed.tokenizing.store_writer import read_journal
from xtrain.runtime.feed.tokenizing.tokenize import Claim, ClaimWatch, has_ended, this_process

TEXTS = [["one", "two"], ["#", "three"], ["? masked", "four"], ["!bad x"], ["five ö"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in", TEXTS)


@pytest.fixture(autouse=True)
def every_unit_is_journaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "COMMIT_SECONDS", 0.0)


def expected(folder: Path, tmp_path: Path) -> tuple[str, dict[str, bytes]]:
    store = build_store(lines_of(folder), BytesEncoder(), tmp_path / "alone", jobs=1)
    return store.key, contents(tmp_path / "alone" / store.key)


def program(what: str, *arguments: object) -> list[str]:
    return [sys.executable, str(Path(tokenising.__file__)), what, *map(str, arguments)]


def crash(folder: Path, cache: Path, *options: object) -> dict:
    command = program("crash", folder, cache, *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_crash_at_any_call_is_gone_on_from(folder: Path, tmp_path: Path):
    found = crash(folder, tmp_path, "--stride", 8)
    assert found["wrong"] == [] and found["crashes"] > 7


@pytest.mark.slow
def test_a_crash_at_every_call_is_gone_on_from(folder: Path, tmp_path: Path):
    found = crash(folder, tmp_path)
    assert found["wrong"] == [] and found["crashes"] > 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_crash_after_crash_is_gone_on_from(seed: int, folder: Path, tmp_path: Path):
    found = crash(folder, tmp_path, "--random", seed, "--trials", 150)
    assert found["wrong"] == [] and found["crashes"] > 120


class Interrupted(BaseException):
    pass


def stop_after(units: int):
    """A report that interrupts the build when so many units are done."""
    seen = 0

    def report(now: DataProgress) -> None:
        nonlocal seen
        seen += now.stage == "tokens"
        if seen == units:
            raise Interrupted

    return report


def test_what_is_done_is_not_done_again(folder: Path, tmp_path: Path):
    key, whole = expected(folder, tmp_path)
    log, cache, reported = tmp_path / "log", tmp_path / "cache", []
    with pytest.raises(Interrupted):
        build_store(lines_of(folder), BytesEncoder(), cache, progress=stop_after(2))
    (left,) = cache.glob(".building-*")
    journal = read_journal(left, key)
    assert journal is not None and (journal.units, journal.documents, journal.bad_records) == (2, 3, 1)
    assert not list(cache.glob(".claim-*"))
    build_store(lines_of(folder), BytesEncoder(log), cache, progress=reported.append)
    assert [line.rpartition("/")[2] for line in log.read_text().splitlines()] == [
        "002.jsonl:1", "002.jsonl:2", "003.jsonl:1", "004.jsonl:1"
    ]  # fmt: skip
    assert contents(cache / key) == whole
    assert {path.name for path in cache.iterdir()} - {"files.json"} == {key}
    moments = [now for now in reported if now.stage == "tokens"]
    assert {now.resumed for now in moments} == {journal.done}
    assert moments[-1].done == moments[-1].total == sum(path.stat().st_size for path in folder.iterdir())
    assert (moments[-1].documents, moments[-1].bad_records, moments[-1].share) == (6, 2, 1.0)


@pytest.mark.parametrize("file", ["tokens.bin", "trained.bin", "lengths.bin", "bad_records.jsonl"])
def test_half_a_unit_is_not_taken_for_one(file: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key, whole = expected(folder, tmp_path)
    real = durable.GrowingFile.append

    def append(growing, data) -> None:
        real(growing, data)
        if growing.path.name == file:
            raise Interrupted

    for _ in range(2):
        monkeypatch.setattr(durable.GrowingFile, "append", append)
        with pytest.raises(Interrupted):
            build_store(lines_of(folder), BytesEncoder(), tmp_path / "cache")
        monkeypatch.setattr(durable.GrowingFile, "append", real)
        with suppress(Interrupted):
            build_store(lines_of(folder), BytesEncoder(tmp_path / "log"), tmp_path / "cache", progress=stop_after(1))
    build_store(lines_of(folder), BytesEncoder(tmp_path / "log"), tmp_path / "cache")
    assert contents(tmp_path / "cache" / key) == whole
    # What was done before is kept every time.
    assert len(logged(tmp_path)) == len(set(logged(tmp_path)))


def test_without_a_claim_left_nor_units_nothing_stays(folder: Path, tmp_path: Path):
    class Broken(BytesEncoder):
        def encode(self, records):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        build_store(lines_of(folder), Broken(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_choices_of_questions_are_stored_beside_their_tokens(tmp_path: Path):
    asked = [{"question": f"q{n}", "choices": ["aé", "b", "c"][: 2 + n % 2], "answer": n % 2} for n in range(5)]
    for n, question in enumerate(asked):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps(question))
    (tmp_path / "5.jsonl").write_text('{"question": "q", "choices": ["a"], "answer": 0}')
    reads = {"form": "choices"}
    source = open_source("jsonl", patterns=("*.jsonl",), reads=reads, base=tmp_path, bad_record_limit=1)
    encoder, caches = DocumentEncoder(ByteTokenizer(), reads), (tmp_path / "whole", tmp_path / "interrupted")
    with pytest.raises(Interrupted):
        build_store(source, encoder, caches[1], jobs=1, progress=stop_after(3))
    whole, continued = (build_store(source, encoder, cache, jobs=1) for cache in caches)
    assert contents(caches[0] / whole.key) == contents(caches[1] / continued.key)
    facts = {"aé": (2, 3), "b": (1, 1), "c": (1, 1)}
    expected = [
        [place, int(place == each["answer"]), *facts[choice]]
        for each in asked
        for place, choice in enumerate(each["choices"])
    ]
    assert continued.choices is not None and continued.choices.tolist() == expected
    assert continued.predicted().tolist() == [1 + size for *_, size in expected]  # a space before each
    os.truncate(caches[0] / whole.key / CHOICES, 16)
    assert open_store(caches[0] / whole.key) is None


def harm_journal(left: Path) -> None:
    (left / JOURNAL).write_text("{}")


def harm_tokens(left: Path) -> None:
    data = bytearray((left / "tokens.bin").read_bytes())
    data[1] ^= 1
    (left / "tokens.bin").write_bytes(data)


def harm_lengths(left: Path) -> None:
    os.truncate(left / "lengths.bin", 8)


def harm_count(left: Path) -> None:
    journal = json.loads((left / JOURNAL).read_text())
    (left / JOURNAL).write_text(json.dumps(journal | {"documents": 2}))


def harm_mark(left: Path) -> None:
    journal = json.loads((left / JOURNAL).read_text())
    (left / JOURNAL).write_text(json.dumps(journal | {"mark": "another"}))


def harm_nothing(left: Path) -> None:
    pass


@pytest.mark.parametrize("harm", [harm_journal, harm_tokens, harm_lengths, harm_count, harm_mark, harm_nothing])
def test_a_damaged_beginning_is_not_gone_on_from(harm, folder: Path, tmp_path: Path):
    key, whole = expected(folder, tmp_path)
    log, cache = tmp_path / "log", tmp_path / "cache"
    with pytest.raises(Interrupted):
        build_store(lines_of(folder), BytesEncoder(), cache, progress=stop_after(2))
    harm(next(cache.glob(".building-*")))
    build_store(lines_of(folder), BytesEncoder(log), cache)
    assert contents(cache / key) == whole
    assert len(log.read_text().splitlines()) == (4 if harm is harm_nothing else 7)
    assert {path.name for path in cache.iterdir()} - {"files.json"} == {key}


def start(folder: Path, cache: Path, *options: object) -> subprocess.Popen:
    cache.mkdir(exist_ok=True)
    return subprocess.Popen(program("build", folder, cache, *options), stdout=subprocess.PIPE, text=True)


def result(builder: subprocess.Popen) -> dict:
    out, _ = builder.communicate(timeout=120)
    assert builder.returncode == 0
    return json.loads(out.splitlines()[-1])


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def logged(tmp_path: Path) -> list[str]:
    log = tmp_path / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_of_several_that_come_at_once_one_builds(folder: Path, tmp_path: Path):
    key, whole = expected(folder, tmp_path)
    builders = [start(folder, tmp_path / "cache", "--seconds", 0.05) for _ in range(3)]
    results = [result(builder) for builder in builders]
    assert [each["key"] for each in results] == [key] * 3
    assert len(logged(tmp_path)) == len(set(logged(tmp_path))) == 7
    assert contents(tmp_path / "cache" / key) == whole
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {key, "files.json"}


def test_when_the_builder_dies_another_goes_on(tmp_path: Path):
    folder = write_lines(tmp_path / "in", [[f"{number}"] for number in range(40)])
    key, whole = expected(folder, tmp_path)
    first = start(folder, tmp_path / "cache", "--seconds", 0.1)
    wait_until(lambda: len(logged(tmp_path)) > 3)
    second = start(folder, tmp_path / "cache", "--seconds", 0.0)
    assert second.stdout is not None and second.stdout.readline() == "waiting\n"
    first.kill()  # and not waited for: a process that is dead and still listed
    assert result(second)["waited"]
    first.wait()
    assert contents(tmp_path / "cache" / key) == whole
    # Only the unit that was under way is done twice.
    assert len(logged(tmp_path)) <= 41
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {key, "files.json"}


def test_a_builder_that_fell_silent_is_not_waited_for_and_does_no_harm(tmp_path: Path):
    folder = write_lines(tmp_path / "in", [[f"{number}"] for number in range(16)])
    key, whole = expected(folder, tmp_path)
    options = ("--beat", 0.05, "--silent", 0.4)
    first = start(folder, tmp_path / "cache", "--seconds", 0.03, *options)
    wait_until(lambda: len(logged(tmp_path)) > 3)
    first.send_signal(signal.SIGSTOP)
    done_before = len(logged(tmp_path))
    second = start(folder, tmp_path / "cache", "--seconds", 0.02, *options)
    wait_until(lambda: len(logged(tmp_path)) > done_before + 2)
    first.send_signal(signal.SIGCONT)  # both write now, each to its own files
    assert result(second)["key"] == result(first)["key"] == key
    assert contents(tmp_path / "cache" / key) == whole
    assert len(set(logged(tmp_path))) == 16
    # What the first had journaled the second did not do again.
    assert logged(tmp_path).count(f"{folder / '000.jsonl'}:1") == 1
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {key, "files.json"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("jobs", [1, 2])
def test_kills_at_random_times_lose_and_repeat_nothing(jobs: int, tmp_path: Path):
    texts = [[f"{number} {line}" for line in range(10)] + ["#", "? m"] for number in range(40)]
    folder, chance = write_lines(tmp_path / "in", texts), random.Random(jobs)
    key, whole = expected(folder, tmp_path)
    kills = 0
    for trial in range(6):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        patience, code = 1.5, None
        while code != 0:
            count = 1 + trial % 2  # alone, or with one that goes on with the work
            builders = [start(folder, tmp_path / "cache", "--seconds", 0.002, "--jobs", jobs) for _ in range(count)]
            try:
                builders[0].wait(chance.uniform(0.2, patience))
            except subprocess.TimeoutExpired:
                kills += 1
                builders[0].kill()
            code = [builder.wait(120) for builder in builders][-1]
            patience += 0.5  # on a busy machine starting alone takes longer than that
        assert contents(tmp_path / "cache" / key) == whole
        assert not list((tmp_path / "cache").glob(".building-*"))
    assert kills > 3


def test_processes_are_distinguished():
    own = this_process()
    assert own is not None and not has_ended(own)
    assert has_ended([*own[:3], "1"])  # its number is another's now
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = tokenise_claims._process(str(child.pid))
    assert not has_ended(process)
    child.kill()
    wait_until(lambda: has_ended(process))
    child.wait()
    assert has_ended(process)
    # Of other machines and containers nothing is known.
    assert not has_ended(["another machine", *own[1:]])
    assert not has_ended([own[0], "another container", *own[2:]])
    assert not has_ended(None) and not has_ended("words")


def test_claims_name_their_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenise_claims, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(tokenise_claims, "SILENT_SECONDS", 0.3)
    first, second = Claim(tmp_path, "key"), Claim(tmp_path, "key")
    Claim(tmp_path, "other").put()
    first.put()
    second.put()
    watch = ClaimWatch(second)
    (rival,) = watch.rivals()
    assert (rival.name, rival.alive, rival.builds) == (first.name, True, False) and first.name < second.name
    assert rival.builder == f"process {os.getpid()} on {os.uname().nodename}"
    first.says(builds=True)
    time.sleep(0.4)
    (rival,) = watch.rivals()
    assert rival.builds and rival.alive  # it is heard of
    first._over.set()
    wait_until(lambda: watch.rivals()[0].silent, 5.0)
    assert not watch.rivals()[0].gone
    first.path.write_text("torn")
    os.utime(first.path, (time.time() - 10_000,) * 2)
    assert ClaimWatch(second).rivals()[0].silent  # so old that it needs not be watched
    first.withdraw()
    assert watch.rivals() == []


def test_a_claim_of_a_process_that_is_no_more_does_not_hold_up(folder: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    key = identify(lines_of(folder), BytesEncoder(), cache).key
    claim = Claim(cache, key)
    cache.mkdir(exist_ok=True)
    own = this_process()
    assert own is not None
    for process, waits in (([*own[:3], "1"], False), (["another machine", *own[1:]], True)):
        claim.path.write_text(json.dumps({"host": "h", "pid": 7, "process": process, "builds": True, "beat": 1}))
        reported: list[DataProgress] = []

        def report(now: DataProgress, reported: list[DataProgress] = reported) -> None:
            reported.append(now)
            if now.stage == "waiting":
                raise Interrupted

        if waits:
            shutil.rmtree(cache / key)
            with pytest.raises(Interrupted):
                build_store(lines_of(folder), BytesEncoder(), cache, progress=report)
            assert reported[-1].builder == "process 7 on h"
            assert {path.name for path in cache.iterdir()} <= {claim.path.name, "files.json"}
        else:
            build_store(lines_of(folder), BytesEncoder(), cache, progress=report)
            assert not claim.path.exists()


@pytest.mark.parametrize(
    "name, builds, waits", [("0", True, True), ("0", False, True), ("9", True, True), ("9", False, False)]
)
def test_the_first_that_came_builds_and_a_builder_is_waited_for(
    name: str, builds: bool, waits: bool, folder: Path, tmp_path: Path
):
    cache = tmp_path / "cache"
    key = identify(lines_of(folder), BytesEncoder(), cache).key
    cache.mkdir(exist_ok=True)
    words = {"host": "h", "pid": 7, "process": ["another machine", "", "7", "1"], "builds": builds, "beat": 1}
    (cache / f".claim-{key}-{name * 20}-x").write_text(json.dumps(words))

    def report(now: DataProgress) -> None:
        if now.stage == "waiting":
            raise Interrupted

    if waits:
        with pytest.raises(Interrupted):
            build_store(lines_of(folder), BytesEncoder(), cache, progress=report)
    else:
        assert build_store(lines_of(folder), BytesEncoder(), cache, progress=report).key == key


def test_an_error_of_the_builder_reaches_all_who_wait(tmp_path: Path):
    folder = write_lines(tmp_path / "in", [["a"], ["b"], ["#"], ["c"]])
    source = lines_of(folder, limit=0)
    for _ in range(2):
        with pytest.raises(DataError, match="1 bad record, but the limit is 0"):
            build_store(source, BytesEncoder(), tmp_path / "cache")
