"""The version of xtrain, in a module that everything else may import."""

from pathlib import Path

__version__ = "1.0.0"


def commit() -> str:
    """Return the commit that the package was built from, or of the checkout that it is; empty if unknown."""
    import subprocess

    folder = Path(__file__).parent
    try:
        if not (folder / ".git").exists():
            return (folder / "commit.txt").read_text(encoding="utf-8").strip()
        asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
