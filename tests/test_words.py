"""Words of the text that people see: the counts of phrases that the style avoids may only fall."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator

import pytest
from rooms import ROOMS, ROOT

# Phrase → (pattern, how often docstrings, comments and messages have it). Lower a number when you remove some.
PHRASES: dict[str, tuple[str, int]] = {
    "go on": (r"\b(go|goes|going|gone|went) on\b", 3),
    "anew": (r"\banew\b", 9),
    "behind": (r"\bbehind\b", 12),
    "in front of": (r"\bin front of\b", 0),
    "beside": (r"\bbesides?\b", 11),
    "tell of": (r"\b(tell|tells|told|say|says|said|telling) of\b", 2),
    "let go of": (r"\blet(s|ting)? go of\b", 0),
    "in place of": (r"\bin place of\b", 4),
    "hold against": (r"\b(hold|holds|held) (\w+ )?(against|beside)\b", 0),
    "stays as it is": (r"\bstays? as (it|they) (is|are)\b", 1),
    "that of": (r"\b(that|those) of\b", 60),
    "no number": (r"\bno number\b", 5),
    "nobody knows": (r"\b(nobody knows|not known)\b", 2),
    "without memory": (r"\bwithout memory\b", 2),
    "a multiple of": (r"\ba multiple of\b", 7),
    "not ended": (r"\b(not ended|how it ended)\b", 5),
}
# A docstring begins with a noun phrase or an imperative verb.
QUESTION = re.compile(r"(What|Whether|Which|How)\b")


ANY = re.compile("|".join(pattern for pattern, _ in PHRASES.values()))


@pytest.fixture(scope="module")
def sources() -> list[tuple[str, ast.Module]]:
    texts = [path.read_text(encoding="utf-8") for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [(text, ast.parse(text)) for text in texts]


def _texts(source: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield " ".join(node.value.split())
    if any(ANY.search(line.partition("#")[2]) for line in source.splitlines() if "#" in line):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield str(statement.value.value)


def test_counts_of_avoided_phrases_only_fall(sources: list[tuple[str, ast.Module]]):
    counts = Counter[str]()
    for text in filter(ANY.search, (text for each in sources for text in _texts(*each))):
        counts.update({name: len(re.findall(pattern, text)) for name, (pattern, _) in PHRASES.items()})
    limits = Counter({name: limit for name, (_, limit) in PHRASES.items()})
    assert dict(counts - limits) == {}, "write it otherwise"
    assert dict(limits - counts) == {}, "lower these limits"


def test_no_docstring_begins_with_a_question(sources: list[tuple[str, ast.Module]]):
    questions = [text for _, tree in sources for text in _docstrings(tree) if QUESTION.match(text.strip())]
    assert not questions
