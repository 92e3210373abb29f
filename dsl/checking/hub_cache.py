"""Where huggingface_hub keeps what it has downloaded: found by the layout of its cache, without the package.

`models--organisation--name` in the cache has a commit in `refs/main`, and the files of that commit, links to what was
downloaded, in `snapshots/COMMIT`.
"""

import os
import re
from pathlib import Path
from typing import Final

_REPO: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def names_repo(text: str) -> bool:
    """Whether this is how the hub writes a repository: `organisation/name`."""
    return "/" in text and _REPO.fullmatch(text) is not None


class SnapshotMissing(Exception):
    """The cache does not have it; hint: what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def cache_folder() -> Path:
    """As huggingface_hub finds it: HF_HUB_CACHE, else `hub` in HF_HOME, else in its folder of the user's cache."""
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return _expanded(named)
    home = os.environ.get("HF_HOME")
    if home is None:
        home = f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/huggingface"
    return _expanded(home) / "hub"


def _expanded(path: str) -> Path:
    """With the home folder for `~`; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def find_snapshot(repo: str, revision: str) -> tuple[str, str]:
    """(folder, commit) of a revision, a branch, tag or commit, as it was when it was downloaded.

    Nothing is ever downloaded. Raises SnapshotMissing.
    """
    written = revision != "" and revision.isprintable() and not revision.startswith("/")
    if not written or not _REPO.fullmatch(repo) or ".." in f"{repo}/{revision}":
        raise SnapshotMissing(f"`{repo}` at `{revision}` is no repository", 'write hub("organisation/name")')
    cache, commit = cache_folder(), revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (_repo_folder(repo) / "refs" / revision).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            commit = ""
    snapshot = snapshot_folder(repo, commit)
    if not _COMMIT.fullmatch(commit) or not snapshot.is_dir():
        hint = f"download it first: hf download {repo} --revision {revision}"
        raise SnapshotMissing(f"{cache} does not have {repo} at revision {revision}", hint)
    return snapshot.as_posix(), commit


def snapshot_folder(repo: str, commit: str) -> Path:
    """Where the files of a commit are, if they have been downloaded."""
    return _repo_folder(repo) / "snapshots" / commit


def _repo_folder(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"
