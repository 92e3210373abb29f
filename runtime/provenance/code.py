"""Which state of the user's code a run is of."""

import subprocess
from hashlib import blake2b
from pathlib import Path

from attrs import frozen


@frozen
class CodeVersion:
    """The state of the git checkout that holds the spec: `code_id` and the diff that makes it dirty."""

    sha: str
    diff: str

    @property
    def code_id(self) -> str:
        """Eight digits of the commit, and of the diff where there is one."""
        if not self.diff:
            return self.sha[:8]
        return f"{self.sha[:8]}-d{blake2b(self.diff.encode(), digest_size=5).hexdigest()}"


def read_code(folder: Path) -> CodeVersion | None:
    """None outside a git checkout or before its first commit.

    Specs are left out of the diff: what they change is in the configuration's own identity.
    """
    sha = _git(folder, "rev-parse", "HEAD")
    if sha is None:
        return None
    return CodeVersion(
        sha=sha.strip(), diff=_git(folder, "diff", "HEAD", "--", ":/", ":(exclude,top,glob)**/*.xtrain") or ""
    )


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None
