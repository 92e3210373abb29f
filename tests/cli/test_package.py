"""The wheel holds the whole project: every module of every room, the grammar, the starters of `xtrain init`, the
pages of the documentation, the examples, the files of editors, and the mark that its types are for others too."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from rooms import ROOMS, ROOT

KINDS = (".py", ".lark", ".json", ".md", ".xtrain", ".template", ".typed", ".html", ".css", ".js", ".mjs", ".scm")
DATA = ("docs", "editors", "recipes", "specs")
COMMIT = "0123456789ab"


def tracked() -> list[str]:
    """Files of the checkout, without those that are deleted and git still knows."""
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in files if (ROOT / name).is_file()]


def build(folder: Path, *what: str) -> None:
    """Build from a copy of the checkout, which is no checkout itself: its commit is the one that an archive names."""
    copy = folder / "source"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    (copy / "commit.txt").write_text(COMMIT)
    command = [sys.executable, "-m", "build", *what, "--no-isolation", "--outdir", str(folder), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_every_module_and_all_data(tmp_path):
    build(tmp_path, "--wheel")
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    chosen = [name for name in tracked() if name.endswith(KINDS) and name != "setup.py"]
    files = [f for f in chosen if f.split("/")[0] in {*ROOMS, *DATA} or ("/" not in f and not f.endswith(".md"))]
    assert len(files) > 50 and {kind for kind in KINDS if any(f.endswith(kind) for f in files)} == set(KINDS)
    assert [f for f in files if f"xtrain/{f}" not in packed] == []
    assert not any(name.startswith(("tests/", "xtrain/tests", "xtrain/setup", "specs/")) for name in packed)
    assert zipfile.ZipFile(wheel).read("xtrain/commit.txt").decode() == COMMIT


@pytest.mark.slow
@pytest.mark.parametrize("what", ["--wheel", "--sdist"])
def test_an_installed_package_plans_runs_and_explains(tmp_path, what):
    """In an environment that has nothing else of the checkout; the packages of this one are seen through a .pth."""
    build(tmp_path, what)
    (archive,) = (*tmp_path.glob("*.whl"), *tmp_path.glob("*.tar.gz"))
    venv, work = tmp_path / "venv", tmp_path / "work"
    work.mkdir()

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", "--without-pip", str(venv))
    python, xtrain = str(venv / "bin/python"), str(venv / "bin/xtrain")
    folder = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (folder / "others.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation", str(archive))
    assert run(python, "-c", "import xtrain; print(xtrain.__path__[0])").strip() == str(folder / "xtrain")
    assert run(xtrain, "--version").endswith(f" · commit {COMMIT}\n")
    assert run(xtrain, "plan", str(folder / "xtrain/specs/quickstart.xtrain")).startswith("quickstart: 300 steps")
    assert "learning" in run(xtrain, "docs", "learning", "rate").lower()
    assert "X302" in run(xtrain, "explain", "X302")
    run(xtrain, "init", "tryout")
    sets = ("experiment.budget=2 steps", "scheduler.warmup=0%", "dataset.library.source=synthetic(documents=64)")
    assert "done" in run(xtrain, "run", "tryout.xtrain", *(word for text in sets for word in ("--set", text)))
