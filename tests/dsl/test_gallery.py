"""What users read when something is wrong: each broken spec of the gallery with the exact text it causes.

After a change that is meant, write the expectations anew with `python tests/dsl/test_gallery.py` and read the diff.
"""

import re
from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec

GALLERY = Path(__file__).parent / "gallery"
SPECS = sorted(path.name for path in GALLERY.glob("*.xtrain"))


def render(name: str) -> str:
    """What is said about a spec, which may name `--set` texts in comments. The working folder is the gallery."""
    sets = re.findall(r"^# --set (.*)$", Path(name).read_text(encoding="utf-8"), re.MULTILINE)
    return load_spec(name, sets).diagnostics.render()


@pytest.mark.parametrize("name", SPECS)
def test_gallery(name, monkeypatch):
    monkeypatch.chdir(GALLERY)
    assert render(name) == Path(name).with_suffix(".expected").read_text(encoding="utf-8")


def test_the_gallery_is_whole():
    assert len(SPECS) >= 40
    assert {path.stem for path in GALLERY.glob("*.expected")} == {Path(name).stem for name in SPECS}


if __name__ == "__main__":
    import os

    os.chdir(GALLERY)
    for each in SPECS:
        Path(each).with_suffix(".expected").write_text(render(each), encoding="utf-8")
