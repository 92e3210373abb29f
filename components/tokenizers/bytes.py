"""`tokenizer bytes`: no vocabulary to learn or to read."""

import json
from pathlib import Path
from typing import Any, Final

from xtrain.dsl.schema.data_components import TOKENIZERS, TokenizerKind
from xtrain.lazy_attrs import frozen

SIZE: Final = 258  # 256 byte values, bos, eos
SPECIAL: Final = {256: "⟨bos⟩", 257: "⟨eos⟩"}


@TOKENIZERS.register()
@frozen
class Bytes(TokenizerKind):
    """`tokenizer bytes`: each byte of UTF-8 is a token."""

    kind = "bytes"

    @classmethod
    def does(cls, source: str) -> str:
        return "tokens are the bytes of UTF-8"

    @classmethod
    def size(cls, source: str) -> int:
        return SIZE

    @classmethod
    def files(cls, source: str, base: Path) -> dict[str, bytes]:
        """Return the files of an equivalent byte-level BPE without merges, whose texts begin with bos as prompts here
        do."""
        bos, eos = SPECIAL
        added = [{"id": token, "content": name, **_SPECIAL} for token, name in SPECIAL.items()]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        first = [{"SpecialToken": {"id": SPECIAL[bos], "type_id": 0}}]
        texts = ([{"Sequence": {"id": name, "type_id": number}}] for number, name in enumerate("AB"))
        single, second = texts
        tokenizer: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [*first, *single],
                "pair": [*first, *single, *second],
                "special_tokens": {SPECIAL[bos]: {"id": SPECIAL[bos], "ids": [bos], "tokens": [SPECIAL[bos]]}},
            },
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": {sign: byte for byte, sign in enumerate(_signs())}, "merges": []},
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[bos],
            "eos_token": SPECIAL[eos],
            "clean_up_tokenization_spaces": False,
        }
        files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
        return {name: json.dumps(content, ensure_ascii=False, indent=2).encode() for name, content in files.items()}


_SPECIAL: Final = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def _signs() -> list[str]:
    """Return the printable character of each byte in byte-level vocabularies since GPT-2 (Radford et al. 2019,
    `bytes_to_unicode` of its code): the byte's own if printable, otherwise the next free one from U+0100."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]
