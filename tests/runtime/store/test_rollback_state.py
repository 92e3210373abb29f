"""`rollback.json`: what a run that has gone back goes on from, whenever it is killed."""

from types import SimpleNamespace

import pytest
from faulty_disk import Death, FaultyDisk
from small_checkpoints import save

from xtrain.components.actions.rollback_torch import _target as target_of
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import ResumeRefused
from xtrain.runtime.base.state import BadSteps, Progress
from xtrain.runtime.store.checkpoints import CheckpointFolder
from xtrain.runtime.store.rollback import RollbackState, finish_rollback, onward, read_rollback, seal_of

LOADER = {"step": 2, "rows": 48}
CHANGES = 19  # of files, until it has gone back
COUNTS = {"in_a_row": 0, "total": 2, "last_good": 2, "went_back": [[7, 2]]}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    """Three checkpoints, of which the second is the best and the third the latest."""
    found = CheckpointFolder(tmp_path / "checkpoints")
    save(found, 2, loader={"step": 2, "rows": 16})
    save(found, 4, "best", loader={"step": 4, "rows": 32})
    save(found, 6, loader={"step": 6, "rows": 48})
    return found


def back_to_2(folder: CheckpointFolder) -> RollbackState:
    entries = {entry.step: entry for entry in folder.published()}
    return RollbackState(
        checkpoint=entries[2].name,
        seal=seal_of(entries[2]),
        from_step=7,
        loader=LOADER,
        nonfinite=COUNTS,
        newer={entries[step].name: seal_of(entries[step]) for step in (4, 6)},
    )


def steps(folder: CheckpointFolder) -> list[int]:
    return [entry.step for entry in folder.entries()]


def test_a_run_that_has_never_gone_back(folder, tmp_path):
    assert read_rollback(tmp_path) is None
    finish_rollback(tmp_path)
    assert steps(folder) == [2, 4, 6]
    assert onward(folder.latest()) == folder.latest().state()


def test_a_damaged_note_is_reported_and_never_passed_over(tmp_path):
    for content in ('{"checkpoint": ', "{}", "[]"):
        (tmp_path / "rollback.json").write_text(content)
        with pytest.raises(ResumeRefused, match=r"rollback\.json is damaged"):
            finish_rollback(tmp_path)


def test_what_is_newer_loses_its_name_and_the_best_keeps_it(folder, tmp_path):
    rollback = back_to_2(folder)
    rollback.write(tmp_path)
    assert read_rollback(tmp_path) == rollback
    finish_rollback(tmp_path)
    assert steps(folder) == [2, 4] and folder.latest().step == 2 and folder.pointed("best").step == 4
    state = onward(folder.latest())
    assert state["loader"] == LOADER and state["nonfinite"] == COUNTS and state["step"] == 2


# As 0.1 wrote it before `newer` was called so in code.
WRITTEN_BEFORE = """{
 "checkpoint": "ckpt-s000000000002",
 "seal": "%s",
 "from_step": 7,
 "loader": {
  "step": 2,
  "rows": 48
 },
 "nonfinite": {
  "in_a_row": 0,
  "total": 2,
  "last_good": 2,
  "went_back": [
   [
    7,
    2
   ]
  ]
 },
 "undone": {
  "ckpt-s000000000004": "%s",
  "ckpt-s000000000006": "%s"
 }
}"""


def test_a_file_of_an_earlier_version_is_read_and_written_as_it_was(folder, tmp_path):
    text = WRITTEN_BEFORE % tuple(seal_of(entry) for entry in folder.published())
    (tmp_path / "rollback.json").write_text(text)
    rollback = read_rollback(tmp_path)
    assert rollback == back_to_2(folder)
    rollback.write(tmp_path)
    assert (tmp_path / "rollback.json").read_text() == text
    finish_rollback(tmp_path)
    assert folder.latest().step == 2 and onward(folder.latest())["loader"] == LOADER


def test_a_checkpoint_that_is_saved_anew_is_another_one(folder, tmp_path):
    back_to_2(folder).write(tmp_path)
    finish_rollback(tmp_path)
    for step in (4, 6):
        save(folder, step, loader={"step": step, "rows": 99})
        finish_rollback(tmp_path)
        assert folder.latest().step == step
        assert onward(folder.latest())["loader"] == {"step": step, "rows": 99}
    save(folder, 2, loader={"step": 2, "rows": 100})
    assert onward(folder.latest())["loader"] == {"step": 2, "rows": 100}


@pytest.mark.parametrize(("progress", "went_back", "last_good", "target"), [
    (7, [], 7, 6),
    (5, [], 5, 4),
    (6, [], 6, 6),
    (7, [(8, 4)], 6, 6),  # it came further than the last time
    (4, [(8, 4)], 4, 2),  # nothing good since: the fault lies in that checkpoint, or before it
    (4, [(8, 6), (7, 4)], 4, 2),
    (2, [(8, 2)], 2, None),
])  # fmt: skip
def test_what_it_goes_back_to(folder, progress, went_back, last_good, target):
    collective = SimpleNamespace(first=lambda call: call(), all=lambda call: [call()], rank=0, size=1)
    saver = SimpleNamespace(folder=folder, transaction=SimpleNamespace(collective=collective))
    found = Progress(step=progress, bad=BadSteps(last_good=last_good, went_back=went_back))
    entry, passed = target_of(saver, found, content=True)
    assert (entry and entry.step, passed) == (target, [])


def test_what_was_saved_after_a_bad_step_is_passed_over(folder):
    save(folder, 8, nonfinite={"in_a_row": 1})
    collective = SimpleNamespace(first=lambda call: call(), all=lambda call: [call()], rank=0, size=1)
    saver = SimpleNamespace(folder=folder, transaction=SimpleNamespace(collective=collective))
    entry, passed = target_of(saver, Progress(step=8), content=True)
    assert entry and entry.step == 6 and passed == ["ckpt-s000000000008: it was saved after a bad step"]


@pytest.mark.parametrize("at", range(CHANGES + 1))
def test_killed_at_any_change_it_goes_on_from_there_or_as_if_it_had_never_gone_back(folder, tmp_path, monkeypatch, at):
    rollback = back_to_2(folder)
    died = False
    with monkeypatch.context() as patched:
        patched.setattr(durable, "os", FaultyDisk(at=at))
        try:
            rollback.write(tmp_path)
            rollback.finish(tmp_path)
        except Death:
            died = True
    written = read_rollback(tmp_path) is not None
    assert died == (at < CHANGES) and (written or died)
    finish_rollback(tmp_path)
    assert folder.latest().step == (2 if written else 6)
    assert onward(folder.latest())["loader"] == (LOADER if written else {"step": 6, "rows": 48})
    assert folder.pointed("best").step == 4
