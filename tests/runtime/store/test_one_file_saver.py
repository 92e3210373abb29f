"""Saves of one file beside training: what is written is of the moment of the save, and what may wait is bounded."""

import threading

import pytest
import torch
from attrs import define, field
from small_savers import METRIC, Disk, Makes, events, only_tensor, values

from xtrain.runtime.base.errors import StorageFailed
from xtrain.runtime.store.file_saver import SaveQueue, Snapshots


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def make(tmp_path, monkeypatch) -> Makes:
    return Makes(tmp_path, "file", only_tensor(monkeypatch))


# The queue ------------------------------------------------------------------------------------------------------------


@define
class Slow:
    """Carries out jobs, each as soon as it is let."""

    done: list[str] = field(factory=list)
    begun: threading.Semaphore = field(factory=lambda: threading.Semaphore(0))
    let: threading.Semaphore = field(factory=lambda: threading.Semaphore(0))

    def __call__(self, job: str) -> None:
        self.begun.release()
        assert self.let.acquire(timeout=20)
        self.done.append(job)


def put(queue: SaveQueue[str], job: str) -> str | None:
    """H… must be kept, L… only matters as the newest; what has made way."""
    dropped = queue.make_way()
    if job.startswith("H"):
        queue.await_room()
    queue.put(job, required=job.startswith("H"))
    return dropped


@pytest.mark.parametrize(("put_in", "carried_out"), [
    ("L1 H1 L2 H2 L3", "L1 H1 H2 L3"),
    ("L1 L2 L3 L4", "L1 L4"),
    ("L1 H1 L2", "L1 H1 L2"),
    ("H1 H2 H3", "H1 H2 H3"),
    ("L1 L2 H1", "L1 H1"),
])  # fmt: skip
def test_what_must_be_kept_is_done_in_order_and_of_the_rest_the_newest(put_in, carried_out):
    slow = Slow()
    queue = SaveQueue(slow, limit=3)
    jobs = put_in.split()
    dropped = [put(queue, jobs[0])]
    assert slow.begun.acquire(timeout=20)  # the first is in flight
    dropped += [put(queue, job) for job in jobs[1:]]
    assert queue.busy and queue.unfinished() == carried_out.split()
    for _ in jobs:
        slow.let.release()
    assert queue.drain(20) and not queue.busy
    assert slow.done == carried_out.split()
    assert {*filter(None, dropped)} == {*jobs} - {*slow.done}


def test_one_that_must_be_kept_waits_for_room():
    slow = Slow()
    queue = SaveQueue(slow, limit=2)
    put(queue, "H1")
    assert slow.begun.acquire(timeout=20)
    for job in ("H2", "H3"):
        put(queue, job)
    late = threading.Thread(target=put, args=(queue, "H4"), daemon=True)
    late.start()
    late.join(0.05)
    assert late.is_alive() and not queue.drain(0.01)
    slow.let.release()
    late.join(20)
    assert not late.is_alive() and queue.unfinished()[-1] == "H4"
    for _ in range(3):
        slow.let.release()
    assert queue.drain(20) and slow.done == ["H1", "H2", "H3", "H4"]


def test_copies_are_of_the_moment_use_the_same_memory_and_are_never_too_many():
    weight = torch.arange(12.0).reshape(3, 4)
    taken = Snapshots(most=2, pinned=False)
    first = taken.take({"w": weight, "piece": weight[:, 1:2]})
    weight.zero_()
    assert first["w"].sum() == 66 and first["piece"].tolist() == [[1.0], [5.0], [9.0]]
    second = taken.take({"w": weight, "piece": weight[:, 1:2]})
    with pytest.raises(RuntimeError, match="2 copies"):
        taken.take({"w": weight})
    place = second["w"].data_ptr()
    taken.give_back(second)
    third = taken.take({"w": weight + 1, "piece": weight[:, 1:2]})
    assert third["w"].data_ptr() == place and third["w"].sum() == 12
    taken.give_back(first)
    assert taken.take({"w": torch.ones(5)})["w"].tolist() == [1] * 5


# The saver ------------------------------------------------------------------------------------------------------------


def in_flight(own) -> None:
    """Wait until the thread has taken up what was put first."""
    while own.queue._current is None:
        assert own.busy


def test_every_save_is_kept_and_holds_what_was_true_at_its_moment(make, disk):
    own = make("async", copies=3)
    disk.free.clear()
    for _ in range(3):
        make.advance(own)
        own.save("tick", must=False)
        make.weight.fill_(-1)  # at once: nothing waits for a copy any more
    assert own.folder.entries() == []
    disk.free.set()
    own.settle()
    assert values(own) == {1: 1.0, 2: 2.0, 3: 3.0} and own.folder.named() == "ckpt-s000000000003"
    assert torch.load(own.folder.alias("latest"), weights_only=True)["model.w"].max() == 3


def test_of_saves_that_only_matter_as_the_newest_one_waits(make, disk):
    own = make("async", overlap="latest", copies=2)
    disk.free.clear()
    make.advance(own)
    own.save("tick", must=False)
    in_flight(own)
    for _ in range(4):
        make.advance(own)
        own.save("tick", must=False)
    disk.free.set()
    own.settle()
    assert values(own) == {1: 1.0, 5: 5.0}


def test_one_that_may_be_the_best_is_kept(make, disk):
    own = make("async", overlap="latest", best=METRIC, copies=4)
    disk.free.clear()
    for loss in (3.0, 2.0, 2.5, None, 1.0, 4.0, 5.0):
        make.advance(own, loss)
        own.save("tick", must=False)
        in_flight(own)
    disk.free.set()
    own.settle()
    assert list(values(own)) == [1, 2, 5, 7] and own.folder.named("best") == "ckpt-s000000000005"


def test_what_the_run_ends_with_comes_behind_all_that_is_kept(make, disk):
    own = make("async", overlap="latest", best=METRIC, copies=4)
    disk.free.clear()
    for loss in (3.0, 2.0, None):
        make.advance(own, loss)
        own.save("tick", must=False)
        in_flight(own)
    threading.Timer(0.05, disk.free.set).start()
    make.advance(own)
    own.save("finish", must=True)
    assert not own.busy and list(values(own)) == [1, 2, 4]  # what was the newest is not any more
    assert own.folder.named() == "ckpt-s000000000004"


def test_the_newest_is_not_dropped_for_one_of_its_own_step(make, disk):
    own = make("async", overlap="latest", copies=2)
    disk.free.clear()
    for _ in range(2):
        make.advance(own)
        own.save("tick", must=False)
        in_flight(own)
    threading.Timer(0.05, disk.free.set).start()
    own.save("finish", must=True)
    assert values(own) == {1: 1.0, 2: 2.0} and len(events(own)) == 2


def test_failures_are_counted_in_their_order_and_leave_no_copy_behind(make, disk):
    own = make("async", failures=2, copies=3)
    disk.error = 28
    disk.free.clear()
    for _ in range(2):
        make.advance(own)
        own.save("tick", must=False)
    disk.free.set()
    own.queue.drain(20)
    make.advance(own)
    with pytest.raises(StorageFailed, match="the disk says no"):
        own.save("tick", must=False)
    disk.error = 0
    for _ in range(5):  # more than there are copies
        make.advance(own)
        own.save("tick", must=False)
    own.settle()
    assert list(values(own)) == [4, 5, 6, 7, 8]
