"""Numbers in the fields of a record: token ids, numbers along them, and numbers of the record as a whole."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from xtrain.dsl.schema.losses import OLD, REF
from xtrain.runtime.data.records.numbers import number, shown
from xtrain.runtime.data.records.records import Content, Numbered, Reads, TokenIds, Unusable
from xtrain.runtime.data.records.texts import described

# So far above 0 come log-probabilities of logits in bf16.
ROUNDED = 0.1
IGNORED = -100
"""The label of a token that is not predicted, in data made for torch and transformers."""


def numbered(content: Content, fields: Mapping[str, Any], reads: Reads) -> Numbered | Unusable:
    """`content` with its numbers, which `fields` have, or why they cannot be used."""
    count = len(content.ids) if isinstance(content, TokenIds) else None
    columns: dict[str, float | np.ndarray] = {}
    for name, field in reads.columns:
        column = _column(fields[field], f"field `{field}`", count, reads)
        if isinstance(column, Unusable):
            return column
        if name in (OLD, REF) and (most := _largest(column, content)) > ROUNDED:
            return Unusable(
                f"field `{field}` says {most:g} of a predicted token, and log-probabilities are not above 0"
            )
        columns[name] = column
    values: dict[str, float] = {}
    for name, field in reads.values:
        value = number(fields[field], f"field `{field}`")
        if isinstance(value, Unusable):
            return value
        values[name] = value
    if reads.label is not None:
        label = fields[reads.label]
        if isinstance(label, Unusable):
            return label
        if not isinstance(label, bool):
            return Unusable(f"field `{reads.label}` is {shown(label)}, neither true nor false")
        values["label"] = float(label)
    return Numbered(content=content, columns=columns, values=values)


def token_ids(ids: Any, mask: Any, reads: Reads) -> TokenIds | Unusable:
    """A document of token ids. mask: which of them are predicted, as 0 and 1, or as labels: the ids, but −100 for
    those that are not predicted. None: all but the first is."""
    found = _integers(ids, f"field `{reads.tokens}`")
    if isinstance(found, Unusable):
        return found
    if len(found) < 2:
        return Unusable(f"field `{reads.tokens}` has {len(found)} tokens, and nothing to predict")
    if mask is None and reads.mask is None:
        return TokenIds(ids=found)
    trained = _mask(mask, f"field `{reads.mask}`", found, reads)
    return trained if isinstance(trained, Unusable) else TokenIds(ids=found, trained=trained)


def _largest(column: float | np.ndarray, content: Content) -> float:
    """Of the numbers of tokens that are predicted, of which there are some."""
    if not isinstance(column, np.ndarray):
        return column
    trained = content.trained if isinstance(content, TokenIds) else None
    # The first token of a document is never predicted.
    return float((column if trained is None else np.where(trained, column, -np.inf))[1:].max())


def _column(value: Any, what: str, count: int | None, reads: Reads) -> float | np.ndarray | Unusable:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return number(value, what)
    if count is None:
        return Unusable(f"{what} is a list; only records of token ids (`tokens`) have a number a token")
    if len(value) != count:
        return Unusable(f"{what} has {len(value):,} numbers, and `{reads.tokens}` has {count:,} tokens")
    for place, each in enumerate(value):
        if isinstance(problem := number(each, f"{what}, number {place},"), Unusable):
            return problem
    return np.array(value, dtype=np.float32)


def _integers(value: Any, what: str) -> np.ndarray | Unusable:
    if isinstance(value, Unusable):
        return value
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return Unusable(f"{what} is {described(value)}, not a list of token ids")
    for place, each in enumerate(value):
        if isinstance(each, bool) or not isinstance(each, int):
            return Unusable(f"{what}, token {place}, is {shown(each)}, not a whole number")
        if not 0 <= each < 1 << 32:
            return Unusable(f"{what}, token {place}, is {shown(each)}, which is no token id")
    return np.array(value, dtype=np.int64)


def _mask(value: Any, what: str, ids: np.ndarray, reads: Reads) -> np.ndarray | Unusable:
    if isinstance(value, Unusable):
        return value
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return Unusable(f"{what} is {described(value)}, not a list")
    if len(value) != len(ids):
        return Unusable(f"{what} has {len(value):,} entries, and `{reads.tokens}` has {len(ids):,} tokens")
    if IGNORED in value or (list(value) == ids.tolist() and max(value) > 1):
        for place, (label, token) in enumerate(zip(value, ids.tolist(), strict=True)):
            if label not in (IGNORED, token):
                return Unusable(f"{what}, label {place}, is {label}, neither the token there, {token}, nor {IGNORED}")
        trained = np.array(value) != IGNORED
    else:
        for place, each in enumerate(value):
            if each not in (0, 1):
                return Unusable(f"{what}, entry {place}, is {shown(each)}, neither 0 nor 1")
        trained = np.array(value, dtype=bool)
    if not trained[1:].any():
        return Unusable(f"{what} leaves no token to predict")
    return trained
