"""Text of several styles in the columns that there are."""

import pytest

from xtrain.text.flow import TextPart, flow, plain, width
from xtrain.text.page import Page
from xtrain.text.units import WIDTH


def flowed(*parts: TextPart, columns: int, color: bool = False, first: str = "", rest: str = "") -> list[str]:
    page = Page(color=color)
    flow(page, parts, columns, first=first, rest=rest)
    return str(page).splitlines()


def test_lines_end_behind_blanks_where_there_are_any():
    assert flowed(TextPart("one two three"), columns=9) == ["one two", "three"]
    assert flowed(TextPart("abcdefghij"), columns=4) == ["abcd", "efgh", "ij"]
    assert flowed(TextPart("ab abcdefgh"), columns=5) == ["ab", "abcde", "fgh"]


def test_margins_count():
    assert flowed(TextPart("one two three"), columns=9, first="> ", rest="    ") == ["> one two", "    three"]
    assert flowed(columns=9, first="  ") == [""]


def test_a_word_of_two_styles_is_one_word():
    lines = flowed(TextPart("one tw", "cyan"), TextPart("o three", "dim"), columns=6, color=True)
    assert lines == ["\x1b[36mone \x1b[0m", "\x1b[36mtw\x1b[0m\x1b[2mo \x1b[0m", "\x1b[2mthree\x1b[0m"]


def test_no_line_ends_within_what_is_whole():
    cells = [
        part for text in ("aa", "bb", "cc") for part in (TextPart(text), TextPart(" 1", whole=True), TextPart(" "))
    ]
    assert flowed(*cells, columns=11) == ["aa 1 bb 1", "cc 1"]


def test_characters_take_the_columns_that_they_take():
    assert flowed(TextPart("日本語"), columns=4) == ["日本", "語"]
    assert flowed(TextPart("e\u0301e\u0301e"), columns=2) == ["e\u0301e\u0301", "e"]


@pytest.mark.parametrize(("text", "shown"), [
    ("plain é 日 text", "plain é 日 text"),
    ("a\nb\tc", "a⏎b⇥c"),
    ("\x1b[31m\x00\x7f", "␛[31m␀␡"),
    ("\x9b\u202eab\u200d", "⟨U+009B⟩⟨U+202E⟩ab⟨U+200D⟩"),
    ("\u2028\ud800", "⟨U+2028⟩⟨U+D800⟩"),
])  # fmt: skip
def test_nothing_in_a_document_acts_on_the_terminal(text: str, shown: str):
    assert plain(text) == shown


def test_there_is_never_more_than_a_page_and_never_nothing(monkeypatch):
    for columns, expected in (("40", 40), ("500", WIDTH), ("3", 20)):
        monkeypatch.setenv("COLUMNS", columns)
        assert width() == expected
