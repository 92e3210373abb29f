"""Prompts begin as the documents do that a model has learned from."""

import pytest

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.runtime.generation.text_generator import prompt_tokens


class WithoutBos(ByteTokenizer):
    """Begins texts with eos, as tokenizers do that have no bos."""

    bos = ByteTokenizer.eos
    has_bos = False


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "tokens"),
    [
        (ByteTokenizer(), "ab", [256, 97, 98]),
        (ByteTokenizer(), "", [256]),
        (ByteTokenizer(), "⟨bos⟩a", [256, 97]),
        (ByteTokenizer(), "a⟨eos⟩b", [256, 97, 257, 98]),
        (WithoutBos(), "a", [257, 97]),
        (WithoutBos(), "⟨bos⟩a", [256, 97]),
    ],
)
def test_a_prompt_is_begun_once(tokenizer, prompt, tokens):
    assert prompt_tokens(tokenizer, prompt) == tokens
