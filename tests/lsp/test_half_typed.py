"""A text that is being written: whatever stands there, every question has an answer, and completion knows the block."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.setting import settings_of
from xtrain.lsp.analysis import Analysis, OpenSpecs, corrections, symbols
from xtrain.lsp.completion import complete
from xtrain.lsp.hover import hints, hover
from xtrain.lsp.names import RenameRefused, colored, definitions, occurrences, references, rename

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "specs").glob("*.xtrain")), *sorted((ROOT / "dsl" / "starters").glob("*.xtrain"))]
FILES += [ROOT / "tests" / "dsl" / "data" / "every_form.xtrain"]
SIGNS = '{}[]()"=:,.# \n\t->%*😀é'


def answers(text: str, offset: int) -> Analysis:
    """Ask everything about one place of a text."""
    path = str(ROOT / "specs" / "half.xtrain")
    specs = OpenSpecs()
    specs.open(path, text)
    found = specs.analysis(path)
    for each in complete(found, path, offset):
        assert 0 <= each.start <= offset <= each.end <= len(text) and "\n" not in text[each.start : each.end]
    over = hover(found, path, offset, None)
    assert over is None or over.span.start <= offset <= over.span.end
    names = [name for name in occurrences(found) if name.span.source.path == path]
    for name in names:
        assert name.span.text.strip('"') == name.name or "\\" in name.span.text
    for name in names[:1] + names[-1:]:
        middle = (name.span.start + name.span.end + 1) // 2
        assert name.span in references(found, path, middle)
        defining = [each.span for each in names if each.defines and each.is_same(name)]
        assert set(defining) <= set(definitions(found, path, middle))
    pieces = colored(found, path)
    assert all(one.end <= other.start for one, other in pairwise(pieces))
    symbols(found, path)
    hints(found, path)
    corrections(found, path, offset, offset)
    try:
        rename(found, path, offset, "another_name")
    except RenameRefused as refused:
        assert str(refused)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_some_beginnings(path: Path):
    text, number = path.read_text(encoding="utf-8"), random.Random(path.stem)
    for _ in range(4):
        end = number.randrange(len(text))
        answers(text[:end], end)


@pytest.mark.parametrize("path", FILES[::4], ids=lambda path: path.stem)
def test_signs_in_the_middle(path: Path):
    text, number = path.read_text(encoding="utf-8"), random.Random(path.stem)
    for _ in range(4):
        at = number.randrange(len(text))
        signs = "".join(number.choice(SIGNS) for _ in range(number.randrange(1, 4)))
        answers(text[:at] + signs + text[at:], at + len(signs))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_beginning_and_a_sign_at_every_place(path: Path):
    text, number = path.read_text(encoding="utf-8"), random.Random(path.stem)
    for end in range(0, len(text) + 1, 3):
        answers(text[:end], end)
        sign = number.choice(SIGNS)
        answers(text[:end] + sign + text[end:], end + 1)


@pytest.mark.parametrize("path", FILES[::3], ids=lambda path: path.stem)
def test_a_new_line_in_a_block_knows_its_settings(path: Path):
    """Behind the first brace of each block, half a name is completed by the settings that the block does not give."""
    text = path.read_text(encoding="utf-8")
    found, settings = answers(text, 0), 0
    for each in symbols(found, found.root):
        if each.kind != "block" or "{" not in each.span.text:
            continue
        at = each.span.start + each.span.text.index("{") + 1
        specs = OpenSpecs()
        specs.open(found.root, text[:at] + "\n  x\n" + text[at:])
        offered = {one.label for one in complete(specs.analysis(found.root), found.root, at + 4)}
        given = {one.name for one in each.inner if one.kind == "setting"}
        settings += len(offered & settings_of(blocks.KINDS[each.name.partition(" ")[0]]).keys())
        assert not offered & given and "every" not in offered, each.name
    assert settings > 20
