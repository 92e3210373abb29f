"""`tokenizer "folder"`: a `tokenizer.json` of the Hugging Face library."""

from pathlib import Path

from attrs import frozen

from ...dsl.schema.tokenizers import TOKENIZERS, TokenizerKind
from ...planner.canonical import portable
from ...planner.data.tokenizer_folder import find_chat_template, find_special_tokens
from ...planner.data.vocabulary import read_vocabulary


@TOKENIZERS.register(default=True)
@frozen
class Folder(TokenizerKind):
    """`tokenizer "folder"`: the folder that has a `tokenizer.json`, or the path of that file."""

    kind = "folder"
    of_files = True

    @classmethod
    def place(cls, source: str) -> str:
        return portable(source)

    @classmethod
    def does(cls, source: str) -> str:
        return f"read tokenizer.json of {portable(source)}"

    @classmethod
    def size(cls, source: str) -> int:
        """Vocabularies have holes. Raises TokenizerUnreadable, also where the run would not find out which tokens begin
        and end a document."""
        vocabulary = read_vocabulary(source)
        find_special_tokens(_folder(source), vocabulary)
        return max(vocabulary.values()) + 1

    @classmethod
    def has_template(cls, source: str) -> bool:
        cls.size(source)
        return find_chat_template(_folder(source)) is not None


def _folder(source: str) -> Path:
    path = Path(source)
    return path if path.is_dir() else path.parent
