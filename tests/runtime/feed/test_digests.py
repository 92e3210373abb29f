"""Digests of files: what is read, what is remembered, and what is not to be believed."""

import os
import time
from pathlib import Path

import pytest

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed import digests
from xtrain.runtime.feed.digests import FileDigests, file_digest, remembering


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read."""
    found: list[str] = []
    real = digests._digest
    monkeypatch.setattr(digests, "_digest", lambda path: (found.append(path.name), real(path))[1])
    return found


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time at which a file changed cannot be set: all is looked at an hour later."""
    real = time.time_ns
    monkeypatch.setattr(digests.time, "time_ns", lambda: real() + 3600 * 10**9)


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path: Path, reads: list[str], later: None):
    path, index = tmp_path / "a", tmp_path / "cache" / "files.json"
    path.write_text("one")
    for _ in range(3):
        with remembering(FileDigests(index)):
            first = file_digest(path)
    assert reads == ["a"]
    stamp = path.stat()
    path.write_text("two")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same size and time of writing: that of change tells
    with remembering(FileDigests(index)):
        assert file_digest(path) != first == file_digest_of("one", tmp_path)


def file_digest_of(text: str, folder: Path) -> str:
    (folder / "other").write_text(text)
    return file_digest(folder / "other")


def test_what_was_just_written_is_read_again(tmp_path: Path, reads: list[str]):
    path, index = tmp_path / "a", tmp_path / "files.json"
    path.write_text("one")
    for _ in range(2):
        with remembering(FileDigests(index)):
            file_digest(path)
            file_digest(path)  # within one build once is enough
    assert reads == ["a", "a"] and not index.exists()


@pytest.mark.parametrize("harm", [b"", b"{}", b"xtrain files 1 0000\n{}"])
def test_a_damaged_index_is_none(harm: bytes, tmp_path: Path, reads: list[str], later: None):
    path, index = tmp_path / "a", tmp_path / "files.json"
    path.write_text("one")
    with remembering(FileDigests(index)):
        file_digest(path)
    whole = index.read_bytes()
    digit = b"0" if whole[-4:-3] != b"0" else b"1"
    for content in (harm, whole[:-5], whole[:-4] + digit + whole[-3:]):
        index.write_bytes(content)
        with remembering(FileDigests(index)):
            file_digest(path)
    assert len(reads) == 4
    assert index.read_bytes() == whole


def test_processes_add_to_one_index(tmp_path: Path, reads: list[str], later: None):
    index = tmp_path / "files.json"
    for name in "ab":
        (tmp_path / name).write_text(name)
    with remembering(FileDigests(index)):
        file_digest(tmp_path / "a")
        with remembering(FileDigests(index)):
            file_digest(tmp_path / "b")
    with remembering(FileDigests(index)):
        file_digest(tmp_path / "a")
        file_digest(tmp_path / "b")
    assert reads == ["a", "b"]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "files.json"}


def test_many_files_are_read_in_threads_and_progress_is_reported(tmp_path: Path, reads: list[str]):
    paths = [tmp_path / f"{number}" for number in range(20)]
    for number, path in enumerate(paths):
        path.write_text("x" * number)
    progress: list[tuple[int, int]] = []
    known = FileDigests()
    known.learn(paths, lambda done, total: progress.append((done, total)))
    assert progress[-1] == (190, 190) and [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert len(reads) == 20
    assert [known.digest(path) for path in paths] == [file_digest(path) for path in paths]


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a"
    path.write_text("one")
    real, times = digests._digest, 0

    def growing(path: Path) -> str:
        nonlocal times
        times += 1
        digest = real(path)
        if times < limit:
            path.write_text("one" * (times + 1))
        return digest

    monkeypatch.setattr(digests, "_digest", growing)
    limit = 2
    assert file_digest(path) == file_digest(path) and times == 3
    limit = 100
    with pytest.raises(DataError, match="a: is being written while it is read"):
        file_digest(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"none: cannot be read: No such file"):
        file_digest(tmp_path / "none")
    with pytest.raises(DataError, match=r"none: cannot be read: No such file"):
        FileDigests().learn([tmp_path / "none"])


def test_an_index_that_cannot_be_written_is_no_fault(tmp_path: Path, later: None):
    (tmp_path / "folder").write_text("in the way")
    (tmp_path / "a").write_text("one")
    with remembering(FileDigests(tmp_path / "folder" / "files.json")):
        assert file_digest(tmp_path / "a")
