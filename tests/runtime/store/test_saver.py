"""One rank that saves: at once, beside what it computes, on a disk that fails, and what is the best so far."""

import errno
import math

import pytest
from checkpoints import tensors
from small_savers import METRIC, Disk, Makes, events, only_tensor, values

from xtrain.components.actions import checkpoint_torch
from xtrain.runtime.base.errors import StorageFailed
from xtrain.runtime.base.state import Clocks
from xtrain.runtime.loop import checkpointing as ops
from xtrain.runtime.nn.batch import Step


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture(params=["dcp", "file"])
def make(request, tmp_path, monkeypatch) -> Makes:
    return Makes(tmp_path, request.param, only_tensor(monkeypatch))


def test_steps_go_on_while_the_state_of_an_earlier_one_is_written(make, disk):
    own = make("async")
    make.advance(own)
    disk.free.clear()
    own.save("tick", must=False)
    for _ in range(3):
        make.advance(own)
    assert own.busy and own.folder.latest() is None
    disk.free.set()
    own.save("tick", must=False)  # waits for the one before
    own.settle()
    assert values(own) == {1: 1.0, 4: 4.0} and own.folder.named() == "ckpt-s000000000004"
    first = events(own)[0]
    assert first["step"] == 1 and first["blocked_seconds"] < first["seconds"]


def test_a_save_that_the_run_ends_with_is_on_the_disk_when_it_returns(make):
    own = make("async")
    make.advance(own)
    own.save("tick", must=False)
    own.save("finish", must=True)  # the same step: nothing is written twice
    assert values(own) == {1: 1.0} and len(events(own)) == 1
    make.advance(own)
    own.save("finish", must=True)
    assert not own.busy and values(own) == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize("make", ["dcp"], indirect=True)  # saves of one file wait in a queue
def test_a_save_that_is_put_off_comes_as_soon_as_the_other_is_done(make, disk):
    own, clocks = make("async", overlap="latest"), Clocks()
    late = ops.put_off_save(own, clocks)
    tick = checkpoint_torch.checkpoint(own, "tick", must=False)

    def step() -> None:
        clocks.answer(clocks.ask(first=True))  # as `step.agree` does
        late(Step(index=own.progress.step))
        make.advance(own)
        tick(Step(index=own.progress.step))

    disk.free.clear()
    for _ in range(4):
        step()
    assert own.put_off == "tick" and own.folder.latest() is None
    disk.free.set()
    own._under_way.result(20)
    step()  # which begins with the save that was due
    own.settle()
    own.save("finish", must=True)
    assert values(own) == {1: 1.0, 4: 4.0, 5: 5.0}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_failures_in_a_row_end_the_run_and_a_success_forgives_them(make, disk, mode):
    own = make(mode, failures=2)

    def save(error: int) -> None:
        own.settle()
        disk.error = error
        make.advance(own)
        own.save("tick", must=False)

    for error in (0, errno.ENOSPC, 0, errno.EROFS):
        save(error)
    assert own.settle() is None and values(own) == {1: 1.0, 3: 3.0}
    with pytest.raises(StorageFailed, match="the disk says no") as failed:
        save(errno.EIO)
        own.settle()
    assert failed.value.code == "X721"
    assert own.folder.remains() == [] and own.folder.latest().flaws(content=True) == []
    warning = next(event for event in events(own) if event["event"] == "warning")
    assert warning["code"] == "X721"
    assert warning["message"] == (
        "the checkpoint of step 2 could not be saved, the last checkpoint is of step 1: the disk says no"
    )
    disk.error = 0
    own.save("finish", must=True)
    assert values(own) == {1: 1.0, 3: 3.0, 5: 5.0}


def test_what_must_be_saved_and_is_not_is_an_error_whatever_is_allowed(make, disk):
    own = make("async", failures=None)
    disk.error = errno.ENOSPC
    for _ in range(9):
        make.advance(own)
        own.save("tick", must=False)
    with pytest.raises(StorageFailed):
        own.save("finish", must=True)


def test_a_folder_that_cannot_be_written_is_named(make, tmp_path):
    own = make(failures=1)
    (tmp_path / "checkpoints").write_text("a file in the way")
    make.advance(own)
    with pytest.raises(StorageFailed, match=r"checkpoints/ckpt-s000000000001\.partial: Not a directory"):
        own.save("tick", must=False)


def test_a_mistake_of_ours_is_no_trouble_of_the_disk(make, disk):
    own = make("async")
    disk.error = -1
    make.advance(own)
    own.save("tick", must=False)
    with pytest.raises(BaseException, match="a mistake of ours"):
        own.settle()


def test_a_run_that_ends_otherwise_still_finishes_its_save(make, disk):
    own = make("async")
    make.advance(own)
    disk.free.clear()
    own.save("tick", must=False)
    own.drain(0.01)
    assert own.folder.latest() is None
    disk.free.set()
    own.drain(20)
    assert values(own) == {1: 1.0}


def test_the_best_is_the_least_that_was_measured_of_a_saved_state(make):
    own = make(best=METRIC, keep=2)
    for loss in (3.0, 2.0, None, 1.0, math.nan):
        make.advance(own, loss)
        if own.progress.step != 4:  # measured, but not saved
            own.save("tick", must=False)
    assert own.folder.named("best") == "ckpt-s000000000002" and own.folder.named() == "ckpt-s000000000005"
    assert list(values(own)) == [2, 3, 5]  # of two that are kept the best is none
    again = make(best=METRIC, keep=2)  # after a restart
    again.progress.step = 5
    for loss in (2.0, 2.5, 1.5):
        make.advance(again, loss)
        again.save("tick", must=False)
    assert again.folder.named("best") == "ckpt-s000000000008"
    assert [event.get("best") for event in events(again)][-1] == {METRIC: 1.5}


def test_the_best_is_the_highest_where_that_is_better(make):
    own = make(best=METRIC, highest=True, keep=2)
    for value in (0.5, 0.75, 0.25, 0.6):
        make.advance(own, value)
        own.save("tick", must=False)
    assert own.folder.named("best") == "ckpt-s000000000002" and list(values(own)) == [2, 3, 4]
    make.advance(own, None)
    own.save("tick", must=False)
    own.progress.measured[METRIC] = (5, 0.9)
    own.measured(METRIC)  # behind its save
    assert own.folder.named("best") == "ckpt-s000000000005"
    own.saved_step = None
    own.progress.measured[METRIC] = (5, 0.1)
    own.save("tick", must=False)  # anew: the next best takes its place
    assert own.folder.named("best") in ("ckpt-s000000000002", "ckpt-s000000000004")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_measured_behind_its_save_can_be_the_best_too(make, mode):
    """As on an event, or by hand: in a step in which both are due a plan measures first."""
    own = make(mode, best=METRIC, keep=1)

    def step(loss: float, *, first: float | None = None) -> None:
        make.advance(own, first)
        own.save("tick", must=False)
        own.progress.measured[METRIC] = own.progress.step, loss
        own.measured(METRIC)

    for loss in (3.0, 2.0, 2.5, math.nan):
        step(loss)
    assert own.folder.named("best") == "ckpt-s000000000002"
    step(1.0, first=2.1)  # measured twice: what it was saved with counts
    assert own.folder.named("best") == "ckpt-s000000000002" and own.folder.pointed("latest").step == 5
    step(1.5)
    assert own.folder.named("best") == "ckpt-s000000000006"
    best_events = [(event["step"], event["best"]) for event in events(own) if event["event"] == "best"]
    assert best_events == [(1, {METRIC: 3.0}), (2, {METRIC: 2.0}), (6, {METRIC: 1.5})]
    again = make(mode, best=METRIC, keep=1)  # after a restart
    again.progress.take(own.folder.pointed("best").state())
    assert again.progress.measured[METRIC] == (6, 1.5)
    assert all(entry.flaws(content=True) == [] for entry in own.folder.published())


def test_what_is_measured_of_a_state_that_is_not_saved_is_no_best(make):
    own = make(best=METRIC)
    make.advance(own, 1.0)
    own.measured(METRIC)
    own.save("tick", must=False)
    make.advance(own, 0.5)
    own.measured(METRIC)
    make.advance(own)
    own.save("tick", must=False)
    own.progress.measured["eval/code/loss"] = own.progress.step, 0.1
    own.measured("eval/code/loss")  # which `best` does not follow
    assert own.folder.named("best") == "ckpt-s000000000001"
    assert [event["event"] for event in events(own)] == ["checkpoint", "checkpoint"]


@pytest.mark.parametrize(("loss", "best"), [(2.5, 2), (3.5, 1), (None, 1)])
def test_where_the_best_is_saved_anew_the_next_best_takes_its_place(make, loss, best):
    """As after a rollback, which keeps what `best` names though its steps are undone."""
    own = make(best=METRIC, keep=5)
    for each in (3.0, 1.0):
        make.advance(own, each)
        own.save("tick", must=False)
    assert own.folder.named("best") == "ckpt-s000000000002"
    own.saved_step, own.progress.step = 1, 1
    own.progress.measured.clear()
    make.advance(own, loss)
    own.save("tick", must=False)
    assert own.folder.named("best") == f"ckpt-s{best:012d}"


def test_weights_alone_replace_those_before_and_touch_no_other_pointer(make):
    own = make(keep=1)
    for _ in range(2):
        make.advance(own)
        own.save("tick", must=False)
        own.save_model("finish")
    assert [entry.step for entry in own.folder.models()] == [2] and own.folder.named("model") == "model-s000000000002"
    assert own.folder.named() == "ckpt-s000000000002" and own.folder.named("best") == ""
    model = own.folder.pointed("model")
    assert model is not None and list(tensors(model.path)) == ["model.w"] and "loader" not in model.state()
