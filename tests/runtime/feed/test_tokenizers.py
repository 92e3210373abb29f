"""Tokenizers: the byte one exactly, and `tokenizer.json` with every way of naming its special tokens."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.tokenizers import load_tokenizer


@given(st.text())
@settings(deadline=None)
def test_bytes_round_trip(text: str):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tobytes() == text.encode()
    assert tokenizer.decode([tokenizer.bos, *ids.tolist(), tokenizer.eos]) == text


def test_bytes_that_form_no_character_are_replaced():
    assert ByteTokenizer().decode(np.array([0xC3, 256, 0x41, 9999])) == "\ufffdA"


def test_truncation_and_padding_of_the_file_do_not_touch_the_data(tiny_tokenizer: Path):
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer)
    assert tokenizer.encode("one two three one two").tolist() == [0, 1, 2, 0, 1]
    assert [ids.tolist() for ids in tokenizer.encode_batch(["two", "one two three"])] == [[1], [0, 1, 2]]
    assert tokenizer.encode("one").dtype == np.uint32


def test_a_special_token_written_in_a_text_stays_text(tiny_tokenizer: Path):
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer)
    ids = tokenizer.encode("one </s> two")
    assert tokenizer.eos not in ids
    assert [ids.tolist()] == [batch.tolist() for batch in tokenizer.encode_batch(["one </s> two"])]


def test_the_vocabulary_reaches_to_the_largest_id_across_holes(tiny_tokenizer: Path):
    assert HuggingFaceTokenizer(tiny_tokenizer).vocab_size == 10


def test_decoding_leaves_special_and_unknown_ids_out(tiny_tokenizer: Path):
    assert HuggingFaceTokenizer(tiny_tokenizer).decode([7, 0, 2, 8, 500, 9]) == "one three"


@pytest.mark.parametrize(("files", "expected"), [
    ({}, (7, 9)),
    ({"tokenizer_config.json": {"bos_token": "one", "eos_token": {"content": "two"}}}, (0, 1)),
    ({"special_tokens_map.json": {"bos_token": {"content": "two"}, "eos_token": "one"}}, (1, 0)),
    ({"tokenizer_config.json": {"eos_token": "two"}, "special_tokens_map.json": {"eos_token": "one"}}, (7, 0)),
    ({"tokenizer_config.json": {"bos_token": "<new>"}}, (10, 9)),
    ({"tokenizer_config.json": {"bos_token": None}}, (9, 9)),
    ({"tokenizer_config.json": {"eos_token": None}}, (7, 7)),
])  # fmt: skip
def test_where_the_special_tokens_come_from(files: dict, expected: tuple[int, int], tiny_tokenizer: Path):
    for name, content in files.items():
        (tiny_tokenizer / name).write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer)
    assert (tokenizer.bos, tokenizer.eos) == expected


@pytest.mark.parametrize(("content", "message"), [
    ('{"bos_token": null, "eos_token": null}', r"neither a bos nor an eos[^\n]*\n.*tokenizer_config\.json"),
    ('{"bos_token": 7}', "special tokens cannot be read: 7 is not a token"),
    ('{"added_tokens_decoder": {"x": "<a>"}}', "special tokens cannot be read: invalid literal"),
    ('{"added_tokens_decoder": {"1": {"content": "<a>", "special": 1}}}', 'flag of token "<a>" is neither true nor'),
    ('{"extra_special_tokens": [[]]}', r"special tokens cannot be read: \[\] is not a token"),
    ("{", "invalid JSON"),
    ("[]", "not a JSON object"),
])  # fmt: skip
def test_side_files_that_cannot_be_followed(content: str, message: str, tiny_tokenizer: Path):
    (tiny_tokenizer / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=message):
        HuggingFaceTokenizer(tiny_tokenizer)


def test_the_fingerprint_covers_the_special_tokens(tiny_tokenizer: Path):
    before = HuggingFaceTokenizer(tiny_tokenizer).fingerprint
    assert HuggingFaceTokenizer(tiny_tokenizer).fingerprint == before
    (tiny_tokenizer / "tokenizer_config.json").write_text('{"bos_token": "one"}')
    assert HuggingFaceTokenizer(tiny_tokenizer).fingerprint != before


def test_a_copy_for_another_process_encodes_the_same(tiny_tokenizer: Path):
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer)
    text = "one </s> two"
    tokenizer.encode_rendered([text])
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert copy.eos not in copy.encode(text)
    assert copy.encode_rendered([text])[0].ids.tolist() == [0, 9, 1]
    assert (copy.fingerprint, copy.specials, copy.bos) == (tokenizer.fingerprint, tokenizer.specials, tokenizer.bos)


def test_in_rendered_text_the_names_of_special_tokens_stand_for_them(tiny_tokenizer: Path):
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer)
    assert dict(tokenizer.special_names) == {"<s>": 7, "</s>": 9}
    found, empty = tokenizer.encode_rendered(["<s>one  two</s>", ""])
    assert found.ids.tolist() == [7, 0, 1, 9]
    assert list(zip(found.starts.tolist(), found.ends.tolist(), strict=True)) == [(0, 3), (3, 6), (8, 11), (11, 15)]
    assert len(empty.ids) == len(empty.starts) == len(empty.ends) == 0


def test_rendered_text_on_bytes():
    found, empty = ByteTokenizer().encode_rendered(["⟨bos⟩aé⟨eos⟩😀", ""])
    assert found.ids.tolist() == [256, 97, 0xC3, 0xA9, 257, *"😀".encode()]
    assert found.starts.tolist() == [0, 5, 6, 6, 7, 12, 12, 12, 12]
    assert found.ends.tolist() == [5, 6, 7, 7, 12, 13, 13, 13, 13]
    assert len(empty.ids) == 0


def test_blanks_of_a_token_are_part_of_its_place(tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    alphabet = {sign: index for index, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab={**alphabet, "</s>": 256}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "</s>"}))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert not tokenizer.has_bos
    (found,) = tokenizer.encode_rendered(["a  é\n"])
    assert list(zip(found.starts.tolist(), found.ends.tolist(), strict=True)) == [
        (0, 1), (1, 2), (2, 3), (3, 4), (3, 4), (4, 5),
    ]  # fmt: skip


def test_loading_by_name_folder_or_file(tiny_tokenizer: Path):
    base = tiny_tokenizer.parent
    assert isinstance(load_tokenizer("bytes", base), ByteTokenizer)
    by_folder, by_file = load_tokenizer("tiny", base), load_tokenizer("tiny/tokenizer.json", base)
    assert by_folder.fingerprint == by_file.fingerprint
    with pytest.raises(DataError, match="no such tokenizer"):
        load_tokenizer("absent", base)
    (base / "tiny" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer("tiny", base)
