"""`tokenizer …`: what is asked of the kinds of tokenizers. One is chosen by its name; any other name is a path."""

from collections.abc import Set
from pathlib import Path
from typing import ClassVar, Final

from attrs import frozen

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.names import file_path
from xtrain.dsl.schema.setting import label

TOKENIZERS: Final = Registry["TokenizerKind"]("tokenizer", "tokenizers", call="{}")


@frozen
class Tokenizer:
    """`tokenizer bytes` or `tokenizer "folder"`: turns text into token ids."""

    source: str = label(check=file_path)


@TOKENIZERS.base
class TokenizerKind(Component):
    """`tokenizer NAME`, or `tokenizer "path"`: turns text into token ids.

    The module `…_run` beside a tokenizer has a function `open_tokenizer`, which takes what the spec names and the
    folder that paths start at, and gives a `TextTokenizer`; see `runtime/data/documents/tokenizers.py`. `source`, in
    what follows, is what the spec names.
    """

    of_files: ClassVar[bool] = False
    """Whether it is read from files, whose path the spec names."""

    @classmethod
    def place(cls, source: str) -> str:
        """What it is called in a plan."""
        return source

    @classmethod
    def does(cls, source: str) -> str:
        """What it does, in words."""
        raise NotImplementedError

    @classmethod
    def size(cls, source: str) -> int:
        """One more than the largest id. Raises TokenizerUnreadable, see `planner/data/tokenizer_folder.py`."""
        raise NotImplementedError

    @classmethod
    def files(cls, source: str, base: Path) -> dict[str, bytes]:
        """What transformers needs to read it from a folder: name → content. base: the folder that paths start at.
        Raises OSError."""
        raise NotImplementedError

    @classmethod
    def template(cls, source: str) -> str | None:
        """Return the template of conversations that comes with it, if one does. Raises TokenizerUnreadable."""
        return None

    @classmethod
    def whole(cls, source: str) -> Set[str] | None:
        """Return the texts that are one token wherever a template writes them; None if it has no such vocabulary.
        Raises TokenizerUnreadable."""
        return None


def tokenizer_kind(source: str) -> type[TokenizerKind]:
    """The kind of what a spec names: by its name, or that of files."""
    return TOKENIZERS.get(source) or TOKENIZERS.default
