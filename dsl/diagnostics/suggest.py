"""Did you mean: the likeliest of some names for a misspelt one, in three tiers, and what other trainers call it."""

import re
from collections.abc import Iterable

from xtrain.dsl.diagnostics.synonyms import ours, synonym_of


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that was probably meant, or None.

    A name that another trainer uses is answered with ours. Else first the same letters in another case, then the
    smallest edit distance up to a third of the word's length, then the same words in another order
    (`tensor_parallel` for `parallel_tensor`).
    """
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
    """What `closest` answers, if nothing else can have been meant: for a fix, which nobody is asked about.

    None where a second candidate is as near, where digits differ, for a word of one or two letters unless they are
    only swapped or in another case, and for another trainer's name that has another value or several meanings here.
    """
    names = [name for name in dict.fromkeys(candidates) if name != word]
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
    """The hint ``did you mean `name`?``, or None if no candidate is near."""
    name = closest(word, candidates)
    return f"did you mean `{name}`?" if name else None


def distance(left: str, right: str, limit: int) -> int | None:
    """Restricted Damerau-Levenshtein distance: insert, delete, replace, swap neighbours. None above `limit`."""
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
            return None  # it never gets less: a swap starts from the row before
    return row[-1] if row[-1] <= limit else None
