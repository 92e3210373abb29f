"""`tokenizer "folder"`: a `tokenizer.json` of the Hugging Face library."""

import json
from collections.abc import Set
from pathlib import Path
from typing import Final

from xtrain.dsl.schema.data_components import TOKENIZERS, TokenizerKind
from xtrain.lazy_attrs import frozen
from xtrain.plan.canonical import portable
from xtrain.plan.data import find_chat_template
from xtrain.plan.vocabulary import ADDED, CONFIG, SPECIALS, find_special_tokens, read_vocabulary

VOCABULARY: Final = "tokenizer.json"
# Other files of a transformers tokenizer; existing ones are exported with it.
BESIDE: Final = (
    CONFIG, SPECIALS, ADDED, "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip


@TOKENIZERS.register()
@frozen
class Folder(TokenizerKind):
    """`tokenizer "folder"`: a folder with a `tokenizer.json`, or the path of that file."""

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
        """Return the largest id + 1, because vocabularies have holes. Raises TokenizerUnreadable, also if the tokens
        that begin and end a document cannot be determined."""
        path = cls.location(source)
        found = read_vocabulary(path)
        find_special_tokens(_folder(path), found.side, found.ids)
        return max(found.ids.values()) + 1

    @classmethod
    def files(cls, source: str, base: Path) -> dict[str, bytes]:
        """Return the folder's files unchanged; `tokenizer_config.json` is generated if missing."""
        path = base / cls.location(source)
        folder = _folder(str(path))
        found = {VOCABULARY: (path / VOCABULARY if path.is_dir() else path).read_bytes()}
        for pattern in BESIDE:
            for file in sorted(folder.glob(pattern)):
                found[file.relative_to(folder).as_posix()] = file.read_bytes()
        if CONFIG not in found:
            vocabulary = read_vocabulary(str(path))
            special = find_special_tokens(folder, vocabulary.side, vocabulary.ids)
            names = {token: name for name, token in vocabulary.ids.items()}
            tokens = {"bos_token": names[special.bos] if special.own_bos else None, "eos_token": names[special.eos]}
            found[CONFIG] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens}, indent=2).encode()
        return found

    @classmethod
    def template(cls, source: str) -> str | None:
        cls.size(source)
        return find_chat_template(_folder(cls.location(source)))

    @classmethod
    def whole(cls, source: str) -> Set[str]:
        return read_vocabulary(cls.location(source)).added


def _folder(source: str) -> Path:
    path = Path(source)
    return path if path.is_dir() else path.parent
