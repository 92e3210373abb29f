"""A folder as transformers saves a chat model: random weights, a tokenizer, and a chat template. Needs no network.

    python tests/support/tiny_chat_model.py models/tiny-chat

A qwen3 of 142 thousand parameters. The tokenizer is a byte-level BPE whose digits are tokens of their own, with ChatML.
"""

import argparse
import sys
from pathlib import Path
from typing import Final

SPECIALS: Final = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE: Final = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
WORDS: Final = ["user", "assistant", "system", "What is", "How much is", " plus ", "?", " + ", "The answer is "]


def make(folder: Path, seed: int = 0) -> None:
    """Write the folder, which must not exist."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True)
    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(WORDS * 4, trainer)
    end, start, turn = SPECIALS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=turn, pad_token=end, additional_special_tokens=[start]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def run() -> int:
    """Exit status: 2 if the folder is there already."""
    parser = argparse.ArgumentParser(description="make a small chat model with random weights")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if folder.exists():
        print(f"{folder} is there already", file=sys.stderr)
        return 2
    make(folder)
    print(f"made {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return 0


if __name__ == "__main__":
    sys.exit(run())
