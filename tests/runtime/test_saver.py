"""One rank that saves: at once, beside what it computes, on a disk that fails, and what is the best so far."""

import errno
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import tensors

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.checkpoint import full_state, ops, writer
from xtrain.runtime.checkpoint.full_state import FullState
from xtrain.runtime.checkpoint.layout import CheckpointFolder
from xtrain.runtime.checkpoint.publish import Publisher
from xtrain.runtime.checkpoint.saver import Saver
from xtrain.runtime.checkpoint.staging import Staging
from xtrain.runtime.checkpoint.together import Together
from xtrain.runtime.checkpoint.transaction import Transaction
from xtrain.runtime.errors import StorageFailed
from xtrain.runtime.records import Records
from xtrain.runtime.state import Progress, Step
from xtrain.runtime.timers import Clocks

QUICKSTART = Path(__file__).parents[2] / "specs/quickstart.xtrain"
METRIC = "eval/web/loss"


@pytest.fixture
def weight(monkeypatch) -> torch.Tensor:
    """All there is to save besides random numbers; step n makes it n."""
    found = torch.zeros(1000)
    monkeypatch.setattr(full_state, "model_tensors", lambda model: {"model.w": found})
    monkeypatch.setattr(full_state, "optimizer_tensors", lambda model, optimizer: {})
    return found


class Disk:
    """Lets a save wait at its first byte until `free` is set, and fail while `error` is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.error = threading.Event(), 0
        self.free.set()
        original = writer._Writer.write_data

        def write_data(own: Any, plan: Any, planner: Any) -> Any:
            assert self.free.wait(20)
            if self.error < 0:
                raise ZeroDivisionError("a mistake of ours")
            if self.error:
                raise OSError(self.error, "the disk says no")
            return original(own, plan, planner)

        monkeypatch.setattr(writer._Writer, "write_data", write_data)


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def make(tmp_path, weight):
    """`make(mode="async", …)`: a saver in the same directory each time."""
    plan = plan_from_spec(QUICKSTART).plan
    assert plan is not None
    feed: Any = SimpleNamespace(steps=10, loader=SimpleNamespace(state=lambda step: {"step": step}))

    def build(mode: str = "sync", **given: Any) -> Saver:
        folder = CheckpointFolder(tmp_path / "checkpoints")
        options: dict[str, Any] = {"overlap": "wait", "best": None, "failures": 3, "saved_step": None, **given}
        keep = options.pop("keep", None)
        nothing: Any = None
        rank: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
        state = FullState(
            plan=plan, rank=rank, model=nothing, ema=None, optimizer=nothing, feed=feed, progress=Progress()
        )
        return Saver(
            state=state, begun_from=None,
            records=Records.open(tmp_path, 0),
            transaction=Transaction(publisher=Publisher(folder), together=Together(0, 1, None), keep=keep),
            staging=None if mode == "sync" else Staging(pinned=mode == "async_pinned", device=torch.device("cpu")),
            **options,
        )  # fmt: skip

    return build


def advance(own: Saver, weight: torch.Tensor, loss: float | None = None) -> None:
    """One step: the copy is awaited, then the optimizer writes."""
    own.await_copy()
    own.progress.step += 1
    weight.fill_(own.progress.step)
    if loss is not None:
        own.progress.measured[METRIC] = own.progress.step, loss


def values(own: Saver) -> dict[int, float]:
    """Step → what its checkpoint holds."""
    return {entry.step: float(tensors(entry.path)["model.w"].max()) for entry in own.folder.entries()}


def events(own: Saver) -> list[dict]:
    return list(map(json.loads, own.records.events.path.read_text().splitlines()))


def test_steps_go_on_while_the_state_of_an_earlier_one_is_written(make, weight, disk):
    own = make("async")
    advance(own, weight)
    disk.free.clear()
    own.save("tick", must=False)
    for _ in range(3):
        advance(own, weight)
    assert own.busy and own.folder.latest() is None
    disk.free.set()
    own.save("tick", must=False)  # waits for the one before
    own.settle()
    assert values(own) == {1: 1.0, 4: 4.0} and own.folder.named() == "ckpt-s000000000004"
    first = events(own)[0]
    assert first["step"] == 1 and first["blocked_seconds"] < first["seconds"]


def test_a_save_that_the_run_ends_with_is_on_the_disk_when_it_returns(make, weight):
    own = make("async")
    advance(own, weight)
    own.save("tick", must=False)
    own.save("finish", must=True)  # the same step: nothing is written twice
    assert values(own) == {1: 1.0} and len(events(own)) == 1
    advance(own, weight)
    own.save("finish", must=True)
    assert not own.busy and values(own) == {1: 1.0, 2: 2.0}


def test_a_save_that_is_put_off_comes_as_soon_as_the_other_is_done(make, weight, disk):
    own, clocks = make("async", overlap="latest"), Clocks()
    late = ops.put_off_save(own, clocks)
    tick = ops.checkpoint(own, "tick", must=False)

    def step() -> None:
        clocks.answer([value > 0 for value in clocks.ask()])  # as `step.agree` does
        late(Step(index=own.progress.step))
        advance(own, weight)
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
def test_failures_in_a_row_end_the_run_and_a_success_forgives_them(make, weight, disk, mode):
    own = make(mode, failures=2)

    def save(error: int) -> None:
        own.settle()
        disk.error = error
        advance(own, weight)
        own.save("tick", must=False)

    for error in (0, errno.ENOSPC, 0, errno.EROFS):
        save(error)
    assert own.settle() is None and values(own) == {1: 1.0, 3: 3.0}
    with pytest.raises(StorageFailed, match="the disk says no"):
        save(errno.EIO)
        own.settle()
    assert own.folder.remains() == [] and own.folder.latest().flaws(content=True) == []
    warning = next(event for event in events(own) if event["event"] == "warning")
    assert warning["message"] == (
        "the checkpoint of step 2 could not be saved, the last one is of step 1: the disk says no"
    )
    disk.error = 0
    own.save("finish", must=True)
    assert values(own) == {1: 1.0, 3: 3.0, 5: 5.0}


def test_what_must_be_saved_and_is_not_is_an_error_whatever_is_allowed(make, weight, disk):
    own = make("async", failures=None)
    disk.error = errno.ENOSPC
    for _ in range(9):
        advance(own, weight)
        own.save("tick", must=False)
    with pytest.raises(StorageFailed):
        own.save("finish", must=True)


def test_a_folder_that_cannot_be_written_is_told_by_name(make, weight, tmp_path):
    own = make(failures=1)
    (tmp_path / "checkpoints").write_text("a file in the way")
    advance(own, weight)
    with pytest.raises(StorageFailed, match=r"checkpoints/ckpt-s000000000001\.partial: Not a directory"):
        own.save("tick", must=False)


def test_a_mistake_of_ours_is_no_trouble_of_the_disk(make, weight, disk):
    own = make("async")
    disk.error = -1
    advance(own, weight)
    own.save("tick", must=False)
    with pytest.raises(BaseException, match="a mistake of ours"):
        own.settle()


def test_a_run_that_ends_otherwise_still_finishes_its_save(make, weight, disk):
    own = make("async")
    advance(own, weight)
    disk.free.clear()
    own.save("tick", must=False)
    own.drain(0.01)
    assert own.folder.latest() is None
    disk.free.set()
    own.drain(20)
    assert values(own) == {1: 1.0}


def test_the_best_is_the_least_that_was_measured_of_a_saved_state(make, weight):
    own = make(best=METRIC, keep=2)
    for loss in (3.0, 2.0, None, 1.0, math.nan):
        advance(own, weight, loss)
        if own.progress.step != 4:  # measured, but not saved
            own.save("tick", must=False)
    assert own.folder.named("best") == "ckpt-s000000000002" and own.folder.named() == "ckpt-s000000000005"
    assert list(values(own)) == [2, 3, 5]  # of two that are kept the best is none
    again = make(best=METRIC, keep=2)  # after a restart
    again.progress.step = 5
    for loss in (2.0, 2.5, 1.5):
        advance(again, weight, loss)
        again.save("tick", must=False)
    assert again.folder.named("best") == "ckpt-s000000000008"
    assert [event.get("best") for event in events(again)][-1] == {METRIC: 1.5}


def test_weights_alone_replace_those_before_and_touch_no_other_pointer(make, weight):
    own = make(keep=1)
    for _ in range(2):
        advance(own, weight)
        own.save("tick", must=False)
        own.save_model("finish")
    assert [entry.step for entry in own.folder.models()] == [2] and own.folder.named("model") == "model-s000000000002"
    assert own.folder.named() == "ckpt-s000000000002" and own.folder.named("best") == ""
    model = own.folder.pointed("model")
    assert model is not None and list(tensors(model.path)) == ["model.w"] and "loader" not in model.state()
