"""`tokenizer bytes`: no vocabulary to learn or to read."""

from typing import Final

from attrs import frozen

from ...dsl.schema.tokenizers import TOKENIZERS, TokenizerKind

SIZE: Final = 258  # 256 byte values, bos, eos


@TOKENIZERS.register()
@frozen
class Bytes(TokenizerKind):
    """`tokenizer bytes`: each byte of UTF-8 is a token."""

    kind = "bytes"

    @classmethod
    def does(cls, source: str) -> str:
        return "each byte of UTF-8 is a token"

    @classmethod
    def size(cls, source: str) -> int:
        return SIZE
