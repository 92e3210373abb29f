"""Processes that read: the same microbatches in the same order, whichever of them is killed, and when."""

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from attrs import evolve, fields
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st
from one_rank import one_rank

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.plan.arithmetic import arithmetic_of
from xtrain.plan.learning_rate import learning_rate
from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.errors import DataError, EnvironmentFault
from xtrain.runtime.feed import reading_ahead as reading_processes
from xtrain.runtime.feed.collate import Stage
from xtrain.runtime.feed.curriculum import TrainingRows, curriculum_of
from xtrain.runtime.feed.loader import RowLoader
from xtrain.runtime.feed.microbatch import Microbatch
from xtrain.runtime.feed.prepared import prepared_from
from xtrain.runtime.feed.reading_ahead import (
    ReaderProcess,
    ReaderProcesses,
    mapped_from,
    receive_answer,
    send_answer,
    send_failure,
)
from xtrain.runtime.feed.reading_process import chain_of, read_recipe, serve
from xtrain.runtime.feed.setup import Feed, ahead_of
from xtrain.runtime.nn.optimizer import build_schedule

SPEC = """
experiment reading {{ seed = 3, budget = 60 steps }}
model qwen3 {{ dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }}
tokenizer bytes
dataset lines {{ source = jsonl("{folder}/lines.jsonl"), holdout = 10% }}
dataset words {{ source = jsonl("{folder}/words.jsonl") }}
dataset noise {{ source = synthetic(documents = 50, length = 40, seed = 1) }}
mixture {{ lines = 0.7, words = 0.3, noise = 0 }}
phase words {{ from = 20 steps, mix = {{ lines: 0, noise: 0.5 }}, lr_scale = 0.5 }}
phase noise {{ from = 50%, mix = {{ lines: 0, words: 0, noise: 1 }} }}
phase even {{ from = 45 steps, mix = {{ lines: 1, words: 1, noise: 1 }}, lr_scale = 0.1 }}
optimizer adamw {{ lr = 1e-3 }}
scheduler constant {{}}
batch {{ sequence = 32, micro = 2, rows = 4 }}
workspace {{ root = "{folder}/runs" }}
"""
RANK = one_rank()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("reading")
    for name in ("lines", "words"):
        texts = [f"{name} {i} " + "abc def ghi "[: i % 13] * (i % 3) for i in range(60)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root


@pytest.fixture(scope="module")
def plan(folder: Path) -> Plan:
    compiled = plan_from_text(SPEC.format(folder=folder), "reading.xtrain")
    assert compiled.plan is not None, compiled.diagnostics
    return compiled.plan


@pytest.fixture(scope="module")
def loader(plan: Plan) -> RowLoader:
    args = plan.node("setup.loader").args
    nodes = {node.args["dataset"]: node for node in plan.nodes if node.op == "setup.data"}
    readers = {name: prepared_from(plan, nodes[name], ByteTokenizer()).parts["training"] for name in args["datasets"]}
    datasets = tuple(TrainingRows.of(name, reader, args["seed"]) for name, reader in readers.items())
    return RowLoader(
        datasets=datasets,
        curriculum=curriculum_of(plan, {each.name: each.order.num_rows for each in datasets}),
        collate=chain_of(plan, RANK),
        micro=args["micro"],
        accumulate=args["accumulate"],
        data_rank=0,
        data_ranks=1,
    )


def processes(plan: Plan, loader: RowLoader, count: int, warned: list) -> ReaderProcesses:
    def warn(step: int, message: str) -> None:
        warned.append((step, message))

    return ReaderProcesses(plan=plan, rank=RANK, loader=loader, count=count, warn=warn)


def assert_same(found: list[Microbatch], expected: list[Microbatch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in (attribute.name for attribute in fields(Microbatch)):
            a, b = getattr(one, name), getattr(other, name)
            if isinstance(b, torch.Tensor):
                assert a.dtype == b.dtype and torch.equal(a, b), name
            else:
                assert a == b, name


class FakeReader:
    """A reader in a thread, which loses its socket when it is asked for what it is to die of."""

    dies_at: ClassVar[set[int]] = set()

    def __init__(self, recipe: bytes) -> None:
        self.socket, theirs = Pipe()
        self.thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
        self.thread.start()
        self.socket.send_bytes(recipe)

    def _serve(self, theirs: Connection) -> None:
        class Mortal:
            def recv_bytes(self) -> bytes:
                message = theirs.recv_bytes()
                if len(message) == 8 and (step := int.from_bytes(message, "little")) in FakeReader.dies_at:
                    FakeReader.dies_at.discard(step)
                    raise EOFError
                return message

            def send_bytes(self, message) -> None:
                theirs.send_bytes(message)

        try:
            serve(Mortal())  # pyright: ignore[reportArgumentType]
        except (EOFError, OSError):
            theirs.close()

    ask, answer = ReaderProcess.ask, ReaderProcess.answer

    @property
    def _socket(self) -> Connection:
        return self.socket

    def _send(self, message: bytes) -> None:
        with suppress(OSError):
            self.socket.send_bytes(message)

    def end(self) -> int:
        self.socket.close()
        return -9


FIRST = {"train": 0, "words": 20, "noise": 30, "even": 45}


@pytest.mark.parametrize(("prefetch", "workers"), [(0, 0), (1, 0), (4, 0), (2, 1), (5, 3)])
def test_a_curriculum_is_read_to_the_step_however_it_is_read(plan, loader, monkeypatch, prefetch, workers):
    """Four phases over three datasets: the mix of each phase, its first batch, and its rate of learning."""
    monkeypatch.setattr(reading_processes, "ReaderProcess", FakeReader)
    feed = Feed(
        loader=loader, collate=loader.collate, micro=loader.micro, steps=60, datasets={}, phases=plan.timeline.phases,
        batch=arithmetic_of(plan),
    )  # fmt: skip
    feed.ahead = ahead_of(feed, plan, RANK, cast(Any, None), prefetch, workers)
    assert (feed.ahead is None) == (prefetch == 0)
    seen = {name: np.zeros(3, dtype=np.int64) for name in FIRST}
    for step in range(60):
        batches = feed.microbatches(step)
        drawn = np.bincount(np.concatenate([batch.dataset_B for batch in batches]), minlength=3)
        phase = feed.phase(step)
        assert phase.name == max((first, name) for name, first in FIRST.items() if first <= step)[1]
        wanted = [phase.shares[dataset.name] for dataset in loader.datasets]
        assert not drawn[np.array(wanted) == 0].any()
        seen[phase.name] += drawn
        assert np.abs(seen[phase.name] - np.array(wanted) * seen[phase.name].sum()).max() < 2.5
        assert_same(batches, loader.microbatches(step))
    feed.close()
    assert sum(map(sum, seen.values())) == 60 * 4

    args = {"kind": "wsd", "lr": 0.1, "warmup": {"steps": 3}, "decay": {"steps": 20}, "shape": "linear", "steps": 60}
    plain, scaled = learning_rate(args | {"floor": 0.0}, arithmetic_of(plan)), build_schedule(feed, floor=0.0, **args)
    for name, first in FIRST.items():
        scale = {"words": 0.5, "even": 0.1}.get(name, 1.0)
        assert scaled(first) == plain(first) * scale
        assert first == 0 or scaled(first - 1) == plain(first - 1) * {30: 0.5}.get(first, 1.0)


@given(st.integers(1, 4), st.integers(0, 25), st.integers(1, 12), st.sets(st.integers(0, 36), max_size=6))
@drawn(12, 250)
def test_readers_that_die_anywhere_lose_and_repeat_nothing(plan, loader, count, first, steps, deaths):
    warned: list = []
    FakeReader.dies_at = set(deaths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_processes, "ReaderProcess", FakeReader)
        found = list(processes(plan, loader, count, warned).reads(first, first + steps))
    assert len(found) == steps
    for step, microbatches in enumerate(found, start=first):
        assert_same(microbatches, loader.microbatches(step))
    assert [step for step, _ in warned] == sorted(deaths & set(range(first, first + steps)))


def test_a_step_at_which_readers_always_die_fails(plan, loader, monkeypatch):
    class Doomed(FakeReader):
        def answer(self):
            raise ConnectionResetError

    warned: list = []
    monkeypatch.setattr(reading_processes, "ReaderProcess", Doomed)
    with pytest.raises(EnvironmentFault, match=r"rank 0: data workers for step 8 died 3 times in a row") as caught:
        next(processes(plan, loader, 2, warned).reads(7, 9))
    assert caught.value.code == "X714" and [step for step, _ in warned] == [7, 7, 7]


@pytest.mark.slow
def test_real_processes_one_of_which_is_killed(plan, loader):
    warned: list = []
    reading = processes(plan, loader, 2, warned).reads(17, 30)
    assert_same(next(reading), loader.microbatches(17))
    before = children()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    for step in range(18, 30):
        assert_same(next(reading), loader.microbatches(step))
    assert len(warned) == 1 and "signal 9" in warned[0][1]
    after = children()
    assert len(after) == 2 and before[0] not in after
    # Signals to a whole job are for the ranks.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(after[0], number)
    time.sleep(0.05)
    assert children() == after
    assert next(reading, None) is None
    assert not children()


@pytest.mark.slow
def test_real_processes_that_are_killed_again_and_again(plan, loader):
    chance, killed, warned = random.Random(5), set(), []
    reading = processes(plan, loader, 3, warned).reads(0, 60)
    for step in range(60):
        assert_same(next(reading), loader.microbatches(step))
        if chance.random() < 0.25 and step < 55:
            time.sleep(chance.uniform(0, 0.2))
            killed.add(victim := chance.choice(children()))
            os.kill(victim, signal.SIGKILL)
    reading.close()
    assert len(warned) == len(killed) > 5 and not children()


def children() -> list[int]:
    """Processes of this one that read, and have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"reading_process" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return sorted(found)


def test_what_is_mapped_from_files_travels_by_its_name(plan, loader):
    """The recipe stays small, and the loader that is made of it reads the very same files."""
    recipe = processes(plan, loader, 1, [])._recipe()
    store = loader.datasets[0].reader.store
    assert store.tokens.tobytes() not in recipe and b"tokens.bin" in recipe
    rebuilt = read_recipe(recipe)
    again = rebuilt.datasets[0].reader.store
    assert mapped_from(again.tokens) == mapped_from(store.tokens) != None  # noqa: E711
    for step in (0, 25):
        assert_same(rebuilt.microbatches(step), loader.microbatches(step))


def test_a_part_of_a_mapped_file_is_found_where_it_is(tmp_path):
    np.arange(100, dtype=np.int32).tofile(tmp_path / "whole.bin")
    whole = np.memmap(tmp_path / "whole.bin", dtype=np.int32, mode="r", offset=40)
    for part in (np.asarray(whole)[5:20], whole[5:20], whole[2:][3:18]):
        _, file, dtype, offset, shape = mapped_from(part) or ()
        again = np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=shape)
        assert again.tolist() == part.tolist() == list(range(15, 30))
    assert mapped_from(whole[::2]) is None and mapped_from(np.arange(3)) is None


def test_a_loader_of_what_is_in_memory_travels_whole(plan, loader):
    first = loader.datasets[0]
    store = evolve(first.reader.store, tokens=np.array(first.reader.store.tokens))
    datasets = (evolve(first, reader=evolve(first.reader, store=store)), *loader.datasets[1:])
    changed = evolve(loader, datasets=datasets)
    rebuilt = read_recipe(processes(plan, changed, 1, [])._recipe())
    assert_same(rebuilt.microbatches(3), loader.microbatches(3))


class Strange(Exception):
    """Cannot be made of its text alone."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    "error", [DataError("bad row", path="a.jsonl", line=3), Strange("this", "that"), KeyError("x")]
)
def test_what_a_process_raises_arrives_with_its_traceback(error: Exception):
    ours, theirs = Pipe()
    try:
        raise error
    except Exception as raised:
        send_failure(theirs, raised)
    received = receive_answer(ours)
    assert isinstance(received, DataError if isinstance(error, DataError) else Exception)
    assert str(error) in str(received) and "test_reading_processes.py" in received.__notes__[0]


def test_an_error_of_a_step_is_raised_and_the_process_goes_on(plan, loader, monkeypatch):
    def fail(value):
        raise DataError("a collator does not like this row")

    broken = evolve(loader.collate, stages=(Stage(name="x", takes="", gives="", function=fail),))
    ours, theirs = Pipe()
    monkeypatch.setattr("xtrain.runtime.feed.reading_process.chain_of", lambda plan, rank: broken)
    thread = threading.Thread(target=_until_closed, args=(theirs,), daemon=True)
    thread.start()
    ours.send_bytes(processes(plan, loader, 1, [])._recipe())
    for _ in range(2):
        ours.send_bytes((0).to_bytes(8, "little"))
        assert str(receive_answer(ours)) == "a collator does not like this row"
    ours.close()
    thread.join(5)
    assert not thread.is_alive()


def _until_closed(socket: Connection) -> None:
    with suppress(EOFError, OSError):
        serve(socket)


def test_microbatches_travel_as_they_are(loader):
    ours, theirs = Pipe()
    expected = [evolve(batch, place_B=None) for batch in loader.microbatches(2)]
    thread = threading.Thread(target=send_answer, args=(theirs, expected))
    thread.start()
    found = receive_answer(ours)
    thread.join()
    assert isinstance(found, list)
    assert_same(found, expected)
    assert found[0].input_ids_BS is not None
    found[0].input_ids_BS.zero_()  # it has memory of its own
