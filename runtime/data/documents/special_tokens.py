"""Which ids start and end a document, from a tokenizer's side files or from the names in common use."""

import json
from collections.abc import Mapping
from pathlib import Path

from attrs import define

from ..errors import DataError

SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")

BOS_NAMES = (
    "<s>",
    "<bos>",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<|begin▁of▁sentence|>",
    "<｜begin▁of▁sentence｜>",
    "[BOS]",
)
EOS_NAMES = (
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "<|eot_id|>",
    "[EOS]",
)


@define(kw_only=True, frozen=True)
class SpecialTokens:
    """The ids put around every document; they may be the same one."""

    bos: int
    eos: int
    own_bos: bool
    """Whether bos is a token of its own, and not eos in its place."""


def find_special_tokens(directory: Path, vocabulary: Mapping[str, int]) -> SpecialTokens:
    """Resolve bos and eos; where only one of them exists it serves as both.

    A side file that declares a token decides, `null` meaning that there is none; undeclared ones are looked up by name.
    Raises DataError if a side file is not JSON, declares a token outside the vocabulary, or if neither is found.
    """
    bos = _find("bos_token", BOS_NAMES, directory, vocabulary)
    eos = _find("eos_token", EOS_NAMES, directory, vocabulary)
    if bos is None and eos is None:
        raise DataError(
            "this tokenizer names neither a bos nor an eos token",
            path=directory,
            remedy=f'Add `{directory / SIDE_FILES[0]}` with {{"bos_token": "…", "eos_token": "…"}}.',
        )
    first, last = (eos if bos is None else bos), (bos if eos is None else eos)
    assert first is not None
    assert last is not None
    return SpecialTokens(bos=first, eos=last, own_bos=bos is not None)


def _find(key: str, names: tuple[str, ...], directory: Path, vocabulary: Mapping[str, int]) -> int | None:
    for file_name in SIDE_FILES:
        path = directory / file_name
        declared = _read(path)
        if key not in declared:
            continue
        value = declared[key]
        if value is None:
            return None
        token = value.get("content") if isinstance(value, dict) else value
        if not isinstance(token, str) or token not in vocabulary:
            raise DataError(
                f"`{key}` is {token!r}, which is not in the vocabulary",
                path=path,
                remedy="Name a token that `tokenizer.json` has.",
            )
        return vocabulary[token]
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def _read(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"invalid JSON: {error}", path=path) from error
    if not isinstance(content, dict):
        raise DataError("not a JSON object", path=path)
    return content
