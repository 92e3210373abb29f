"""Suggestions: the likeliest name for a misspelled one, in three tiers, and fixes that several diagnostics share."""

import re
from collections.abc import Iterable

from xtrain.dsl.diagnostics.diagnostic import Fix, SourceText, Span


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that was probably meant, or None.

    Another trainer's name is translated to ours. Else first the same letters in another case, then the smallest edit
    distance up to a third of the word's length, then the same words in another order (`tensor_parallel` for
    `parallel_tensor`).
    """
    from xtrain.dsl.diagnostics.synonyms import ours  # a large table, which only mistakes need

    names = [name for name in candidates if name != word]
    known_elsewhere = ours(word, names)
    if known_elsewhere is not None:
        return known_elsewhere
    for name in names:
        if name.lower() == word.lower():
            return name
    limit = max(len(word), 3) // 3
    near = [(distance(word.lower(), name.lower(), limit), abs(len(name) - len(word)), name) for name in names]
    best = min((each for each in near if each[0] is not None), key=lambda each: each[:2], default=None)
    if best is not None:
        return best[2]
    words = sorted(word.lower().split("_"))
    if len(words) > 1:
        for name in names:
            if sorted(name.lower().split("_")) == words:
                return name
    return None


def certain(word: str, candidates: Iterable[str]) -> str | None:
    """Return `closest` if nothing else can have been meant: for a fix that is applied without asking.

    None if a second candidate is as near, if digits differ, for words of one or two letters unless they are only
    swapped or in another case, and for another trainer's name with another value or several meanings here.
    """
    names = [name for name in dict.fromkeys(candidates) if name != word]
    from xtrain.dsl.diagnostics.synonyms import synonym_of

    meant, synonym = closest(word, names), synonym_of(word)
    if meant is None or (synonym is not None and meant.lower() != word.lower()):
        return meant if synonym is not None and synonym.is_same and meant in synonym.names else None
    lower = word.lower()
    alike = [name for name in names if name.lower() == lower]
    if alike:
        return meant if len(alike) == 1 else None
    if re.findall(r"\d", word) != re.findall(r"\d", meant):
        return None  # another number is seldom a slip: `qwen4` is not `qwen3`
    steps = distance(lower, meant.lower(), len(lower)) or 0
    rivals = [n for n in names if n != meant and distance(lower, n.lower(), steps) == steps]
    if rivals and sorted(lower.split("_")) != sorted(meant.lower().split("_")):
        return None
    return meant if len(word) > 2 or sorted(lower) == sorted(meant.lower()) else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str | None:
    """Return the hint ``did you mean `name`?``, or None if no candidate is near."""
    name = closest(word, candidates)
    return f"did you mean `{name}`?" if name else None


def distance(left: str, right: str, limit: int) -> int | None:
    """Return the restricted Damerau-Levenshtein distance (insert, delete, replace, swap neighbors); None above
    `limit`."""
    if abs(len(left) - len(right)) > limit:
        return None
    last: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, last, row = last, row, [i]
        for j, b in enumerate(right, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        if min(row) > limit and min(last) >= limit:
            return None  # it never decreases: a swap starts from the previous row
    return row[-1] if row[-1] <= limit else None


def renamed(span: Span, word: str, candidates: Iterable[str], *, taken: Iterable[str] = ()) -> Fix | None:
    """Return the fix to the only candidate that `word` at `span` can mean; None if it is `taken`."""
    meant = certain(word, candidates)
    return Fix(span, meant) if meant is not None and meant not in taken and span.text == word else None


def without(span: Span) -> Fix:
    """Return the fix that removes an item with its comma, or with its lines if nothing else is on them."""
    text, start, end = span.source.text, span.start, span.end
    begin, finish = _back(text, start), _forth(text, end)
    alone = text[begin - 1 : begin] in ("", "\n") and text[finish : finish + 1] in ("", "\n")
    if alone:
        return Fix(Span(span.source, begin, min(finish + 1, len(text))), "")
    if text[finish : finish + 1] == ",":
        return Fix(Span(span.source, start, _forth(text, finish + 1)), "")
    if text[begin - 1 : begin] == ",":
        return Fix(Span(span.source, begin - 1, end), "")
    return Fix(span, "")


def closed(source: SourceText, opener: Span, at: int, sign: str) -> Fix:
    """Return the fix that adds a closing bracket after the last token, which ends at `at`: on its own line if the block
    has several."""
    if sign != "}":
        return Fix(Span(source, at, at), sign)
    if "\n" not in source.text[opener.end : at]:
        return Fix(Span(source, at, at), " }")
    end = source.text.find("\n", at)
    end = len(source.text) if end < 0 else end
    line = source.line(opener.line)
    return Fix(Span(source, end, end), "\n" + line[: len(line) - len(line.lstrip())] + "}")


def _back(text: str, at: int) -> int:
    """Return the offset of the blanks that end at `at`."""
    while at and text[at - 1] in " \t":
        at -= 1
    return at


def _forth(text: str, at: int) -> int:
    """Return the offset after the blanks that begin at `at`."""
    while at < len(text) and text[at] in " \t":
        at += 1
    return at
