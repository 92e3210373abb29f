"""The code that a run is of: the source files of the git checkout that holds its spec.

Only tracked source files count. A note, a table or a spec that changes leaves the code as it is: what a spec says is in
the identity of its configuration. Git is asked by plumbing commands with fixed options, so that the settings of a user
and variables as GIT_DIR change nothing.
"""

import os
import subprocess
from hashlib import blake2b, sha1, sha256
from pathlib import Path
from typing import Final

from attrs import frozen

# What a Python program imports or builds its extensions from.
_ENDINGS: Final = (
    b".py", b".pyi", b".pyx", b".pxd", b".c", b".cc", b".cpp", b".cxx", b".h", b".hh", b".hpp", b".cu", b".cuh", b".rs",
)  # fmt: skip
_SECONDS: Final = 20
_OPTIONS: Final = (
    "--no-pager",
    "--no-optional-locks",
    *(
        word
        for setting in ("core.quotePath=false", "core.fsmonitor=false", "color.ui=false")
        for word in ("-c", setting)
    ),
)
# A patch is the same for every user: no prefixes, colors, renames or programs of their own.
_PATCH: Final = (
    "-c", "diff.suppressBlankEmpty=false", "diff", "--patch", "--binary", "--full-index", "--no-color", "--no-ext-diff",
    "--no-textconv", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/", "--unified=3", "--inter-hunk-context=0",
    "--diff-algorithm=myers", "--indent-heuristic", "--ignore-submodules", "--no-relative", "-O/dev/null",
)  # fmt: skip


@frozen
class CodeVersion:
    """The state of a checkout. sha: the commit, None before the first one. code_id: eight digits of the content of all
    source files. diff: of all tracked files but specs against the commit, None where it could not be read."""

    sha: str | None
    code_id: str
    diff: bytes | None


@frozen
class CodeUnread:
    """A checkout that git could not read. reason: in words, for people."""

    reason: str


class _GitFailed(Exception):
    """Git is missing, takes too long, or refuses; says why."""


def read_code(folder: Path) -> CodeVersion | CodeUnread | None:
    """Return the code of the checkout that holds `folder`; None where there is no checkout."""
    folder = folder.resolve()
    root = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), None)
    if root is None:
        return None
    try:
        return CodeVersion(sha=_commit(root), code_id=_digest(root), diff=_diff(root))
    except _GitFailed as error:
        return CodeUnread(str(error))


def _commit(root: Path) -> str | None:
    found = _git(root, "rev-parse", "--verify", "--quiet", "HEAD", failing=1)
    return found.decode("ascii", "replace").strip() or None


def _digest(root: Path) -> str:
    """Eight digits of the paths and contents of the source files. No filter of the checkout is run."""
    digest = blake2b(digest_size=4)
    changed = set(_git(root, "diff-files", "-z", "--name-only", "--no-ext-diff", "--ignore-submodules").split(b"\0"))
    for entry in _git(root, "ls-files", "-z", "--stage").split(b"\0"):
        about, _, path = entry.partition(b"\t")
        if not path.endswith(_ENDINGS):
            continue
        stored = about.split()[1]
        if path in changed:
            stored = _blob(root / os.fsdecode(path), len(stored))
        if stored:
            digest.update(b"%d %s %s\0" % (len(path), path, stored))
    return digest.hexdigest()


def _blob(path: Path, digits: int) -> bytes:
    """The name that git gives to the content of a file, of 40 digits or 64; empty where there is none."""
    try:
        content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
    except (OSError, ValueError):
        return b""
    kind = sha1 if digits == 40 else sha256
    return kind(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest().encode()


def _diff(root: Path) -> bytes | None:
    """The changes since the commit. A checkout of another user is not asked, as its filters would be run."""
    try:
        return _git(root, *_PATCH, "HEAD", "--", ".", ":(exclude,top,glob)**/*.xtrain", trusting=False)
    except _GitFailed:
        return None


def _git(root: Path, *arguments: str, failing: int = 0, trusting: bool = True) -> bytes:
    """Return what a command prints. failing: an exit code that is an answer too; trusting: read a checkout that belongs
    to another user. Raises _GitFailed."""
    trust = ("-c", f"safe.directory={root}") if trusting else ()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment = {**kept, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_CEILING_DIRECTORIES": str(root.parent)}
    if trusting:  # with nothing of the user's settings, among which are the checkouts that a user trusts
        environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", *_OPTIONS, *trust, "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, env=environment, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise _GitFailed("there is no `git`") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _GitFailed(f"`git` cannot be run: {error}") from error
    if done.returncode not in (0, failing):
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise _GitFailed(f"git {arguments[0]}: {lines[0]}")
    return done.stdout
