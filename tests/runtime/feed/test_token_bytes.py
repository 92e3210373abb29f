"""How many bytes of text tokens stand for: together as many as the text has."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer

TEXTS = [
    "def f(x):\n\treturn  x + 1\n",
    "Ein Käse für 3 €, häufig!",
    "日本語 🎉 text",
    "x",
    "  two in front",
    "a▁b Ġ <0x41>",
]
SPECIALS = ["<unk>", "<s>", "</s>"]
METASPACE = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
FUSED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def byte_level(*, space: bool = False) -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    found.add_tokens(["for 3 €"])
    return found


def sentence_piece(*, strips: bool) -> Tokenizer:
    """As llama 2 has it; without `strips` as gemma, that puts no space in front."""
    found = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    found.normalizer = METASPACE if strips else normalizers.Replace(" ", "▁")
    found.train_from_iterator(
        ["def return text two in front"], trainers.BpeTrainer(vocab_size=60, special_tokens=SPECIALS)
    )
    described = json.loads(found.to_str())
    described["model"]["vocab"] |= {f"<0x{byte:02X}>": 100 + byte for byte in range(256)}
    found = Tokenizer.from_str(json.dumps(described))
    found.decoder = decoders.Sequence([*FUSED, decoders.Strip(" ", 1, 0)] if strips else FUSED)
    return found


def metaspace() -> Tokenizer:
    found = Tokenizer(models.Unigram())
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.decoder = decoders.Metaspace()
    found.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    )
    return found


KINDS = {
    "byte level": byte_level(),
    "byte level with a space in front": byte_level(space=True),
    "llama 2": sentence_piece(strips=True),
    "gemma": sentence_piece(strips=False),
    "metaspace": metaspace(),
}


def opened(folder: Path, kind: Tokenizer) -> HuggingFaceTokenizer:
    kind.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_have_the_bytes_of_their_text(tmp_path: Path, kind: str):
    tokenizer = opened(tmp_path, KINDS[kind])
    found = tokenizer.bytes_of
    assert found is not None
    assert found.inside[[tokenizer.bos, tokenizer.eos]].tolist() == [0, 0]
    # A tokenizer that puts a space before a text puts none before one that has it.
    given = [text for text in TEXTS if not text.startswith(" ") or kind in ("byte level", "llama 2", "gemma")]
    for text in given:
        ids = tokenizer.encode(text)
        assert len(ids) > 1 or text == "x"
        # SentencePiece's sign for a space is one, also where a text has that sign.
        text = text if "byte level" in kind else text.replace("▁", " ")
        assert found.first[ids[0]] + found.inside[ids[1:]].sum() == len(text.encode()), text
    longest = max(given, key=len)
    assert found.inside[tokenizer.encode(longest)].max() > 1


def test_bytes_are_bytes():
    found = ByteTokenizer().bytes_of
    for text in TEXTS:
        assert found.inside[ByteTokenizer().encode(text)].sum() == len(text.encode())
    assert found.inside.shape == (258,) and not np.any(found.inside[256:]) and np.array_equal(found.inside, found.first)


def test_words_that_are_put_together_with_spaces_have_no_number_of_bytes(tmp_path: Path):
    found = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2}, unk_token="a"))
    found.add_special_tokens(["<s>"])
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    assert opened(tmp_path, found).bytes_of is None
