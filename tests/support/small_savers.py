"""A saver of one process with one tensor to save, on a disk that can be made to wait and to fail."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import frozen
from checkpoints import tensors

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base.mesh import CollectiveErrors
from xtrain.runtime.base.state import Progress
from xtrain.runtime.observe.records import Records
from xtrain.runtime.store import full_state
from xtrain.runtime.store import writing as file_writer
from xtrain.runtime.store import writing as writer
from xtrain.runtime.store.checkpoints import CheckpointFolder, Publisher
from xtrain.runtime.store.file_saver import FileSaver, Snapshots
from xtrain.runtime.store.full_state import FullState
from xtrain.runtime.store.saver import HostCopy, Saver
from xtrain.runtime.store.writing import Transaction

QUICKSTART = Path(__file__).parents[2] / "specs/quickstart.xtrain"
METRIC = "eval/web/loss"


class Disk:
    """Lets a save wait at its first byte until `free` is set, and fail while `error` is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.error = threading.Event(), 0
        self.free.set()
        monkeypatch.setattr(writer._Writer, "write_data", self._guarded(writer._Writer.write_data))
        monkeypatch.setattr(file_writer, "write_file", self._guarded(file_writer.write_file))

    def _guarded(self, original: Any) -> Any:
        def write(*args: Any) -> Any:
            assert self.free.wait(20)
            if self.error < 0:
                raise ZeroDivisionError("a mistake of ours")
            if self.error:
                raise OSError(self.error, "the disk says no")
            return original(*args)

        return write


@frozen
class Makes:
    """`make(mode="async", …)`: a saver in the same directory each time; each step makes `weight` its number."""

    directory: Path
    backend: Any
    weight: torch.Tensor

    def __call__(self, mode: str = "sync", **given: Any) -> Saver:
        plan = plan_from_spec(QUICKSTART).plan
        assert plan is not None
        feed: Any = SimpleNamespace(
            steps=10,
            batch=None,
            datasets={},
            epoch=lambda step: None,
            loader=SimpleNamespace(state=lambda step: {"step": step}),
        )
        folder = CheckpointFolder(self.directory / "checkpoints")
        options: dict[str, Any] = {"overlap": "wait", "best": None, "failures": 3, "saved_step": None, **given}
        keep, copies = options.pop("keep", None), options.pop("copies", 3)
        nothing: Any = None
        rank: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
        state = FullState(
            plan=plan, rank=rank, model=nothing, ema=None, optimizer=nothing, feed=feed, progress=Progress()
        )
        common: dict[str, Any] = {
            "state": state,
            "begun_from": None,
            "written_by": {"code_id": "1a2b3c4d"},
            "records": Records.open(self.directory, 0),
            "transaction": Transaction(publisher=Publisher(folder, options.get("best"), options.get("highest", False)),
                collective=CollectiveErrors(0, 1, None), keep=keep, backend=self.backend),
            **options,
        }  # fmt: skip
        if mode != "sync" and self.backend == "file":
            return FileSaver(**common, snapshots=Snapshots(most=copies, pinned=False))
        staging = None if mode == "sync" else HostCopy(pinned=mode == "async_pinned", device=torch.device("cpu"))
        return Saver(**common, staging=staging)

    def advance(self, own: Saver, loss: float | None = None) -> None:
        """One step: the copy is awaited, then the optimizer writes."""
        own.await_copy()
        own.progress.step += 1
        self.weight.fill_(own.progress.step)
        if loss is not None:
            own.progress.measured[METRIC] = own.progress.step, loss


def only_tensor(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """All there is to save from now on, besides random numbers."""
    found = torch.zeros(1000)
    monkeypatch.setattr(full_state, "saved_tensors", lambda model, plan: {"model.w": found})
    monkeypatch.setattr(full_state, "optimizer_tensors", lambda model, optimizer, plan: {})
    return found


def values(own: Saver) -> dict[int, float]:
    """Step → what its checkpoint holds."""
    return {entry.step: float(tensors(entry.path)["model.w"].max()) for entry in own.folder.entries()}


def events(own: Saver) -> list[dict]:
    return list(map(json.loads, own.records.events.path.read_text().splitlines()))
