"""A file that is only half written: every prefix of every spec gives diagnostics with a place, never a traceback."""

import json
from pathlib import Path

import examples
import pytest

from xtrain.dsl.autofix import apply_fixes
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SpecErrors, render
from xtrain.dsl.evaluation.statements import read_source
from xtrain.dsl.syntax.format import format_source
from xtrain.planner.load import check_from_spec

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
FILES = [*sorted((ROOT / "specs").glob("*.xtrain")), *sorted((ROOT / "dsl" / "starters").glob("*.xtrain"))]
FILES += [DATA / "quickstart.xtrain", DATA / "every_form.xtrain", DATA / "taste.xtrain"]
PARTS = {"cluster.xtrain": (DATA / "cluster.xtrain").read_text(encoding="utf-8")}
SAMPLED = 4  # prefixes of each file; all of them take minutes


def survives(data: bytes, *, fix: bool) -> None:
    """Read, check, format and fix the bytes of a file: whatever they are, there is a spec or a diagnostic."""
    found = Diagnostics()
    source = read_source("spec.xtrain", found, data=data)
    if source is None:
        assert [d.code for d in found] == ["X121"]  # cut in the middle of a character
        return
    texts = {**PARTS, "spec.xtrain": source.text}
    found = check_from_spec("spec.xtrain", (), texts)
    for diagnostic in found:
        assert diagnostic.message and render(diagnostic)
    json.dumps([d.to_json() for d in found])
    try:
        format_source(source)
    except SpecErrors as errors:
        assert found.has_errors and errors.diagnostics.has_errors
    if fix and any(d.fix for d in found):
        apply_fixes(lambda changed: check_from_spec("spec.xtrain", (), {**texts, **changed}))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_some_prefixes(path):
    data = path.read_bytes()
    for number in range(SAMPLED):
        survives(data[: len(data) * number // SAMPLED + number % 3], fix=number % 5 == 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_prefix(path):
    data = path.read_bytes()
    for end in range(len(data) + 1):
        survives(data[:end], fix=end % 7 == 0)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_prefix_that_lacks_something_says_so(path):
    """Cut inside the first block: that cannot be a whole spec."""
    data = path.read_bytes()
    end = data.index(b"{") + 1
    found = check_from_spec("spec.xtrain", (), {"spec.xtrain": data[:end].decode()})
    assert found.has_errors and any(error.span is not None for error in found.errors)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_suffix_of_lines(path):
    lines = path.read_text(encoding="utf-8").split("\n")
    for begin in range(0, len(lines), 7 if examples.is_long else 21):
        survives("\n".join(lines[begin:]).encode(), fix=False)
