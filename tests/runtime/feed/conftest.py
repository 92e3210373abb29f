"""Fixtures of the data tests: stores made in memory, and a tiny tokenizer on disk."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from xtrain.runtime.feed.records import BadRecordReport
from xtrain.runtime.feed.token_store import TokenStore

MakeStore = Callable[[list[int]], TokenStore]


@pytest.fixture(scope="session")
def make_store() -> MakeStore:
    """A store of documents of the given token counts, in which every token is another number."""

    def make(lengths: list[int]) -> TokenStore:
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint32)
        return TokenStore(key="memory", tokens=tokens, offsets=offsets, num_files=1, bad_records=BadRecordReport())

    return make


@pytest.fixture
def tiny_tokenizer(tmp_path: Path) -> Path:
    """A folder with a word-level `tokenizer.json` whose specials are <s> (7) and </s> (9); id 8 is not used."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"one": 0, "two": 1, "three": 2, "<": 3, ">": 4, "</": 5, "[UNK]": 6, "<s>": 7, "</s>": 9}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=4, pad_token="</s>")
    folder = tmp_path / "tiny"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    assert json.loads((folder / "tokenizer.json").read_text())["truncation"]
    return folder
