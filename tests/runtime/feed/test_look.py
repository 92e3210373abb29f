"""Rows written out for people: what is trained on and what is only read, special tokens by name."""

from collections.abc import Sequence

import numpy as np
import pytest
from attrs import evolve, frozen

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.components.packings.sequential_run import pack as pack_sequential
from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.runtime.feed.collate import compose
from xtrain.runtime.feed.collated_view import laid
from xtrain.runtime.feed.dataset_view import SegmentInRow, ShownRow, laid_out, written_out
from xtrain.runtime.feed.packing.stored_rows import RawRow, RowReader
from xtrain.runtime.feed.records import BadRecordReport
from xtrain.runtime.feed.token_store import TokenStore
from xtrain.runtime.feed.tokenizers import pieces, written

BYTES = ByteTokenizer()


def reader(*texts: str, capacity: int, masks: Sequence[str] = ()) -> RowReader:
    """`masks`: of each text an x where a byte of it is trained; what is around a text is, if it has no mask."""
    documents = [[BYTES.bos, *BYTES.encode(text).tolist(), BYTES.eos] for text in texts]
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in documents])]).astype(np.int64)
    tokens = np.array([token for ids in documents for token in ids], dtype=np.uint16)
    trained = np.array([mark == "x" for mask in masks for mark in f".{mask}."], dtype=np.uint8) if masks else None
    store = TokenStore(
        key="memory", tokens=tokens, offsets=offsets, num_files=1, bad_records=BadRecordReport(), trained=trained
    )
    rows = pack_sequential(store.lengths(), capacity, "split")
    return RowReader(store=store, documents=np.arange(len(texts)), rows=rows)


def stretches(row: ShownRow) -> list[list[tuple[bool, str]]]:
    return [[(one.trained, one.text) for one in segment.stretches] for segment in row.segments]


def test_plain_documents_are_trained_but_for_their_first_token():
    rows = reader("ab", "c", capacity=8)
    row = written_out(rows, 0, BYTES, dataset="words", place=5)
    assert stretches(row) == [[(False, "⟨bos⟩"), (True, "ab⟨eos⟩")], [(False, "⟨bos⟩"), (True, "c⟨eos⟩")]]
    assert (row.dataset, row.place, row.capacity, row.filled, row.trained) == ("words", 5, 8, 5, 5)
    assert [(s.before, s.text, s.ends) for s in row.segments] == [("", "ab", True), ("", "c", True)]


def test_masked_tokens_are_stretches_of_their_own():
    row = written_out(reader("ask: tell", capacity=16, masks=(".....xxxx",)), 0, BYTES, dataset="talk")
    assert stretches(row) == [[(False, "⟨bos⟩ask: "), (True, "tell"), (False, "⟨eos⟩")]]
    assert (row.filled, row.trained, row.place) == (10, 4, None)
    assert all(one.pieces == () for one in row.segments[0].stretches)


def test_a_chunk_reads_a_trained_token_without_predicting_it():
    rows = reader("abcdef", capacity=3, masks=("..xxx.",))
    found = [written_out(rows, index, BYTES, dataset="x") for index in range(rows.rows.num_rows)]
    assert [stretches(row)[0] for row in found] == [
        [(False, "⟨bos⟩ab"), (True, "c")],
        [(False, "c"), (True, "de"), (False, "f")],
        [(False, "f⟨eos⟩")],
    ]
    assert sum(row.trained for row in found) == 3, "each token is predicted once"


def test_tokens_by_themselves():
    row = written_out(reader("aé", capacity=8), 0, BYTES, dataset="x", each=True)
    (first, rest) = row.segments[0].stretches
    assert (first.ids, first.pieces) == ((256,), ("⟨bos⟩",))
    assert (rest.ids, rest.pieces) == ((97, 195, 169, 257), ("a", "\\xc3", "\\xa9", "⟨eos⟩"))
    assert rest.text == "aé⟨eos⟩"


def test_segments_of_a_microbatch_are_read_back():
    """As collators of the user's own left them: labels may be any."""
    chain = compose([to_tensor(), flatten(), shift_tokens(), pack(capacity=8, align=2)])
    tokens = [np.array([256, 7, 8, 9]), np.array([256, 5, 257])]
    masks = [np.array([0, 1, 0, 0]), np.array([0, 1, 1])]
    batch = chain([RawRow(segments=tokens, trained=masks)])
    one, other = laid(batch)
    assert (one.ids, one.trained, one.positions, one.other) == ([256, 7, 8], [False, True, False], 3, 0)
    assert (other.ids, other.trained, other.positions) == ([256, 5, 257], [False, True, True], 2)
    batch.labels_BS[0, 1] = 99
    assert laid(batch)[0] == SegmentInRow(ids=[256, 7, 8], trained=[False, True, True], positions=3, other=1)
    row = laid_out(written_out(reader("ab", capacity=8), 0, BYTES, dataset="x"), laid(batch), BYTES)
    assert [(s.document, s.tokens, s.trained, s.other) for s in row.segments] == [(None, 3, 2, 1), (None, 2, 2, 0)]


@frozen
class Words:
    """Ids are words; a decoder as many are: a blank before each word but the first."""

    specials = frozenset({0})
    special_names = {"<eos>": 0}  # noqa: RUF012
    words = ("<eos>", "one", "two", "�")

    def decode(self, ids) -> str:
        return " ".join(self.words[token] for token in ids if token)

    def piece(self, token: int) -> str:
        return "??" if token == 3 else self.words[token]


def test_what_a_decoder_does_at_the_beginning_of_a_text_is_undone():
    assert written(Words(), [1, 2, 0, 2, 1]) == "one two<eos>two one"
    assert written(Words(), [2, 1], before=1) == " two one"
    assert written(Words(), [2, 1], before=0) == "two one"
    assert pieces(Words(), [1, 2, 0, 1, 3]) == ["one", " two", "<eos>", "one", "??"]


@pytest.mark.parametrize(("parts", "expected"), [
    (["a⟨eos⟩b", BYTES.eos], r"a\⟨eos⟩b⟨eos⟩"),
    (["⟨bos⟩⟨eos⟩"], r"\⟨bos⟩\⟨eos⟩"),
    (["\\⟨eos⟩"], r"\\\⟨eos⟩"),
    (["a\\", BYTES.eos, "\\b"], r"a\\⟨eos⟩\b"),
    (["c:\\d"], r"c:\d"),
])  # fmt: skip
def test_characters_that_spell_a_special_token_look_otherwise(parts: list[str | int], expected: str):
    ids = [token for part in parts for token in ([part] if isinstance(part, int) else BYTES.encode(part).tolist())]
    assert written(BYTES, ids) == expected


def test_a_tokenizer_of_its_own_names_its_special_tokens(tiny_tokenizer):
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer)
    assert tokenizer.specials == {7, 9}
    assert [tokenizer.piece(token) for token in (7, 0, 8, 9)] == ["<s>", "one", "⟨8⟩", "</s>"]
    assert written(tokenizer, [7, 0, 1, 9]) == "<s>one two</s>"


@pytest.mark.parametrize("token", [0, 65, 200, 256])
def test_bytes_have_names(token: int):
    assert BYTES.piece(token) == {0: "\0", 65: "A", 200: "\\xc8", 256: "⟨bos⟩"}[token]


def test_rows_that_are_read_are_not_changed_by_masks():
    plain, masked = reader("abc", "d", capacity=4), reader("abc", "d", capacity=4, masks=("x.x", "x"))
    for index in range(plain.rows.num_rows):
        one, other = (written_out(rows, index, BYTES, dataset="x") for rows in (plain, masked))
        assert [evolve(s, trained=0, stretches=()) for s in one.segments] == [
            evolve(s, trained=0, stretches=()) for s in other.segments
        ]
