"""The wheel holds the whole project: every module of every room, the grammar, the starters of `xtrain init`, the
pages of the documentation, and the mark that its types are for others too."""

import subprocess
import sys
import zipfile

from rooms import ROOMS, ROOT


def test_the_wheel_holds_every_module_and_all_data(tmp_path):
    tracked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [name for name in files if (ROOT / name).is_file()]  # those that are deleted, git still knows
    copy = tmp_path / "source"
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(copy)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    kinds = (".py", ".lark", ".json", ".md", ".xtrain", ".template", ".typed")
    folders = {*ROOMS, "docs"}
    chosen = [f for f in files if f.endswith(kinds)]
    modules = [f for f in chosen if f.split("/")[0] in folders or ("/" not in f and not f.endswith(".md"))]
    assert len(modules) > 50 and {kind for kind in kinds if any(m.endswith(kind) for m in modules)} == set(kinds)
    assert [m for m in modules if f"xtrain/{m}" not in packed] == []
    assert not any(name.startswith(("tests/", "xtrain/tests", "specs/")) for name in packed)
