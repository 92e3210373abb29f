"""Commands that docs, specs, hints and messages name are there, with the options they are named with; `--help`."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rooms import ROOMS

from xtrain.cli.main import GROUPS, VERBS, make_parser

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("specs/*.xtrain"))]
CODE = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
# In backticks, or a line of a block of code.
NAMED = re.compile(r"`(xtrain [^`\n]+)`|^(?:\$ |# +)?(xtrain [a-z]+ [^\n]*)$", re.MULTILINE)


def commands(path: Path) -> Iterator[list[str]]:
    """The words of each, without comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blocks = "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        text = blocks + "\n" + "\n".join(f"`{each}`" for each in re.findall(r"`(xtrain [^`\n]+)`", text))
    for ticked, alone in NAMED.findall(text):
        for part in re.split(r"&&|\||;|  #", ticked or alone):
            words = part.split()
            if len(words) > 1 and words[0] == "xtrain" and re.fullmatch(r"[a-z]+", words[1]):
                yield words


def options(verb: str) -> set[str]:
    found, todo = set(), [make_parser((verb,))]
    while todo:
        for action in todo.pop()._actions:
            found |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                todo += list(action.choices.values())
    return found


@pytest.mark.parametrize("paths", [TEXTS, CODE], ids=["docs and specs", "code"])
def test_every_command_that_is_named_exists(paths):
    named = [(path.relative_to(ROOT), words) for path in paths for words in commands(path)]
    assert len(named) > 30
    assert [(path, words) for path, words in named if words[1] not in VERBS] == []
    known = {verb: options(verb) for verb in VERBS}
    flags = [(path, words[1], re.match(r"--[a-z-]+", w)) for path, words in named for w in words if w.startswith("--")]
    assert [(path, verb, flag[0]) for path, verb, flag in flags if flag and flag[0] not in known[verb]] == []


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


@pytest.mark.parametrize("width", [80, 100])
def test_help_is_wrapped_at_words(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for parser in parsers(make_parser()):
        text = parser.format_help()
        assert [line for line in text.splitlines() if len(line) > width] == [], parser.prog
        for said in (parser.description or "", parser.epilog or ""):
            assert " ".join(said.split()) in " ".join(text.split()), parser.prog


def test_help_groups_the_verbs(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = make_parser().format_help().partition("verbs:")[2]
    assert re.findall(r"^(\w.*):$", text, re.MULTILINE) == list(GROUPS)
    assert re.findall(r"^  ([a-z-]+) ", text, re.MULTILINE) == list(VERBS)
