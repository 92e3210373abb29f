"""The size of a tokenizer, read from its files without the library that runs it."""

import json
from pathlib import Path
from typing import Any

BYTES = 258  # 256 byte values, bos, eos


class TokenizerUnreadable(Exception):
    """The folder or file is missing or is no tokenizer; the message says which."""


def tokenizer_size(source: str) -> int:
    """One more than the largest id of `bytes`, of a folder with a `tokenizer.json`, or of the file itself.

    Relative paths start at the working folder. Vocabularies have holes, so ids are compared and entries not counted.
    Raises TokenizerUnreadable.
    """
    if source == "bytes":
        return BYTES
    path = Path(source)
    try:
        if path.is_dir():
            path = path / "tokenizer.json"
        content: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise TokenizerUnreadable(f"{path.as_posix()}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TokenizerUnreadable(f"{path.as_posix()} is not JSON") from error
    try:
        vocabulary = content["model"]["vocab"]
        # A unigram model lists [piece, score] pairs, whose place is the id; the others map pieces to ids.
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        ids += [token["id"] for token in content.get("added_tokens") or ()]
        return int(max(ids)) + 1
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TokenizerUnreadable(f"{path.as_posix()} has no vocabulary") from error
