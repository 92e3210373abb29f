"""The ids of a tokenizer, read from its files without the library that runs it."""

import json
from pathlib import Path
from typing import Any

from .tokenizer_folder import TokenizerMissing, TokenizerUnreadable


def read_vocabulary(source: str) -> dict[str, int]:
    """Token → id of a folder with a `tokenizer.json`, or of the file itself.

    Relative paths start at the working folder. Raises TokenizerUnreadable.
    """
    path = Path(source)
    try:
        if path.is_dir():
            path = path / "tokenizer.json"
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
            raise TokenizerUnreadable(f"{path.as_posix()} is no regular file")
        content: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise TokenizerMissing(f"{path.as_posix()}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TokenizerUnreadable(f"{path.as_posix()} is not JSON") from error
    try:
        listed = content["model"]["vocab"]
        # A unigram model lists [piece, score] pairs, whose place is the id; the others map pieces to ids.
        found = dict(listed) if isinstance(listed, dict) else {piece: id for id, (piece, _) in enumerate(listed)}
        found |= {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        found = {piece: int(id) for piece, id in found.items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TokenizerUnreadable(f"{path.as_posix()} has no vocabulary") from error
    if not found:
        raise TokenizerUnreadable(f"{path.as_posix()} has no vocabulary")
    return found


def differing_token(ours: str, theirs: str) -> str | None:
    """The first token that two tokenizers have under other ids, in words; None where there is none. Raises
    TokenizerUnreadable."""
    own, other = read_vocabulary(ours), read_vocabulary(theirs)
    apart = {token for token, _ in other.items() ^ own.items()}
    if not apart:
        return None
    token = min(apart)
    return f"token {json.dumps(token)} is {other.get(token, 'absent')} there and {own.get(token, 'absent')} in {ours}"
