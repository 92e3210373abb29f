"""The folder of checkpoints: what is published, what pointers mean after any crash, what is kept."""

import json

import pytest
from faulty_disk import FULL, Death, FaultyDisk
from small_checkpoints import save, save_model

from xtrain.runtime.checkpoint import durable
from xtrain.runtime.checkpoint.layout import POINTERS, CheckpointFolder
from xtrain.runtime.checkpoint.publish import Publisher
from xtrain.runtime.checkpoint.sidecar import flaws


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def steps(folder: CheckpointFolder) -> list[int]:
    return [entry.step for entry in folder.entries()]


def test_an_empty_folder_has_no_latest(folder):
    assert folder.latest() is None and folder.entries() == [] and folder.protected() == {}


def test_published_checkpoints_are_found_in_order_and_carry_their_state(folder):
    for step in (20, 5, 100):
        save(folder, step)
    assert steps(folder) == [5, 20, 100]
    assert folder.latest().step == 100 and folder.latest().state()["step"] == 100
    assert [e.step for e in folder.candidates()] == [100, 20, 5]


def test_what_was_not_published_is_not_there_and_is_swept(folder):
    save(folder, 5)
    partial = Publisher(folder).begin(folder.path(10))
    (partial / ".metadata").write_bytes(b"")
    assert steps(folder) == [5] and folder.latest().step == 5
    Publisher(folder).begin(folder.path(10))  # the next attempt finds an empty folder
    assert list(partial.iterdir()) == []
    Publisher(folder).sweep()
    assert sorted(path.name for path in folder.root.iterdir()) == ["ckpt-s000000000005", "latest"]


@pytest.mark.parametrize("missing", [".metadata", "state.json", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_passed_over(folder, missing):
    save(folder, 5)
    save(folder, 10)
    (folder.path(10) / missing).unlink()
    assert folder.latest().step == 5
    assert folder.published()[-1].flaws() == [f"{missing} is missing"]


def test_one_bit_is_found_by_its_checksum_and_only_by_that(folder):
    final = save(folder, 5, content=bytes(20 * 2**20))
    shard = final / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[17 * 2**20] ^= 1
    shard.write_bytes(content)
    assert flaws(final) == []
    assert flaws(final, content=True) == ["__0_0.distcp is not what was written"]
    parts = [flaws(final, content=True, part=(i, 2)) for i in range(2)]
    assert sorted(map(len, parts)) == [0, 1]


def test_a_changed_sidecar_is_found_at_once(folder):
    final = save(folder, 5)
    state = (final / "state.json").read_text()
    (final / "state.json").write_text(state.replace('"step": 5', '"step": 6'))
    assert flaws(final) == ["state.json is not what was written"]
    (final / "state.json").write_text("[]")
    assert flaws(final) == ["state.json cannot be read"]


def test_a_checkpoint_of_the_first_format_is_judged_by_its_sizes(folder):
    final = save(folder, 5)
    files = {name: (final / name).stat().st_size for name in (".metadata", "__0_0.distcp")}
    (final / "state.json").write_text(json.dumps({"format": 1, "step": 5, "files": files}))
    assert flaws(final, content=True) == []
    (final / "__0_0.distcp").write_bytes(b"short")
    assert flaws(final) == ["__0_0.distcp has 5 of 7 bytes"]


def test_a_lost_or_foreign_pointer_means_the_newest(folder):
    save(folder, 5)
    save(folder, 10)
    for content in ("", "../../elsewhere", "\xff"):
        (folder.root / "latest").write_text(content, encoding="latin-1")
        assert folder.named() == "" and folder.latest().step == 10
    (folder.root / "latest").unlink()
    assert folder.latest().step == 10
    (folder.root / "latest").write_text("ckpt-s000000000005\n")
    assert folder.latest().step == 5


def test_retention_keeps_the_newest_and_whatever_latest_names(folder):
    for step in (1, 2, 3, 4):
        save(folder, step)
    (folder.root / "latest").write_text("ckpt-s000000000001\n")
    assert [p.name for p in Publisher(folder).retain(2)] == ["ckpt-s000000000002"]
    assert steps(folder) == [1, 3, 4]
    assert Publisher(folder).retain(None) == []


def test_the_best_is_kept_and_takes_nobodys_place(folder):
    save(folder, 100, "best")
    for step in (200, 300, 400):
        save(folder, step)
        Publisher(folder).retain(2)
    assert steps(folder) == [100, 300, 400]
    save(folder, 500, "best")
    Publisher(folder).retain(2)
    assert steps(folder) == [300, 400, 500]  # the old best is as old as it is


def test_the_same_step_can_be_saved_again(folder):
    for content in (b"one", b"two"):
        save(folder, 5, "best", content=content)
        assert steps(folder) == [5] and folder.latest().step == 5
    assert (folder.path(5) / "__0_0.distcp").read_bytes() == b"two"
    assert folder.remains() == []


# Crashes and errors ---------------------------------------------------------------------------------------------------


def everything(folder: CheckpointFolder) -> None:
    """All that a writer does: a new step, the same one again, pointers, weights alone, retention."""
    save(folder, 30, "best")
    Publisher(folder).retain(1)
    save(folder, 30, content=b"again")
    save_model(folder, 30)
    Publisher(folder).retain(1)


def works(folder: CheckpointFolder) -> None:
    """Pointers name whole checkpoints or nothing, there is one to go on from, and the next writer succeeds."""
    for pointer in POINTERS:
        if name := folder.named(pointer):
            assert flaws(folder.root / name, content=True) == [], f"{pointer} names {name}"
    assert all(entry.flaws(content=True) == [] for entry in folder.published())
    latest = folder.latest()
    assert latest is not None and latest.step >= 20
    Publisher(folder).sweep()
    assert folder.remains() == [] and folder.latest() == latest
    everything(folder)
    assert steps(folder) == [30] and folder.remains() == []
    assert [folder.named(p) for p in ("latest", "model")] == ["ckpt-s000000000030", "model-s000000000030"]


def prepared(folder: CheckpointFolder) -> None:
    save(folder, 10, "best")
    save(folder, 20)


def number_of_changes(tmp_path, monkeypatch) -> int:
    disk, folder = FaultyDisk(), CheckpointFolder(tmp_path / "counted")
    prepared(folder)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "os", disk)
        everything(folder)
    return disk.count


@pytest.mark.parametrize("error", [None, FULL], ids=["death", "disk full"])
def test_whatever_fails_at_whatever_moment_leaves_a_folder_that_works(tmp_path, monkeypatch, error):
    count = number_of_changes(tmp_path, monkeypatch)
    assert count > 40
    for at in range(count):
        folder = CheckpointFolder(tmp_path / str(at))
        prepared(folder)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", FaultyDisk(at, error))
            with pytest.raises((Death, OSError)):
                everything(folder)
        works(folder)


def test_a_pointer_is_the_old_or_the_new_one_at_every_moment(folder, monkeypatch):
    save(folder, 1, "best")
    for at in range(5):
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", FaultyDisk(at))
            with pytest.raises(Death):
                Publisher(folder).point("best", "ckpt-s000000000002")
        assert folder.named("best") in ("ckpt-s000000000001", "ckpt-s000000000002")
        assert (folder.named("best")[-1] == "2") == (at >= 4)


def test_a_writer_that_pointed_first_would_be_found(tmp_path, monkeypatch):
    """Break the order on purpose: a crash then leaves a pointer to nothing."""
    rename = durable.rename

    def late(path, to):
        if path.suffix == durable.PARTIAL:
            durable.write(to.parent / "latest", f"{to.name}\n")
        rename(path, to)

    monkeypatch.setattr(durable, "rename", late)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_whatever_fails_at_whatever_moment_leaves_a_folder_that_works(tmp_path, monkeypatch, None)
