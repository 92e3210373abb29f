"""Codes are documented, and their examples do what they say."""

import re
from pathlib import Path

import pytest
from examples import each
from rooms import ROOMS

from xtrain.dsl.diagnostics.codes import CODES, near

ROOT = Path(__file__).parents[2]
EMITTED = {code for room in ROOMS for path in (ROOT / room).rglob("*.py") for code in re.findall(
    r"""["']([XW][0-9]\w\w)["']""",
    path.read_text(encoding="utf-8"),
)}  # fmt: skip
OF_TEXT = [code for code in CODES.values() if re.match(r"X[123]|W2|X709", code.code)]


def test_every_code_in_the_tree_has_a_page():
    assert EMITTED and not EMITTED - set(CODES), "give these codes a page in dsl/diagnostics/pages"


def test_every_page_of_the_language_is_of_a_code_that_is_emitted():
    assert not {code.code for code in OF_TEXT} - EMITTED


def test_pages_are_whole():
    each(((code.code, (code,)) for code in CODES.values()), is_whole)


def is_whole(code):
    assert (code.title and code.title[0].islower()) or code.title.startswith("cp")
    assert len(code.meaning.split()) >= 8
    assert code.page().startswith(f"{code.code}: {code.title}\n\n")
    assert all(len(line) <= 120 for line in code.page().splitlines())


@pytest.mark.parametrize("code", [c for c in OF_TEXT if c.wrong], ids=lambda code: code.code)
def test_the_wrong_example_causes_the_code_and_the_right_one_does_not(code, load):
    alone = code.code in ("X204", "X205", "X207", "X219")  # the base would give what is missing
    found = [d.code for d in load(code.wrong, base=not alone).diagnostics]
    assert code.code in found
    if code.right:
        assert code.code not in [d.code for d in load(code.right).diagnostics]


def test_near():
    assert near("x203") == "X203"
    assert near("X2O3") == "X203"
    assert near("nonsense") is None
