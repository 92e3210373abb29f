"""What stands beside a `tokenizer.json`: which ids begin and end a document, and the template of conversations."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import define

SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Of chat templates; the first that has one decides.
CHAT_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")

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


class TokenizerUnreadable(Exception):
    """A file is missing, is no tokenizer, or stands beside one and is not what it should be; the text says which."""

    def __init__(self, message: str, path: Path | None = None, remedy: str | None = None) -> None:
        super().__init__(message if path is None else f"{path.as_posix()}: {message}")
        self.message, self.path, self.remedy = message, path, remedy


class TokenizerMissing(TokenizerUnreadable):
    """Nothing can be read at its path; another machine may have it, or this one later."""


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
    Raises TokenizerUnreadable if a side file is not JSON, declares a token outside the vocabulary, or if neither is
    found.
    """
    bos = _find("bos_token", BOS_NAMES, directory, vocabulary)
    eos = _find("eos_token", EOS_NAMES, directory, vocabulary)
    if bos is None and eos is None:
        raise TokenizerUnreadable(
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
            raise TokenizerUnreadable(
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
    except OSError as error:
        raise TokenizerUnreadable(f"cannot be read: {error}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise TokenizerUnreadable(f"invalid JSON: {error}", path=path) from error
    if not isinstance(content, dict):
        raise TokenizerUnreadable("not a JSON object", path=path)
    return content


def find_chat_template(folder: Path) -> str | None:
    """The text of the template beside a `tokenizer.json`; None if there is none.

    Of several named ones it is the `default`. Raises TokenizerUnreadable for a file that cannot be read as what it is.
    """
    for name in CHAT_FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            content: Any = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                content = json.loads(content)
                content = content.get("chat_template") if isinstance(content, dict) else None
        except (OSError, ValueError, RecursionError) as error:
            raise TokenizerUnreadable(f"cannot be read: {error}", path=path) from error
        template = _default(content, path)
        if template is not None:
            return template
    return None


def _default(content: Any, path: Path) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(each, dict) for each in content):
        content = {each.get("name"): each.get("template") for each in content}
    if isinstance(content, dict) and isinstance(content.get("default"), str):
        return content["default"]
    raise TokenizerUnreadable(
        "its chat templates have no `default`", path=path, remedy="Name the file of one as `template`."
    )
