"""Words of texts, as documents and benchmarks are compared."""

import re

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation, as n-grams are compared (GPT-3, arXiv 2005.14165,
    appendix C)."""
    return _WORD.findall(text.lower())
