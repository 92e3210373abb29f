"""The folder of checkpoints: what is published, what `latest` means after any crash, what is kept."""

import pytest

from xtrain.runtime.checkpoint.layout import CheckpointFolder


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def save(folder: CheckpointFolder, step: int) -> None:
    partial = folder.begin(step)
    (partial / "__0_0.distcp").write_bytes(b"tensors")
    (partial / ".metadata").write_bytes(b"where they are")
    folder.publish(step, {"step": step})


def steps(folder: CheckpointFolder) -> list[int]:
    return [entry.step for entry in folder.entries()]


def test_an_empty_folder_has_no_latest(folder):
    assert folder.latest() is None and folder.entries() == []


def test_published_checkpoints_are_found_in_order_and_carry_their_state(folder):
    for step in (20, 5, 100):
        save(folder, step)
    assert steps(folder) == [5, 20, 100]
    assert folder.latest().step == 100 and folder.latest().state()["step"] == 100


def test_what_was_not_published_is_not_there(folder):
    save(folder, 5)
    partial = folder.begin(10)
    (partial / ".metadata").write_bytes(b"")
    assert steps(folder) == [5] and folder.latest().step == 5
    folder.begin(10)  # the next attempt finds an empty folder
    assert list(partial.iterdir()) == []


@pytest.mark.parametrize("missing", [".metadata", "state.json"])
def test_a_damaged_checkpoint_is_passed_over(folder, missing):
    save(folder, 5)
    save(folder, 10)
    (folder.path(10) / missing).unlink()
    assert folder.latest().step == 5


def test_a_lost_pointer_means_the_newest(folder):
    save(folder, 5)
    save(folder, 10)
    (folder.root / "latest").unlink()
    assert folder.latest().step == 10
    (folder.root / "latest").write_text("ckpt-s000000000005\n")
    assert folder.latest().step == 5


def test_retention_keeps_the_newest_and_whatever_latest_names(folder):
    for step in (1, 2, 3, 4):
        save(folder, step)
    (folder.root / "latest").write_text("ckpt-s000000000001\n")
    assert [p.name for p in folder.retain(2)] == ["ckpt-s000000000002"]
    assert steps(folder) == [1, 3, 4]
    assert folder.retain(None) == []


def test_the_same_step_can_be_saved_again(folder):
    save(folder, 5)
    save(folder, 5)
    assert steps(folder) == [5] and folder.latest().step == 5
