"""The folder of checkpoints: what is published, what pointers mean after any crash, what is kept."""

import errno
import fcntl
import json
from pathlib import Path

import pytest
from faulty_disk import FULL, Death, FaultyDisk, no_links
from small_checkpoints import save, save_model

from xtrain.plan.checkpoints import POINTERS
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.locks import hold_for_reading
from xtrain.runtime.store.beginning import find, find_to_read
from xtrain.runtime.store.checkpoints import TENSORS, CheckpointEntry, CheckpointFolder, Publisher, flaws
from xtrain.runtime.store.writing import Backend


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
    assert flaws(final, content=True) == ["__0_0.distcp has changed since it was written"]
    parts = [flaws(final, content=True, part=(i, 2)) for i in range(2)]
    assert sorted(map(len, parts)) == [0, 1]


def test_a_changed_sidecar_is_found_at_once(folder):
    final = save(folder, 5)
    state = (final / "state.json").read_text()
    (final / "state.json").write_text(state.replace('"step": 5', '"step": 6'))
    assert flaws(final) == ["state.json has changed since it was written"]
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


def test_retention_leaves_what_another_process_reads_for_the_next_time(folder):
    for step in (1, 2, 3):
        save(folder, step)
    with hold_for_reading(folder.path(1)), hold_for_reading(folder.path(1)):
        assert [path.name for path in Publisher(folder).retain(1)] == ["ckpt-s000000000002"]
        assert folder.entries()[0].flaws(content=True) == []
    assert [path.name for path in Publisher(folder).retain(1)] == ["ckpt-s000000000001"]
    assert hold_for_reading(folder.path(1)) is None


def test_what_is_removed_between_being_found_and_held_is_followed_by_the_newest(folder):
    save(folder, 1)
    found: list[int] = []

    def find_latest() -> CheckpointEntry:
        entry = find(folder.root)
        found.append(entry.step)
        if len(found) < 3:
            save(folder, entry.step + 1)
            Publisher(folder).retain(1)
        return entry

    entry, held = find_to_read(find_latest)
    assert found == [1, 2, 3] and entry.step == 3
    save(folder, 4)
    assert Publisher(folder).retain(1) == [] and held.close() is None
    with pytest.raises(EnvironmentFault, match="there is no"):
        find_to_read(lambda: find(folder.path(1)))


def test_a_file_system_without_locks_on_folders_is_read_and_cleared_all_the_same(folder, monkeypatch):
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for step in (1, 2):
        save(folder, step)
    assert hold_for_reading(folder.path(1)) is not None
    assert [path.name for path in Publisher(folder).retain(1)] == ["ckpt-s000000000001"]


def test_a_save_that_was_cut_off_before_its_pointers_costs_no_older_one(folder):
    """The run goes on from what `latest` names and saves the same step again: in the end it keeps what it would have
    kept."""
    save(folder, 16, "best")
    for step in (18, 19, 20):
        save(folder, step)
    (folder.root / "latest").write_text("ckpt-s000000000019\n")
    assert Publisher(folder).retain(2, begun=folder.latest()) == []
    save(folder, 20, "best")
    assert [path.name for path in Publisher(folder).retain(2)] == ["ckpt-s000000000016", "ckpt-s000000000018"]
    assert steps(folder) == [19, 20] and folder.named("best") == "ckpt-s000000000020"


@pytest.mark.parametrize(("steps", "best", "latest", "begun", "keep", "removed"), [
    ((1, 2, 3, 4), None, 4, None, 2, [1, 2]),
    ((1, 2, 3, 4), None, 4, None, 4, []),
    ((1, 2, 3, 4), 1, 4, None, 2, [2]),
    ((1, 2, 3, 4), None, 3, 3, 2, [1]),  # what it goes on from counts, later ones do not
    ((1, 2, 3, 4), None, 3, 3, 1, [1, 2]),
    ((1, 2, 3, 4), 2, 3, 3, 1, [1]),
    ((1, 2, 3, 4), None, 4, 1, 1, []),
])  # fmt: skip
def test_what_is_too_old(folder, steps, best, latest, begun, keep, removed):
    for step in steps:
        save(folder, step, *(["best"] if step == best else []))
    (folder.root / "latest").write_text(f"{folder.path(latest).name}\n")
    entry = next((entry for entry in folder.entries() if entry.step == begun), None)
    assert [int(path.name[-3:]) for path in Publisher(folder).retain(keep, begun=entry)] == removed


def test_the_best_is_kept_next_to_the_newest_or_as_one_of_them(folder):
    save(folder, 100, "best")
    for step in (200, 300, 400):
        save(folder, step)
        Publisher(folder).retain(2)
    assert steps(folder) == [100, 300, 400]
    save(folder, 500, "best")
    Publisher(folder).retain(2)
    assert steps(folder) == [400, 500]  # the old best is as old as it is, and the new one is among the newest
    save(folder, 600)
    Publisher(folder).retain(1)
    assert steps(folder) == [500, 600]
    save(folder, 700, "best")
    Publisher(folder).retain(1)
    assert steps(folder) == [700]


def test_the_same_step_can_be_saved_again(folder):
    for content in (b"one", b"two"):
        save(folder, 5, "best", content=content)
        assert steps(folder) == [5] and folder.latest().step == 5
    assert (folder.path(5) / "__0_0.distcp").read_bytes() == b"two"
    assert folder.remains() == []


# Crashes and errors ---------------------------------------------------------------------------------------------------


def everything(folder: CheckpointFolder, backend: Backend) -> None:
    """All that a writer does: a new step, the same one again, pointers, weights alone, retention."""
    save(folder, 30, "best", backend=backend)
    Publisher(folder).retain(2)
    save(folder, 30, content=b"again", backend=backend)
    save_model(folder, 30, backend)
    Publisher(folder).retain(1)


def works(folder: CheckpointFolder, backend: Backend) -> None:
    """Pointers name whole checkpoints or nothing, there is one to go on from, and the next writer succeeds.

    What lies beside the pointers is whole at every moment, and theirs again once somebody has begun to write.
    """
    for pointer in POINTERS:
        if name := folder.named(pointer):
            assert flaws(folder.root / name, content=True) == [], f"{pointer} names {name}"
    assert all(entry.flaws(content=True) == [] for entry in folder.published())
    for alias in filter(Path.exists, map(folder.alias, POINTERS)):
        assert alias.read_bytes() in (b"tensors", b"again", b"weights")
    latest = folder.latest()
    assert latest is not None and latest.step >= 20
    Publisher(folder).sweep()
    assert folder.remains() == [] and folder.latest() == latest
    assert aliases_follow(folder, backend)
    everything(folder, backend)
    assert steps(folder) == [30] and folder.remains() == []
    assert [folder.named(p) for p in ("latest", "model")] == ["ckpt-s000000000030", "model-s000000000030"]
    assert aliases_follow(folder, backend)


def aliases_follow(folder: CheckpointFolder, backend: Backend) -> bool:
    """Whether `latest.pt` and the others are the files of what the pointers name, and there where these are."""
    names = {pointer: folder.named(pointer) for pointer in POINTERS}
    if backend == "dcp":
        return not any(folder.alias(pointer).exists() for pointer in names)
    return all(
        _bytes(folder.alias(pointer)) == _bytes(folder.root / named / TENSORS) for pointer, named in names.items()
    )


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def prepared(folder: CheckpointFolder, backend: Backend) -> None:
    save(folder, 10, "best", backend=backend)
    save(folder, 20, backend=backend)


def number_of_changes(tmp_path, monkeypatch, backend: Backend, links: bool) -> int:
    disk, folder = FaultyDisk(links=links), CheckpointFolder(tmp_path / "counted")
    prepared(folder, backend)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "os", disk)
        everything(folder, backend)
    return disk.count


@pytest.mark.parametrize(("backend", "links", "error"), [
    pytest.param("dcp", True, None, id="dcp, death", marks=pytest.mark.slow),
    pytest.param("dcp", True, FULL, id="dcp, disk full", marks=pytest.mark.slow),
    pytest.param("file", True, None, id="file, death", marks=pytest.mark.slow),
    pytest.param("file", True, FULL, id="file, disk full"),
    pytest.param("file", False, None, id="file without links, death", marks=pytest.mark.slow),
    pytest.param("file", False, FULL, id="file without links, disk full", marks=pytest.mark.slow),
])  # fmt: skip
def test_whatever_fails_at_whatever_moment_leaves_a_folder_that_works(tmp_path, monkeypatch, error, backend, links):
    count = number_of_changes(tmp_path, monkeypatch, backend, links)
    assert count > 40
    for at in range(count):
        folder = CheckpointFolder(tmp_path / str(at))
        prepared(folder, backend)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", FaultyDisk(at, error, links=links))
            with pytest.raises((Death, OSError)):
                everything(folder, backend)
        works(folder, backend)


@pytest.mark.parametrize("links", [True, False])
def test_a_name_that_stays_is_the_file_of_the_newest(folder, monkeypatch, links):
    if not links:
        monkeypatch.setattr("os.link", no_links)
    for step in (1, 2):
        save(folder, step, *(["best"] if step == 1 else []), content=bytes([step]), backend="file")
    assert [folder.alias(pointer).read_bytes() for pointer in ("latest", "best")] == [b"\2", b"\1"]
    assert folder.alias("latest").samefile(folder.path(2) / TENSORS) == links
    opened = folder.alias("latest").open("rb")  # who has it open reads on
    save(folder, 3, content=bytes([3]), backend="file")
    assert opened.read() == b"\2"
    before = folder.alias("latest").stat().st_ino
    Publisher(folder).sweep()  # which finds it as it should be, and copies nothing again
    assert folder.alias("latest").stat().st_ino == before
    save(folder, 4)  # in many files
    assert not folder.alias("latest").exists() and folder.alias("best").read_bytes() == b"\1"


def test_a_file_that_still_has_a_name_is_not_removed(folder, monkeypatch):
    for step in (1, 2, 3):
        save(folder, step, backend="file")
    with monkeypatch.context() as patch:  # the process dies between the pointer and the name beside it
        patch.setattr(durable, "name_also", lambda path, alias: None)
        Publisher(folder).point("latest", folder.path(2).name)
    assert folder.alias("latest").samefile(folder.path(3) / TENSORS)
    save(folder, 4, backend="dcp")
    (folder.root / "latest.pt").hardlink_to(folder.path(1) / TENSORS)
    Publisher(folder).retain(1)
    assert steps(folder) == [1, 4]
    Publisher(folder).sweep()
    Publisher(folder).retain(1)
    assert steps(folder) == [4] and not folder.alias("latest").exists()


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
        test_whatever_fails_at_whatever_moment_leaves_a_folder_that_works(tmp_path, monkeypatch, None, "dcp", True)
