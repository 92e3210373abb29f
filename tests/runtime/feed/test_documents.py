"""Documents of text: where bos and eos stand, very long texts, and texts of which nothing is left."""

import pickle
from pathlib import Path

import numpy as np

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.runtime.feed.documents import DocumentEncoder, TokenDocument
from xtrain.runtime.feed.records import BadRecord, SourceRecord, TokenIds


def encode(texts: list[str], encoder: DocumentEncoder) -> list[TokenDocument | BadRecord]:
    return encoder.encode([SourceRecord(text, str(index)) for index, text in enumerate(texts)])


def test_text_stands_between_bos_and_eos():
    found = encode(["ab", "é"], DocumentEncoder(ByteTokenizer(), {"form": "text"}))
    assert [document.ids.tolist() for document in found] == [[256, 97, 98, 257], [256, 0xC3, 0xA9, 257]]  # type: ignore[union-attr]
    assert all(document.trained is None and document.ids.dtype == np.uint16 for document in found)  # type: ignore[union-attr]
    assert DocumentEncoder(ByteTokenizer(), {"form": "text"}).encode([]) == []


def test_a_copy_of_the_encoder_encodes_the_same(tiny_tokenizer: Path):
    encoder = DocumentEncoder(HuggingFaceTokenizer(tiny_tokenizer), {"form": "text", "text": "body"})
    copy = pickle.loads(pickle.dumps(encoder))
    (found,) = encode(["one </s> two"], copy)
    assert isinstance(found, TokenDocument) and found.ids.tolist() == [7, 0, 5, 6, 4, 1, 9]
    assert copy.covers == encoder.covers


def test_a_vocabulary_of_more_than_16_bits_takes_32():
    class Wide(ByteTokenizer):
        vocab_size = (1 << 16) + 1
        eos = 1 << 16

    (found,) = encode(["a"], DocumentEncoder(Wide(), {"form": "text"}))
    assert isinstance(found, TokenDocument) and found.ids.tolist() == [256, 97, 1 << 16]


def test_a_text_without_tokens_is_a_bad_record(tiny_tokenizer: Path):
    found = encode(["one", " \n", "two"], DocumentEncoder(HuggingFaceTokenizer(tiny_tokenizer), {"form": "text"}))
    assert found[1] == BadRecord(origin="1", reason="the tokenizer gives no tokens for this text")
    assert [document.ids.tolist() for document in (found[0], found[2])] == [[7, 0, 9], [7, 1, 9]]  # type: ignore[union-attr]


def test_token_ids_stay_as_they_are():
    mask = np.array([False, True, True])
    records = [
        SourceRecord(TokenIds(ids=np.array([5, 6, 257], np.int64)), "a"),
        SourceRecord(TokenIds(ids=np.array([5, 6, 7], np.uint8), trained=mask), "b"),
    ]
    first, second = DocumentEncoder(ByteTokenizer(), {"form": "text"}).encode(records)
    assert isinstance(first, TokenDocument) and first.ids.tolist() == [5, 6, 257] and first.trained is None
    assert isinstance(second, TokenDocument) and second.trained is mask
    assert first.ids.dtype == second.ids.dtype == np.uint16
