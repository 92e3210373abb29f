"""Records for small experiments: the first ones of a dataset whose records are texts, else made-up ones of its form."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final

from xtrain.dsl.schema.data import Dataset
from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.prepared import source_of

COUNT: Final = 160
LONGEST: Final = 70
"""Characters of a text. Rows of 64 positions then have several documents, and ranks differ in their valid tokens."""
VOCABULARY: Final = 256


def write_records(plan: Plan, name: str, dataset: Dataset, path: Path) -> bool:
    """Write small records of a dataset, one JSON object a line; return False if they are made up."""
    texts = _real_texts(plan, name, dataset)
    real = len(texts) == COUNT
    lines = [{dataset.text: text} for text in texts] if real else list(_made_up(dataset))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return real


def _real_texts(plan: Plan, name: str, dataset: Dataset) -> list[str]:
    """Return the beginnings of the first texts of a dataset; empty if it has other records, or cannot be read here."""
    if dataset.has_answers or dataset.prompt or dataset.choices or dataset.tokens or dataset.columns or dataset.values:
        return []
    draw = Random(name)
    try:
        source = source_of(plan, plan.node(f"setup.data.{name}"), None)  # pyright: ignore[reportArgumentType]
        records = (record for unit in source.units() for record in source.read(unit))
        contents = (getattr(record, "content", None) for record in islice(records, 4 * COUNT))
        texts = (text for text in contents if isinstance(text, str) and len(text) > 10)
        return [text[: draw.randint(10, LONGEST)] for text in islice(texts, COUNT)]
    except (DataError, OSError):
        return []


def _made_up(dataset: Dataset) -> Iterator[dict[str, Any]]:
    draw = Random(dataset.name)

    def words(least: int, most: int) -> str:
        return "".join(draw.choice("abcdefgh  ") for _ in range(draw.randint(least, most))).strip() or "a"

    for number in range(COUNT):
        record: dict[str, Any] = {}
        length = draw.randint(3, LONGEST - 10)
        if dataset.tokens is not None:
            record[dataset.tokens] = [draw.randrange(VOCABULARY) for _ in range(length)]
            if dataset.mask is not None:
                record[dataset.mask] = [int(draw.random() < 0.7) for _ in range(length)]
        elif dataset.choices is not None:
            record |= {dataset.question: words(4, 20), dataset.choices: ["a", "bc", "de f"], dataset.answer: number % 3}
        elif dataset.messages is not None:
            keys = {"message_train": draw.random() < 0.8, "message_weight": 1 + number % 2}
            own = {name: value for key, value in keys.items() if (name := getattr(dataset, key)) is not None}
            record[dataset.messages] = [
                {"role": "user", "content": words(2, 10)},
                {"role": "assistant", "content": words(1, 16), **own},
            ]
        elif dataset.has_answers or dataset.prompt is not None:
            fields = (dataset.prompt, dataset.response, dataset.chosen, dataset.rejected, dataset.input)
            record |= {field: words(1, 9) for field in fields if field is not None}
            if dataset.rejected is not None:
                record[dataset.rejected] += "."  # never the same as the chosen one
        else:
            record[dataset.text] = words(5, LONGEST)
        if dataset.label is not None:
            record[dataset.label] = number % 2 == 0
        if dataset.system is not None:
            record[dataset.system] = words(2, 6)
        if dataset.tools is not None:
            record[dataset.tools] = []
        for field in dataset.columns.values():
            value = round(draw.uniform(-1, 1), 3)
            record[field] = [value] * length if dataset.tokens is not None else value
        record |= {field: round(draw.uniform(0, 1), 3) for field in dataset.values.values()}
        yield record
