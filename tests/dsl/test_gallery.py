"""What users read when something is wrong: each broken spec of the gallery with the exact text it causes. Specs that
can be read are planned.

`# right:` in a spec is the line that its hint asks for, in the place of the one that is wrong.

After a change that is meant, write the expectations anew with `PYTHONPATH=tests/support python
tests/dsl/test_gallery.py` and read the diff.
"""

import re
from pathlib import Path

import pytest
from dense import diagnostics_text

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.load import load_spec
from xtrain.planner.load import plan_from_spec
from xtrain.planner.rules import validate as stack_rules

GALLERY = Path(__file__).parent / "gallery"
RIGHT = "# right:"
SPECS = sorted(path.name for path in GALLERY.glob("*.xtrain"))


def diagnose(name: str) -> Diagnostics:
    """What is said about a spec, which may name `--set` texts in comments. The working folder is the gallery, and
    every package of a stack counts as installed."""
    sets = re.findall(r"^# --set (.*)$", Path(name).read_text(encoding="utf-8"), re.MULTILINE)
    read = load_spec(name, sets).diagnostics
    if read.errors:
        return read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack_rules, "is_installed", lambda package: True)
        return plan_from_spec(Path(name), sets).diagnostics


def text(name: str) -> str:
    return diagnostics_text(diagnose(name).render(), name, Path(name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SPECS)
def test_gallery(name, monkeypatch, tmp_path):
    monkeypatch.chdir(GALLERY)
    assert text(name) == Path(name).with_suffix(".expected").read_text(encoding="utf-8")
    *lines, last = Path(name).read_text(encoding="utf-8").splitlines()
    if not last.startswith(RIGHT):
        return
    (wrong,) = diagnose(name)
    assert wrong.span is not None and wrong.hint
    lines[wrong.span.line - 1] = last.removeprefix(RIGHT)
    (tmp_path / name).write_text("\n".join(lines).replace("parts/", f"{GALLERY}/parts/"), encoding="utf-8")
    assert not list(plan_from_spec(tmp_path / name).diagnostics)


def test_the_gallery_is_whole():
    assert len(SPECS) >= 100
    assert {path.stem for path in GALLERY.glob("*.expected")} == {Path(name).stem for name in SPECS}


if __name__ == "__main__":
    import os

    os.chdir(GALLERY)
    for each in SPECS:
        Path(each).with_suffix(".expected").write_text(text(each), encoding="utf-8")
