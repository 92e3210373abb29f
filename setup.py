"""Build steps that pyproject.toml cannot declare: the commit is written into wheels and source archives."""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
COMMIT = "commit.txt"


def commit() -> str:
    """Return the commit of the checkout, or of the source archive; empty if there is neither."""
    if not (ROOT / ".git").exists():
        kept = ROOT / COMMIT
        return kept.read_text(encoding="utf-8") if kept.is_file() else ""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


class BuildWithCommit(build_py):
    """The modules without this file, which lies in the folder of the package, and the commit next to them."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if Path(each[2]).resolve() != Path(__file__).resolve()]

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib) / "xtrain"
        if not self.editable_mode and folder.is_dir():
            (folder / COMMIT).write_text(commit(), encoding="utf-8")


class ArchiveWithCommit(sdist):
    """The source archive, and the commit in it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        (Path(base_dir) / COMMIT).write_text(commit(), encoding="utf-8")


setup(cmdclass={"build_py": BuildWithCommit, "sdist": ArchiveWithCommit})
