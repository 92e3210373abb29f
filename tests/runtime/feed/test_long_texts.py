"""Long texts: whatever the tokenizer, their ids are those of the whole text."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from xtrain.components.tokenizers import folder_run
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.runtime.feed.tokenizers import Placed, joined

pytestmark = pytest.mark.usefixtures("lean_forks")

WORDS = [
    "the", "tokens", "of", "a", "text", "are", "those", "wholes", "  ", "\n\n\n", "é", "\t", "12345", "don't",
    "aaaaaaaa",
]  # fmt: skip


def text_of(characters: int, seed: int = 0, between: str = " ") -> str:
    dice = random.Random(seed)
    found: list[str] = []
    while sum(map(len, found)) + len(found) < characters:
        found.append(dice.choice(WORDS))
    return between.join(found)


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _metaspace(scheme: str) -> Callable[[], Tokenizer]:
    def build() -> Tokenizer:
        tokenizer = Tokenizer(models.Unigram() if scheme == "first" else models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        return tokenizer

    return build


def _whole_text() -> Tokenizer:
    """As that of Llama 2: no words, one sequence of merges over the text."""
    tokenizer = Tokenizer(models.BPE())
    steps = [normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


KINDS = {
    "byte level": _byte_level,
    "metaspace, always": _metaspace("always"),
    "metaspace, first": _metaspace("first"),
    "whole text": _whole_text,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, build in KINDS.items():
        tokenizer = build()
        kind = trainers.UnigramTrainer if isinstance(tokenizer.model, models.Unigram) else trainers.BpeTrainer
        more = {"unk_token": "<unk>"} if kind is trainers.UnigramTrainer else {}
        lines = [text_of(300, seed) for seed in range(30)]
        tokenizer.train_from_iterator(lines, kind(vocab_size=120, special_tokens=["<unk>", "</s>"], **more))
        found[name] = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save(str(found[name] / "tokenizer.json"))
        (found[name] / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return found


TEXTS = {
    "words": text_of(6000),
    "no spaces": text_of(6000, between=""),
    "one letter": "a" * 6001,
    "blanks": " " * 3000 + "a" + "\n" * 3000,
    "lines": text_of(6000, between="\n"),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_ids_are_those_of_the_whole_text(
    name: str, text: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    tokenizer = HuggingFaceTokenizer(folders[name])
    whole = tokenizer.encode(text)
    for piece, overlap in ((1000, 100), (777, 64), (2500, 400)):
        assert joined(text, tokenizer._placed, piece, overlap).tolist() == whole.tolist()
    monkeypatch.setattr(folder_run, "PIECE", 1000)
    monkeypatch.setattr(folder_run, "joined", lambda text, encode: joined(text, encode, 1000, 100))
    found = tokenizer.encode_batch(["a", text, "b"])
    assert [ids.tolist() for ids in found] == [
        tokenizer.encode("a").tolist(),
        whole.tolist(),
        tokenizer.encode("b").tolist(),
    ]


def test_a_long_text_is_never_encoded_as_a_whole():
    sizes = []

    def encode(text: str) -> Placed:
        sizes.append(len(text))
        starts = np.arange(len(text))
        return Placed(ids=np.frombuffer(text.encode("utf-32-le"), np.uint32), starts=starts, ends=starts + 1)

    text = text_of(10_000)
    assert joined(text, encode, 1000, 100).tolist() == [ord(sign) for sign in text]
    assert max(sizes) == 1000 and sum(sizes) < 1.2 * len(text)


@given(st.text(alphabet="ab \né", min_size=30, max_size=400), st.integers(20, 100))
@drawn(20, 300)
def test_any_text_of_one_token_a_word_is_put_together(text: str, piece: int):
    def encode(part: str) -> Placed:
        """A token a word, with the blanks before it; one more blank at the beginning."""
        starts = [index for index in range(len(part)) if not index or (part[index] == " " and part[index - 1] != " ")]
        ends = [*starts[1:], len(part)]
        ids = [hash(("" if start else " ") + part[start:end]) % 1000 for start, end in zip(starts, ends, strict=True)]
        return Placed(ids=np.array(ids, np.uint32), starts=np.array(starts), ends=np.array(ends))

    assert joined(text, encode, piece, 8).tolist() == encode(text).ids.tolist()
