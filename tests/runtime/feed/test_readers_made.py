"""Documents that no file holds: synthetic ones, and the user's own."""

import pickle
from collections import Counter
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xtrain.components.sources import synthetic_run, user_part_run
from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.dsl.user_parts.files import find_module, module_digest
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.documents import PHRASE, SUCCESSORS, DocumentEncoder, TokenDocument, lengths
from xtrain.runtime.feed.records import BadRecord, SourceRecord
from xtrain.runtime.feed.sources.source import DataSource, open_source
from xtrain.runtime.feed.tokenizers import TextTokenizer


def synthetic(documents: int = 50, length: int = 100, spread: float = 0.5, seed: int = 1) -> DataSource:
    options = {"documents": documents, "length": length, "spread": spread, "seed": seed}
    return open_source("synthetic", options=options, base=Path("/nowhere"))


def documents_of(source: DataSource, tokenizer: TextTokenizer) -> list[TokenDocument]:
    encoder = pickle.loads(pickle.dumps(DocumentEncoder(tokenizer, {"form": "text"})))
    records = [record for unit in source.units() for record in pickle.loads(pickle.dumps(source)).read(unit)]
    return encoder.encode(records)


def test_lengths_have_the_mean_and_the_spread_that_are_asked_for():
    drawn = lengths(3, np.arange(200_000, dtype=np.uint64), 500, 0.6)
    assert abs(drawn.mean() - 500) < 5
    assert abs(np.log(drawn).std() - 0.6) < 0.005
    assert np.all(lengths(3, np.arange(1000, dtype=np.uint64), 40, 0.0) == 40)
    assert lengths(3, np.arange(1000, dtype=np.uint64), 2, 1.0).min() == 3


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_documents_have_exactly_the_drawn_length_with_any_tokenizer(kind: str, tiny_tokenizer: Path):
    # The tiny tokenizer knows none of the words: then they are single tokens of its.
    tokenizer = ByteTokenizer() if kind == "bytes" else HuggingFaceTokenizer(tiny_tokenizer)
    found = documents_of(synthetic(), tokenizer)
    assert [len(document.ids) for document in found] == lengths(1, np.arange(50, dtype=np.uint64), 100, 0.5).tolist()
    for document in found:
        assert (document.ids[0], document.ids[-1]) == (tokenizer.bos, tokenizer.eos)
        assert not np.isin(document.ids[1:-1], [tokenizer.bos, tokenizer.eos]).any()
        assert document.ids.max() < tokenizer.vocab_size


def test_a_document_depends_on_the_seed_and_its_number_alone(monkeypatch: pytest.MonkeyPatch):
    texts = [ByteTokenizer().decode(document.ids) for document in documents_of(synthetic(), ByteTokenizer())]
    monkeypatch.setattr(synthetic_run, "UNIT_TOKENS", 700)
    source = synthetic()
    assert len(list(source.units())) == 8
    assert sum(unit.size for unit in source.units()) == source.num_bytes() == 5000
    assert [ByteTokenizer().decode(document.ids) for document in documents_of(source, ByteTokenizer())] == texts
    assert len(set(texts)) == 50
    other = documents_of(synthetic(seed=2), ByteTokenizer())
    assert not set(texts) & {ByteTokenizer().decode(document.ids) for document in other}
    # The first words of all, written down: they must stay what they are.
    assert blake2b("".join(texts).encode(), digest_size=8).hexdigest() == "3c2c0f1bc12b0471"


def test_there_is_something_to_learn():
    documents = [ByteTokenizer().decode(document.ids) for document in documents_of(synthetic(200), ByteTokenizer())]
    # What stands behind the last full stop is cut off somewhere.
    phrases = [phrase.split() for document in documents for phrase in document.split(".")[:-1]]
    counts = Counter(word for phrase in phrases for word in phrase)
    followers: dict[str, set[str]] = {}
    for phrase in phrases:
        assert len(phrase) == PHRASE
        for word, after in pairwise(phrase):
            followers.setdefault(word, set()).add(after)
    (most, often), *_ = counts.most_common()
    assert often > 20 * sorted(counts.values())[len(counts) // 2]
    assert len(followers[most]) <= SUCCESSORS


PARTS = '''
from xtrain import source

@source
def documents(count: int = 3, fail_at: int = -1, form: str = "text"):
    """Some documents."""
    for index in range(count):
        if index == fail_at:
            raise KeyError("no such thing")
        if form == "text":
            yield f"text {index}"
        elif form == "fields":
            yield {"text": f"text {index}", "lock": open}
        elif form == "talk":
            yield {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": str(index)}]}
        elif form == "bad":
            yield ["", {"text": 3}, {"text": "a\\ud800"}, {"body": "b"}, "good"][index]
'''


def own(folder: Path, reads: dict[str, Any] | None = None, **arguments: Any) -> DataSource:
    path = folder / "parts.py"
    path.write_text(PARTS)
    defaults = {"count": 3, "fail_at": -1, "form": "text"}
    options = {
        "module": "parts.py", "function": "documents", "digest": module_digest(find_module("parts.py", folder)),
        "arguments": defaults | arguments,
    }  # fmt: skip
    return open_source("python", options=options, reads=reads or {"form": "text", "text": "text"}, base=folder)


def rows_of(source: DataSource) -> list[SourceRecord | BadRecord]:
    copy = pickle.loads(pickle.dumps(source))
    return [record for unit in source.units() for record in copy.read(pickle.loads(pickle.dumps(unit)))]


def test_texts_and_fields_of_the_users_own(tmp_path: Path):
    expected = [SourceRecord(f"text {index}", f"parts.py: documents, record {index + 1}") for index in range(3)]
    assert rows_of(own(tmp_path)) == expected
    # What is not read does not travel to another process: it could not be pickled.
    assert rows_of(own(tmp_path, form="fields")) == expected
    (talk, *_) = rows_of(own(tmp_path, {"form": "chat", "messages": "messages"}, form="talk"))
    assert isinstance(talk, SourceRecord) and isinstance(talk.content, list) and talk.content[1]["content"] == "0"


def test_bad_records_of_the_users_own_are_numbered(tmp_path: Path):
    found = rows_of(own(tmp_path, count=5, form="bad"))
    assert [record.reason if isinstance(record, BadRecord) else record.content for record in found] == [
        "the record is empty",
        "field `text` is a number, not a string",
        "field `text` has an unpaired surrogate at character 1",
        "no field `text`; there are `body`",
        "good",
    ]
    assert [record.origin.rpartition(" ")[2] for record in found] == ["1", "2", "3", "4", "5"]
    (text, *_) = rows_of(own(tmp_path, {"form": "instruction", "prompt": "q", "response": "a"}))
    assert isinstance(text, BadRecord) and text.reason == "a text, and it should have `q` and `a`"


def test_what_the_users_code_raises_is_reported_with_its_line(tmp_path: Path):
    line = PARTS.splitlines().index('            raise KeyError("no such thing")') + 1
    with pytest.raises(DataError, match=rf"parts\.py:{line}: .*KeyError: 'no such thing'"):
        rows_of(own(tmp_path, fail_at=2))


def test_units_of_the_users_own_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(user_part_run, "UNIT_RECORDS", 4)
    source = own(tmp_path, count=10)
    assert [(unit.line, len(unit.part), unit.size) for unit in source.units()] == [(1, 4, 24), (5, 4, 24), (9, 2, 12)]
    monkeypatch.setattr(user_part_run, "UNIT_CHARACTERS", 10)
    assert [len(unit.part) for unit in source.units()] == [2] * 5
    assert len(rows_of(source)) == 10
