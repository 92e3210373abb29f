"""The code of a run: what of a checkout counts, and that a user's settings of git do not."""

import os
import subprocess
from pathlib import Path

import pytest

from xtrain.runtime.observe.provenance import CodeUnread, CodeVersion, read_code

SETTINGS = {
    "color.ui": "always", "diff.noprefix": "true", "diff.mnemonicPrefix": "true", "core.abbrev": "4",
    "diff.external": "echo changed", "diff.context": "0", "diff.renames": "copies", "diff.algorithm": "patience",
    "diff.interHunkContext": "9", "diff.suppressBlankEmpty": "true", "diff.relative": "true", "diff.submodule": "log",
    "diff.orderFile": "order", "core.quotePath": "true", "diff.colorMoved": "zebra", "status.short": "true",
}  # fmt: skip


def git(folder: Path, *arguments: str) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *name, "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of code, a note, a table that is no text and a spec, with a change of each."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    folder = tmp_path / "work"
    (folder / "parts").mkdir(parents=True)
    git(tmp_path, "init", "-q", "work")
    (folder / "parts/own.py").write_text("\n".join(f"a{i} = {i}" for i in range(30)))
    (folder / "ä name.py").write_text("b = 1\n")
    (folder / "notes.md").write_text("one\n\n")
    (folder / "table.csv").write_bytes(b"caf\xe9\n")
    (folder / "a.xtrain").write_text("experiment a {}\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "one")
    (folder / "parts/own.py").write_text("\n".join(f"a{i} = {i * (i % 15 != 3)}" for i in range(30)))
    (folder / "table.csv").write_bytes(b"th\xe9\n")
    return folder


def code(folder: Path) -> CodeVersion:
    found = read_code(folder)
    assert isinstance(found, CodeVersion), found
    return found


def test_no_setting_of_a_user_changes_code_or_diff(checkout, monkeypatch):
    plain = code(checkout)
    assert plain.diff is not None and b"-caf\xe9" in plain.diff and b"--- a/parts/own.py" in plain.diff
    assert code(checkout / "parts") == plain
    for name, value in SETTINGS.items():
        git(checkout, "config", "--global", name, value)
        assert code(checkout) == plain, name
        git(checkout, "config", "--global", "--unset", name)
        git(checkout, "config", name, value)
        assert code(checkout) == plain, f"{name} of the checkout"
        git(checkout, "config", "--unset", name)
    for name, value in (
        ("GIT_EXTERNAL_DIFF", "echo"), ("GIT_DIR", "/nowhere"), ("GIT_WORK_TREE", "/"), ("GIT_INDEX_FILE", "/nowhere"),
        ("GIT_CONFIG_COUNT", "x"), ("GIT_DIFF_OPTS", "-u0"), ("LANG", "de_DE.UTF-8"), ("GIT_PAGER", "cat"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
        assert code(checkout) == plain, name
        monkeypatch.delenv(name)


def test_only_source_files_are_code_whatever_the_commit(checkout):
    before = code(checkout).code_id
    for path in ("notes.md", "a.xtrain", "table.csv"):
        (checkout / path).write_text("another\n")
        assert code(checkout).code_id == before, path
    git(checkout, "commit", "-q", "-a", "-m", "two")
    (checkout / "untracked.py").write_text("c = 1\n")
    os.utime(checkout / "parts/own.py", (1, 1))
    clean = code(checkout)
    assert clean.code_id == before and not clean.diff
    git(checkout, "mv", "ä name.py", "other.py")
    assert code(checkout).code_id != before
    git(checkout, "mv", "other.py", "ä name.py")
    assert code(checkout).code_id == before
    (checkout / "ä name.py").write_text("b = 2\n")
    assert code(checkout).code_id != before
    (checkout / "ä name.py").unlink()
    assert code(checkout).code_id != before


def test_what_cannot_be_read_is_neither_no_checkout_nor_clean(checkout, tmp_path, monkeypatch):
    plain = code(checkout)
    assert read_code(tmp_path / "home") is None
    if os.geteuid() == 0:  # git then refuses the checkout of another user
        for path in (checkout, checkout / ".git"):
            os.chown(path, 12345, 12345)
        assert (code(checkout).code_id, code(checkout).diff) == (plain.code_id, None)
        for path in (checkout, checkout / ".git"):
            os.chown(path, 0, 0)
    (checkout / ".git/HEAD").rename(checkout / ".git/HEAD.away")
    broken = read_code(checkout)
    assert isinstance(broken, CodeUnread) and "not a git repository" in broken.reason
    (checkout / ".git/HEAD.away").rename(checkout / ".git/HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_code(checkout) == CodeUnread("`git` is not installed")
    assert read_code(tmp_path / "home") is None


def test_a_checkout_without_a_commit_has_code(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "own.py").write_text("a = 1\n")
    git(tmp_path, "add", "own.py")
    found = code(tmp_path)
    assert found.sha is None and found.diff is None and len(found.code_id) == 8
